"""Segments and heads: what is written is read again, and what is damaged is not believed."""

from __future__ import annotations

import random

import pytest

from replication.constants import SEGMENT_BLOCKS_MAX, SEGMENT_BYTES_MAX, SEGMENT_ENTRIES_MAX
from replication.errors import Damaged
from replication.formats.announced import Announced, Entry, entry_of
from replication.formats.sealed import seal
from replication.formats.segment import (
    HEAD_FORMAT,
    SEGMENT_CUT_BYTES,
    Head,
    Segment,
    ahead,
    cut,
    decode,
    encode,
    encode_head,
    segment_name,
)
from tests.objects import flip
from tests.replication.durable import pack_of, random_pack, spec_of
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACK_RECORDS_MAX, PackHeader, describe

WRITER = "00000000000000aa"


def segment(entries: list[Announced], number: int = 7) -> Segment:
    return Segment(WRITER, number, 1234.5, entries)


@pytest.mark.parametrize("seed", range(50))
def test_segments_come_back(seed: int) -> None:
    """A segment of any packs, with and without a codec, is read as it was written."""
    chance = random.Random(seed)
    entries = [random_pack(chance) for _ in range(chance.randrange(20))]
    packed = PackHeader(spec_of(9), b"", bytes(64), bytes(32), "zstd", (17, 4096))
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
        with pytest.raises(Damaged, match="says it is feed/00000000000000aa/0000000000000007"):
            decode(content, writer, number)


@pytest.mark.parametrize(
    "body",
    [
        (WRITER, 7, "yesterday", [], []),
        (WRITER, 7, float("nan"), [], []),
        (WRITER, -7, 0.0, [], []),
        (WRITER, 7, 0.0, [NamespaceSpec(bytes(16), 0, 32)], []),
        (WRITER, 7, 0.0, [NamespaceSpec(bytes(16), 1 << 62, 32)], []),
        (WRITER, 7, 0.0, [NamespaceSpec(bytes(15), 64, 32)], []),
        {"writer": WRITER},
        None,
    ],
)
def test_nonsense_with_a_checksum_is_damaged(body: object) -> None:
    """What is sealed correctly and makes no sense is damaged, too, and no other error."""
    with pytest.raises(Damaged):
        decode(seal(b"KVFEED1\n", body), WRITER, 7)


def _changed(**parts: object) -> list[object]:
    entry = entry_of(pack_of(["a", "b"]), 0)
    return [parts.get(name, getattr(entry, name)) for name in Entry.__struct_fields__]


@pytest.mark.parametrize(
    "parts",
    [
        {"spec": 1},
        {"spec": -1},
        {"stored_s": -1},
        {"stored_s": 1 << 32},
        {"kept_until_s": -1},
        {"kept_until_s": 1 << 40},
        {"kept_until_s": 1.5},
        {"origin": "A place"},
        {"origin": "eu\n"},
        {"origin": b"\xff"},
        {"id": bytes(15)},
        {"start": 0},
        {"start": 1 << 40},
        {"size_bytes": -1},
        {"size_bytes": 1 << 60},
        {"size_bytes": 8193},
        {"parent": b"x"},
        {"hashes": bytes(31)},
        {"hashes": b""},
        {"checksums": bytes(17)},
        {"checksums": b""},
        {"codec": "zstd"},
        {"codec": "split-zstd", "sizes": (1 << 61, 1 << 61)},
        {"codec": "split-zstd", "sizes": (-1, 1)},
        {"codec": "split-zstd", "sizes": (5000, 1)},
        {"sizes": (4096, 4096)},
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_true_takes_no_other_with_it(parts: dict[str, object]) -> None:
    """Of a segment with one entry whose number or length cannot be, the others are read, and that one is counted."""
    good = [entry_of(pack_of([name]), 0) for name in "xy"]
    body = (WRITER, 7, 0.0, [spec_of()], [good[0], _changed(**parts), good[1]])
    found = decode(seal(b"KVFEED1\n", body), WRITER, 7)
    assert found.entries == [pack_of(["x"]), pack_of(["y"])]
    assert found.unsound == 1 and segment_name(WRITER, 7) in found.reason


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
    assert HEAD_FORMAT.unseal(content, "a head") == Head(number, 3.5)
    for behind in (0, 1, 64, 4095):
        if behind <= number:
            assert ahead(len(content), number - behind) == behind
    for bit in range(8 * len(seal(b"KVHEAD1\n", Head(number, 3.5)))):
        with pytest.raises(Damaged):
            HEAD_FORMAT.unseal(flip(content, bit), "a head")
