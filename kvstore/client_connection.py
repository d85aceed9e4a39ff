"""One connection of a client: attach, then one frame out and one frame in at a time.

    connect ─▶ whose? ─▶ Hello ─▶ Welcome + fd ─▶ lock the owner byte ─▶ map the arena ─▶ exchange, …

Every step has the deadline of the call it serves. After a step that failed the state of the
stream is unknown, so the connection is closed and never used again.

Whatever listens on the socket could claim to be the daemon, and hand out KV of its own making.
So its user must be ours or root, as the kernel saw it when it began to listen. Only root's
tools, which take nothing from the arena, may ask anybody's daemon.

Not thread-safe, `owe` aside: the client locks. Imported with the first call and not with the client,
because msgspec and logging cost more to import than everything else together.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
import time
from collections import deque

import msgspec

from kvstore import wire
from kvstore.client_arena import ArenaView, OwnerLock
from kvstore.errors import Refused, Unavailable

log = logging.getLogger("kvstore.client")

OWED_PER_CALL_MAX = 64  # leases given back ahead of one request
_RECEIVE_BYTES = 64 << 10  # grows to the largest answer seen
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_LOST = (OSError, ValueError, msgspec.MsgspecError)  # ValueError: the arena is not as long as it claims


class Connection:
    """An attached (or, with attach=False, a plain) connection."""

    def __init__(self, path: str, label: str, attach: bool, view: ArenaView | None, deadline: float) -> None:
        """Connect and attach; `view` is kept if the daemon serves the same arena file.

        Raises Unavailable (nobody answers in time), Refused (the daemon said no).
        """
        self.namespace_ids: dict[object, int] = {}
        self.instance = ""
        self.lost = False
        self._owed: deque[int] = deque()  # bounded by the leases one connection may hold
        self._view: ArenaView | None = None
        self._lock: OwnerLock | None = None
        self._out = bytearray(_RECEIVE_BYTES)
        self._in = bytearray(_RECEIVE_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._set_timeout(deadline)
            self._socket.connect(path)
            self._require_trusted(attach)
            self._attach(label, attach, view, deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, _LOST):
                raise Unavailable(f"kvstore daemon at {path}: {_reason(error)}") from error
            raise
        log.info("connected to the kvstore daemon at %s (instance %s)", path, self.instance or "unnamed")

    # -- what leases need --

    def arena(self) -> ArenaView:
        """The mapping that the offsets in this connection's answers refer to."""
        if self._view is None:
            raise Refused("not_attached", "this client was made with attach=False")
        return self._view

    def lock_for_writing(self) -> OwnerLock:
        if self._lock is None:
            raise Refused("not_attached", "this client was made with attach=False")
        return self._lock

    def owe(self, lease: int) -> None:
        """Give this lease back (uncommitted, if it is one for writing) ahead of the next call.

        For who cannot wait for the wire: takes no lock, from any thread or destructor. After
        the connection was lost it has no effect: the daemon took everything back.
        """
        if not self.lost:
            self._owed.append(lease)

    # -- calls --

    def settle(self, deadline: float) -> None:
        """Give back leases that are owed. Raises Unavailable (and is closed)."""
        for _ in range(min(len(self._owed), OWED_PER_CALL_MAX)):
            try:
                self.exchange(wire.Release(self._owed.popleft()), deadline)
            except Refused as error:
                log.warning("a lease could not be given back: %s", error)

    def exchange(self, request: wire.Request, deadline: float) -> wire.Answer:
        """Send a request, return its answer (never Error). Raises Unavailable (and is closed), Refused."""
        try:
            wire.encode_frame_into(request, self._out)
            self._set_timeout(deadline)
            self._socket.sendall(self._out)
            answer = wire.answer_decoder.decode(self._receive(deadline))
        except _LOST as error:
            self.close()
            raise Unavailable(
                f"kvstore daemon: {type(request).__name__.lower()}: {_reason(error)}"
            ) from error
        except BaseException:
            self.close()
            raise
        if isinstance(answer, wire.Error):
            raise Refused(answer.code, answer.message)
        return answer

    def close(self) -> None:
        """Idempotent. The owner lock stays while write leases are open."""
        self.lost = True
        self._socket.close()
        if self._lock is not None:
            self._lock.disconnect()

    def forget_in_child(self) -> None:
        """After a fork: close what we inherited without ending the parent's connection."""
        self.lost = True
        self._socket.close()
        if self._lock is not None:
            self._lock.forget_in_child()

    # -- steps --

    def _set_timeout(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("deadline passed")
        self._socket.settimeout(remaining_s)

    def _receive(self, deadline: float) -> memoryview:
        """The payload of the next frame; valid until the next call."""
        have = self._read_into(0)
        while have < wire.HEADER_BYTES:
            self._set_timeout(deadline)
            have += self._read_into(have)
        size = self._frame_bytes()
        if len(self._in) < size:
            self._in.extend(bytes(size - len(self._in)))
        while have < size:
            self._set_timeout(deadline)
            have += self._read_into(have)
        if have > size:
            raise ConnectionError("more than one answer to one request")
        return memoryview(self._in)[wire.HEADER_BYTES : size]

    def _frame_bytes(self) -> int:
        size: int = wire.HEADER.unpack_from(self._in)[0]
        if size > wire.FRAME_BYTES_MAX:
            raise ConnectionError(f"answer of {size} bytes: at most {wire.FRAME_BYTES_MAX} are allowed")
        return wire.HEADER_BYTES + size

    def _read_into(self, position: int) -> int:
        count = self._socket.recv_into(memoryview(self._in)[position:])
        if not count:
            raise ConnectionError("connection closed by the daemon")
        return count

    def _require_trusted(self, attach: bool) -> None:
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(credentials)
        ours = os.geteuid()
        if uid not in (0, ours) and (attach or ours != 0):
            raise ConnectionError(f"it runs as uid {uid}; only uid {ours} and root are trusted")

    def _attach(self, label: str, attach: bool, view: ArenaView | None, deadline: float) -> None:
        hello = wire.Hello(wire.PROTOCOL_VERSION, label[: wire.LABEL_CHARS_MAX], attach)
        self._set_timeout(deadline)
        try:
            self._socket.sendall(wire.encode_frame(hello))
        except BrokenPipeError:
            pass  # refused before we spoke: the reason is there to be read
        payload, fds = self._receive_with_fds(deadline)
        try:
            welcome = wire.welcome_decoder.decode(payload)
            if isinstance(welcome, wire.Error):
                raise Refused(welcome.code, welcome.message)
            if welcome.protocol != wire.PROTOCOL_VERSION:
                raise Refused(
                    "wrong_protocol",
                    f"the daemon speaks protocol {welcome.protocol}, this client {wire.PROTOCOL_VERSION}",
                )
            self.instance = welcome.instance
            if attach:
                if len(fds) != 1:
                    raise ConnectionError("the daemon sent no arena")
                self._adopt(fds[0], welcome, view)
        finally:
            for fd in fds:
                os.close(fd)

    def _adopt(self, fd: int, welcome: wire.Welcome, view: ArenaView | None) -> None:
        self._lock = OwnerLock(fd, welcome.lock_base, welcome.owner)
        if view is not None and view.is_of(fd, welcome.arena_bytes):
            self._view = view
        else:
            self._view = ArenaView(fd, welcome.arena_bytes)

    def _receive_with_fds(self, deadline: float) -> tuple[bytes, list[int]]:
        """The first frame and the descriptors that came with it, closed on exec."""
        fds: array.array[int] = array.array("i")
        received = b""
        try:
            size = wire.HEADER_BYTES
            while len(received) < size:
                self._set_timeout(deadline)
                data, ancillary, _, _ = self._socket.recvmsg(
                    size - len(received), socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
                )
                for level, kind, content in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                if not data:
                    raise ConnectionError("connection closed by the daemon")
                received += data
                if len(received) == wire.HEADER_BYTES:
                    size = self._welcome_bytes(received)
            return received[wire.HEADER_BYTES :], fds.tolist()
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _welcome_bytes(self, header: bytes) -> int:
        size: int = wire.HEADER.unpack(header)[0]
        if not 0 < size <= wire.HELLO_BYTES_MAX:
            raise ConnectionError(f"greeting of {size} bytes: at most {wire.HELLO_BYTES_MAX} are allowed")
        return wire.HEADER_BYTES + size


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or f"{error}" or type(error).__name__
