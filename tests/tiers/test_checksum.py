"""Checksums of records that are laid out in columns."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiers.checksum import COLUMNS_BYTES_MAX, column_sizes, described, digest, joined, pack_columns

RUNS = st.lists(st.tuples(st.integers(1, 64), st.integers(1, 4096)), max_size=8)


@given(RUNS)
def test_a_description_says_the_columns_again(runs: list[tuple[int, int]]) -> None:
    """What was packed comes out; one column is described by nothing; no description is too long for a row."""
    sizes = [size for count, size in runs for _ in range(count)]
    columns = pack_columns(sizes, sum(sizes))
    assert column_sizes(columns, sum(sizes)) == (sizes or [0])
    assert (columns == b"") == (len(sizes) < 2) and len(columns) <= COLUMNS_BYTES_MAX
    with pytest.raises(ValueError, match="columns"):
        pack_columns([*sizes, 1], sum(sizes))
    if columns:
        other = sum(sizes) + 7
        with pytest.raises(ValueError, match=f"of {sum(sizes)} bytes together: they must add up to {other}"):
            column_sizes(columns, other)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=8))
def test_the_checksum_is_made_of_those_of_the_columns(parts: list[bytes]) -> None:
    """Whoever hashes columns apart gets what hashing the record gives; one column is its own checksum."""
    sums = [xxhash.xxh3_128_digest(part) for part in parts]
    record, columns = b"".join(parts), pack_columns([len(part) for part in parts])
    expected = xxhash.xxh3_128_digest(b"".join(sums)) if len(parts) > 1 else xxhash.xxh3_128_digest(record)
    assert digest(record, columns) == digest(memoryview(record), columns) == joined(sums) == expected


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([0, 4], "columns of 0 to 4 bytes"),
        ([1, 1 << 32], "columns of 1 to 4294967296 bytes"),
        ([1] * 1025, "1025 columns: at most 1024"),
        ([1, 2] * 4 + [1], "9 runs of equal sizes: at most 8"),
        ([9], "9 bytes together: they must add up to 10"),
    ],
)
def test_what_cannot_be_columns_is_refused(sizes: Sequence[int], words: str) -> None:
    """With one line that says what is wrong, and what is allowed."""
    with pytest.raises(ValueError, match=words):
        pack_columns(sizes, sum(sizes) if sizes != [9] else 10)


@pytest.mark.parametrize(
    "runs", [[(0, 4)], [(1, 8)], [(1, 4), (1, 4)], [(65535, 65537)], [(2, 4), (0, 1)], [(1, 1), (1, 2)] * 5]
)
def test_what_was_not_packed_here_is_no_description(runs: list[tuple[int, int]]) -> None:
    """Runs of nothing, one column, equal neighbours, too many, half a run."""
    columns = b"".join(struct.pack("<HI", *run) for run in runs)
    size_bytes = sum(count * size for count, size in runs)
    for wrong in (columns, columns[:-1]):
        with pytest.raises(ValueError, match="columns"):
            column_sizes(wrong, size_bytes)


@given(RUNS.filter(bool))
def test_people_are_told_the_runs(runs: list[tuple[int, int]]) -> None:
    """A description for people names each run once."""
    sizes = [size for count, size in runs for _ in range(count)]
    expected = "+".join(f"{len(list(run))}*{size}" for size, run in groupby(sizes))
    assert described(pack_columns(sizes), sum(sizes)) == expected
