"""Cutting: every byte is in one chunk, none is too large, and a tensor begins one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from coldstart.published.cutting import JOINED_BYTES_MAX, Header, TensorPlace, cut, parse_header, read_header
from replication.formats.manifests import CHUNK_BYTES_MAX, MIB


def header_of(sizes: list[int], data_start: int = 80) -> Header:
    tensors, at = [], data_start
    for number, size_bytes in enumerate(sizes):
        tensors.append(TensorPlace(f"t{number}", "U8", (size_bytes,), at, at + size_bytes))
        at += size_bytes
    return Header(data_start, tensors)


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES_MAX) | st.integers(0, 2 * JOINED_BYTES_MAX)))
def test_every_byte_is_in_one_chunk_and_large_tensors_begin_one(sizes: list[int]) -> None:
    """Small neighbours share one; what is larger than that is cut apart from whatever lies before it."""
    header = header_of(sizes)
    cuts = cut(80 + sum(sizes), header)
    assert cuts[:2] == [0, 80] and cuts[-1] == 80 + sum(sizes)
    assert all(0 < high - low <= CHUNK_BYTES_MAX for low, high in itertools.pairwise(cuts))
    assert {t.start for t in header.tensors if t.end - t.start > JOINED_BYTES_MAX} <= set(cuts)


def test_a_changed_tensor_leaves_the_chunks_of_others(tmp_path: Path) -> None:
    """Also where it has another size, so that all behind it lie elsewhere."""
    sizes = [5 * MIB, 3 * MIB, 40 * MIB, 2 * MIB]
    other = [5 * MIB, 4 * MIB, 40 * MIB, 2 * MIB]
    one, two = (cut(80 + sum(each), header_of(each)) for each in (sizes, other))
    assert [b - a for a, b in itertools.pairwise(one)][3:] == [b - a for a, b in itertools.pairwise(two)][3:]


def test_files_without_a_header_are_cut_evenly() -> None:
    """In pieces as large as chunks may be; an empty file has none."""
    assert cut(0, None) == [0]
    assert cut(CHUNK_BYTES_MAX, None) == [0, CHUNK_BYTES_MAX]
    assert cut(CHUNK_BYTES_MAX + 1, None) == [0, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1]


def test_headers_are_those_of_safetensors(tmp_path: Path) -> None:
    """As its own library writes them, names and places, whatever order it chose."""
    tensors = {"b": torch.arange(6).reshape(2, 3), "a": torch.ones(5, dtype=torch.float16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    fd = os.open(tmp_path / "x.safetensors", os.O_RDONLY)
    header = read_header(fd)
    assert header is not None
    for place in header.tensors:
        assert os.pread(fd, place.end - place.start, place.start) == tensors[place.name].numpy().tobytes()
    os.close(fd)
    assert {place.name for place in header.tensors} == {"a", "b"}


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', b'{"a":' * 5000,
    ],
)  # fmt: skip
def test_what_is_no_header_is_none(text: bytes) -> None:
    """Whatever a file says of itself, cutting it goes on: it is cut like any other."""
    assert parse_header(text, 8 + len(text) + 4) is None
