"""A model in DRAM: its image, how it is filled from chunks, how tensors are read from it without a copy.

    image    │ magic │ size of the manifest │ manifest, sealed │ 0… │ file 0 │ 0… │ file 1 │ …       files begin on pages
    slabs    │            slab 0            │            slab 1            │ …                     each committed with its checksum

The image says everything about itself: which model it is, which files it has, where they lie. So a reader needs neither a
disk nor a bucket. Every chunk is compared with its xxh3_128 before the slab it lies in is committed; what was committed by a
filler that died is not read again.

Who maps the slabs is the caller's business (`kvstore.client.models`): here an image is one run of memory.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

from coldstart.disk.sources import Source, fetched
from coldstart.errors import ModelMissing, NoRoom
from coldstart.published.cutting import SAFETENSORS, TensorPlace, header_from
from replication.errors import Damaged
from replication.formats.manifests import (
    CHUNK_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    Chunk,
    File,
    Manifest,
    decode,
    encode,
)
from tiers.checksum import digest
from tiers.together import in_thread, together

STREAMS: Final = 4  # chunks that are read at a time, from a disk
ROOM_S: Final = 60.0  # for KV to give way, for one slab
CONTENT_BYTES: Final = 16  # of the digest, by which contents of one name are told apart
_MAGIC: Final = b"KVIMAGE1"
_HEAD: Final = struct.Struct("<8sQ")
_PAGE_BYTES: Final = 4096


class Filling(Protocol):
    """As `kvstore.client.models.ModelFilling`."""

    view: memoryview
    slab_bytes: int
    count: int
    ready: set[int]

    def arrived(self, index: int, wait_s: float) -> bool: ...
    def commit(self, checksums: Mapping[int, bytes]) -> None: ...


class Layout(NamedTuple):
    """Where things lie in an image. head: what it begins with; places: of the files, in the manifest's order."""

    head: bytes
    places: list[int]
    size_bytes: int


def layout_of(manifest: Manifest) -> Layout:
    return _laid_out(encode(manifest), manifest.files)


def _laid_out(sealed: bytes, files: Sequence[File]) -> Layout:
    head = _HEAD.pack(_MAGIC, len(sealed)) + sealed
    ends = list(accumulate((_pages(file.size_bytes) for file in files), initial=_pages(len(head))))
    return Layout(head, ends[:-1], ends[-1])


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES


class Image:
    """One that is whole. Everything in it is a view of memory that the caller keeps; nothing is copied."""

    def __init__(self, view: memoryview) -> None:
        """Raises Damaged."""
        magic, size_bytes = _HEAD.unpack_from(view) if len(view) >= _HEAD.size else (b"", 0)
        if magic != _MAGIC or not 0 < size_bytes <= min(MANIFEST_BYTES_MAX, len(view) - _HEAD.size):
            raise Damaged("a model in DRAM: no image of a model")
        sealed = bytes(view[_HEAD.size : _HEAD.size + size_bytes])
        self.manifest = decode(sealed, "a model in DRAM")
        layout = _laid_out(sealed, self.manifest.files)
        if layout.size_bytes > len(view):
            raise Damaged(f"a model in DRAM: {len(view)} bytes, its files need {layout.size_bytes}")
        self._view = view
        self._places = {
            file.path: (at, file.size_bytes)
            for file, at in zip(self.manifest.files, layout.places, strict=True)
        }

    def file(self, path: str) -> memoryview:
        """All of its bytes. Raises ModelMissing."""
        if path not in self._places:
            raise ModelMissing(f"{self.manifest.model}@{self.manifest.revision}: has no file {path!r}")
        at, size_bytes = self._places[path]
        return self._view[at : at + size_bytes]

    def place(self, path: str) -> int:
        """Where a file begins in the image."""
        return self._places[path][0]

    def tensors(self, path: str) -> Iterator[tuple[TensorPlace, memoryview]]:
        """Of a safetensors file, in the order of its bytes. Raises ModelMissing, Damaged."""
        content = self.file(path)
        header = header_from(lambda size, at: bytes(content[at : at + size]), len(content))
        if header is None:
            raise Damaged(f"{path}: no safetensors file")
        for tensor in header.tensors:
            yield tensor, content[tensor.start : tensor.end]

    def weights(self) -> list[str]:
        """Its safetensors files, by name."""
        return sorted(path for path in self._places if path.endswith(SAFETENSORS))


class _Job(NamedTuple):
    """Bytes of the image to be put in their place: those of a chunk, or (None) some of the head. at: of the image."""

    at: int
    size_bytes: int
    chunk: Chunk | None


async def fill(
    filling: Filling,
    manifest: Manifest,
    sources: Sequence[Source],
    came: Callable[[int], None] = lambda size_bytes: None,
    room_s: float = ROOM_S,
    streams: int = STREAMS,
) -> Counter[str]:
    """Until the model is whole; returns bytes by source. A chunk that lies in several places comes once. came: told how many bytes of the
    files are there, as they come. streams: chunks that are read at a time.

    Raises NoRoom (KV is in use, and does not give way), ChunkDamaged, ObjectError, and what `filling` raises; what was
    committed by then stays for whoever goes on.
    """
    work = _Work(filling, manifest, sources, came, room_s)
    jobs = iter(work.jobs)
    came(work.ready_bytes)
    await together(work.stream(jobs) for _ in range(streams))
    return work.by_source


