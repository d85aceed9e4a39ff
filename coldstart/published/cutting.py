"""Where files are cut into chunks.

    safetensors   │ header │ tensor │ tensor, in pieces of CHUNK_BYTES_MAX │ small ones, together up to JOINED_BYTES_MAX │ ...
    other files   │ pieces of CHUNK_BYTES_MAX ...

Tensors begin chunks, so that a revision in which some of them changed has the other ones' chunks, wherever they lie in the
file. A file that says it is safetensors and is not is cut like any other: what is in it is the engine's business.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from replication.formats.manifests import CHUNK_BYTES_MAX, MIB
from tiers.parsing import ParserErrors

SAFETENSORS: Final = ".safetensors"
JOINED_BYTES_MAX: Final = 1 * MIB  # of small tensors that share a chunk: made anew where one of them changes
HEADER_BYTES_MAX: Final = 100 * 1000 * 1000  # as safetensors itself allows
_PREFIX_BYTES: Final = 8

Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]


class TensorPlace(msgspec.Struct, frozen=True):
    """Of a tensor in a safetensors file. start, end: bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """data_start: where the tensors begin. tensors: in the order of their bytes."""

    data_start: int
    tensors: list[TensorPlace]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[Offset], Meta(max_length=64)]
    data_offsets: tuple[Offset, Offset]


def read_header(fd: int) -> Header | None:
    """Of a safetensors file; None where it is none, whole and without gaps. Blocks; raises OSError."""
    return header_from(partial(os.pread, fd), os.fstat(fd).st_size)


def header_from(read: Callable[[int, int], bytes], size_bytes: int) -> Header | None:
    """Of a file of so many bytes. read: some of them, from there on."""
    header_bytes = int.from_bytes(read(_PREFIX_BYTES, 0), "little") if size_bytes > _PREFIX_BYTES else 0
    if not 0 < header_bytes <= min(HEADER_BYTES_MAX, size_bytes - _PREFIX_BYTES):
        return None
    return parse_header(read(header_bytes, _PREFIX_BYTES), size_bytes)


def parse_header(text: bytes, size_bytes: int) -> Header | None:
    """text: without the eight bytes that say its length. size_bytes: of the file."""
    start = _PREFIX_BYTES + len(text)
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries = {name: _ENTRY.decode(raw) for name, raw in found.items() if name != "__metadata__"}
    except ParserErrors:
        return None
    tensors = [
        TensorPlace(name, entry.dtype, tuple(entry.shape), *(start + at for at in entry.data_offsets))
        for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    edges = [start, *(at for tensor in tensors for at in (tensor.start, tensor.end)), size_bytes]
    has_gaps = any(left != right for left, right in zip(edges[::2], edges[1::2], strict=True))
    return None if has_gaps or edges != sorted(edges) else Header(start, tensors)


_ENTRY = msgspec.json.Decoder(_Entry)


def cut(size_bytes: int, header: Header | None) -> list[int]:
    """Where chunks of a file begin, in order, and where the last one ends; [0] of an empty file."""
    borders = [0, size_bytes] if header is None else [0, header.data_start, *(t.end for t in header.tensors)]
    cuts = [0]
    for low, high in _joined(pairwise(borders)):
        cuts += [*range(low + CHUNK_BYTES_MAX, high, CHUNK_BYTES_MAX), high]
    return cuts


def _joined(pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same bytes, neighbours together as long as they have no more than JOINED_BYTES_MAX. The first piece, which is the
    header, stays alone: it changes with every tensor's shape."""
    low = high = 0
    for start, end in pieces:
        if start == end:
            continue
        if low and end - low > JOINED_BYTES_MAX:
            yield low, high
            low = 0
        if not low:
            if start == 0:
                yield start, end
                continue
            low = start
        high = end
    if low:
        yield low, high
