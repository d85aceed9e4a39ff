"""Peers of a ZeroMQ socket that listens on TCP: how many there are, and how much each has said.

    accepted ─▶ a duplicate of its descriptor ─▶ bytes that came, as the kernel counts them ─▶ too many: the connection ends
    gone     ─▶ the duplicate is closed

ZeroMQ keeps the parts of a message until the last one has come, and all that a peer subscribes to, without a limit of its own: whoever
reaches the port could take all memory of the daemon. A peer that is cut off connects anew, by itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import zmq
from zmq.utils.monitor import recv_monitor_message

GUESTS_MAX = 64
GUEST_BYTES_MAX = (
    128 << 10
)  # in all; a subscription or a request has some fifty, and takes as many times that of memory
GUESTS_LOOK_S = 0.1
_NEWS_MAX = 1000  # of who came and went, at a time

_TCP_INFO_BYTES, _RECEIVED_AT = 136, 128  # tcpi_bytes_received


class Guests:
    """Of one socket, which is to be bound. For its thread."""

    def __init__(self, door: zmq.Socket[bytes]) -> None:
        self._door = door
        self._here: dict[int, socket.socket] = {}  # by ZeroMQ's own descriptor
        self.news = door.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def look(self) -> bool:
        """Cut off who says too much; whether anybody is here."""
        came: set[int] = set()
        for _ in range(_NEWS_MAX):
            if not self.news.poll(0):
                break
            told = recv_monitor_message(self.news)
            if told["event"] == zmq.EVENT_ACCEPTED:
                came.add(told["value"])
                continue
            came.discard(told["value"])
            if (gone := self._here.pop(told["value"], None)) is not None:
                gone.close()
        for fd in came:
            self._let_in(fd)
        for guest in self._here.values():
            if _received_bytes(guest) > GUEST_BYTES_MAX:
                _cut_off(guest)
        return bool(self._here)

    def close(self) -> None:
        """Before its socket is closed. Idempotent."""
        for guest in self._here.values():
            guest.close()
        self._here.clear()
        if not self.news.closed:
            self._door.disable_monitor()
            self.news.close(linger=0)

    def _let_in(self, fd: int) -> None:
        """If it is still here: its number may be another file's by now."""
        try:
            guest = socket.socket(fileno=os.dup(fd))
        except OSError:
            return
        _, _, port = self._door.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")
        is_ours = guest.family in (socket.AF_INET, socket.AF_INET6) and guest.getsockname()[1] == int(port)
        if is_ours and len(self._here) < GUESTS_MAX:
            self._here[fd] = guest
            return
        if is_ours:
            _cut_off(guest)
        guest.close()


def _received_bytes(guest: socket.socket) -> int:
    found = guest.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(found[_RECEIVED_AT:], "little")


def _cut_off(guest: socket.socket) -> None:
    """ZeroMQ closes it then, and what still comes is refused."""
    guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(OSError):  # it has gone
        guest.shutdown(socket.SHUT_RDWR)
