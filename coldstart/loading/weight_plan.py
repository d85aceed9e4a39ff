"""What is read of a model's weight files, in which order, and where it lies in the ring meanwhile.

    file      │ header │ tensor A        │ B │ C │ tensor D, not wanted │ tensor E ...
    pieces             │ chunk  │ chunk  │ chunk │                      │ chunk ...        read and verified one by one
    spans              │       0         │   1   │                      │   2 ...          whole tensors; given back one by one

A span lies in one run in the ring, as far behind a border of a block as in its file, so that it can be read past the page
cache. A tensor that is too large for the ring has a span for each of its pieces, and memory of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from coldstart.blocks import BLOCK_BYTES
from coldstart.published.cutting import TensorPlace
from replication.formats.manifests import Chunk
from tiers.dram.pages import whole_pages

SPANS_MIN: Final = (
    4  # that the ring has room for: engines still hold the last ones while they ask for the next
)


class Piece(NamedTuple):
    """A chunk of a file. file: its place in the plan. at: of its first byte in the file. place: the same in the ring."""

    file: int
    at: int
    chunk: Chunk
    place: int


class Span(NamedTuple):
    """start, end: bytes of the file. first, after: its pieces. tensors: in it, or, if it `is_part`, the one that it is
    part of. place: of its first byte in the ring."""

    file: int
    start: int
    end: int
    first: int
    after: int
    tensors: Sequence[TensorPlace]
    is_part: bool
    place: int


class WeightFile(NamedTuple):
    """chunks: each with its place in the file. tensors: in the order of their bytes; () of a file that is only verified."""

    path: Path
    chunks: Sequence[tuple[int, Chunk]]
    tensors: Sequence[TensorPlace]


class Plan:
    """wanted: whether a tensor of this name is; pieces without such a one are not read. buffer_bytes: of the ring, at most,
    unless the largest pieces need more."""

    def __init__(self, files: Sequence[WeightFile], wanted: Callable[[str], bool], buffer_bytes: int) -> None:
        self.paths = [file.path for file in files]
        largest = max((chunk.size_bytes for file in files for _, chunk in file.chunks), default=0)
        self.ring_bytes = whole_pages(max(buffer_bytes, SPANS_MIN * (largest + 2 * BLOCK_BYTES)))
        self.pieces: list[Piece] = []
        self.spans: list[Span] = []
        self._place = 0
        for number, file in enumerate(files):
            for chunks, tensors in runs(file):
                kept = [tensor for tensor in tensors if wanted(tensor.name)]
                if kept or not file.tensors:
                    self._add(number, chunks, kept)
        if self._place <= self.ring_bytes:
            self.ring_bytes = whole_pages(max(1, self._place))
        self.size_bytes = sum(piece.chunk.size_bytes for piece in self.pieces)

    def _add(self, file: int, chunks: Sequence[tuple[int, Chunk]], tensors: Sequence[TensorPlace]) -> None:
        size_bytes = sum(chunk.size_bytes for _, chunk in chunks)
        if size_bytes + BLOCK_BYTES <= self.ring_bytes // SPANS_MIN:
            self._add_span(file, chunks, tensors, is_part=False)
            return
        for chunk in chunks:
            self._add_span(file, [chunk], tensors, is_part=True)

    def _add_span(
        self, file: int, chunks: Sequence[tuple[int, Chunk]], tensors: Sequence[TensorPlace], *, is_part: bool
    ) -> None:
        start, first = chunks[0][0], len(self.pieces)
        end = chunks[-1][0] + chunks[-1][1].size_bytes
        place = self._place + (start - self._place) % BLOCK_BYTES
        if place // self.ring_bytes != (place + end - start - 1) // self.ring_bytes:
            place = (place // self.ring_bytes + 1) * self.ring_bytes + start % BLOCK_BYTES
        self._place = place + end - start
        self.pieces += [Piece(file, at, chunk, place + at - start) for at, chunk in chunks]
        self.spans.append(Span(file, start, end, first, len(self.pieces), tensors, is_part, place))

    def digest(self) -> str:
        """Equal where two ranks read the same bytes in the same order."""
        facts = (
            f"{self.paths[piece.file].name} {piece.at} {piece.chunk.sha256.hex()} {piece.place}"
            for piece in self.pieces
        )
        return xxhash.xxh3_128_hexdigest("\n".join([str(self.ring_bytes), *facts]).encode())


def runs(file: WeightFile) -> Iterator[tuple[list[tuple[int, Chunk]], list[TensorPlace]]]:
    """Neighbouring chunks and the tensors in them, none of which is in another run, too."""
    waiting, chunks, tensors = deque(file.tensors), list[tuple[int, Chunk]](), list[TensorPlace]()
    for at, chunk in file.chunks:
        chunks.append((at, chunk))
        end = at + chunk.size_bytes
        while waiting and (waiting[0].start < end or waiting[0].end <= end):
            tensors.append(waiting.popleft())
        if not tensors or tensors[-1].end <= end:
            yield chunks, tensors
            chunks, tensors = [], []


def is_cut_at_tensors(file: WeightFile) -> bool:
    """Whether none of several tensors reaches from one chunk into another: else they cannot be given back one by one."""
    return all(len(chunks) == 1 or _count(tensors) == 1 for chunks, tensors in runs(file))


def _count(tensors: Iterable[TensorPlace]) -> int:
    return sum(tensor.end > tensor.start for tensor in tensors)
