"""Reads of S3 that go straight into the caller's memory.

    address, signed by obstore ─▶ GET of a range, on a connection that is kept ─▶ received into the view, by a thread

obstore hands out bytes of its own, which then have to be copied: that costs as much as receiving them. Here one core
fetches half as much again as obstore alone.

It does one thing: a range that is answered with 206 and exactly as long as asked. Whatever else happens, it says no, and
obstore is asked for the same, whose failures are understood (tiers/bucket/object_failures.py). After a few in a row it
stays away for a while.

Invariant: when `read` has returned or was cancelled, the views are not written.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, urlsplit

import obstore

from tiers.bucket.object_failures import StoreErrors
from tiers.constants import OBJECT_REQUESTS_MAX
from tiers.together import ended

if TYPE_CHECKING:  # exists in obstore's stubs only
    from obstore.store import S3Store

DIRECT_URL_S: Final = 900  # an address is good for
DIRECT_IDLE_S: Final = 4.0  # a connection is kept: servers close theirs after 5 s and more
DIRECT_FAILURES_MAX: Final = 3  # in a row; then direct reads pause
DIRECT_PAUSE_S: Final = 60.0  # of direct reads that failed; obstore reads meanwhile

log = logging.getLogger("tiers.direct_reads")

_PARTIAL_CONTENT = 206


class DirectReads:
    """Of one S3 store. timeout_s: of a connection, and of a wait for bytes."""

    def __init__(self, where: str, store: S3Store, timeout_s: float) -> None:
        self.reads = self.failures = 0
        self._where = where
        self._store = store
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(OBJECT_REQUESTS_MAX, "kvstore-read")
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []  # since when
        self._tls: ssl.SSLContext | None = None
        self._in_a_row = 0
        self._again_s = float("inf") if urllib.request.getproxies() else 0.0  # obstore knows proxies

    async def read(self, name: str, start: int, views: Sequence[memoryview]) -> bool:
        """Fill the views, one after the other, with the object's bytes from `start` on; False where that did not work."""
        if time.monotonic() < self._again_s:
            return False
        try:
            url = await obstore.sign_async(self._store, "GET", name, timedelta(seconds=DIRECT_URL_S))
        except StoreErrors:  # no credentials, or none that can sign
            self._count(False)
            return False
        request = _Request(urlsplit(url), start, views)
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._carry_out, request)
        try:
            is_read = await asyncio.shield(work)
        except asyncio.CancelledError:
            if request.abandon():
                await ended(work)
            raise
        self._count(is_read)
        return is_read

    def _count(self, is_read: bool) -> None:
        self.reads += is_read
        self.failures += not is_read
        self._in_a_row = 0 if is_read else self._in_a_row + 1
        if self._in_a_row >= DIRECT_FAILURES_MAX:
            self._in_a_row, self._again_s = 0, time.monotonic() + DIRECT_PAUSE_S
            log.info("reads go through obstore for a while", extra={"where": self._where})

    # -- in a thread --

    def _carry_out(self, request: _Request) -> bool:
        connection, is_kept = self._connection(request.url)
        if is_kept and not self._is_alive(connection):
            connection.close()
            connection = self._connect(request.url)
        can_be_kept = False
        try:
            can_be_kept = request.carry_out(connection)
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            if can_be_kept:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
        return request.is_filled

    def _connection(self, url: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """One that was used before, or a new one; all go to one host."""
        while self._idle:
            try:
                since_s, connection = self._idle.pop()
            except IndexError:  # another thread took it
                break
            if time.monotonic() - since_s < DIRECT_IDLE_S:
                return connection, True
            connection.close()
        return self._connect(url), False

    def _connect(self, url: SplitResult) -> http.client.HTTPConnection:
        assert url.hostname is not None
        if url.scheme == "http":
            return http.client.HTTPConnection(url.hostname, url.port, timeout=self._timeout_s)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return http.client.HTTPSConnection(url.hostname, url.port, timeout=self._timeout_s, context=self._tls)

    def _is_alive(self, connection: http.client.HTTPConnection) -> bool:
        """Whether there is nothing to receive: not even that the other side has closed it."""
        connection.sock.settimeout(0.0)
        try:
            connection.sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            connection.sock.settimeout(self._timeout_s)
            return True
        except OSError:
            pass
        return False


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1e6))


class _Request:
    """One range, between the thread that receives it and the coroutine that waits for it."""

    def __init__(self, url: SplitResult, start: int, views: Sequence[memoryview]) -> None:
        self.url = url
        self.is_filled = False
        self._size_bytes = sum(map(len, views))
        self._range = f"bytes={start}-{start + self._size_bytes - 1}"
        self._views = views
        self._guard = threading.Lock()
        self._is_abandoned = False
        self._socket: socket.socket | None = None  # while bytes are received

    def carry_out(self, connection: http.client.HTTPConnection) -> bool:
        """Whether the connection can be used again. Raises OSError, HTTPException."""
        connection.request("GET", f"{self.url.path}?{self.url.query}", headers={"Range": self._range})
        receiving = connection.sock  # the connection forgets it where the server closes it
        answer = connection.getresponse()
        if answer.status != _PARTIAL_CONTENT or answer.length != self._size_bytes:
            return False
        with self._guard:
            if self._is_abandoned:
                return False
            self._socket = receiving
        self.is_filled = self._receive(answer, receiving)
        return self.is_filled and not answer.will_close

    def _receive(self, answer: http.client.HTTPResponse, receiving: socket.socket) -> bool:
        """Fill the views; False where the bytes end before. Raises OSError, HTTPException.

        Without TLS one call waits for all bytes of a view: coming back for each piece costs a third of the processor's time
        that receiving takes. What came with the answer's head is in its buffer.
        """
        is_plain = not isinstance(receiving, ssl.SSLSocket)
        held = len(answer.fp.peek()) if is_plain else self._size_bytes
        timeout_s = receiving.gettimeout()
        if is_plain and timeout_s is not None:
            receiving.settimeout(None)  # with one, every call returns with what there is
            receiving.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
        for view in self._views:
            filled = 0
            while filled < len(view):
                if held:
                    count = answer.readinto(view[filled : filled + held])
                    held -= count
                else:
                    count = receiving.recv_into(view[filled:], 0, socket.MSG_WAITALL)
                if not count:
                    return False
                filled += count
        # One that the server closes is closed already where all bytes came with the head.
        if is_plain and not answer.will_close:
            receiving.settimeout(timeout_s)
            answer.close()  # it has not seen its end
        return True

    def abandon(self) -> bool:
        """Whether the thread may be writing; then it will end soon. Else it writes nothing any more."""
        with self._guard:
            self._is_abandoned = True
            if self._socket is not None:
                try:
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                except OSError:
                    pass  # it has ended by itself
            return self._socket is not None