class _Work:
    def __init__(
        self,
        filling: Filling,
        manifest: Manifest,
        sources: Sequence[Source],
        came: Callable[[int], None],
        room_s: float,
    ) -> None:
        self.by_source: Counter[str] = Counter()
        self._filling, self._manifest, self._sources = filling, manifest, sources
        self._came, self._room_s = came, room_s
        self._layout = layout_of(manifest)
        self._asking = asyncio.Lock()  # for slabs: one question at a time
        ready = frozenset(filling.ready)
        jobs = list(_jobs(self._layout, manifest))
        self._starts = [job.at for job in jobs]
        self._ends = [job.at + job.size_bytes for job in jobs]
        self.jobs = [job for job in jobs if not ready.issuperset(self._slabs(job))]
        self._ready = ready
        left_bytes = sum(job.size_bytes for job in self.jobs if job.chunk is not None)
        self.ready_bytes = manifest.size_bytes - left_bytes
        counts = Counter(job.chunk for job in self.jobs if job.chunk is not None)
        self._shared = {chunk for chunk, count in counts.items() if count > 1}
        self._first: dict[Chunk, tuple[asyncio.Event, memoryview]] = {}  # of these, the one that was fetched
        self._left = Counter(slab for job in self.jobs for slab in self._slabs(job))

    def _slabs(self, job: _Job) -> range:
        size = self._filling.slab_bytes
        return range(job.at // size, (job.at + job.size_bytes - 1) // size + 1)

    async def stream(self, jobs: Iterator[_Job]) -> None:
        for job in jobs:
            slabs = [slab for slab in self._slabs(job) if slab not in self._ready]
            for slab in slabs:
                await self._arrive(slab)
            is_straight = len(slabs) == len(self._slabs(job))
            view = self._filling.view[job.at : job.at + job.size_bytes]
            if job.chunk is None:
                content = memoryview(self._layout.head)[job.at : job.at + job.size_bytes]
                self._put(job, content, slabs)
            elif is_straight:
                await self._fetch(job.chunk, view)
            else:
                content = memoryview(bytearray(job.size_bytes))
                await self._fetch(job.chunk, content)
                self._put(job, content, slabs)
            for slab in slabs:
                self._left[slab] -= 1
                if not self._left[slab]:
                    await self._commit(slab)

    async def _arrive(self, slab: int) -> None:
        async with self._asking:
            if not await in_thread(self._filling.arrived, slab, self._room_s):
                name = f"{self._manifest.model}@{self._manifest.revision}"
                raise NoRoom(
                    f"{name}: no slab of DRAM has become free for {self._room_s:g} s: what is there is in use, or pinned; "
                    "the same command goes on where this one ended"
                )

    def _put(self, job: _Job, content: memoryview, slabs: Sequence[int]) -> None:
        """What lies in these slabs of it."""
        size = self._filling.slab_bytes
        for slab in slabs:
            low, high = max(job.at, slab * size), min(job.at + job.size_bytes, (slab + 1) * size)
            self._filling.view[low:high] = content[low - job.at : high - job.at]

    async def _fetch(self, chunk: Chunk, view: memoryview) -> None:
        is_there, first = self._first.get(chunk, (None, view))
        if is_there is None and chunk in self._shared:
            is_there, _ = self._first[chunk] = asyncio.Event(), view
        elif is_there is not None:
            await is_there.wait()
        if first is view or not await in_thread(_is_copied, first, view, chunk):
            self.by_source[await fetched(self._sources, chunk, view)] += chunk.size_bytes
        if is_there is not None:
            is_there.set()
        self._came(chunk.size_bytes)

    async def _commit(self, slab: int) -> None:
        checksum = await in_thread(self._sealed, slab)
        await in_thread(self._filling.commit, {slab: checksum})

    def _sealed(self, slab: int) -> bytes:
        """Zeros between its files and behind the last one; its checksum."""
        size = self._filling.slab_bytes
        start, end = slab * size, (slab + 1) * size
        at, job = start, max(0, bisect_right(self._starts, start) - 1)
        while at < end:
            following = self._starts[job] if job < len(self._starts) else end
            if at < min(following, end):
                self._filling.view[at : min(following, end)] = bytes(min(following, end) - at)
            if job < len(self._ends):
                at = max(at, self._ends[job])
                job += 1
            else:
                at = end
        return digest(self._filling.view[start:end])


def _is_copied(first: memoryview, view: memoryview, chunk: Chunk) -> bool:
    """Whether what was true is so still: others may write there."""
    view[:] = first
    return digest(view) == chunk.checksum


def _jobs(layout: Layout, manifest: Manifest) -> Iterator[_Job]:
    """In the order of the bytes."""
    head_bytes = len(layout.head)
    for at in range(0, head_bytes, CHUNK_BYTES_MAX):
        yield _Job(at, min(CHUNK_BYTES_MAX, head_bytes - at), None)
    for file, place in zip(manifest.files, layout.places, strict=True):
        for at, chunk in manifest.chunks_of(file):
            yield _Job(place + at, chunk.size_bytes, chunk)
