"""Chunks of models in a bucket: which of them are not there, and whether bytes are those of a chunk.

A chunk counts as there where an object of its name has its size: whoever put it has compared its bytes. Many are looked for
by listing their folders, a few one by one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import xxhash

from replication.constants import KIB
from replication.formats.manifests import CHUNKS, Chunk
from tiers.bucket.objects import Bytes, Objects
from tiers.errors import ObjectMissing
from tiers.together import each

CHUNKS_ASKED_MAX: Final = 4  # of a folder, one by one; of more, the folder is listed
FOLDERS_ASKED_MAX: Final = 16  # at a time
CHUNK_INLINE_BYTES_MAX: Final = 256 * KIB  # hashed by the loop itself


async def lacking(objects: Objects, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Those that are not there, or have another size, in their order. Raises ObjectError."""
    wanted = {chunk.name: chunk for chunk in chunks}
    there = await sizes_of(objects, wanted.values())
    return [chunk for name, chunk in wanted.items() if there.get(name) != chunk.size_bytes]


async def sizes_of(objects: Objects, chunks: Iterable[Chunk]) -> dict[str, int]:
    """The bytes that are there of each, by its name; without those that are not there. Raises ObjectError."""
    folders: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        folders.setdefault(chunk.name[: len(CHUNKS) + 3], []).append(chunk)
    found = await each(lambda one: _sizes(objects, *one), folders.items(), FOLDERS_ASKED_MAX)
    return {name: size for sizes in found for name, size in sizes.items()}


async def _sizes(objects: Objects, folder: str, chunks: Sequence[Chunk]) -> Mapping[str, int]:
    """Of those that are there, by name."""
    if len(chunks) <= CHUNKS_ASKED_MAX:
        return {chunk.name: size for chunk in chunks if (size := await _size(objects, chunk)) is not None}
    names = {chunk.name for chunk in chunks}
    return {
        info.name: info.size_bytes
        async for page in objects.list(folder)
        for info in page
        if info.name in names
    }


async def _size(objects: Objects, chunk: Chunk) -> int | None:
    try:
        return (await objects.head(chunk.name)).size_bytes
    except ObjectMissing:
        return None


async def wrong_bytes(chunk: Chunk, content: Bytes) -> str:
    """As `wrong_of_chunk`, in a thread if it takes long. The content must not change meanwhile."""
    if len(content) <= CHUNK_INLINE_BYTES_MAX:
        return wrong_of_chunk(chunk, content)
    return await asyncio.to_thread(wrong_of_chunk, chunk, content)


def wrong_of_chunk(chunk: Chunk, content: Bytes) -> str:
    """Why these bytes are not those of a chunk, in words; "" if they are. Takes 9 ms for 16 MiB."""
    if len(content) != chunk.size_bytes:
        return f"{len(content)} bytes: its manifest says {chunk.size_bytes}"
    if xxhash.xxh3_128_digest(content) != chunk.checksum:
        return "its checksum does not match"
    if hashlib.sha256(content).digest() != chunk.sha256:
        return "its SHA-256 is not that of its name"
    return ""
