"""Publishing: the files of a model into a bucket, as chunks and a manifest, of which the manifest comes last.

    files ─read once, by threads─▶ SHA-256 of files and chunks, XXH3 of chunks ─▶ manifest
    intent ─▶ no collection under way ─▶ which chunks are there? ─▶ read and put the others ─▶ manifest, only if new

Killed at any instant, nothing of it can be seen; a rerun puts what is missing. A chunk is compared with its checksum as it is read
once more: files that change end in `FilesWrong`, and no manifest.

A revision that is there with the same files is published already. Its manifest counts then, however it was cut, and chunks of it
that are missing are put: so publishing again repairs. With other files it is `ModelExists`.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, NamedTuple

import xxhash
from msgspec.structs import replace

from coldstart.blocks import read_all
from coldstart.errors import FilesWrong, ModelExists
from coldstart.published.cutting import cut
from coldstart.published.models import Progress, check_name
from coldstart.published.tree import Tree, TreeFile, header_of, opened
from replication.erasure.removed_models import read_removal
from replication.errors import Damaged
from replication.feed.announcing import announce_in_region
from replication.formats.announced_models import announced_model
from replication.formats.keeping import store_now_s
from replication.formats.manifests import (
    CACHES,
    CHUNK_BYTES_MAX,
    MANIFESTS,
    Chunk,
    File,
    Manifest,
    content_of,
    decode,
    encode,
    read_manifest,
)
from replication.models.chunks import lacking, wrong_bytes
from replication.models.collecting import LOCK_S, publishing
from replication.models.published import LATEST_S, latest_first
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing
from tiers.together import each, together

HASHERS: Final = min(8, os.cpu_count() or 1)  # files at once, each with CHUNK_BYTES_MAX of memory
PUTS_AT_ONCE: Final = 16  # each with a chunk in memory
REVISION_DIGITS: Final = 16  # of the content: a revision that nobody has named
STEP_S: Final = 0.001  # between two revisions that were published in one second of the store

Read = Callable[[Chunk], Awaitable[bytes | memoryview]]


class Digested(NamedTuple):
    """A file, what it is, and of which chunks."""

    file: TreeFile
    sha256: bytes
    chunks: list[Chunk]


class Stored(NamedTuple):
    """was_there: the manifest. put: chunks that were not."""

    manifest: Manifest
    was_there: bool
    put: int
    put_bytes: int


async def digested(tree: Tree, progress: Progress) -> list[Digested]:
    """All files, each read once. Raises FilesWrong."""
    loop = asyncio.get_running_loop()
    stop = threading.Event()
    done_bytes, all_bytes = 0, sum(file.size_bytes for file in tree.files)

    def add(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        progress("reading files", done_bytes, all_bytes)

    def work(file: TreeFile) -> Digested:
        def passed(size_bytes: int) -> None:
            if stop.is_set():
                raise CancelledError
            loop.call_soon_threadsafe(add, size_bytes)

        return _digest(file, chunk_threads, passed)

    with ThreadPoolExecutor(HASHERS) as chunk_threads, ThreadPoolExecutor(HASHERS) as file_threads:
        try:
            return await together(loop.run_in_executor(file_threads, work, file) for file in tree.files)
        finally:
            stop.set()


def _digest(file: TreeFile, threads: ThreadPoolExecutor, passed: Callable[[int], None]) -> Digested:
    """In a thread. The digests of a chunk are made beside that of the file, from the same bytes."""
    whole = hashlib.sha256()
    chunks = []
    with opened(file) as fd:
        cuts = cut(file.size_bytes, header_of(file, fd))
        memory = memoryview(bytearray(min(file.size_bytes, CHUNK_BYTES_MAX)))
        for start, end in pairwise(cuts):
            view = memory[: end - start]
            if not read_all(fd, view, start):
                raise FilesWrong(f"{file.place}: it is changed while it is read: publish what is complete")
            of_chunk = threads.submit(_chunk_of, view)
            whole.update(view)
            chunks.append(of_chunk.result())
            passed(len(view))
    return Digested(file, whole.digest(), chunks)


def _chunk_of(view: memoryview) -> Chunk:
    return Chunk(hashlib.sha256(view).digest(), xxhash.xxh3_128_digest(view), len(view))


def manifest_of(
    files: list[Digested], model: str, revision: str, by: str, source: str, about: dict[str, str]
) -> Manifest:
    """One that everybody can read; when it was published is not known yet. revision: "" for one that follows from the content.
    about: of caches, else empty. Raises ModelError."""
    places: dict[Chunk, int] = {}
    found = []
    for one in files:
        numbers = [places.setdefault(chunk, len(places)) for chunk in one.chunks]
        found.append(File(one.file.path, one.file.size_bytes, one.sha256, numbers))
    content = content_of(found)
    revision = revision or content.hex()[:REVISION_DIGITS]
    check_name("model", model)
    check_name("revision", revision)
    made = Manifest(model, revision, content, 0.0, by, source, about, list(places), found)
    try:
        return decode(encode(made), "its manifest")
    except Damaged as error:
        raise FilesWrong(
            f"{source}: {len(found)} files in {len(places)} chunks are more than a model may have: {error}"
        ) from error


async def publish(
    objects: Objects, tree: Tree, manifest: Manifest, again: bool, progress: Progress
) -> Stored:
    """Have the files of a tree, which this manifest is of, in a bucket. again: put every chunk, whatever is there.

    Raises ModelExists, FilesWrong, Damaged, ObjectError.
    """
    there = await _published(objects, manifest)
    manifest = there or manifest
    by_path = {file.path: file for file in tree.files}
    places = {
        chunk: (by_path[file.path], at) for file in manifest.files for at, chunk in manifest.chunks_of(file)
    }

    async def read(chunk: Chunk) -> memoryview:
        content = await asyncio.to_thread(_read_chunk, chunk, *places[chunk])
        if there and await wrong_bytes(chunk, content):  # whose names others have given
            raise Damaged(f"{manifest.name}: its chunks are not those of its files")
        return content

    stored = await store(objects, manifest, read, again, progress)
    return stored._replace(was_there=there is not None)


def _read_chunk(chunk: Chunk, file: TreeFile, at: int) -> memoryview:
    with opened(file) as fd:
        is_whole = read_all(fd, content := memoryview(bytearray(chunk.size_bytes)), at)
    if not is_whole or xxhash.xxh3_128_digest(content) != chunk.checksum:
        raise FilesWrong(f"{file.place}: it is changed while it is published: publish what is complete")
    return content.toreadonly()  # else a store copies it


async def store(objects: Objects, manifest: Manifest, read: Read, again: bool, progress: Progress) -> Stored:
    """Put what is missing of a revision, the manifest last. read: the bytes of a chunk, which are believed.

    Raises ModelExists, IntentLost, ObjectError, and whatever `read` does.
    """
    await _require_not_removed(objects, manifest)

    def waits(passed_s: float) -> None:
        progress("waiting for a collection", int(passed_s), int(LOCK_S))

    async with publishing(objects, manifest, uuid.uuid4().hex, waits) as intent:
        missing = manifest.chunks if again else await lacking(objects, manifest.chunks)
        await _put(objects, missing, read, progress)
        manifest = await _dated(objects, manifest, await intent.now_s())
        is_new = await objects.put(manifest.name, encode(manifest), only_new=True)
        # A store without conditions may have taken two: the one that is there now is the one.
        there = await _published(objects, manifest)
        try:
            await _require_not_removed(objects, manifest)
        except ModelExists:
            await objects.delete([manifest.name])
            raise
        await announce_in_region(objects, announced_model(there or manifest), random.Random())
    return Stored(there or manifest, not is_new, len(missing), sum(chunk.size_bytes for chunk in missing))


async def _dated(objects: Objects, manifest: Manifest, now_s: float) -> Manifest:
    """With when it is published: later than whatever is published already, also in this second, or by a clock that was wrong. One that
    is there stays as it is: a store without conditions would take it anew. Raises ObjectError."""
    folder, of = MANIFESTS, manifest.model
    if manifest.key:
        folder, of = CACHES, f"{of}/{manifest.revision}"
    there = await latest_first(objects, of, folder)
    if any(one.object_name == manifest.name for one in there):
        return manifest
    return replace(manifest, published_s=max([now_s, *(one.published_s + STEP_S for one in there[:1])]))


async def _require_not_removed(objects: Objects, manifest: Manifest) -> None:
    """Raises ModelExists, Damaged, ObjectError."""
    removal = await read_removal(objects, manifest.model, manifest.revision, 0.0)
    if removal is not None and await store_now_s(objects) < removal.watched_until_s:
        raise ModelExists(
            f"{objects.where}: {manifest.model}@{manifest.revision} was removed by {_words(removal.removed_by)} on"
            f" {_date(removal.removed_s)}, and its name is free from {_date(removal.watched_until_s)} on: choose another --revision"
        )


def _date(at_s: float) -> str:
    return f"{datetime.fromtimestamp(min(at_s, LATEST_S), UTC):%Y-%m-%d at %H:%M} UTC"


def _words(who: str) -> str:
    return " ".join(who.split())[:100] or "somebody"


async def _put(objects: Objects, chunks: Sequence[Chunk], read: Read, progress: Progress) -> None:
    done_bytes, all_bytes = 0, sum(chunk.size_bytes for chunk in chunks)

    async def put(chunk: Chunk) -> None:
        nonlocal done_bytes
        await objects.put(chunk.name, await read(chunk))
        done_bytes += chunk.size_bytes
        progress("putting chunks", done_bytes, all_bytes)

    await each(put, chunks, PUTS_AT_ONCE)


async def _published(objects: Objects, manifest: Manifest) -> Manifest | None:
    """The manifest of this revision that is there. Raises ModelExists where it is of other files, Damaged, ObjectError."""
    try:
        there = await read_manifest(objects, manifest.model, manifest.revision, manifest.key)
    except ObjectMissing:
        return None
    if there.content != manifest.content:
        raise ModelExists(
            f"{objects.where}: {there.model}@{there.revision} is there with other files,"
            f" published by {_words(there.published_by)} on {_date(there.published_s)}: choose another --revision"
        )
    return there
