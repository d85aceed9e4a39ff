"""Filling the files of a revision that is under way with what its chunks say, each fetched once.

    chunk ─▶ true in one of its places on disk? ─no─▶ sources, in turn ─▶ slot ─▶ xxh3_128 ─▶ written to all of its places
                         │ yes                                                  wrong ↺ the next source, then all once more
                         ╰─▶ written to those places where it is not

Every stream has a slot (coldstart/blocks.py) and does one chunk at a time, from fetching to writing: nothing is written that
was not verified, nothing is fetched without room for it, and a process that is killed has lost one chunk a stream at most.
There is no journal: what is on disk is read again, where anything was written at all, and believed if its checksum says so.
A file is synced when its last chunk was written.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

from coldstart.blocks import BLOCK_BYTES, Filled, Slot, Tree, slots
from coldstart.disk.sources import THIS_DISK, Source, fetched
from replication.formats.manifests import Chunk, Manifest
from tiers.checksum import digest
from tiers.together import in_full, together

STREAMS: Final = 16  # chunks under way; each has memory for one
RATE_S: Final = 5.0  # the rate is that of so long

# As the kernel says it; the second and the third one to who reads past the page cache.
_BAD_SECTOR: Final = (errno.EIO, errno.ENODATA, errno.EILSEQ)

T = TypeVar("T")


class Progress:
    """How far a revision is. by_source: bytes that came from each. kept_bytes: that were there, and true."""

    def __init__(self, total_bytes: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_bytes = total_bytes
        self.kept_bytes = 0
        self.by_source: Counter[str] = Counter()
        self._clock = clock
        self._begun_s = clock()
        self._lately: deque[tuple[float, int]] = deque([(self._begun_s, 0)])

    @property
    def came_bytes(self) -> int:
        return sum(self.by_source.values())

    @property
    def left_bytes(self) -> int:
        return self.total_bytes - self.kept_bytes - self.came_bytes

    @property
    def seconds(self) -> float:
        return self._clock() - self._begun_s

    @property
    def bytes_per_s(self) -> float:
        """Lately."""
        began_s, before = self._lately[0]
        return (self.came_bytes - before) / max(1e-3, self._clock() - began_s)

    def came(self, source: str, size_bytes: int) -> None:
        self.by_source[source] += size_bytes
        now_s = self._clock()
        self._lately.append((now_s, self.came_bytes))
        while self._lately[0][0] < now_s - RATE_S and len(self._lately) > 1:
            self._lately.popleft()


class Run(NamedTuple):
    """Where a chunk lies. at: of its first byte in the file."""

    path: str
    at: int


class Filling:
    """Of one revision, once."""

    def __init__(
        self,
        tree: Tree,
        manifest: Manifest,
        sources: Sequence[Source],
        progress: Progress,
        streams: int = STREAMS,
    ) -> None:
        self._tree = tree
        self._manifest = manifest
        self._sources = sources
        self._progress = progress
        self._runs = runs_of(manifest)
        self._streams = max(1, min(streams, len(self._runs)))
        self._left = Counter(
            {file.path: len(file.chunks) for file in manifest.files}
        )  # chunks that are not written
        self._filled: dict[str, Filled] = {}
        self._has: list[tuple[Source, set[Chunk]]] = []
        self._threads = ThreadPoolExecutor(self._streams, "coldstart-fill")

    async def fill(self) -> None:
        """Until all files are whole and on disk. Raises ChunkDamaged, ObjectError, OSError; what was filled stays then."""
        self._progress.total_bytes = sum(chunk.size_bytes * len(runs) for chunk, runs in self._runs.items())
        try:
            await self._in_thread(self._look)
            self._has = [(source, await source.has(self._runs)) for source in self._sources]
            jobs = iter(self._runs.items())
            largest = max((chunk.size_bytes for chunk in self._runs), default=1)
            await together(self._stream(jobs, slot) for slot in slots(self._streams, largest))
        finally:
            self._threads.shutdown(wait=True)

    def _look(self) -> None:
        """What may be there, and files that have no bytes."""
        self._filled = {file.path: self._tree.filled(file.path) for file in self._manifest.files}
        for file in self._manifest.files:
            if not file.chunks:
                self._tree.sync(file.path)

    async def _stream(self, jobs: Iterator[tuple[Chunk, list[Run]]], slot: Slot) -> None:
        for chunk, runs in jobs:
            there = [run for run in runs if self._filled[run.path].covers(run.at, run.at + chunk.size_bytes)]
            missing = await self._in_thread(self._missing, chunk, runs, there, slot) if there else runs
            self._progress.kept_bytes += chunk.size_bytes * (len(runs) - len(missing))
            copies = len(missing)
            if len(missing) == len(runs):
                near = [source for source, has in self._has if chunk in has]
                source = await fetched(near, chunk, slot.run(runs[0].at, chunk.size_bytes))
                self._progress.came(source, chunk.size_bytes)
                copies -= 1
            if copies:
                self._progress.came(THIS_DISK, chunk.size_bytes * copies)
            await self._in_thread(self._write, chunk, runs, missing, slot)
            self._left.subtract(run.path for run in runs)
            for path in {run.path for run in runs}:
                if not self._left[path]:
                    await self._in_thread(self._tree.sync, path)

    # -- in a thread --

    def _missing(self, chunk: Chunk, runs: Sequence[Run], there: Sequence[Run], slot: Slot) -> list[Run]:
        """The runs that are not on disk, or not true; if some are, the chunk is in the slot, as for the first run. there: those
        that may be."""
        true = [run for run in there if is_true(self._tree, chunk, run, slot)]
        if true and len(true) < len(runs):
            if not is_true(self._tree, chunk, true[0], slot):
                return list(runs)
            content = bytes(slot.run(true[0].at, chunk.size_bytes))
            slot.run(runs[0].at, chunk.size_bytes)[:] = content
        return [run for run in runs if run not in true]

    def _write(self, chunk: Chunk, runs: Sequence[Run], missing: Sequence[Run], slot: Slot) -> None:
        content = slot.run(runs[0].at, chunk.size_bytes)
        for run in missing:
            self._tree.write(run.path, run.at, content, (run.at - runs[0].at) % BLOCK_BYTES == 0)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await in_full(
            asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*arguments))
        )


def is_true(tree: Tree, chunk: Chunk, run: Run, slot: Slot) -> bool:
    """Whether a run on disk is what its chunk says; it is in the slot then. A bad sector is not: writing gives it another one.
    Blocks; raises OSError."""
    try:
        found = tree.read(run.path, run.at, slot, chunk.size_bytes)
    except OSError as error:
        if error.errno not in _BAD_SECTOR:
            raise
        return False
    return found is not None and digest(found) == chunk.checksum


def runs_of(manifest: Manifest) -> dict[Chunk, list[Run]]:
    """Where each chunk lies, in the order of the files' bytes."""
    found: dict[Chunk, list[Run]] = {}
    for file in manifest.files:
        for at, chunk in manifest.chunks_of(file):
            found.setdefault(chunk, []).append(Run(file.path, at))
    return found
