"""Sources: places that chunks can be read from, for whoever fills files or memory with them.

    Local (another revision on this disk)  ─┐
    Bucket (the region's)                  ─┴─▶ read(chunk) ─▶ the caller's memory ─▶ verified by the caller

They are asked in the order in which they are given: what is near first. No source is believed: whoever reads compares the
checksum, and counts the bytes under the source's name.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from coldstart.blocks import read_all
from coldstart.errors import ChunkDamaged
from replication.formats.manifests import Chunk, Manifest
from tiers.bucket.objects import Objects
from tiers.checksum import digest
from tiers.errors import ObjectDamaged, ObjectError
from tiers.together import in_thread

THIS_DISK: Final = "disk"
ROUNDS_MAX: Final = 2  # all sources are asked so often for a chunk that came damaged


class Source(ABC):
    """One place with chunks. name: under which its bytes are counted."""

    name: str

    @abstractmethod
    async def has(self, chunks: Iterable[Chunk]) -> set[Chunk]:
        """Which of these it has, as far as it knows without reading them."""

    @abstractmethod
    async def read(self, chunk: Chunk, view: memoryview) -> bool:
        """Fill the view, which is as long, with a chunk's bytes.

        False where it does not have it any more. The bytes may be wrong. Raises ObjectError. When this has returned or was
        cancelled, nobody writes into the view.
        """

    def is_true(self, chunk: Chunk, view: memoryview) -> bool:
        """Whether these are the bytes of a chunk, as far as its place can be trusted. Blocks."""
        return digest(view) == chunk.checksum


class Bucket(Source):
    """The region's: it has whatever a manifest there names."""

    name = "bucket"

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    async def has(self, chunks: Iterable[Chunk]) -> set[Chunk]:
        return set(chunks)

    async def read(self, chunk: Chunk, view: memoryview) -> bool:
        if not await self._objects.read_into(chunk.name, 0, [view]):
            (content,) = await self._objects.get_ranges(chunk.name, [(0, chunk.size_bytes)])
            view[:] = content
        return True

    def is_true(self, chunk: Chunk, view: memoryview) -> bool:
        """Where the deployment has a key anybody may have made these bytes: SHA-256 says which they are."""
        is_sealed = self._objects.seals is not None
        return super().is_true(chunk, view) and (
            not is_sealed or hashlib.sha256(view).digest() == chunk.sha256
        )


async def fetched(sources: Sequence[Source], chunk: Chunk, view: memoryview) -> str:
    """Fill the view; the name of the source whose bytes were true. Raises ChunkDamaged, ObjectError."""
    failure: ObjectError | None = None
    damaged: set[str] = set()
    for _ in range(ROUNDS_MAX):
        for source in sources:
            try:
                if not await source.read(chunk, view):
                    continue
                if await in_thread(source.is_true, chunk, view):
                    return source.name
                damaged.add(source.name)
            except ObjectDamaged:
                damaged.add(source.name)
            except ObjectError as error:
                failure = error
        if not damaged:  # who failed has tried more than once
            break
    if failure is not None:
        raise failure
    where = " and ".join(sorted(damaged)) or "every place that had it"
    raise ChunkDamaged(
        f"{chunk.name}: its bytes are not those of its name: damaged in {where}; nothing of it was used"
    )


async def true_chunk(objects: Objects, chunk: Chunk) -> memoryview:
    """From a bucket, compared with the SHA-256 that it is named by. Raises ChunkDamaged, ObjectError."""
    content = memoryview(await objects.get_within(chunk.name, chunk.size_bytes))
    if hashlib.sha256(content).digest() != chunk.sha256:
        raise ChunkDamaged(f"{objects.where}: {chunk.name}: its bytes are not what its name says")
    return content


class Place(NamedTuple):
    """at: of its first byte in the file."""

    path: Path
    at: int


class Local(Source):
    """Chunks that whole revisions on this disk have: those of an earlier one, of which most tensors are the same."""

    name = THIS_DISK

    def __init__(self, revisions: Mapping[Path, Manifest]) -> None:
        """By the directories that they lie in."""
        self._places = {
            chunk: Place(path / file.path, at)
            for path, manifest in revisions.items()
            for file in manifest.files
            for at, chunk in manifest.chunks_of(file)
        }

    async def has(self, chunks: Iterable[Chunk]) -> set[Chunk]:
        return self._places.keys() & set(chunks)

    async def read(self, chunk: Chunk, view: memoryview) -> bool:
        place = self._places.get(chunk)
        return place is not None and await in_thread(_read, place, view)


def _read(place: Place, view: memoryview) -> bool:
    """Evicted meanwhile, cut off: it is not there any more."""
    try:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return read_all(fd, view, place.at)
    except OSError:
        return False
    finally:
        os.close(fd)
