"""Segments and heads of feeds: what a writer said, immutable and numbered, and how far it is.

    feed/<writer>/<number, 16 hex>    Segment: packs and models that became durable, or were removed, from 1, without gaps
    heads/<writer>                    Head: the highest number; a hint, replaced after each segment

Both are sealed (replication/formats/sealed.py). A segment has writer and number inside: one that lies under another name is damaged. A
head is padded to a length that says its number modulo HEAD_NUMBERS, so that one LIST of all heads tells how much is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from replication.constants import (
    HEAD_NUMBERS,
    MIB,
    SEGMENT_BLOCKS_MAX,
    SEGMENT_BYTES_MAX,
    SEGMENT_ENTRIES_MAX,
    SEGMENT_MODELS_MAX,
    SEGMENT_REMOVED_MAX,
)
from replication.formats.announced import Announced, tabled, untabled, weight_bytes
from replication.formats.announced_models import AnnouncedModel, heard_models
from replication.formats.ranges import Number, UnixS, WriterName
from replication.formats.removed import Removed, heard_removed
from replication.formats.sealed import Sealed
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACK_HEADER_BYTES_MAX

SEGMENT_CUT_BYTES: Final = 1 * MIB  # a segment that has so much takes no further pack
HEAD_BYTES_MIN: Final = 128  # of a head, whose length says its number modulo HEAD_NUMBERS
HEAD_BYTES_MAX: Final = HEAD_BYTES_MIN + HEAD_NUMBERS
assert SEGMENT_CUT_BYTES + PACK_HEADER_BYTES_MAX < SEGMENT_BYTES_MAX

FEED = "feed/"
HEADS = "heads/"
WRITER_NAME = re.compile(r"[0-9a-f]{16}")
_NUMBER = re.compile(
    r"[0-7][0-9a-f]{15}"
)  # no writer comes as far as half of them, and behind each there is a next one


class Segment(msgspec.Struct, frozen=True):
    """What one writer announced at once. written_s: unix seconds by its clock; of two announcements of a pack it says which is later.
    unsound: how many further entries it has that cannot be true; reason: what is wrong with the first of them. removed: what is
    void, said by who keeps the region's house."""

    writer: str
    number: int
    written_s: float
    entries: Sequence[Announced]
    unsound: int = 0
    reason: str = ""
    models: Sequence[AnnouncedModel] = ()
    removed: Sequence[Removed] = ()


class _Body(msgspec.Struct, array_like=True):
    writer: WriterName
    number: Number
    written_s: UnixS
    specs: Annotated[list[NamespaceSpec], Meta(max_length=SEGMENT_ENTRIES_MAX)]
    entries: Annotated[list[msgspec.Raw], Meta(max_length=SEGMENT_ENTRIES_MAX)]
    models: Annotated[list[msgspec.Raw], Meta(max_length=SEGMENT_MODELS_MAX)] = []
    removed: Annotated[list[msgspec.Raw], Meta(max_length=SEGMENT_REMOVED_MAX)] = []


class Head(msgspec.Struct, array_like=True):
    """number: of the highest segment. at_s: when it was written, by the clock of the writer, for people only."""

    number: Number
    at_s: UnixS


def segment_name(writer: str, number: int) -> str:
    return f"{FEED}{writer}/{number:016x}"


def segment_number(name: str) -> int:
    """The number in the name of a segment; 0 if it is none."""
    last = name.rpartition("/")[2]
    return int(last, 16) if _NUMBER.fullmatch(last) else 0


def head_name(writer: str) -> str:
    return f"{HEADS}{writer}"


SEGMENT_FORMAT: Final = Sealed(
    b"KVFEED1\n", _Body, SEGMENT_BYTES_MAX, lambda body: segment_name(body.writer, body.number)
)
HEAD_FORMAT: Final = Sealed(b"KVHEAD1\n", Head, HEAD_BYTES_MAX)


def encode(segment: Segment) -> bytes:
    specs, entries = tabled(segment.entries, is_said=False)
    rest = (
        (segment.models, segment.removed) if segment.removed else (segment.models,) if segment.models else ()
    )
    return SEGMENT_FORMAT.seal((segment.writer, segment.number, segment.written_s, specs, entries, *rest))


def decode(content: bytes | memoryview, writer: str, number: int) -> Segment:
    """The segment of this name. Raises Damaged."""
    where = segment_name(writer, number)
    body = SEGMENT_FORMAT.unseal(content, where)
    entries, unsound, reason = untabled(body.specs, body.entries, where)
    models, removed = heard_models(body.models, where), heard_removed(body.removed, where)
    unsound += models.unsound + removed.unsound
    reason = reason or models.reason or removed.reason
    return Segment(
        writer, number, body.written_s, entries, unsound, reason, tuple(models.found), tuple(removed.found)
    )


def encode_head(head: Head) -> bytes:
    content = HEAD_FORMAT.seal(head)
    assert len(content) <= HEAD_BYTES_MIN
    return content.ljust(HEAD_BYTES_MIN + head.number % HEAD_NUMBERS, b"\0")


def ahead(head_bytes: int, position: int) -> int:
    """How many segments follow on this position, as the length of a head tells it: 0 to HEAD_NUMBERS - 1."""
    return (head_bytes - HEAD_BYTES_MIN - position) % HEAD_NUMBERS


def cut(entries: Sequence[Announced]) -> Iterator[list[Announced]]:
    """The same entries in order, in pieces of the size of a segment."""
    piece: list[Announced] = []
    blocks = size_bytes = 0
    for entry in entries:
        if piece and (
            len(piece) == SEGMENT_ENTRIES_MAX
            or blocks + entry.blocks > SEGMENT_BLOCKS_MAX
            or size_bytes >= SEGMENT_CUT_BYTES
        ):
            yield piece
            piece, blocks, size_bytes = [], 0, 0
        piece.append(entry)
        blocks += entry.blocks
        size_bytes += weight_bytes(entry)
    if piece:
        yield piece
