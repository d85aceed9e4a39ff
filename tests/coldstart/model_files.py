"""Small models for tests: real safetensors files, with an index and a configuration."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from replication.formats.manifests import CHUNKS, MANIFESTS, Manifest, decode
from tests.objects import MemoryObjects
from tiers.bucket.objects import Objects


def make_model(
    directory: Path, tensors: int = 6, tensor_bytes: int = 1 << 18, seed: int = 0, changed: int = 0
) -> Path:
    """changed: so many of the tensors are others than without; shapes and names stay."""
    directory.mkdir(parents=True, exist_ok=True)
    numbers = range(tensors)
    made = {
        f"layers.{n}.weight": torch.frombuffer(
            bytearray(random.Random(f"{seed} {n} {n < changed}").randbytes(tensor_bytes)), dtype=torch.uint8
        ).reshape(-1, 16)
        for n in numbers
    }
    shards = {name: f"model-0000{n % 2 + 1}-of-00002.safetensors" for n, name in enumerate(made)}
    for shard in sorted(set(shards.values())):
        save_file({name: made[name] for name in made if shards[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": shards})
    )
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "empty.txt").touch()
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below it, by its path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def unpacked(objects: MemoryObjects, manifest: Manifest) -> dict[str, bytes]:
    """Every file of a manifest, put together from its chunks."""
    return {
        file.path: b"".join(objects.stored[chunk.name] for _, chunk in manifest.chunks_of(file))
        for file in manifest.files
    }


def manifests(objects: MemoryObjects) -> Iterator[Manifest]:
    for name, content in objects.stored.items():
        if name.startswith(MANIFESTS):
            yield decode(content, name)


def lacking(objects: MemoryObjects) -> list[str]:
    """What manifests name and is not there, as long as they say."""
    return [
        f"{manifest.name}: {chunk.name}"
        for manifest in manifests(objects)
        for chunk in manifest.chunks
        if len(objects.stored.get(chunk.name, b"")) != chunk.size_bytes
    ]


def chunk_names(objects: MemoryObjects) -> set[str]:
    return {name for name in objects.stored if name.startswith(CHUNKS)}


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
    assert what and done >= 0 and total >= 0


async def names_in(objects: Objects, folder: str) -> list[str]:
    return [info.name async for page in objects.list(folder) for info in page]
