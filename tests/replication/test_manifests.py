"""Manifests: what was written is read; what cannot be true is damaged."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
import xxhash

from replication.errors import Damaged
from replication.manifests import (
    Chunk,
    File,
    Manifest,
    content_of,
    decode,
    encode,
    manifest_name,
    named,
    wrong_of_path,
)


def chunk_of(content: bytes) -> Chunk:
    return Chunk(hashlib.sha256(content).digest(), xxhash.xxh3_128_digest(content), len(content))


def manifest_of(files: dict[str, list[bytes]], **changes: Any) -> Manifest:
    """files: of each, its chunks."""
    chunks: dict[bytes, Chunk] = {}
    found = []
    for path, pieces in files.items():
        mine = [chunk_of(piece) for piece in pieces]
        chunks |= {chunk.sha256: chunk for chunk in mine}
        whole = b"".join(pieces)
        places = [list(chunks).index(chunk.sha256) for chunk in mine]
        found.append(File(path, len(whole), hashlib.sha256(whole).digest(), places))
    made = Manifest("m", "r", content_of(found), 1.0, "me", "/m", {}, list(chunks.values()), found)
    return msgspec.structs.replace(made, **changes)


FILES = {"config.json": [b"{}"], "a/model.safetensors": [b"head", b"tensor", b"head"], "empty": []}


def test_what_was_written_is_read() -> None:
    """A chunk that lies twice in a file is in the list once."""
    manifest = manifest_of(FILES)
    assert decode(encode(manifest), "x") == manifest and len(manifest.chunks) == 3
    assert [at for at, _ in manifest.chunks_of(manifest.files[1])] == [0, 4, 10]


def test_names_say_what_it_is() -> None:
    """Of a model, of caches; and what is neither is said to be none."""
    assert named(manifest_name("m", "r")) == ("m", "r", "")
    caches = manifest_of(FILES, about={"vllm": "0.32"})
    assert named(caches.name) == ("m", "r", caches.key) and caches.key
    assert named("models/manifests/m") is None and named("models/chunks/aa/bb") is None
    assert named("models/manifests/../r") is None and named("models/caches/m/r/x") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"content": b"x" * 32},
        {"chunks": [chunk_of(b"{}")]},
        {"chunks": [chunk_of(b"{}")] * 4},
        {"chunks": [chunk_of(b"{}"), chunk_of(b"heads"), chunk_of(b"tensor")]},
    ],
)
def test_what_cannot_be_true_is_damaged(wrong: dict[str, Any]) -> None:
    """Under a checksum that matches, too."""
    with pytest.raises(Damaged, match="x: "):
        decode(encode(manifest_of(FILES, **wrong)), "x")


@pytest.mark.parametrize("paths", [("a", "a/b"), ("a/b/c", "a/b"), ("../a",), ("/etc/passwd",), ("a//b",)])
def test_no_file_lies_outside_or_below_another(paths: tuple[str, ...]) -> None:
    """Wherever a manifest is unpacked, it writes inside, and each file has its place."""
    with pytest.raises(Damaged, match="path"):
        decode(encode(manifest_of({path: [b"x"] for path in paths})), "x")


@pytest.mark.parametrize(
    "path", ["", ".", "..", "a/..", "a/./b", "/a", "a/", "a\0", "a\n", "a\\b", "é" * 128, "\udc80"]
)
def test_names_of_files_stay_inside(path: str) -> None:
    """No way out, nothing that a terminal or a file system takes amiss."""
    assert wrong_of_path(path)


@pytest.mark.parametrize("path", ["a", "a.b/c d", "é", "..a", "x" * 255])
def test_other_names_are_allowed(path: str) -> None:
    """Dots, spaces and letters of all alphabets are names."""
    assert wrong_of_path(path) == ""
