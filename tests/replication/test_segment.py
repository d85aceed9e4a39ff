"""Segments and heads: what is written is read again, and what is damaged is not believed."""

from __future__ import annotations

import random

import pytest

from replication.announced import Announced
from replication.constants import (
    SEGMENT_BLOCKS_MAX,
    SEGMENT_BYTES_MAX,
    SEGMENT_CUT_BYTES,
    SEGMENT_ENTRIES_MAX,
)
from replication.errors import Damaged
from replication.sealed import seal
from replication.segment import Head, Segment, ahead, cut, decode, decode_head, encode, encode_head
from tests.objects import flip
from tests.replication.durable import pack_of, random_pack, spec_of
from tiers.packs import PACK_RECORDS_MAX, PackHeader, describe

WRITER = "00000000000000aa"


def segment(entries: list[Announced], number: int = 7) -> Segment:
    return Segment(WRITER, number, 1234.5, entries)


@pytest.mark.parametrize("seed", range(50))
def test_segments_come_back(seed: int) -> None:
    """A segment of any packs, with and without a codec, is read as it was written."""
    chance = random.Random(seed)
    entries = [random_pack(chance) for _ in range(chance.randrange(20))]
    packed = PackHeader(spec_of(9), b"", bytes(64), bytes(32), "zstd", (17, 2**33))
    entries.append(Announced(describe(packed)[0], 5, "eu"))
    said = segment(entries)
    assert decode(encode(said), WRITER, 7) == said


def test_any_flipped_bit_is_found() -> None:
    """Whichever bit of a segment is flipped, and wherever it is cut off, it is not read."""
    content = encode(segment([pack_of([1, 2]), pack_of([3], spec_of(1))]))
    for bit in range(8 * len(content)):
        with pytest.raises(Damaged):
            decode(flip(content, bit), WRITER, 7)
    for size_bytes in range(len(content)):
        with pytest.raises(Damaged):
            decode(content[:size_bytes], WRITER, 7)


def test_a_segment_under_another_name_is_not_read() -> None:
    """Writer and number inside must be those of the name."""
    content = encode(segment([pack_of([1])]))
    for writer, number in ((WRITER, 8), ("00000000000000ab", 7)):
        with pytest.raises(Damaged, match="says it is 00000000000000aa/0000000000000007"):
            decode(content, writer, number)


@pytest.mark.parametrize(
    "body",
    [
        (WRITER, 7, 0.0, [], [[0, 0, "", bytes(16), 32, 64, b"", bytes(32), bytes(16)]]),
        (WRITER, 7, 0.0, [spec_of()], [[0, 0, "", bytes(15), 32, 64, b"", bytes(32), bytes(16)]]),
        (WRITER, 7, 0.0, [spec_of()], [[0, 0, "", bytes(16), 64, 64, b"", bytes(32), bytes(16)]]),
        (WRITER, 7, 0.0, [spec_of()], [[0, 0, "", bytes(16), 32, 64, b"", bytes(31), bytes(16)]]),
        (WRITER, 7, 0.0, [spec_of()], [[0, 0, "", bytes(16), 32, 64, b"x", bytes(32), bytes(16)]]),
        (WRITER, 7, "yesterday", [], []),
        {"writer": WRITER},
        None,
    ],
)
def test_nonsense_with_a_checksum_is_damaged(body: object) -> None:
    """What is sealed correctly and makes no sense is damaged, too, and no other error."""
    with pytest.raises(Damaged):
        decode(seal(b"KVFEED1\n", body), WRITER, 7)


def test_other_kinds_and_newer_formats_are_named() -> None:
    """What is no segment of this format is not read, whatever it says inside."""
    content = encode(segment([]))
    for magic in (b"KVFEED2\n", b"KVHEAD1\n"):
        with pytest.raises(Damaged, match="begins with"):
            decode(magic + content[8:], WRITER, 7)


def test_large_segments_are_cut() -> None:
    """No piece has more packs, blocks or bytes than a segment may, none is empty, and nothing is lost or reordered."""
    large = pack_of(range(PACK_RECORDS_MAX), spec_of(0, 64))
    small = [pack_of([index]) for index in range(SEGMENT_ENTRIES_MAX + 5)]
    wide = [pack_of(range(index, index + 300), spec_of(1, 64)) for index in range(20)]
    entries = [*small, large, *wide, large]
    pieces = list(cut(entries))
    assert [entry for piece in pieces for entry in piece] == entries
    assert max(map(len, pieces)) == SEGMENT_ENTRIES_MAX
    for piece in pieces:
        assert len(piece) == 1 or sum(entry.blocks for entry in piece) <= SEGMENT_BLOCKS_MAX
        assert len(encode(segment(piece))) < SEGMENT_CUT_BYTES
    assert not list(cut([]))


def test_too_long_is_no_segment() -> None:
    """An object that is longer than any segment is not read, however sound it is."""
    with pytest.raises(Damaged, match="allowed are"):
        decode(seal(b"KVFEED1\n", bytes(SEGMENT_BYTES_MAX)), WRITER, 7)


@pytest.mark.parametrize("number", [1, 4095, 4096, 4097, 10**12])
def test_the_length_of_a_head_tells_its_number(number: int) -> None:
    """A head is read as it was written, and its length alone says how many segments follow on a position."""
    content = encode_head(Head(number, 3.5))
    assert decode_head(content, "a head") == Head(number, 3.5)
    for behind in (0, 1, 64, 4095):
        if behind <= number:
            assert ahead(len(content), number - behind) == behind
    for bit in range(8 * len(seal(b"KVHEAD1\n", Head(number, 3.5)))):
        with pytest.raises(Damaged):
            decode_head(flip(content, bit), "a head")
