"""Models for tests: a manifest with its chunks, and putting them into a bucket as a publisher does."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import xxhash

from replication.feed.announcing import announce_models
from replication.formats.announced_models import AnnouncedModel, announced_model
from replication.formats.manifests import Chunk, File, Manifest, content_of, encode
from tiers.bucket.objects import Objects


class MadeModel(NamedTuple):
    """chunks: their bytes, by the names of their objects."""

    manifest: Manifest
    chunks: dict[str, bytes]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def announced(self) -> AnnouncedModel:
        return announced_model(self.manifest)

    @property
    def objects(self) -> dict[str, bytes]:
        return {**self.chunks, self.name: encode(self.manifest)}


def make_model(
    model: str = "m",
    revision: str = "r",
    seed: object = 0,
    chunks: int = 3,
    size_bytes: int = 100,
    **changes: Any,
) -> MadeModel:
    """One file of so many chunks of these bytes, drawn from name, revision and seed."""
    chance = random.Random(f"{model} {revision} {seed}")
    pieces = [chance.randbytes(size_bytes) for _ in range(chunks)]
    made = [
        Chunk(hashlib.sha256(piece).digest(), xxhash.xxh3_128_digest(piece), len(piece)) for piece in pieces
    ]
    whole = b"".join(pieces)
    files = [File("model.safetensors", len(whole), hashlib.sha256(whole).digest(), list(range(len(made))))]
    manifest = Manifest(model, revision, content_of(files), 1.0, "me", "/m", {}, made, files)
    manifest = msgspec.structs.replace(manifest, **changes)
    return MadeModel(manifest, {chunk.name: piece for chunk, piece in zip(made, pieces, strict=True)})


async def put_model(objects: Objects, made: MadeModel) -> None:
    """Chunks, and the manifest."""
    for name, content in made.objects.items():
        await objects.put(name, content)


async def publish(objects: Objects, *made: MadeModel, clock: Callable[[], float] = lambda: 1.0) -> None:
    for one in made:
        await put_model(objects, one)
    await announce_models(objects, [one.announced for one in made], clock, random.Random())
