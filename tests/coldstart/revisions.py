"""Whole revisions of models in a directory, as a preload leaves them there, without a bucket."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import xxhash

from coldstart.cutting import cut, read_header
from coldstart.home import MARK
from replication.manifests import Chunk, File, Manifest, content_of, encode


def manifest_of(directory: Path, model: str = "tiny", revision: str = "r1") -> Manifest:
    """Of all files below a directory."""
    chunks: dict[bytes, Chunk] = {}
    files = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MARK):
        content = path.read_bytes()
        with path.open("rb") as file:
            edges = cut(len(content), read_header(file.fileno()))
        names = []
        for start, end in pairwise(edges):
            piece = content[start:end]
            digest = hashlib.sha256(piece).digest()
            chunks.setdefault(digest, Chunk(digest, xxhash.xxh3_128_digest(piece), len(piece)))
            names.append(list(chunks).index(digest))
        sha256 = hashlib.sha256(content).digest()
        files.append(File(path.relative_to(directory).as_posix(), len(content), sha256, names))
    return Manifest(model, revision, content_of(files), 0.0, "a test", "", {}, list(chunks.values()), files)


def mark(directory: Path, model: str = "tiny", revision: str = "r1") -> Manifest:
    """Make a directory a whole revision."""
    manifest = manifest_of(directory, model, revision)
    (directory / MARK).write_bytes(encode(manifest))
    return manifest
