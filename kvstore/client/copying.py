"""Moving bytes fast from Python: two threads, no GIL, checksum while the bytes are in cache.

Small records are copied by the caller alone, by slices of memoryviews: looking up addresses,
giving up the GIL and waking a second thread each cost more than the copy.

Large ones:

    jobs ─┬─▶ caller's thread ─┐   each takes the next record, and copies it in pieces:
          └─▶ helper thread  ──┘   memmove 512 KiB, hash these 512 KiB, memmove …

One thread does not fill the memory bus, and more than two gain nothing that inference would
not rather use. The helpers are started once and sleep in between. Hashing a piece right
after it was copied reads it from cache, so that the checksum costs little.

The bytes that are hashed are those of the destination: what is stored is what is summed,
even if somebody changes the source meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import xxhash

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

COPY_THREADS = 2  # the caller and one helper
PIECE_BYTES = 512 << 10  # stays in the L2 cache between copying and hashing
SMALL_BYTES_MAX = 256 << 10  # of a record that is not worth a second thread

_memmove = ctypes.memmove  # releases the GIL
_PyBUF_WRITABLE = 1


class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)


class Pinned:
    """The address of a contiguous buffer, which cannot move or go away while this lives."""

    __slots__ = ("_buffer", "address", "size_bytes")

    def __init__(self, buffer: ReadableBuffer, writable: bool = False) -> None:
        """Raises BufferError or TypeError if it is not contiguous, or read-only where it must not be."""
        self._buffer: _PyBuffer | None = None
        raw = _PyBuffer()
        _get_buffer(buffer, ctypes.byref(raw), _PyBUF_WRITABLE if writable else 0)
        self._buffer = raw
        self.address: int = raw.buf or 0
        self.size_bytes: int = raw.len

    def release(self) -> None:
        if self._buffer is not None:
            _release_buffer(ctypes.byref(self._buffer))
            self._buffer = None

    __del__ = release


class _Batch:
    """Records that several threads work off together. A helper that comes too late does nothing."""

    __slots__ = ("_done", "_error", "_guard", "_helping", "_indexes", "_open", "_work", "results")

    def __init__(self, work: Callable[[int], object], count: int) -> None:
        self._work = work
        self.results: list[object] = [None] * count
        self._indexes: Iterator[int] = iter(range(count))  # next() of it is atomic
        self._error: BaseException | None = None
        self._guard = threading.Lock()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._open = True
        self._helping = 0

    def lead(self) -> None:
        """In the caller's thread: work, then wait for what helpers have in hand. Raises what work raised."""
        self._run()
        with self._guard:
            self._open = False
            helping = self._helping
        for _ in range(helping):
            self._done.get()
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """In a helper's thread: work, unless the batch is finished already."""
        with self._guard:
            if not self._open:
                return
            self._helping += 1
        self._run()
        self._done.put(None)

    def _run(self) -> None:
        try:
            for index in self._indexes:
                self.results[index] = self._work(index)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._error = error


_helpers_guard = threading.Lock()
_helpers: list[threading.Thread] = []
_waiting: SimpleQueue[_Batch] = SimpleQueue()


def _help(waiting: SimpleQueue[_Batch]) -> None:
    while True:
        batch = waiting.get()
        batch.help()
        del batch  # or its buffers would stay pinned until the next one


def _start_helpers() -> None:
    with _helpers_guard:
        while len(_helpers) < COPY_THREADS - 1:
            thread = threading.Thread(target=_help, args=(_waiting,), name="kvstore-copy", daemon=True)
            thread.start()
            _helpers.append(thread)


def _forget_helpers_in_child() -> None:
    global _helpers_guard, _waiting
    _helpers_guard = threading.Lock()
    _waiting = SimpleQueue()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget_helpers_in_child)


def _run(work: Callable[[int], object], count: int, total_bytes: int) -> list[object]:
    batch = _Batch(work, count)
    if count > 1 and total_bytes > count * SMALL_BYTES_MAX:
        _start_helpers()
        for _ in range(min(COPY_THREADS, count) - 1):
            _waiting.put(batch)
    batch.lead()
    return batch.results


def _nothing(_: int) -> None:
    pass


