"""One connection of a client: attach, then frames out, and their answers in, in the same order.

    connect ─▶ whose? ─▶ Hello ─▶ Welcome + fds ─▶ map the arena ─▶ send … answer, …

Every step has the deadline of the call it serves. After a step that failed the state of the
stream is unknown, so the connection is closed and never used again.

Whatever listens on the socket could claim to be the daemon, and hand out KV of its own making.
So its user must be ours or root, as the kernel saw it when it began to listen. Only root's
tools, which take nothing from the arena, may ask any user's daemon.

Not thread-safe, `owe` aside: the client locks. Imported with the first call and not with the client,
because msgspec and logging cost more to import than everything else together.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
import weakref
from collections import deque

import msgspec

from kvstore.client.arena_view import ArenaView, OwnerLock, mapped
from kvstore.client.sendable import encode_sendable
from kvstore.errors import Refused, Unavailable
from kvstore.protocol import frames

log = logging.getLogger("kvstore.client")

OWED_PER_CALL_MAX = 64  # leases given back ahead of one request
UNANSWERED_MAX = 64  # requests whose answers were not read yet
CONNECT_AGAIN_S = 0.005  # between two tries, while the daemon has a queue at its door
_RECEIVE_BYTES = 64 << 10  # grows to the largest answer seen
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_LOST = (OSError, ValueError, msgspec.MsgspecError)  # ValueError: the arena is not as long as it claims


class Asked:
    """A request that was sent. answer: what came, which may be an Error; None until it was read."""

    answer: frames.Answer | None = None

    def __init__(self, name: str, is_unwanted: bool = False) -> None:
        """is_unwanted: no caller waits for the answer."""
        self.name, self.is_unwanted = name, is_unwanted


class Connection:
    """An attached (or, with attach=False, a plain) connection."""

    def __init__(
        self, path: str, label: str, attach: bool, writable: bool, deadline: float, door: str = ""
    ) -> None:
        """Connect and attach. writable: map the arena so that write leases are possible. door: which one this process is.

        Raises Unavailable (no answer in time), Refused (the daemon said no).
        """
        self.namespace_ids = weakref.WeakKeyDictionary[
            object, int
        ]()  # an engine makes new ones with new weights
        self.registered = set[int]()  # numbers that the daemon holds for us
        self.instance, self.life = "", 0
        self.lost = False
        self._owed: deque[int] = deque()  # bounded by the leases one connection may hold
        self._asked: deque[Asked] = deque()  # whose answers were not read yet
        self._view: ArenaView | None = None
        self._lock: OwnerLock | None = None
        self._out = bytearray(_RECEIVE_BYTES)
        self._in = bytearray(_RECEIVE_BYTES)
        self._frame_end = self._have = 0  # in `_in`: of the answer read last, and of what was read along
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is left
            self.lost = True
            raise Unavailable(f"kvstore daemon at {path}: {_reason(error)}") from error
        try:
            self._reach(path, deadline)
            self._require_trusted(attach)
            self._attach(label, attach, writable, deadline, door)
        except BaseException as error:
            self.close()
            if isinstance(error, _LOST):
                raise Unavailable(f"kvstore daemon at {path}: {_reason(error)}") from error
            raise
        log.info("connected to the kvstore daemon at %s (instance %s)", path, self.instance or "unnamed")

    def take_dropped(self) -> set[int]:
        """Namespaces that the daemon holds for us, but no handle is left here. The caller unregisters them."""
        dropped = self.registered.difference(self.namespace_ids.values())
        self.registered -= dropped
        return dropped

    # -- what leases need --

    def arena(self) -> ArenaView:
        """The mapping that the offsets in this connection's answers refer to."""
        if self._view is None:
            raise Refused("not_attached", "this client was made with attach=False")
        return self._view

    def lock_for_writing(self) -> OwnerLock:
        if self._lock is None:
            raise Refused("not_attached", "this client was made with attach=False or writable=False")
        return self._lock

    def owe(self, lease: int) -> None:
        """Have this lease given back (uncommitted, if it is one for writing) by the next `give_back`.

        Takes no lock, from any thread or destructor. After the connection was lost it has no
        effect: the daemon took everything back.
        """
        if not self.lost:
            self._owed.append(lease)

    # -- calls --

    @property
    def owes(self) -> bool:
        """Whether `give_back` has something to send."""
        return bool(self._owed) and not self.lost

    def give_back(self, deadline: float) -> None:
        """Send the leases that are owed, and wait for no answer. Raises Unavailable (and is closed)."""
        for _ in range(min(len(self._owed), OWED_PER_CALL_MAX)):
            self.send(frames.Release(self._owed.popleft()), deadline, is_unwanted=True)

    def send(self, request: frames.Request, deadline: float, is_unwanted: bool = False) -> Asked:
        """Send a request, and wait for no answer of its own. Raises Refused where it cannot be sent, Unavailable (and is
        closed)."""
        encode_sendable(request, self._out)
        asked = Asked(type(request).__name__.lower(), is_unwanted)
        try:
            if len(self._asked) >= UNANSWERED_MAX:
                self._read_answers(self._asked[-1], deadline)
            self._set_timeout(deadline)
            self._asked.append(asked)
            self._socket.sendall(self._out)
        except _LOST as error:
            raise self._gone(error, asked) from error
        except BaseException:
            self.close()
            raise
        return asked

    def answer(self, asked: Asked, deadline: float) -> frames.Answer:
        """The answer to a request that was sent (never Error). Raises Unavailable (and is closed), Refused."""
        try:
            self._read_answers(asked, deadline)
            if self._have > self._frame_end and not self._asked:
                raise ConnectionError("more than one answer to one request")
        except _LOST as error:
            raise self._gone(error, asked) from error
        except BaseException:
            self.close()
            raise
        answer = asked.answer
        assert answer is not None, "it was read"
        if isinstance(answer, frames.Error):
            raise Refused(answer.code, answer.message)
        return answer

    def exchange(self, request: frames.Request, deadline: float) -> frames.Answer:
        """Send a request, return its answer (never Error). Raises Unavailable (and is closed), Refused."""
        return self.answer(self.send(request, deadline), deadline)

    def forget(self, asked: Asked) -> None:
        """No caller waits for this answer any more: a lease that it grants is given back. Takes no lock."""
        asked.is_unwanted = True
        if asked.answer is not None:
            self._undo(asked.answer)

    def _undo(self, answer: frames.Answer) -> None:
        if isinstance(answer, frames.Error):
            log.warning(
                "a request whose caller had given up was refused: %s: %s", answer.code, answer.message
            )
        elif isinstance(answer, frames.Reserved) and answer.lease:
            self.owe(answer.lease)

    def _read_answers(self, last: Asked, deadline: float) -> None:
        """Of all requests up to this one."""
        while last.answer is None:
            if self.lost:
                raise ConnectionError("the connection was lost")
            answer = frames.answer_decoder.decode(self._receive(deadline))
            asked = self._asked.popleft()
            asked.answer = answer
            if asked.is_unwanted:
                self._undo(answer)

    def _gone(self, error: BaseException, asked: Asked) -> Unavailable:
        self.close()
        return Unavailable(f"kvstore daemon: {asked.name}: {_reason(error)}")

    def close(self) -> None:
        """Idempotent. The owner lock stays while write leases are open."""
        self.lost = True
        self._socket.close()
        if self._lock is not None:
            self._lock.disconnect()

    def hand_over(self) -> socket.socket:
        """The socket, greeted, for who sends and reads frames itself; this is closed by it."""
        kept = self._socket.dup()
        self.close()
        return kept

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

    def _receive(self, deadline: float, bytes_max: int = frames.FRAME_BYTES_MAX) -> memoryview:
        """The payload of the next frame; valid until the next call."""
        have = self._have - self._frame_end
        if have:
            self._in[:have] = self._in[self._frame_end : self._have]
        while have < frames.HEADER_BYTES:
            self._set_timeout(deadline)
            have += self._read_into(have)
        payload_bytes: int = frames.HEADER.unpack_from(self._in)[0]
        if payload_bytes > bytes_max:
            raise ValueError(f"answer of {payload_bytes} bytes: at most {bytes_max} are allowed")
        size = frames.HEADER_BYTES + payload_bytes
        if len(self._in) < size:
            self._in.extend(bytes(size - len(self._in)))
        while have < size:
            self._set_timeout(deadline)
            have += self._read_into(have)
        self._frame_end, self._have = size, have
        return memoryview(self._in)[frames.HEADER_BYTES : size]

    def _reach(self, path: str, deadline: float) -> None:
        """Connect; wait for our turn where more want to than the daemon has let in yet."""
        while True:
            self._set_timeout(deadline)
            try:
                return self._socket.connect(path)
            except BlockingIOError:  # its queue is full
                time.sleep(CONNECT_AGAIN_S)

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

    def _attach(self, label: str, attach: bool, writable: bool, deadline: float, door: str) -> None:
        hello = frames.Hello(
            frames.PROTOCOL_VERSION,
            label[: frames.LABEL_CHARS_MAX],
            attach,
            read_only=not writable,
            door=door,
        )
        self._set_timeout(deadline)
        try:
            self._socket.sendall(frames.encode_frame(hello))
        except BrokenPipeError:
            pass  # refused before we spoke: the reason is there to be read
        self._set_timeout(deadline)
        first, fds, _, _ = socket.recv_fds(self._socket, frames.HEADER_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        try:
            self._in[: len(first)], self._have = first, len(first)
            if not first:
                raise ConnectionError("connection closed by the daemon")
            try:
                welcome = frames.welcome_decoder.decode(self._receive(deadline, frames.HELLO_BYTES_MAX))
            except (ValueError, msgspec.MsgspecError) as error:
                raise ConnectionError("what answers there is no kvstore daemon") from error
            if isinstance(welcome, frames.Error):
                raise Refused(welcome.code, welcome.message)
            if welcome.protocol != frames.PROTOCOL_VERSION:
                raise Refused(
                    "wrong_protocol",
                    f"the daemon speaks protocol {welcome.protocol}, this client {frames.PROTOCOL_VERSION}",
                )
            self.instance, self.life = welcome.instance, welcome.life
            if attach:
                if len(fds) != 2 + writable:
                    raise ConnectionError("the daemon sent no arena")
                if writable:
                    self._lock = OwnerLock(fds[0], welcome.lock_base, welcome.owner, fds[2])
                self._view = mapped(fds[0], welcome.arena_bytes, fds[1], welcome.generations_bytes, writable)
        finally:
            for fd in fds:
                os.close(fd)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or f"{error}" or type(error).__name__
