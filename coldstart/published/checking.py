"""Whether what a bucket's manifests name is there and true.

    manifests ─▶ chunks, each once ─list─▶ is it there, as long as it should be? ─read, --deep─▶ are its bytes what its name says?
                                                     ╰── no: which files of which revisions have it ◀── manifests, once more

Manifests are read one after the other, and of each only its chunks are kept: what is wrong is looked up in a second round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from coldstart.published.models import Progress
from replication.errors import Damaged
from replication.formats.manifests import Chunk, Manifest, read_manifest
from replication.models.chunks import sizes_of, wrong_bytes
from replication.models.published import Published
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused
from tiers.together import each

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


async def verify(objects: Objects, revisions: Sequence[Published], deep: bool, progress: Progress) -> Report:
    """deep: read every byte. Raises ObjectError."""
    chunks: set[Chunk] = set()
    findings, sound_ones = [], []
    for done, one in enumerate(revisions):
        progress("manifests", done, len(revisions))
        try:
            chunks.update((await read_manifest(objects, one.model, one.revision, one.key)).chunks)
            sound_ones.append(one)
        except ObjectMissing:
            continue  # removed meanwhile
        except (Damaged, ObjectRefused) as error:
            findings.append(Finding("manifest", one.object_name, str(error), []))
    wrong = await _wrong_sizes(objects, chunks)
    read_bytes = 0
    if deep:
        sound = [chunk for chunk in chunks if chunk not in wrong]
        read_bytes = sum(chunk.size_bytes for chunk in sound)
        wrong |= await _wrong_bytes(objects, sound, progress)
    files = await _files_with(objects, sound_ones, wrong) if wrong else {}
    for chunk, (kind, reason) in wrong.items():
        if chunk in files:  # else removed, and collected, meanwhile
            findings.append(Finding(kind, chunk.name, reason, files[chunk]))
    return Report(len(revisions), len(chunks), sum(c.size_bytes for c in chunks), read_bytes, findings)


async def _wrong_sizes(objects: Objects, chunks: set[Chunk]) -> dict[Chunk, tuple[str, str]]:
    """Kind and reason of each."""
    sizes = await sizes_of(objects, chunks)
    wrong = {}
    for chunk in chunks:
        found = sizes.get(chunk.name)
        if found is None:
            wrong[chunk] = ("missing", "it is not there")
        elif found != chunk.size_bytes:
            wrong[chunk] = ("size", f"{found} bytes of {chunk.size_bytes}")
    return wrong


async def _wrong_bytes(
    objects: Objects, chunks: Sequence[Chunk], progress: Progress
) -> dict[Chunk, tuple[str, str]]:
    wrong: dict[Chunk, tuple[str, str]] = {}
    done_bytes, all_bytes = 0, sum(chunk.size_bytes for chunk in chunks)

    async def read(chunk: Chunk) -> None:
        nonlocal done_bytes
        try:
            content = await objects.get_within(chunk.name, chunk.size_bytes)
            if reason := await wrong_bytes(chunk, content):
                wrong[chunk] = ("damaged", reason)
        except ObjectMissing:
            wrong[chunk] = ("missing", "it is not there")
        except ObjectDamaged as error:
            wrong[chunk] = ("damaged", str(error))
        done_bytes += chunk.size_bytes
        progress("reading chunks", done_bytes, all_bytes)

    await each(read, chunks, READS_AT_ONCE)
    return wrong


async def _files_with(
    objects: Objects, revisions: Sequence[Published], wrong: dict[Chunk, tuple[str, str]]
) -> dict[Chunk, list[str]]:
    """Of those that a revision names still."""
    found: dict[Chunk, list[str]] = {}
    room = FILES_SAID_MAX
    for one in revisions:
        try:
            manifest = await read_manifest(objects, one.model, one.revision, one.key)
        except ObjectMissing:
            continue
        for chunk in wrong.keys() & manifest.chunks:
            found.setdefault(chunk, [])
        for chunk, path in _pairs(manifest, wrong):
            if room > 0:
                room -= 1
                found[chunk].append(f"{one.model}@{one.revision}/{path}")
    return found


def _pairs(manifest: Manifest, wrong: dict[Chunk, tuple[str, str]]) -> list[tuple[Chunk, str]]:
    places = {place for place, chunk in enumerate(manifest.chunks) if chunk in wrong}
    return [
        (manifest.chunks[place], file.path)
        for file in (manifest.files if places else ())
        for place in sorted(places.intersection(file.chunks))
    ]
