"""Small models for tests of images: a manifest, its files' bytes, and a source that has their chunks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from itertools import pairwise

from coldstart.disk.sources import Source
from coldstart.published.cutting import cut, parse_header
from replication.formats.manifests import Chunk, File, Manifest, content_of
from tiers.checksum import digest
from tiers.errors import ObjectUnavailable


def safetensors(chance: random.Random, tensors: int, size_bytes: int) -> bytes:
    """A file with so many tensors of about this size."""
    header, at, data = {}, 0, b""
    for number in range(tensors):
        content = chance.randbytes(chance.randint(1, size_bytes))
        header[f"layer.{number}.weight"] = {
            "dtype": "U8",
            "shape": [len(content)],
            "data_offsets": [at, at + len(content)],
        }
        at += len(content)
        data += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def files_of(seed: int, tensors: int = 3, size_bytes: int = 300_000) -> dict[str, bytes]:
    chance = random.Random(seed)
    return {
        "config.json": b'{"model_type": "random"}',
        "model-00001-of-00002.safetensors": safetensors(chance, tensors, size_bytes),
        "model-00002-of-00002.safetensors": safetensors(chance, tensors, size_bytes),
        "empty.txt": b"",
        "tokenizer/vocab.txt": chance.randbytes(10_000),
    }


def manifest_of(files: dict[str, bytes], model: str = "random", revision: str = "r1") -> Manifest:
    chunks: dict[bytes, Chunk] = {}
    made: list[File] = []
    for path, content in files.items():
        header_bytes = int.from_bytes(content[:8], "little")
        is_weights = path.endswith(".safetensors")
        header = parse_header(content[8 : 8 + header_bytes], len(content)) if is_weights else None
        mine = [content[low:high] for low, high in pairwise(cut(len(content), header))]
        for piece in mine:
            chunk = chunk_of(piece)
            chunks.setdefault(chunk.sha256, chunk)
        places = [list(chunks).index(hashlib.sha256(piece).digest()) for piece in mine]
        made.append(File(path, len(content), hashlib.sha256(content).digest(), places))
    return Manifest(model, revision, content_of(made), 1, "tests", "memory", {}, list(chunks.values()), made)


def chunk_of(piece: bytes) -> Chunk:
    return Chunk(hashlib.sha256(piece).digest(), digest(piece), len(piece))


class Memory(Source):
    """A source. flipped: chunks that come with a wrong byte. failing: those that cannot be had."""

    def __init__(self, files: dict[str, bytes], name: str = "memory") -> None:
        self.name = name
        self.flipped: set[bytes] = set()
        self.failing: set[bytes] = set()
        self.read_chunks: list[bytes] = []
        self._content: dict[bytes, bytes] = {}
        manifest = manifest_of(files)
        for file in manifest.files:
            for at, chunk in manifest.chunks_of(file):
                self._content[chunk.sha256] = files[file.path][at : at + chunk.size_bytes]

    async def has(self, chunks: Iterable[Chunk]) -> set[Chunk]:
        return {chunk for chunk in chunks if chunk.sha256 in self._content}

    async def read(self, chunk: Chunk, view: memoryview) -> bool:
        if chunk.sha256 in self.failing:
            raise ObjectUnavailable("away")
        content = bytearray(self._content.get(chunk.sha256, b""))
        if not content:
            return False
        self.read_chunks.append(chunk.sha256)
        if chunk.sha256 in self.flipped:
            content[len(content) // 2] ^= 1
        view[:] = content
        return True
