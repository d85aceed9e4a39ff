"""Loading: the weights of a revision on this disk as tensors, each chunk verified while it streams.

    files ─O_DIRECT─▶ pieces in a ring ─xxh3_128─▶ READY ─▶ tensors, views of the ring ─▶ the engine copies its slice
              threads without the GIL, in the order of the files            freed when nobody holds a tensor any more

A tensor that is given back is right, or there is an error that names the file and the bytes. It stays right as long as
somebody holds it: the ring is told by the end of its memory's last user, not by the next question. Where an engine keeps so
many tensors that the ring is full of them, the ring leaves them their memory, and from then on tensors are copies.

Several ranks read one ring (coldstart/loading/ring.py): rank r of n reads every n-th piece, and waits for what the others read. Where
one of them is gone, each of those left reads the rest itself.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final, Protocol

import xxhash

from coldstart.blocks import RunsFile, read_all
from coldstart.disk.reading import Tensor
from coldstart.errors import ChunkDamaged, FilesWrong, ModelError
from coldstart.loading.pins import Pins, address_of
from coldstart.loading.ring import DAMAGED, FAILED, NEVER_OFFSET, READY, Ring
from coldstart.loading.weight_plan import Piece, Plan, Span, WeightFile, is_cut_at_tensors
from coldstart.published.cutting import HEADER_BYTES_MAX, SAFETENSORS, Header, TensorPlace, parse_header
from replication.formats.manifests import Chunk, File, Manifest
from tiers.dram.pages import HUGE_PAGE_BYTES, private_memory

BUFFER_BYTES: Final = 512 << 20  # of the ring, by default: tensors up to a quarter of it are not copied
THREADS: Final = 8  # that read, of all ranks of a node together
_POLL_S: Final = 0.0005  # between looks at what other threads and ranks have done: a piece takes some ms
_ROOM_POLL_S: Final = 0.002  # the same for room, by every thread that reads: no more is read ahead meanwhile
_WRITTEN_BYTES_MAX: Final = 1 << 20
_ALIVE_S: Final = 0.2  # between looks at whether other ranks are there


class Chunks(Protocol):
    """Where pieces are read from. stopped: whether nobody waits for it any more."""

    def read(self, piece: Piece, view: memoryview, stopped: Callable[[], bool]) -> bool:
        """Fill the view with a piece's true bytes; False where they are not true. Blocks. Raises OSError, ModelError."""

    def close(self) -> None: ...


