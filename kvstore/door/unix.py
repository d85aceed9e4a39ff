"""The local door: engines on this node come in here, over a Unix socket (kvstore.protocol.frames).

    accept ─▶ greet: peer uid and pid, Hello ─▶ Welcome + arena fd ─▶ connection ─▶ api ─▶ engine
                 │ no                                            │ request in, answer out, in order
                 ▼                                               ▼ lost, garbage, stalled
          one Error frame, close                          session closed: leases go back

Everything runs on the engine's thread (the event loop), in pieces (`kvstore.door.turns`); nothing
here blocks it. A request that is refused costs an Error frame; a stream that makes no sense costs
the connection. Either way the log gets one line per connection, and `counters` gets the rest.

Invariants: at most one request per connection is being served; a session is open exactly
while its connection is, and closing it returns every lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path

import msgspec

from kvstore.constants import (
    CONNECTIONS_MAX_MAX,
    DOOR_CONNECTIONS_MAX,
    DOOR_RECEIVE_BYTES,
    DOOR_TOOLS_MAX,
    MIB,
    require,
)
from kvstore.door.api import Api
from kvstore.door.connection import DOOR_STALLED_S_PRESSED, DoorConnection, Shared
from kvstore.door.holders import Holder
from kvstore.door.listener import DoorSocket
from kvstore.door.memory import FrameMemory, UnreadAnswers
from kvstore.errors import (
    BadFrame,
    ConnectionRefused,
    FrameTooLarge,
    TooManyConnections,
    TooSlow,
    WrongPeer,
    WrongProtocol,
)
from kvstore.protocol import answers, frames
from kvstore.security import principals
from kvstore.security.principals import Principal
from tiers.dram.arena import Arena
from tiers.errors import TierError
from tiers.locks import LOCK_BASE

DOOR_HELLO_TIMEOUT_S = 5.0  # a peer that connects and says nothing
DOOR_STALLED_S_MAX = 10.0  # for half a frame, or for answers that are not read
DOOR_ACCEPTED_AT_ONCE = 16  # in one turn of the loop, a fraction of a millisecond
DOOR_REFUSAL_LOG_S = 1.0  # between two lines about connections that are refused for the same reason
DOOR_ACCEPT_RETRY_S = 0.1  # after running out of descriptors
DOOR_FRAMES_BYTES_MAX = 32 * MIB  # frames larger than one read, all connections together
DOOR_UNREAD_BYTES_MAX = 16 * MIB  # answers that are not read, all connections together
require(DOOR_STALLED_S_MAX > DOOR_HELLO_TIMEOUT_S > 0, "a greeting is the shortest thing to wait for")
require(DOOR_STALLED_S_MAX >= DOOR_STALLED_S_PRESSED, "pressed is shorter")
require(DOOR_FRAMES_BYTES_MAX >= 2 * frames.FRAME_BYTES_MAX, "there is room for two of the largest frames")

log = logging.getLogger("kvstore.door")

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD = 77  # the socket module does not name it


class Door:
    """Serves one engine and its arena on one socket path. Made within the event loop that it is to run on."""

    def __init__(
        self,
        api: Api,
        arena: Arena,
        socket_path: str | os.PathLike[str],
        *,
        instance: str = "",
        connections_max: int = DOOR_CONNECTIONS_MAX,
        connections_room: int = CONNECTIONS_MAX_MAX,
        hello_timeout_s: float = DOOR_HELLO_TIMEOUT_S,
        stalled_s_max: float = DOOR_STALLED_S_MAX,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Opens nothing yet.

        instance: named in every Welcome. connections_room: for how many this process has descriptors. on_failure:
        called when the door cannot go on.
        """
        self.api = api
        self.engine = api.engine
        self.connections: set[DoorConnection] = set()
        self.shared = Shared(
            api,
            FrameMemory(DOOR_FRAMES_BYTES_MAX),
            UnreadAnswers(DOOR_UNREAD_BYTES_MAX),
            self.connections,
            memoryview(bytearray(DOOR_RECEIVE_BYTES)),
            stalled_s_max,
        )
        self._arena = arena
        self.path = Path(socket_path)
        self._instance = instance
        self._connections_room = connections_room
        self._connections_max = self._fitting(connections_max)
        self._hello_timeout_s = hello_timeout_s
        self._on_failure = on_failure
        self._accepted = 0
        self._refused_s: dict[str, float] = {}  # by code: when it was logged last
        self._greeting: set[asyncio.Task[None]] = set()
        self._listener: DoorSocket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def limit(self, connections_max: int) -> None:
        """Another limit from now on; who is connected already stays."""
        self._connections_max = self._fitting(connections_max)

    def _fitting(self, connections_max: int) -> int:
        if connections_max > self._connections_room:
            log.warning(
                "door.connections_max is %d: this process may have too few open files for %d; ulimit -n or "
                "LimitNOFILE allows more",
                self._connections_room,
                connections_max,
            )
        return min(connections_max, self._connections_room)

    @property
    def counters(self) -> answers.Door:
        """connections, attached: now; accepted, refused (by code), frames (by request): since the start."""
        return {
            "connections": len(self.connections),
            "attached": sum(connection.attached for connection in self.connections),
            "accepted": self._accepted,
            "refused": dict(self.api.refused),
            "frames": dict(self.api.requests),
            "slow": dict(self.api.slow.by_why),
        }

    async def start(self) -> None:
        """Open the socket (mode 0600) and serve. Replaces the socket file of a dead daemon.

        Raises SocketBusy when a live one answers there, SocketPathError when the path cannot be used.
        """
        self._listener = await asyncio.to_thread(self.another_socket)
        self._accepting = self._lasting(self._accept(self._listener.socket))
        self._tasks = [self._accepting, self._lasting(self._sweep())]

    def _lasting(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Neither accepting nor sweeping ends by itself."""
        if not task.cancelled() and (error := task.exception()) is not None and self._on_failure:
            self._on_failure(error)

    def is_in_place(self) -> bool:
        """Whether the file of the socket leads to us. Blocks on the file system: for any thread."""
        listener = self._listener
        return listener is None or listener.is_in_place()

    def another_socket(self) -> DoorSocket:
        """For `listen_at`, where the file is gone. Blocks on the file system: for any thread. Raises SocketBusy,
        SocketPathError."""
        return DoorSocket(self.path)

    def listen_at(self, another: DoorSocket) -> bool:
        """From now on; those who came to the socket before are served. Closes it, and answers False, where the door is closed already."""
        before = self._listener
        if before is None:
            another.close()
            return False
        self._accepting.cancel()
        self._accepting.add_done_callback(lambda _: before.socket.close())
        with contextlib.suppress(OSError):
            while True:
                self._admit(before.socket.accept()[0])
        self._listener = another
        self._tasks.remove(self._accepting)
        self._accepting = self._lasting(self._accept(another.socket))
        self._tasks.append(self._accepting)
        return True

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

    # -- accepting --

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(_Spare()) as spare:
            while True:
                try:
                    peer, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of descriptors or memory: those inside go on
                    if not self.api.refused["accept_failed"]:
                        log.error("accepting a connection failed: %s", error)
                    self.api.refused["accept_failed"] += 1
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        spare.refuse(listener)
                    await asyncio.sleep(DOOR_ACCEPT_RETRY_S)
                    continue
                self._accepted += 1
                self._admit(peer)
                if self._accepted % DOOR_ACCEPTED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # connections that are served come first

    def _admit(self, peer: socket.socket) -> None:
        """Greet a peer, or refuse it at once: one that connects thousands of times does not hold up others."""
        try:
            principal = _principal_of(peer)
            peer.setblocking(False)
        except OSError:
            self._gone(peer)
            return
        try:
            self._require_room(DOOR_TOOLS_MAX - 1)  # this peer is not counted yet
            holder = self.api.enter(principal)
        except ConnectionRefused as refusal:
            self._refuse(peer, principal, refusal)
        else:
            task = asyncio.create_task(self._greet(peer, holder))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    def _refuse(self, peer: socket.socket, principal: Principal, refusal: ConnectionRefused) -> None:
        """Say why, and close. A line in the log for each reason, and no more than one a second."""
        self.api.refused[refusal.code] += 1
        now_s = self.api.clock()
        if now_s - self._refused_s.get(refusal.code, -1.0) >= DOOR_REFUSAL_LOG_S:
            self._refused_s[refusal.code] = now_s
            log.warning("connection of %s refused: %s: %s", principal, refusal.code, refusal)
        with contextlib.suppress(OSError):
            peer.send(frames.encode_frame(frames.Error(refusal.code, str(refusal))))
        peer.close()

    def _gone(self, peer: socket.socket) -> None:
        """It left before it said anything."""
        self.api.refused["gone"] += 1
        peer.close()

    async def _greet(self, peer: socket.socket, holder: Holder) -> None:
        is_inside, principal = False, holder.principal
        try:
            hello = await self._hello(peer)
            if hello.attach:
                self._require_room(0)
            if not principal.may:
                raise WrongPeer(f"uid {principal.uid} is not served here")
            if hello.protocol != frames.PROTOCOL_VERSION:
                raise WrongProtocol(
                    f"protocol {hello.protocol}: this daemon speaks {frames.PROTOCOL_VERSION}"
                )
            await self._welcome(peer, hello, holder)
            is_inside = True
        except ConnectionRefused as refusal:
            self._refuse(peer, principal, refusal)
        except OSError:
            self._gone(peer)
        except BaseException:
            peer.close()
            raise
        finally:
            if not is_inside:  # else its connection leaves
                self.api.leave(holder)

    def _require_room(self, beyond: int) -> None:
        """Raises TooManyConnections."""
        if len(self.connections) + len(self._greeting) > self._connections_max + beyond:
            raise TooManyConnections(f"{self._connections_max} connections are served already")

    async def _hello(self, peer: socket.socket) -> frames.Hello:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                size: int = frames.HEADER.unpack(await _read(peer, frames.HEADER_BYTES))[0]
                if size > frames.FRAME_BYTES_MAX:
                    raise FrameTooLarge(size, frames.FRAME_BYTES_MAX)
                if size > frames.HELLO_BYTES_MAX:
                    raise BadFrame(f"Hello of {size} bytes: at most {frames.HELLO_BYTES_MAX} are allowed")
                payload = await _read(peer, size)
        except TimeoutError:
            raise TooSlow(f"no Hello within {self._hello_timeout_s} s") from None
        try:
            return frames.hello_decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise BadFrame(f"Hello expected: {error}") from error

    async def _welcome(self, peer: socket.socket, hello: frames.Hello, holder: Holder) -> None:
        session, byte, lock_fds = None, 0, list[int]()
        if hello.attach:
            try:
                owner, byte, lock_fds = self._claim(hello)
            except TierError as error:
                raise TooManyConnections(str(error)) from error
            session = self.engine.open_session(owner, hello.label)
        try:
            self._send_welcome(peer, byte, hello.read_only, lock_fds)
            connection = DoorConnection(self.shared, holder, session, hello.label, hello.door)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer)
        except BaseException:
            if session is not None:
                self.engine.close_session(session)
            raise

    def _claim(self, hello: frames.Hello) -> tuple[int, int, list[int]]:
        """The number of a client, the byte of the arena that all writers share, and the file that it locks."""
        arena = self._arena
        if hello.read_only:
            return arena.owners.claim_reader(), arena.owners.writers_byte, []
        owner, fd = arena.owners.claim_file()
        return owner, arena.owners.writers_byte, [fd]

    def _send_welcome(self, peer: socket.socket, byte: int, read_only: bool, lock_fds: list[int]) -> None:
        """With descriptors that carry no locks of the daemon: they would travel along."""
        if not byte:
            welcome = frames.Welcome(frames.PROTOCOL_VERSION, self._instance, 0, 0, 0, life=self.api.life)
            peer.send(frames.encode_frame(welcome))
            return
        arena = self._arena
        welcome = frames.Welcome(
            frames.PROTOCOL_VERSION,
            self._instance,
            arena.capacity_bytes,
            byte,
            LOCK_BASE,
            arena.layout.generations_end,
            self.api.life,
        )
        fds = [arena.read_only_fd if read_only else arena.fd, arena.generations_fd, *lock_fds]
        socket.send_fds(peer, [frames.encode_frame(welcome)], fds)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, self.shared.stalled_s_max / 4))
            for connection in list(self.connections):
                connection.drop_if_stalled(loop.time())


class _Spare:
    """One descriptor that is kept for refusing: a client that comes when there are no others gets the reason, and does not hang."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._keep()

    def refuse(self, listener: socket.socket) -> None:
        """All that wait to be accepted, each with the reason."""
        refusal = TooManyConnections("the daemon has no descriptor left: its limit of open files is reached")
        while self._fd is not None:
            os.close(self._fd)
            self._fd = None
            try:
                peer, _ = listener.accept()
            except OSError:  # no peer waits any more
                self._keep()
                return
            with peer, contextlib.suppress(OSError):
                peer.setblocking(False)
                peer.send(frames.encode_frame(frames.Error(refusal.code, str(refusal))))
            self._keep()

    def _keep(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


async def _read(peer: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size:
        data = await loop.sock_recv(peer, size - len(received))
        if not data:
            raise ConnectionResetError("closed by the peer")
        received += data
    return received


def _principal_of(peer: socket.socket) -> Principal:
    """Who connected. Raises OSError."""
    pid, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return principals.local(uid, pid or -_pidfd_inode(peer))


def _pidfd_inode(peer: socket.socket) -> int:
    """Since Linux 6.9 each process has one of its own; before, all have the same; 0 without."""
    try:
        pidfd = peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return 0
    try:
        return os.fstat(pidfd).st_ino
    finally:
        os.close(pidfd)
