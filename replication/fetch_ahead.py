"""Fetch ahead: where many jobs wait, a bulk copy brings their packs near before they are carried out.

    jobs, waiting ── take_bulk ──▶ juicefs sync ──▶ ready ──▶ carried out: from what was fetched, or from the source
         ╰───────────────── one by one, meanwhile ─────────▶

A job is never held back for longer than a run takes, and each comes back, whatever became of the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from replication.bulk_copy import BulkCopy
from replication.catalogue import Catalogue
from replication.constants import (
    BULK_BYTES_MAX,
    BULK_LOOK_S,
    BULK_PACKS_MAX,
    BULK_PACKS_MIN,
    BULK_PAUSE_S,
    CATALOGUE_CHUNK_PACKS,
)
from replication.errors import BulkCopyFailed, CatalogueDamaged
from replication.jobs import Job, Jobs
from replication.region import MARKER
from replication.waits import within
from tiers.errors import ObjectError
from tiers.objects import Objects

log = logging.getLogger("replication.fetch_ahead")


class FetchAhead:
    """Of one source. ready: jobs that come before all others. woken: set when there are new jobs."""

    def __init__(
        self,
        bulk: BulkCopy,
        bucket: Objects,
        catalogue: Catalogue,
        jobs: Jobs,
        wake: Callable[[], None],
        damaged: Callable[[], None],
    ) -> None:
        """bucket, catalogue: of the source. wake: called when jobs are ready. damaged: called when the catalogue is found to be."""
        self.ready: deque[Job] = deque()
        self.woken = asyncio.Event()
        self._bulk = bulk
        self._bucket = bucket
        self._catalogue = catalogue
        self._jobs = jobs
        self._wake = wake
        self._damaged = damaged

    async def run(self) -> None:
        """Until it is cancelled. Raises nothing that a store, a disk or a program can cause."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self.woken.clear()
                if len(self.ready) < BULK_PACKS_MIN:  # so that what lies on disk is two runs at most
                    jobs = self._jobs.take_bulk(loop.time(), BULK_PACKS_MIN, BULK_PACKS_MAX, BULK_BYTES_MAX)
                    if jobs:
                        await asyncio.sleep(await self._fetch(jobs))
                        continue
                await within(BULK_LOOK_S, self.woken)
        finally:
            self._bulk.close()

    async def drop(self, job: Job) -> None:
        """What was fetched for a job is not needed any more."""
        name, job.fetched = job.fetched, ""
        try:
            await self._bulk.fetched.delete([name])
        except ObjectError as error:
            log.warning("fetched, and not removed: %s", error)

    async def _fetch(self, jobs: list[Job]) -> float:
        """Make these jobs ready; returns how long to wait before the next ones."""
        began_s = asyncio.get_running_loop().time()
        size_bytes = sum(job.size_bytes for job in jobs)
        try:
            names = await self._names(jobs)
            await self._bucket.head(MARKER)  # a source that is not there looks like an empty one
            count = await self._bulk.fetch(names, size_bytes)
        except (BulkCopyFailed, ObjectError) as error:
            log.warning("not copied in bulk, but one by one for %d s: %s", BULK_PAUSE_S, error)
            return BULK_PAUSE_S
        except CatalogueDamaged as error:
            log.warning("not copied in bulk, but one by one for %d s: %s", BULK_PAUSE_S, error)
            self._damaged()
            return BULK_PAUSE_S
        else:
            took_s = asyncio.get_running_loop().time() - began_s
            log.info(
                "fetched in bulk",
                extra={"packs": count, "of": len(jobs), "bytes": size_bytes, "took_s": took_s},
            )
            return 0.0
        finally:
            self.ready += jobs
            self._wake()

    async def _names(self, jobs: list[Job]) -> list[str]:
        """What their packs are called, as far as the source has them. Raises CatalogueDamaged."""
        names = []
        for start in range(0, len(jobs), CATALOGUE_CHUNK_PACKS):
            chunk = jobs[start : start + CATALOGUE_CHUNK_PACKS]
            for job, announced in zip(
                chunk, self._catalogue.packs([job.pack_id for job in chunk]), strict=True
            ):
                if announced is not None:
                    job.fetched = announced.pack.name
                    names.append(job.fetched)
            await asyncio.sleep(0)
        if not names:
            raise BulkCopyFailed(f"{self._bucket.where}: none of {len(jobs)} packs is announced any more")
        return names
