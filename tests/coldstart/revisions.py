"""Revisions of models: whole in a directory, as a preload leaves them there, and in a bucket that is a directory."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
from itertools import pairwise
from pathlib import Path

import xxhash

from coldstart.disk.home import MARK, read_mark
from coldstart.disk.sources import Local
from coldstart.loading.resident import CONTENT_BYTES, fill, layout_of
from coldstart.published.cutting import cut, read_header
from kvstore.client import models
from replication.formats.manifests import Chunk, File, Manifest, content_of, encode
from tests.running import kvstore
from tiers.bucket.object_store import open_objects


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


def into_dram(directory: Path, socket: Path, manifest: Manifest | None = None) -> None:
    """As `kvstore model load` does it with a revision that lies anywhere."""
    manifest = manifest or read_mark(directory)
    assert manifest is not None
    size_bytes, content = layout_of(manifest).size_bytes, manifest.content[:CONTENT_BYTES]
    with models.fill(manifest.model, manifest.revision, content, size_bytes, socket) as filling:
        asyncio.run(fill(filling, manifest, [Local({directory: manifest})]))


class Bucket:
    """A directory as a bucket, with one revision of a model, and an empty node beside it."""

    def __init__(self, model: Path, path: Path) -> None:
        self.model, self.models = model, path / "models"
        self.url = f"file://{path / 'bucket'}"
        self.words = ["--to", self.url, f"--set=models.dir={self.models}"]
        (path / "bucket").mkdir()
        self.manifest = manifest_of(model)
        asyncio.run(self.put(self.manifest))

    async def put(self, manifest: Manifest) -> None:
        objects = open_objects(self.url)
        for file in manifest.files:
            content = (self.model / file.path).read_bytes()
            for at, chunk in manifest.chunks_of(file):
                await objects.put(chunk.name, content[at : at + chunk.size_bytes])
        await objects.put(manifest.name, encode(manifest))

    def start(self, *words: str) -> subprocess.CompletedProcess[str]:
        return kvstore("model", "start", "tiny", *self.words, *words)
