"""Models for tests: small files of any kind, and a revision of them in a bucket, put there directly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from replication.formats.manifests import Chunk, File, Manifest, content_of, encode
from tiers.bucket.objects import Objects
from tiers.checksum import digest

Cuts = Mapping[str, Sequence[int]]  # of each file: where its chunks begin, and where the last one ends


def made(
    files: Mapping[str, bytes], cuts: Cuts, model: str = "m", revision: str = "r1"
) -> tuple[Manifest, dict[str, bytes]]:
    """A revision of these files, and its chunks by name."""
    chunks: dict[bytes, tuple[int, Chunk]] = {}
    contents: dict[str, bytes] = {}
    listed = []
    for path, content in files.items():
        places = []
        for low, high in pairwise(cuts[path]):
            piece = content[low:high]
            sha256 = hashlib.sha256(piece).digest()
            chunk = Chunk(sha256, digest(piece), len(piece))
            contents[chunk.name] = piece
            places.append(chunks.setdefault(sha256, (len(chunks), chunk))[0])
        listed.append(File(path, len(content), hashlib.sha256(content).digest(), places))
    all_chunks = [chunk for _, chunk in chunks.values()]
    manifest = Manifest(model, revision, content_of(listed), 1.0, "tests", "memory", {}, all_chunks, listed)
    return manifest, contents


async def put(objects: Objects, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        await objects.put(name, content)
    await objects.put(manifest.name, encode(manifest))


def cut_evenly(files: Mapping[str, bytes], chunk_bytes: int) -> Cuts:
    return {path: [*range(0, len(content), chunk_bytes), len(content)] for path, content in files.items()}


def random_files(chance: random.Random, size_bytes: int, count: int = 3) -> dict[str, bytes]:
    return {f"f{n}.bin": chance.randbytes(size_bytes // count) for n in range(count)}


def files_at(path: Path) -> dict[str, bytes]:
    """What lies below a directory, but for our mark."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != ".kvstore-model"
    }