class WholeFiles:
    """Files that are all there: what is not true in them is damaged."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[int, RunsFile] = {}
        self._guard = threading.Lock()

    def read(self, piece: Piece, view: memoryview, stopped: Callable[[], bool]) -> bool:
        with self._guard:
            file = self._open.get(piece.file)
            if file is None:
                file = self._open[piece.file] = RunsFile(self._paths[piece.file])
        return file.read(view, piece.at) and xxhash.xxh3_128_digest(view) == piece.chunk.checksum

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


class Loading:
    """The tensors of a plan, once, by one rank. read_bytes: what this rank has read until now. waited_s: for bytes.

    Threads are started by the first question, and end with the last tensor or `close`.
    """

    def __init__(
        self,
        plan: Plan,
        chunks: Chunks,
        ring: Ring | None = None,
        threads: int = THREADS,
        pins: Pins | None = None,
    ) -> None:
        """pins: of the device that tensors are copied to."""
        self._plan = plan
        self._pins = pins
        self._pinned = 0  # the address of the ring, while it is registered
        self._chunks = chunks
        self._ring = ring or Ring(plan.ring_bytes, len(plan.pieces))
        self._threads_count = max(1, -(-threads // self._ring.count))
        self.read_bytes = 0
        self.waited_s = 0.0
        self._held: dict[int, int] = {}  # by span, in order: how many may still look at it
        self._dropped: deque[int] = deque()  # spans that one of them let go, at any time, in any thread
        self._copies = False
        self._stop = False
        self._failure: Exception | None = None
        self._guard = threading.RLock()  # of `freed`, too: nobody hears of room while it is held

    def tensors(self, first: int = 0) -> Iterator[tuple[str, Any]]:
        """Names and tensors of torch, in the order of the bytes. first: the span that is begun with. Raises ChunkDamaged,
        FilesWrong, OSError."""
        threads = self._start(first)
        self._pin()
        own = memoryview(b"")
        is_over = False
        try:
            for number in range(first, len(self._plan.spans)):
                span = self._plan.spans[number]
                self._hold(number)
                if not self._await(number):
                    self._leave()
                    self._close(threads)
                    yield from self._alone(number)
                    return
                if span.is_part:
                    own = self._joined(own, span)
                else:
                    for tensor in span.tensors:
                        yield (
                            tensor.name,
                            as_tensor(tensor, self._seen(number, tensor), self._plan.paths[span.file]),
                        )
                self._dropped.append(number)
                if span.is_part and all(tensor.end <= span.end for tensor in span.tensors):
                    for tensor in span.tensors:
                        yield (
                            tensor.name,
                            as_tensor(tensor, own[: tensor.end - tensor.start], self._plan.paths[span.file]),
                        )
                    own = memoryview(b"")
            is_over = True
        finally:
            if not is_over and self._held:
                self._leave()
            self._close(threads)

    # -- the ring --

    def _hold(self, number: int) -> None:
        """A span is looked at from now on: none before it is needed, but those that somebody holds."""
        with self._guard:
            self._held[number] = 1
        self._settle()

    def _settle(self) -> None:
        """Say what is free by now."""
        with self._guard:
            count = len(self._dropped)  # not what is dropped from now on: that may land later
            if count and self._pins is not None:
                self._pins.landed()
            for _ in range(count):
                number = self._dropped.popleft()
                self._held[number] -= 1
                if not self._held[number]:
                    del self._held[number]
            first = next(iter(self._held), None)
            if first is not None and not self._stop:
                self._ring.freed[self._ring.index] = self._plan.spans[first].place

    def _seen(self, number: int, tensor: TensorPlace) -> memoryview:
        """The bytes of a tensor, in the ring until its last user is gone; or a copy."""
        span = self._plan.spans[number]
        start = (span.place + tensor.start - span.start) % self._ring.size_bytes
        view = self._ring.seen[start : start + tensor.end - tensor.start]
        if self._copies:
            own = _own(len(view))
            own[:] = view
            return own
        if self._ring.count > 1 and (own := for_a_writer(view)) is not view:
            return own
        with self._guard:
            self._held[number] += 1
        weakref.finalize(view, self._dropped.append, number).atexit = False
        return view

    def _leave(self) -> None:
        """The memory of what is held stays its holders', and all of the ring is free; what is not held yet is copied."""
        self._unpin()
        with self._guard:
            self._ring.leave_seen()
            self._held, self._dropped, self._copies = {}, deque(), True

    def _leave_if_full(self, number: int) -> None:
        """Where this span has no room because of tensors that this rank's engine holds, and still has none when nothing is
        registered any more: a thread that let one go meanwhile has made room, which others may be reading into."""
        if self._is_full_of_mine(number):
            self._unpin()
            with self._guard:
                if self._is_full_of_mine(number):
                    self._leave()
                    self._hold(number)

    def _pin(self) -> None:
        """Reading has begun by then: it takes some ms."""
        if self._pins is not None and self._pins.pin(
            address := address_of(self._ring.seen), self._ring.size_bytes
        ):
            self._pinned = address

    def _unpin(self) -> None:
        if self._pins is not None and self._pinned:
            self._pins.landed()
            self._pins.unpin(self._pinned)
            self._pinned = 0

    def _joined(self, own: memoryview, span: Span) -> memoryview:
        """Memory of its own for a tensor that is too large for the ring, and this part of it copied there."""
        tensor = max(span.tensors, key=lambda each: each.end - each.start)
        if not len(own):
            own = _own(tensor.end - tensor.start)
        low, high = max(span.start, tensor.start), min(span.end, tensor.end)
        start = (span.place + low - span.start) % self._ring.size_bytes
        own[low - tensor.start : high - tensor.start] = self._ring.seen[start : start + high - low]
        return own

    # -- waiting --

    def _await(self, number: int) -> bool:
        """Until all pieces of a span are true. False where a rank that should have read one is gone. Raises as `tensors`."""
        span, states = self._plan.spans[number], self._ring.states
        begun_s = looked_s = time.monotonic()
        for place in range(span.first, span.after):
            while states[place] != READY:
                if states[place] in (DAMAGED, FAILED):
                    raise self._failed(place) from self._failure
                self._leave_if_full(number)
                now_s = time.monotonic()
                if now_s - looked_s > _ALIVE_S:
                    looked_s = now_s
                    if not self._ring.is_there(place % self._ring.count) and states[place] != READY:
                        return False
                time.sleep(_POLL_S)
        self.waited_s += time.monotonic() - begun_s
        return True

    def _is_full_of_mine(self, number: int) -> bool:
        """Whether this span has no room because of tensors that this rank's engine holds."""
        self._settle()
        span = self._plan.spans[number]
        needed = span.place + span.end - span.start - self._ring.size_bytes
        return needed > int(self._ring.freed[self._ring.index])

    def _failed(self, place: int) -> Exception:
        piece = self._plan.pieces[place]
        path = self._plan.paths[piece.file]
        if self._ring.states[place] == DAMAGED:
            return damaged(path, piece.at, piece.chunk)
        if isinstance(self._failure, ModelError):
            return type(self._failure)(*self._failure.args)
        why = self._failure or "another rank says why"
        return FilesWrong(
            f"{path}: bytes {piece.at} to {piece.at + piece.chunk.size_bytes} cannot be read ({why})"
        )

    def _alone(self, first: int) -> Iterator[tuple[str, Any]]:
        """The rest, with a ring of its own."""
        alone = Loading(self._plan, self._chunks, pins=self._pins)
        alone._copies = self._copies
        try:
            yield from alone.tensors(first)
        finally:
            self.read_bytes += alone.read_bytes
            self.waited_s += alone.waited_s

    # -- reading, in threads --

    def _start(self, first: int) -> list[threading.Thread]:
        """Each takes the next piece of this rank's."""
        spans = enumerate(self._plan.spans)
        pieces = iter(
            [
                (span, place)
                for number, span in spans
                for place in range(span.first, span.after)
                if number >= first and place % self._ring.count == self._ring.index
            ]
        )
        threads = [
            threading.Thread(target=self._read_all, args=(pieces,), name="kvstore-load", daemon=True)
            for _ in range(self._threads_count)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _read_all(self, pieces: Iterator[tuple[Span, int]]) -> None:
        for span, place in pieces:  # next() of it is atomic
            piece = self._plan.pieces[place]
            try:
                if not self._has_room(span):
                    return
                start = piece.place % self._ring.size_bytes
                view = self._ring.memory[start : start + piece.chunk.size_bytes]
                is_true = self._chunks.read(piece, view, lambda: self._stop)
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait for the piece hear of it
                self._failure = error
                self._ring.states[place] = FAILED
                return
            if self._stop and not is_true:
                return  # nobody has waited for its bytes: other ranks read them themselves
            self._ring.states[place] = READY if is_true else DAMAGED
            with self._guard:
                self.read_bytes += piece.chunk.size_bytes
            if not is_true:
                return

    def _has_room(self, span: Span) -> bool:
        """Waits until a span has; False where nobody wants it any more."""
        ring, looked_s = self._ring, time.monotonic()
        needed = span.place + span.end - span.start - ring.size_bytes
        while not self._stop:
            self._settle()
            slow = [rank for rank in range(ring.count) if ring.freed[rank] < needed]
            if not slow:
                return True
            time.sleep(_ROOM_POLL_S)
            if time.monotonic() - looked_s > _ALIVE_S:
                looked_s = time.monotonic()
                for rank in slow:
                    if not ring.is_there(rank):
                        ring.freed[rank] = NEVER_OFFSET
        return False

    def _close(self, threads: Sequence[threading.Thread]) -> None:
        self._stop = True
        for thread in threads:
            thread.join()
        self._unpin()
        self._ring.close()
        self._chunks.close()


# ---- which files, and what is in them ---------------------------------------------------------


def weight_file(path: Path, file: File, manifest: Manifest, is_header_alone: bool = False) -> WeightFile:
    """What is in a file, as far as it can be given back tensor by tensor. is_header_alone: its tensors are elsewhere. Raises
    FilesWrong, ChunkDamaged, OSError."""
    chunks = list(manifest.chunks_of(file))
    with path.open("rb", buffering=0) as opened:
        fd, size_bytes = opened.fileno(), os.fstat(opened.fileno()).st_size
        if size_bytes != file.size_bytes and not is_header_alone:
            raise FilesWrong(
                f"{path}: {size_bytes} bytes, published were {file.size_bytes}: cut off, or changed"
            )
        header = _verified_header(fd, path, file, chunks) if path.suffix == SAFETENSORS else None
    whole = WeightFile(path, chunks, header.tensors if header is not None else ())
    return whole if is_cut_at_tensors(whole) else WeightFile(path, chunks, ())


def _verified_header(fd: int, path: Path, file: File, chunks: Sequence[tuple[int, Chunk]]) -> Header | None:
    """None of a file that is no safetensors, whatever it is called, or whose header has no chunks of its own. Raises
    ChunkDamaged, OSError."""
    text_bytes = min(HEADER_BYTES_MAX, int.from_bytes(os.pread(fd, 8, 0), "little"))
    content, filled = bytearray(8 + text_bytes), 0
    for at, chunk in chunks:
        if at >= len(content):
            break
        view = memoryview(bytearray(chunk.size_bytes))
        if at + chunk.size_bytes > len(content):
            return None
        if not read_all(fd, view, at) or xxhash.xxh3_128_digest(view) != chunk.checksum:
            raise damaged(path, at, chunk)
        content[at : at + chunk.size_bytes] = view
        filled = at + chunk.size_bytes
    return parse_header(bytes(content[8:]), file.size_bytes) if filled == len(content) else None


def damaged(path: Path, at: int, chunk: Chunk) -> ChunkDamaged:
    where = f"{path}: bytes {at} to {at + chunk.size_bytes}"
    return ChunkDamaged(f"{where} are not those that were published: damaged on this disk, or changed")


# ---- tensors of torch -------------------------------------------------------------------------


def as_tensor(place: TensorPlace, view: memoryview, path: Path) -> Any:
    """A tensor over these bytes, which stay as they are as long as it, or a view of it, is there; of bytes that lie askew,
    over a copy. Raises FilesWrong."""
    if view.readonly:
        _hush_about_read_only()
    item_bytes = len(view) // (prod(place.shape) or 1)
    if item_bytes > 1 and address_of(view) % item_bytes:
        view = memoryview(bytearray(view))
    return Tensor(place, view, f"{path}: {place.name}").torch()


def for_a_writer(view: memoryview) -> memoryview:
    """Of memory that others see, too: a copy where a model may write into it. Some do so with biases, of which they need none
    on most ranks."""
    return memoryview(bytearray(view)) if len(view) <= _WRITTEN_BYTES_MAX else view


@cache
def _hush_about_read_only() -> None:
    """Torch says once that it does not keep anybody from writing to such memory: the kernel does."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


def _own(size_bytes: int) -> memoryview:
    is_small = size_bytes < HUGE_PAGE_BYTES
    return memoryview(bytearray(size_bytes)) if is_small else private_memory(size_bytes)
