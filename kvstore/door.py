"""The local door: engines on this node come in here, over a Unix socket (frames: kvstore.wire).

    accept ─▶ greet: peer uid, Hello ─▶ Welcome + arena fd ─▶ connection ─▶ engine
                 │ no                                            │ request in, answer out, in order
                 ▼                                               ▼ lost, garbage, stalled
          one Error frame, close                          session closed: leases go back

Everything runs on the engine's thread (the event loop); nothing here blocks it. A peer is
not believed: what it claims is bounded before memory is spent on it, its half frames and
unread answers have a time limit, and what it may hold of the arena has a limit, too. A
request that is refused costs an Error frame; a stream that makes no sense costs the
connection. Either way the log gets one line per connection, and `counters` gets the rest.

Invariants: at most one request per connection is being served; a session is open exactly
while its connection is, and closing it returns every lease.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvstore import constants, wire
from kvstore.door_connection import DoorConnection, DoorLimits
from kvstore.door_socket import DoorSocket
from kvstore.engine import Engine
from kvstore.errors import (
    BadFrame,
    ConnectionRefusal,
    FrameTooLarge,
    TooManyConnections,
    TooSlow,
    WrongPeer,
    WrongProtocol,
)
from tiers.arena import Arena
from tiers.constants import LOCK_BASE
from tiers.errors import TierError

log = logging.getLogger("kvstore.door")

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Door:
    """Serves one engine and its arena on one socket path."""

    def __init__(
        self,
        engine: Engine,
        arena: Arena,
        socket_path: str | os.PathLike[str],
        *,
        instance: str = "",
        report: Callable[[], dict[str, Any]] | None = None,
        totals: Callable[[float, int], dict[str, Any]] | None = None,
        connections_max: int = constants.DOOR_CONNECTIONS_MAX,
        hello_timeout_s: float = constants.DOOR_HELLO_TIMEOUT_S,
        stalled_s_max: float = constants.DOOR_STALLED_S_MAX,
        leases_max: int = constants.DOOR_LEASES_MAX,
        lease_bytes_max: int | None = None,
        uid: int | None = None,
    ) -> None:
        """Opens nothing yet.

        instance: told to every client. report: what a Status request answers; by default the
        engine's status with our counters under "door". totals: what a Report request answers. lease_bytes_max: what one connection
        may hold of the arena, by default half of it. uid: whose processes may come in, besides
        root; by default the daemon's own.
        """
        if lease_bytes_max is None:
            lease_bytes_max = int(arena.capacity_bytes * constants.DOOR_LEASE_SHARE_MAX)
        self.engine = engine
        self.limits = DoorLimits(stalled_s_max, leases_max, lease_bytes_max)
        self.report = report or self._default_report
        self.totals = totals or engine.report
        self.frames: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.connections: set[DoorConnection] = set()
        self.receive_buffer = memoryview(
            bytearray(constants.DOOR_RECEIVE_BYTES)
        )  # shared: see DoorConnection
        self._arena = arena
        self._path = Path(socket_path)
        self._instance = instance
        self._connections_max = connections_max
        self._hello_timeout_s = hello_timeout_s
        self._uids = {0, os.geteuid() if uid is None else uid}
        self._accepted = 0
        self._greeting: set[asyncio.Task[None]] = set()
        self._listener: DoorSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def counters(self) -> dict[str, Any]:
        """connections, attached: now; accepted, refused (by code), frames (by request): since the start."""
        return {
            "connections": len(self.connections),
            "attached": sum(connection.attached for connection in self.connections),
            "accepted": self._accepted,
            "refused": dict(self.refused),
            "frames": dict(self.frames),
        }

    async def start(self) -> None:
        """Open the socket (mode 0600) and serve. Replaces the socket file of a dead daemon.

        Raises SocketBusy when a live one answers there, SocketPathError when the path cannot be used.
        """
        self._listener = DoorSocket(self._path, constants.DOOR_BACKLOG)
        self._tasks = [
            asyncio.create_task(self._accept(self._listener.socket)),
            asyncio.create_task(self._sweep()),
        ]

    async def stop(self) -> None:
        """Close the socket and every connection; their leases go back. Idempotent."""
        tasks, self._tasks = [*self._tasks, *self._greeting], []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the next turn of the loop

    def count_refusal(self, code: str) -> None:
        """One more refused request or connection."""
        self.refused[code] += 1

    # -- accepting --

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors or memory: those inside go on
                if not self.refused["accept_failed"]:
                    log.error("accepting a connection failed: %s", error)
                self.count_refusal("accept_failed")
                await asyncio.sleep(constants.DOOR_ACCEPT_RETRY_S)
                continue
            self._accepted += 1
            task = asyncio.create_task(self._greet(peer))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, peer: socket.socket) -> None:
        pid = uid = -1
        try:
            pid, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            peer.setblocking(False)
            if len(self.connections) + len(self._greeting) > self._connections_max:
                raise TooManyConnections(f"{self._connections_max} connections are served already")
            hello = await self._hello(peer)
            if uid not in self._uids:
                raise WrongPeer(f"uid {uid} is not served here")
            if hello.protocol != wire.PROTOCOL_VERSION:
                raise WrongProtocol(f"protocol {hello.protocol}: this daemon speaks {wire.PROTOCOL_VERSION}")
            await self._welcome(peer, hello, f"{hello.label or 'unnamed'} (pid {pid}, uid {uid})")
        except ConnectionRefusal as refusal:
            self.count_refusal(refusal.code)
            log.warning("connection of pid %d, uid %d refused: %s: %s", pid, uid, refusal.code, refusal)
            with contextlib.suppress(OSError):
                peer.send(wire.encode_frame(wire.Error(refusal.code, str(refusal))))
            peer.close()
        except OSError:  # gone before it said anything
            self.count_refusal("gone")
            peer.close()
        except BaseException:
            peer.close()
            raise

    async def _hello(self, peer: socket.socket) -> wire.Hello:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                size: int = wire.HEADER.unpack(await _read(peer, wire.HEADER_BYTES))[0]
                if size > wire.FRAME_BYTES_MAX:
                    raise FrameTooLarge(f"frame of {size} bytes: at most {wire.FRAME_BYTES_MAX} are allowed")
                if size > wire.HELLO_BYTES_MAX:
                    raise BadFrame(f"Hello of {size} bytes: at most {wire.HELLO_BYTES_MAX} are allowed")
                payload = await _read(peer, size)
        except TimeoutError:
            raise TooSlow(f"no Hello within {self._hello_timeout_s} s") from None
        try:
            return wire.hello_decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise BadFrame(f"Hello expected: {error}") from error

    async def _welcome(self, peer: socket.socket, hello: wire.Hello, name: str) -> None:
        session = None
        owner = 0
        if hello.attach:
            try:
                owner = self._arena.claim_owner()
            except TierError as error:
                raise TooManyConnections(str(error)) from error
            session = self.engine.open_session(owner, hello.label)
        try:
            self._send_welcome(peer, owner)
            connection = DoorConnection(self, session, name)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer)
        except BaseException:
            if session is not None:
                self.engine.close_session(session)
            raise

    def _send_welcome(self, peer: socket.socket, owner: int) -> None:
        """With the arena's descriptor, which must carry no locks of the daemon: they would travel along."""
        if not owner:
            peer.send(wire.encode_frame(wire.Welcome(wire.PROTOCOL_VERSION, self._instance, 0, 0, 0)))
            return
        arena_bytes = os.fstat(self._arena.fd).st_size
        welcome = wire.Welcome(wire.PROTOCOL_VERSION, self._instance, arena_bytes, owner, LOCK_BASE)
        fds = array.array("i", [self._arena.fd])
        peer.sendmsg([wire.encode_frame(welcome)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.limits.stalled_s_max / 4))
            for connection in list(self.connections):
                connection.drop_if_stalled(loop.time())

    def _default_report(self) -> dict[str, Any]:
        return {**self.engine.status(), "door": self.counters}


async def _read(peer: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size:
        data = await loop.sock_recv(peer, size - len(received))
        if not data:
            raise ConnectionResetError("closed by the peer")
        received += data
    return received
