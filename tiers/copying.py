"""Moving bytes fast from Python: two threads, no GIL, checksum while the bytes are in cache.

Small records are copied by the caller alone, by slices of memoryviews: looking up addresses,
giving up the GIL and waking a second thread each cost more than the copy.

Large ones:

    jobs ─┬─▶ caller's thread ─┐   each takes the next record, and copies it in pieces:
          └─▶ helper thread  ──┘   memmove 512 KiB, hash these 512 KiB, memmove …

One thread does not fill the memory bus, and more than two gain nothing that inference would
not rather use. The helper is started once and sleeps in between. Hashing a piece right
after it was copied reads it from cache, so that the checksum costs little.

The bytes that are hashed are those of the destination: what is stored is what is summed,
even if the source changes meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence

import xxhash

from tiers.checksum import digest

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor
    from typing import TypeVar

    from _typeshed import ReadableBuffer, WriteableBuffer

    T = TypeVar("T")

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


_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.argtypes, _new_bytes.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
_bytes_address = ctypes.pythonapi.PyBytes_AsString
_bytes_address.argtypes, _bytes_address.restype = (ctypes.py_object,), ctypes.c_void_p


def behind(head: bytes, source: ReadableBuffer) -> bytes:
    """head, and a copy of source behind it. Without the GIL, which b"".join keeps for as long as the copy takes."""
    pinned = Pinned(source)
    found: bytes = _new_bytes(
        None, len(head) + pinned.size_bytes
    )  # nobody else has it yet: so it may be filled
    address = _bytes_address(found)
    _memmove(address, head, len(head))
    _memmove(address + len(head), pinned.address, pinned.size_bytes)
    pinned.release()
    return found


_pool_guard = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _helped(work: Callable[[], None]) -> Future[None] | None:
    """Have a helper do this, too; None while the interpreter ends."""
    global _pool
    try:
        with _pool_guard:
            if _pool is None:
                from concurrent.futures import ThreadPoolExecutor

                _pool = ThreadPoolExecutor(COPY_THREADS - 1, "kvstore-copy")
            return _pool.submit(work)
    except RuntimeError:
        return None


def _forget_helpers_in_child() -> None:
    global _pool_guard, _pool
    _pool_guard, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_helpers_in_child)


def share(work: Callable[[int], T], count: int, total_bytes: int) -> list[T]:
    """The results of `work` for 0, 1, …; large work is shared with the helper, unless it comes too late."""
    results: dict[int, T] = {}
    indexes = iter(range(count))  # next() of it is atomic

    def take() -> None:
        for index in indexes:
            results[index] = work(index)

    is_large = count > 1 and total_bytes > count * SMALL_BYTES_MAX
    helping = _helped(take) if is_large else None
    try:
        take()
    finally:
        if helping is not None and not helping.cancel():
            helping.result()
    return [results[index] for index in range(count)]


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
    with _addresses(pairs) as jobs:

        def work(index: int) -> None:
            touch(index)
            _memmove(*jobs[index])

        share(work, len(jobs), sum(job[2] for job in jobs))


def copy_and_digest(
    pairs: Sequence[tuple[memoryview, ReadableBuffer]],
    touch: Callable[[int], None] = _nothing,
    columns: bytes = b"",
) -> list[bytes]:
    """Like `copy`; returns the checksum of every destination, a record of these columns."""
    if columns:
        copy(pairs, touch)
        return digest_all([destination for destination, _ in pairs], columns)
    if _are_small(pairs):
        digests = []
        for index, (destination, source) in enumerate(pairs):
            touch(index)
            _bytes_of(destination)[:] = _bytes_of(source)
            digests.append(xxhash.xxh3_128_digest(destination))
        return digests
    with _addresses(pairs) as jobs:

        def work(index: int) -> bytes:
            touch(index)
            destination, source, size_bytes = jobs[index]
            return _gather(pairs[index][0], destination, [(source, size_bytes)])

        return share(work, len(jobs), sum(job[2] for job in jobs))


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
    return share(work, len(records), total_bytes)


def digest_all(views: Sequence[memoryview], columns: bytes = b"") -> list[bytes]:
    """The checksum of each record, by two threads; see tiers/checksum.py."""

    def work(index: int) -> bytes:
        return digest(views[index], columns)

    total_bytes = sum(view.nbytes for view in views)
    return share(work, len(views), total_bytes)


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
    """All records of a lease have one size: that of the first one."""
    return not pairs or memoryview(pairs[0][0]).nbytes <= SMALL_BYTES_MAX


def _bytes_of(buffer: WriteableBuffer | ReadableBuffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@contextlib.contextmanager
def _addresses(
    pairs: Sequence[tuple[WriteableBuffer, ReadableBuffer]],
) -> Iterator[list[tuple[int, int, int]]]:
    """(destination, source, bytes) of every pair, both sides of which are pinned meanwhile."""
    pinned: list[Pinned] = []
    jobs: list[tuple[int, int, int]] = []
    try:
        for destination, source in pairs:
            into, out_of = Pinned(destination, writable=True), Pinned(source)
            pinned += (into, out_of)
            if into.size_bytes != out_of.size_bytes:
                raise ValueError(f"buffer of {out_of.size_bytes} bytes for a record of {into.size_bytes}")
            jobs.append((into.address, out_of.address, into.size_bytes))
        yield jobs
    finally:
        for each in pinned:
            each.release()
