"""Models in the node's DRAM, as a process sees them: slabs of the arena, mapped one behind the other.

    arena              │ KV │ slab 1 │ KV │ KV │ slab 0 │ …
    address space      │ slab 0 │ slab 1 │ … │               mmap of the arena's descriptor, MAP_FIXED over a reservation

    attach ─▶ ResidentModel: read-only; in use until it is closed, and its last view is gone
    fill   ─▶ ModelFilling: slabs to be written as they come, committed one by one ─▶ whole

What is mapped stays true for as long as a view of it exists: the process holds a shared lock on the arena, which the
daemon asks for before it gives a slab to others, and so does the daemon that comes next. The lock goes with the last view, or
with the process. Each of these objects has a connection of its own, whose end the daemon takes for the end of the use.

Light on purpose: no more is imported here than a client needs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
import weakref
from collections.abc import Mapping, Sequence

from kvstore.client.calls import Calls
from kvstore.client.refusing import refused, refusing, require
from kvstore.errors import Refused, Unavailable
from tiers.locks import change_lock

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from typing import Any, Self

    from kvstore.client.arena_view import OwnerLock
    from kvstore.protocol import answers, frames
    from kvstore.protocol.frames import Extents

TIMEOUT_S = 10.0  # of each call: a daemon that is starting verifies much
POLL_S = 0.02  # between two looks at what is coming
_ALIGN_BYTES = 2 << 20  # slabs begin on huge pages, wherever they are mapped
_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x1, 0x2, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _ModelCalls(Calls):
    """Calls about models."""

    def reserve_model(self, label: str, content: bytes, count: int, start: int) -> Any:
        return self._call((), lambda w, _: w.ReserveModel(label, content, count, start))

    def commit_model(self, label: str, indexes: Sequence[int], checksums: bytes) -> None:
        self._call((), lambda w, _: w.CommitModel(label, list(indexes), checksums))

    def attach_model(self, label: str, start: int) -> Any:
        return self._call((), lambda w, _: w.AttachModel(label, start))

    def drop_model(self, label: str) -> None:
        self._call((), lambda w, _: w.DropModel(label))

    def model_loaded(self, label: str, by_source: dict[frames.ModelSource, int], seconds: float) -> None:
        self._call((), lambda w, _: w.ModelLoaded(label, by_source, seconds))

    def list_models(self) -> Any:
        return self._call((), lambda w, _: w.ListModels()).report

    def writing_lock(self) -> OwnerLock:
        """Of the connection there is. Raises Unavailable."""
        connection = self._connection
        if connection is None:
            raise Unavailable("the connection to the daemon was lost")
        return connection.lock_for_writing()

    def is_intact(self, parts: Sequence[Extents]) -> bool:
        """Whether these slabs are still those that the daemon named. Makes no call."""
        view = self._view
        return view is not None and all(view.intact(part) == len(part.runs) for part in parts)


class Memory:
    """Addresses for so many slabs, each of which is mapped when it is known where it lies. view: all of them, contiguous."""

    def __init__(self, slab_bytes: int, count: int) -> None:
        """Raises Unavailable."""
        self.slab_bytes = slab_bytes
        self.size_bytes = slab_bytes * count
        flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE
        whole_bytes = self.size_bytes + _ALIGN_BYTES
        start = _mapped(0, whole_bytes, _PROT_NONE, flags, -1, 0)
        self._address = -(-start // _ALIGN_BYTES) * _ALIGN_BYTES
        self._held: list[int] = []  # descriptors that are closed when the last view is gone
        array = (ctypes.c_ubyte * self.size_bytes).from_address(self._address)
        weakref.finalize(array, _let_go, start, whole_bytes, self._held)
        self.view = memoryview(array).cast("B")

    def place(self, index: int, count: int, fd: int, offset: int, is_writable: bool) -> None:
        """Map so many slabs, that lie one behind the other in the file, too. Raises Unavailable."""
        prot = _PROT_READ | (_PROT_WRITE if is_writable else 0)
        start, size_bytes = self._address + index * self.slab_bytes, count * self.slab_bytes
        _mapped(start, size_bytes, prot, _MAP_SHARED | _MAP_FIXED, fd, offset)

    def touch(self, start: int, size_bytes: int, is_writable: bool = False) -> None:
        """Have the pages of these bytes in our page tables before they are copied from: one by one is 3x slower."""
        low = start & -4096
        advice = _MADV_POPULATE_WRITE if is_writable else _MADV_POPULATE_READ
        _libc.madvise(
            self._address + low, start + size_bytes - low, advice
        )  # what is not there comes by itself

    def close(self) -> None:
        """Forget our own view."""
        self.view = memoryview(b"")

    def hold(self, fd: int) -> None:
        """Keep this descriptor as long as a view exists."""
        self._held.append(fd)


def _mapped(address: int, size_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    found = _libc.mmap(address, size_bytes, prot, flags, fd, offset)
    if found == _MAP_FAILED or found is None:
        raise Unavailable(
            f"a model of {size_bytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}"
        )
    return int(found)


def _let_go(start: int, size_bytes: int, held: list[int]) -> None:
    _libc.munmap(start, size_bytes)
    for fd in held:
        os.close(fd)


@refusing
class ResidentModel:
    """A model that is whole, mapped read-only. Context manager. view: its image (see coldstart.loading.resident), then zeros.

    content: the first bytes of the digest of what it is.
    """

    def __init__(self, calls: _ModelCalls, memory: Memory, content: bytes, parts: Sequence[Extents]) -> None:
        self._calls, self._memory, self._parts = calls, memory, parts
        self.content = content
        self.view = memory.view.toreadonly()
        memory.close()

    def valid(self) -> bool:
        """Whether every byte has been the model's until now. Costs no call. False only where the lock of this process
        was taken away."""
        return self._calls.is_intact(self._parts)

    def touch(self, start: int, size_bytes: int) -> None:
        """See Memory."""
        self._memory.touch(start, size_bytes)

    def close(self) -> None:
        """The use ends, when the last view is gone. Idempotent."""
        self.view = memoryview(b"")
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@refusing
class ModelFilling:
    """A model that this process brings into DRAM. Context manager; leaving it gives up what is not committed.

    view: the image, of which only slabs that have `arrived` may be touched. ready: slabs that an earlier filler committed;
    they cannot be written.
    """

    @refused
    def __init__(self, calls: _ModelCalls, label: str, content: bytes, count: int) -> None:
        """Raises Unavailable, Refused."""
        self._calls, self._label, self._content, self.count = calls, label, content, count
        self.ready: set[int] = set()
        self._there: set[int] = set()
        self._lock: OwnerLock | None = None
        answer = calls.reserve_model(label, content, count, 0)
        while answer.state == "verifying":  # an earlier daemon left it, all of it or some
            time.sleep(POLL_S)
            answer = calls.reserve_model(label, content, count, 0)
        self.is_whole = answer.state == "whole"  # there is nothing to do
        self.slab_bytes: int = answer.extents.slot_bytes
        self._memory = Memory(self.slab_bytes, count)
        self.view = self._memory.view
        try:
            lock = calls.writing_lock()
            lock.enter()  # until the end: the daemon waits for it before it gives our slabs to others
            self._lock = lock
            self._take(answer)
        except BaseException:
            self.close()
            raise

    def arrived(self, index: int, wait_s: float) -> bool:
        """Whether a slab is there to be written, or ready; waits for KV to give way. Raises Unavailable, Refused."""
        give_up_s = time.monotonic() + wait_s
        while index not in self._there:
            self._take(self._calls.reserve_model(self._label, self._content, self.count, index))
            if index in self._there:
                break
            if time.monotonic() > give_up_s:
                return False
            time.sleep(POLL_S)
        return True

    def commit(self, checksums: Mapping[int, bytes]) -> None:
        """All bytes of these slabs are true, and have these checksums. Raises Unavailable, Refused."""
        indexes = list(checksums)
        self._calls.commit_model(self._label, indexes, b"".join(checksums.values()))
        self.ready.update(indexes)

    def slab(self, index: int) -> memoryview:
        return self.view[index * self.slab_bytes : (index + 1) * self.slab_bytes]

    def _take(self, answer: Any) -> None:
        arena, extents = self._calls.arena, answer.extents
        if self._calls.writing_lock() is not self._lock:
            raise Unavailable("the connection that this model was filled on was lost")
        if arena.intact(extents) < len(extents.runs):
            raise Unavailable("slabs that were reserved were taken back")
        for index, is_ready, offset in zip(answer.indexes, answer.ready, extents.offsets(), strict=True):
            if index not in self._there:
                self._memory.place(index, 1, arena.fd, offset, is_writable=not is_ready)
                if not is_ready:
                    self._memory.touch(index * self.slab_bytes, self.slab_bytes, is_writable=True)
                else:
                    self.ready.add(index)
                self._there.add(index)

    def close(self) -> None:
        """Idempotent."""
        lock, self._lock = self._lock, None
        self.view = memoryview(b"")
        self._memory.close()
        self._calls.close()
        if lock is not None:
            lock.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(
    name: str,
    revision: str,
    socket_path: str | os.PathLike[str] | None = None,
    wait_s: float = 0.0,
    timeout_s: float = TIMEOUT_S,
    stalled_s: float = 0.0,
) -> ResidentModel:
    """Use a model that is in this node's DRAM. wait_s: for one that is being brought there, or verified after a start.
    stalled_s: longer than that, until it has come no nearer for so long.

    Raises Refused (`not_found`, or `not_ready` after the wait), Unavailable.
    """
    label, give_up_s, there_bytes = f"{name}@{revision}", time.monotonic() + wait_s, -1
    calls = _ModelCalls(socket_path, timeout_s, f"model {label}"[:200], writable=False)
    try:
        while (answer := calls.attach_model(label, 0)).state != "whole":
            if stalled_s and answer.state in ("filling", "verifying"):
                ready_bytes = _ready_bytes(calls, name, revision)
                if ready_bytes > there_bytes:
                    there_bytes, give_up_s = ready_bytes, max(give_up_s, time.monotonic() + stalled_s)
            if time.monotonic() > give_up_s:
                raise Refused("not_ready", f"model {label}: {answer.state}")
            time.sleep(POLL_S)
        return _attached(calls, label, answer)
    except BaseException:
        calls.close()
        raise


def _ready_bytes(calls: _ModelCalls, name: str, revision: str) -> int:
    found = calls.list_models()["models"]
    return next(
        (one["ready_bytes"] for one in found if (one["name"], one["revision"]) == (name, revision)), 0
    )


def _attached(calls: _ModelCalls, label: str, answer: Any) -> ResidentModel:
    arena, slab_bytes = calls.arena, answer.extents.slot_bytes
    parts, offsets = [], list[int]()
    memory = Memory(slab_bytes, answer.count)
    fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY | os.O_CLOEXEC)  # with locks of its own
    memory.hold(fd)
    change_lock(fd, fcntl.F_RDLCK, answer.user_lock)
    while True:
        if answer.state != "whole" or not answer.indexes:
            raise Unavailable(f"model {label}: it left while it was attached to")
        parts.append(answer.extents)
        offsets += answer.extents.offsets()
        if len(offsets) >= answer.count:
            break
        answer = calls.attach_model(label, len(offsets))
    start = 0
    for at in range(1, len(offsets) + 1):
        if at == len(offsets) or offsets[at] != offsets[at - 1] + slab_bytes:
            memory.place(start, at - start, arena.fd, offsets[start], is_writable=False)
            start = at
    model = ResidentModel(calls, memory, answer.content, parts)
    if not model.valid():  # another daemon, which knows nothing of us, had it between the two
        raise Unavailable(f"model {label}: it left while it was attached to")
    return model


def fill(
    name: str,
    revision: str,
    content: bytes,
    size_bytes: int,
    socket_path: str | os.PathLike[str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> ModelFilling:
    """Bring an image of so many bytes into this node's DRAM. content: 16 bytes that differ from those of others of the same name.

    Raises Refused (`limit_exceeded`: it does not fit; `in_use`), Unavailable.
    """
    require(size_bytes > 0, f"an image of {size_bytes} bytes")
    label = f"{name}@{revision}"
    calls = _ModelCalls(socket_path, timeout_s, f"fills {label}"[:200])
    try:
        slab_bytes: int = calls.list_models()["slab_bytes"]
        return ModelFilling(calls, label, content, -(-size_bytes // slab_bytes))
    except BaseException:
        calls.close()
        raise


def drop(name: str, revision: str, socket_path: str | os.PathLike[str] | None = None) -> None:
    """Give a model's slabs back. Raises Refused (`not_found`, `in_use`), Unavailable."""
    with _ModelCalls(socket_path, TIMEOUT_S, "model unload", attach=False) as calls:
        calls.drop_model(f"{name}@{revision}")


def listed(socket_path: str | os.PathLike[str] | None = None) -> list[answers.Model]:
    """Models in DRAM. Raises Refused, Unavailable."""
    with _ModelCalls(socket_path, TIMEOUT_S, "models", attach=False) as calls:
        found: list[answers.Model] = calls.list_models()["models"]
        return found


def loaded(
    name: str,
    revision: str,
    by_source: Mapping[frames.ModelSource, int],
    seconds: float,
    socket_path: str | os.PathLike[str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Have it counted that this process has loaded a model. by_source: bytes. Raises Refused, Unavailable."""
    with _ModelCalls(socket_path, timeout_s, "model loaded", attach=False) as calls:
        calls.model_loaded(f"{name}@{revision}", dict(by_source), seconds)
