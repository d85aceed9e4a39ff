"""Whether what a bucket's manifests name is there and true.

    manifests ─▶ chunks, each once ─list─▶ is it there, as long as it should be? ─read, --deep─▶ are its bytes what its name says?
                                                     ╰── no: which files of which revisions have it ◀── manifests, once more

Manifests are read one after the other, and of each only its chunks are kept: what is wrong is looked up in a second round.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import xxhash

from coldstart.models import Progress, Published
from replication.errors import Damaged
from replication.manifests import Chunk, Manifest, read_manifest
from tiers.errors import ObjectDamaged, ObjectMissing
from tiers.objects import Objects
from tiers.together import together

FOLDERS_AT_ONCE: Final = 16
READS_AT_ONCE: Final = 8
FILES_SAID_MAX: Final = 1000  # of one verification


class Finding(NamedTuple):
    """kind: missing, size, damaged, or manifest, where nobody knows which chunks it has. files: MODEL@REVISION/path of those that have it."""

    kind: str
    name: str
    reason: str
    files: list[str]


class Report(NamedTuple):
    """bytes: of all chunks, each once. read_bytes: with deep."""

    revisions: int
    chunks: int
    bytes: int
    read_bytes: int
    findings: list[Finding]


async def sizes_of(objects: Objects, chunks: Iterable[Chunk]) -> dict[bytes, int]:
    """The bytes that a store has of each chunk, by its SHA-256; without those that are not there. Raises ObjectError."""
    folders: dict[str, dict[str, bytes]] = {}
    for chunk in chunks:
        folders.setdefault(chunk.name.rpartition("/")[0] + "/", {})[chunk.name] = chunk.sha256
    found: dict[bytes, int] = {}

    async def look(folder: str) -> None:
        async for page in objects.list(folder):
            found.update({folders[folder][i.name]: i.size_bytes for i in page if i.name in folders[folder]})

    names = list(folders)
    for start in range(0, len(names), FOLDERS_AT_ONCE):
        await together(map(look, names[start : start + FOLDERS_AT_ONCE]))
    return found


async def verify(objects: Objects, revisions: Sequence[Published], deep: bool, progress: Progress) -> Report:
    """deep: read every byte. Raises ObjectError."""
    chunks: set[Chunk] = set()
    findings = []
    for done, one in enumerate(revisions):
        progress("manifests", done, len(revisions))
        try:
            chunks.update((await read_manifest(objects, one.model, one.revision, one.key)).chunks)
        except ObjectMissing:
            continue  # removed meanwhile
        except Damaged as error:
            findings.append(Finding("manifest", one.object_name, str(error), []))
    wrong = await _wrong_sizes(objects, chunks)
    read_bytes = 0
    if deep:
        sound = [chunk for chunk in chunks if chunk not in wrong]
        read_bytes = sum(chunk.size_bytes for chunk in sound)
        wrong |= await _wrong_bytes(objects, sound, progress)
    files = await _files_with(objects, revisions, wrong) if wrong else {}
    for chunk, (kind, reason) in wrong.items():
        findings.append(Finding(kind, chunk.name, reason, files.get(chunk, [])))
    return Report(len(revisions), len(chunks), sum(c.size_bytes for c in chunks), read_bytes, findings)


async def _wrong_sizes(objects: Objects, chunks: set[Chunk]) -> dict[Chunk, tuple[str, str]]:
    """Kind and reason of each."""
    sizes = await sizes_of(objects, chunks)
    wrong = {}
    for chunk in chunks:
        found = sizes.get(chunk.sha256)
        if found is None:
            wrong[chunk] = ("missing", "it is not there")
        elif found != chunk.size_bytes:
            wrong[chunk] = ("size", f"{found} bytes of {chunk.size_bytes}")
    return wrong


async def _wrong_bytes(
    objects: Objects, chunks: Sequence[Chunk], progress: Progress
) -> dict[Chunk, tuple[str, str]]:
    wrong: dict[Chunk, tuple[str, str]] = {}
    waiting = iter(chunks)
    done_bytes, all_bytes = 0, sum(chunk.size_bytes for chunk in chunks)

    async def work() -> None:
        nonlocal done_bytes
        for chunk in waiting:
            try:
                content = await objects.get_within(chunk.name, chunk.size_bytes)
                if not await asyncio.to_thread(is_true, chunk, content):
                    wrong[chunk] = ("damaged", "its bytes are not what its name says")
            except ObjectMissing:
                wrong[chunk] = ("missing", "it is not there")
            except ObjectDamaged as error:
                wrong[chunk] = ("damaged", str(error))
            done_bytes += chunk.size_bytes
            progress("reading chunks", done_bytes, all_bytes)

    await together(work() for _ in range(READS_AT_ONCE))
    return wrong


def is_true(chunk: Chunk, content: bytes | memoryview) -> bool:
    """Whether these bytes are the chunk, by both digests."""
    return (
        len(content) == chunk.size_bytes
        and xxhash.xxh3_128_digest(content) == chunk.checksum
        and hashlib.sha256(content).digest() == chunk.sha256
    )


async def _files_with(
    objects: Objects, revisions: Sequence[Published], wrong: dict[Chunk, tuple[str, str]]
) -> dict[Chunk, list[str]]:
    found: dict[Chunk, list[str]] = {}
    room = FILES_SAID_MAX
    for one in revisions:
        try:
            manifest = await read_manifest(objects, one.model, one.revision, one.key)
        except (ObjectMissing, Damaged):
            continue
        for chunk, path in _pairs(manifest, wrong):
            if room > 0:
                room -= 1
                found.setdefault(chunk, []).append(f"{one.model}@{one.revision}/{path}")
    return found


def _pairs(manifest: Manifest, wrong: dict[Chunk, tuple[str, str]]) -> list[tuple[Chunk, str]]:
    places = {place for place, chunk in enumerate(manifest.chunks) if chunk in wrong}
    return [
        (manifest.chunks[place], file.path)
        for file in (manifest.files if places else ())
        for place in sorted(places.intersection(file.chunks))
    ]