def copy(
    pairs: Sequence[tuple[WriteableBuffer, ReadableBuffer]], touch: Callable[[int], None] = _nothing
) -> None:
    """Copy each source to its destination of the same length. Raises ValueError, BufferError, TypeError.

    touch: called with the position of each pair before it is copied, in the thread that copies it.
    """
    if _are_small(pairs):
        for index, (destination, source) in enumerate(pairs):
            touch(index)
            _bytes_of(destination)[:] = _bytes_of(source)
        return
    with _Addresses(pairs) as jobs:

        def work(index: int) -> None:
            touch(index)
            _memmove(*jobs[index])

        _run(work, len(jobs), sum(job[2] for job in jobs))


def copy_and_digest(
    pairs: Sequence[tuple[memoryview, ReadableBuffer]], touch: Callable[[int], None] = _nothing
) -> list[bytes]:
    """Like `copy`; returns xxh3_128 of every destination."""
    if _are_small(pairs):
        digests = []
        for index, (destination, source) in enumerate(pairs):
            touch(index)
            _bytes_of(destination)[:] = _bytes_of(source)
            digests.append(xxhash.xxh3_128_digest(destination))
        return digests
    with _Addresses(pairs) as jobs:

        def work(index: int) -> bytes:
            touch(index)
            destination, source, size_bytes = jobs[index]
            return _gather(pairs[index][0], destination, [(source, size_bytes)])

        return _run(work, len(jobs), sum(job[2] for job in jobs))  # type: ignore[return-value]  # of `work`


def gather_and_digest(
    records: Sequence[memoryview], addresses: Sequence[int], pieces: Sequence[Sequence[tuple[int, int]]]
) -> list[bytes]:
    """Fill each record (which starts at its address) with its pieces, one after the other, and hash it.

    pieces: of each record, (address, bytes) of what goes into it; together as long as the
    record. The caller sees to it that the memory is there. Returns xxh3_128 of every record.
    """

    def work(index: int) -> bytes:
        return _gather(records[index], addresses[index], pieces[index])

    total_bytes = sum(record.nbytes for record in records)
    return _run(work, len(records), total_bytes)  # type: ignore[return-value]  # of `work`


def digest_all(views: Sequence[ReadableBuffer]) -> list[bytes]:
    """xxh3_128 of each buffer."""

    def work(index: int) -> bytes:
        return xxhash.xxh3_128_digest(views[index])

    total_bytes = sum(memoryview(view).nbytes for view in views)
    return _run(work, len(views), total_bytes)  # type: ignore[return-value]  # of `work`


def _gather(record: memoryview, address: int, pieces: Sequence[tuple[int, int]]) -> bytes:
    """Copy the pieces, hashing what was copied whenever it is PIECE_BYTES."""
    state, hashed, filled = xxhash.xxh3_128(), 0, 0
    for source, size_bytes in pieces:
        for start in range(0, size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, size_bytes - start)
            _memmove(address + filled, source + start, count)
            filled += count
            if filled - hashed >= PIECE_BYTES:
                state.update(record[hashed:filled])
                hashed = filled
    state.update(record[hashed:filled])
    return state.digest()


def _are_small(pairs: Sequence[tuple[WriteableBuffer, ReadableBuffer]]) -> bool:
    """All records of a lease have one size: the first tells it."""
    return not pairs or memoryview(pairs[0][0]).nbytes <= SMALL_BYTES_MAX


def _bytes_of(buffer: WriteableBuffer | ReadableBuffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class _Addresses:
    """Pins both sides of every pair for the time of a copy."""

    def __init__(self, pairs: Sequence[tuple[WriteableBuffer, ReadableBuffer]]) -> None:
        self._pinned: list[Pinned] = []
        self._pairs = pairs

    def __enter__(self) -> list[tuple[int, int, int]]:
        jobs: list[tuple[int, int, int]] = []
        try:
            for destination, source in self._pairs:
                into, out_of = Pinned(destination, writable=True), Pinned(source)
                self._pinned += (into, out_of)
                if into.size_bytes != out_of.size_bytes:
                    raise ValueError(f"buffer of {out_of.size_bytes} bytes for a record of {into.size_bytes}")
                jobs.append((into.address, out_of.address, into.size_bytes))
        except BaseException:
            self.__exit__()
            raise
        return jobs

    def __exit__(self, *_: object) -> None:
        for pinned in self._pinned:
            pinned.release()
