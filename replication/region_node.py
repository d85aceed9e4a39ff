"""One daemon's part in its region: what it finds, fetches and makes durable there.

    held ───▶ catalogue's filter                                  any thread, memory only
    fetch ──▶ catalogue ─▶ which packs ─▶ ranges of each, once    all that was asked for in one turn of the loop together
    persist ▶ put the pack ─▶ announce it ─▶ know it              what became ready meanwhile is announced together
    run ────▶ the tail of the feed, and upkeep, for ever

Everything but `held` is called on one event loop, and nothing else happens there.

Invariants: a pack is announced when it is in the bucket, and packs are announced in the order in which they were put, so
that a prefix is announced before what hangs on it. A record that is a HIT has the checksum that was announced for its key. A pack that is gone is forgotten, so nobody asks for
it again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from replication.announced import Announced
from replication.catalogue import Catalogue, Spot
from replication.constants import (
    ANNOUNCE_INTERVAL_PER_WRITER_S,
    ANNOUNCE_INTERVAL_S,
    ANNOUNCE_RETRY_S,
    CLOCK_SKEW_S,
    DOUBTED_PACKS_MAX,
    FETCH_RANGE_BYTES,
)
from replication.erasure import Erasure
from replication.errors import CatalogueDamaged
from replication.feed import FeedWriter
from replication.region import MARKER, Region, open_region
from replication.tail import Tail
from replication.tombstones import Tombstone
from replication.upkeep import Upkeep
from tiers.base import Get, Record
from tiers.errors import ObjectError, PackDamaged
from tiers.objects import Objects
from tiers.pack_io import fetch_records, put_pack
from tiers.packs import Pack, PackHeader

log = logging.getLogger("replication.region_node")

Answer = tuple[Get, Record | None]


class Wanted(Protocol):
    """A record to fetch: its key, and where its bytes go."""

    @property
    def key(self) -> bytes: ...
    @property
    def into(self) -> memoryview: ...


class _Asked(NamedTuple):
    """One call of `fetch`. answers: filled in as records arrive."""

    wanted: Sequence[Wanted]
    answers: list[Answer]
    done: asyncio.Future[None]


class _Part(NamedTuple):
    """A record of a pack that somebody wants: in which call, at which position, in which pack, at which index."""

    asked: _Asked
    position: int
    spot: Spot


class RegionNode:
    """Made by `join`."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        catalogue: Catalogue,
        writer: FeedWriter,
        tail: Tail,
        upkeep: Upkeep,
        erasure: Erasure,
    ) -> None:
        self.where = objects.where
        self.codec = ""  # of packs that are put from now on, see tiers/codecs.py
        self.region = region.region
        self.catalogue = catalogue
        self._objects = objects
        self._writer = writer
        self._tail = tail
        self._upkeep = upkeep
        self.erasure = erasure
        self._asked: list[_Asked] = []
        self._fetching: set[asyncio.Task[None]] = set()
        self._doubted: dict[bytes, None] = {}  # ids of packs, the latest ones
        self._unannounced: list[tuple[Announced, asyncio.Future[None]]] = []
        self._announcing: asyncio.Task[None] | None = None
        self.fetched = self.missing = self.corrupt = self.failed = 0  # records
        self.fetched_bytes = 0

    @classmethod
    async def join(
        cls,
        objects: Objects,
        deployment: str,
        region: str,
        catalogue_path: Path,
        instance: str,
        chance: random.Random,
        clock: Callable[[], float],
        skew_s: float = CLOCK_SKEW_S,
        erased: Callable[[Tombstone], None] = lambda tombstone: None,
    ) -> RegionNode:
        """instance: names this daemon, the same after each start. clock: unix seconds. skew_s: by which clocks differ.
        erased: called with each tombstone that becomes known.

        Raises RegionError (not this region), CatalogueBusy, CatalogueDamaged, ObjectError.
        """
        marker = await open_region(objects, deployment, region)
        writer = FeedWriter(objects, xxhash.xxh3_64_hexdigest(instance.encode()), clock, chance)
        await writer.open()
        catalogue = Catalogue.open(catalogue_path, marker.identity)
        tail = Tail(objects, catalogue, clock, chance)
        upkeep = Upkeep(objects, catalogue, lambda: tail.status().writers, skew_s, clock, chance)
        erasure = Erasure(objects, catalogue, clock, erased)
        return cls(objects, marker, catalogue, writer, tail, upkeep, erasure)

    async def run(self) -> None:
        """Follow the feed, remove what is over or erased, until cancelled."""
        await asyncio.gather(self._tail.run(), self._keep_up(), self.erasure.run())

    async def _keep_up(self) -> None:
        """At once when all of the feed was read: it tells of packs whose life was over before this daemon began."""
        await self.caught_up.wait()
        await self._upkeep.run()

    def close(self) -> None:
        self.catalogue.close()

    def held(self, namespace: bytes, hash_bytes: int, hashes: bytes, start: int) -> int:
        """The end of the durable prefix behind the first `start` blocks; see `Catalogue.held`."""
        return self.catalogue.held(namespace, hash_bytes, hashes, start)

    @property
    def caught_up(self) -> asyncio.Event:
        """All of the feed was read, once."""
        return self._tail.caught_up

    def known(self, pack_ids: Sequence[bytes]) -> list[Announced | None]:
        """What is known of these packs; None of those that are not there, or may be deleted any moment."""
        try:
            found = self.catalogue.packs(pack_ids)
        except CatalogueDamaged as error:
            self._mend(error)
            return [None] * len(pack_ids)
        return [pack if pack is not None and self._upkeep.may_renew(pack) else None for pack in found]

    # -- fetching --

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Answer]:
        """Records into their views: one answer each, as `tiers.base.Get` says. Never raises for a record."""
        asked = _Asked(wanted, [(Get.MISS, None)] * len(wanted), asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if len(self._asked) == 1:
            self._begin(self._fetch_asked())
        await asked.done
        return asked.answers

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._fetching.add(task)
        task.add_done_callback(self._fetching.discard)
        return task

    async def _fetch_asked(self) -> None:
        """All that is asked for now: others of the same turn of the loop are let in first."""
        await asyncio.sleep(0)
        calls, self._asked = self._asked, []
        try:
            groups = self._planned(calls)
        except CatalogueDamaged as error:
            self._mend(error)
            groups = []
        left = {id(call): 0 for call in calls}
        for group in groups:
            for part in group:
                left[id(part.asked)] += 1
        for call in calls:
            if not left[id(call)]:
                call.done.set_result(None)
        for group in groups:
            self._begin(self._fetch_group(group, left))

    def _mend(self, error: CatalogueDamaged) -> None:
        log.warning("the catalogue is made anew: %s", error)
        self._tail.mend()

    def _planned(self, calls: Sequence[_Asked]) -> list[list[_Part]]:
        """What is read with one request each: neighbours in a pack, up to FETCH_RANGE_BYTES."""
        packs: dict[bytes, list[_Part]] = {}
        for call in calls:
            spots = self.catalogue.find([one.key for one in call.wanted])
            for position, spot in enumerate(spots):
                if spot is not None and _fits(spot, call.wanted[position]):
                    packs.setdefault(spot.announced.pack.id, []).append(_Part(call, position, spot))
                else:
                    self.missing += 1
        groups: list[list[_Part]] = []
        for parts in packs.values():
            parts.sort(key=lambda part: part.spot.index)
            ranges = parts[0].spot.announced.pack.ranges()
            begun = None
            for part in parts:
                start, end = ranges[part.spot.index]
                if begun is None or end - begun > FETCH_RANGE_BYTES:
                    groups.append([])
                    begun = start
                groups[-1].append(part)
        return groups

    async def _fetch_group(self, group: Sequence[_Part], left: dict[int, int]) -> None:
        pack = group[0].spot.announced.pack
        places = [(part.spot.index, part.asked.wanted[part.position].into) for part in group]
        try:
            results = await fetch_records(self._objects, pack, places)
        except BaseException:
            results = [Get.FAILED] * len(group)
            raise
        finally:
            for part, result in zip(group, results, strict=True):
                part.asked.answers[part.position] = result, self._record(part) if result is Get.HIT else None
                left[id(part.asked)] -= 1
                if not left[id(part.asked)] and not part.asked.done.done():
                    part.asked.done.set_result(None)
        self._count(group, results)

    def _record(self, part: _Part) -> Record:
        announced, index = part.spot.announced, part.spot.index
        header = announced.pack.header
        spec = header.spec
        above = header.hash_at(index - 1) if index else header.parent
        return Record(
            spec.digest + header.hash_at(index),
            spec.digest + above if above else b"",
            spec.record_bytes,
            header.checksum_at(index),
            announced.stored_s,
            spec.columns,
        )

    def _count(self, group: Sequence[_Part], results: Sequence[Get]) -> None:
        pack = group[0].spot.announced.pack
        self.fetched += results.count(Get.HIT)
        self.fetched_bytes += results.count(Get.HIT) * pack.header.spec.record_bytes
        self.missing += results.count(Get.MISS)
        self.corrupt += results.count(Get.CORRUPT)
        self.failed += results.count(Get.FAILED)
        if Get.MISS in results or Get.CORRUPT in results:
            self._doubt(pack)

    def _doubt(self, pack: Pack) -> None:
        """It was not there, or not what was announced. The way may be to blame once; the second time it is forgotten."""
        if pack.id in self._doubted:
            log.warning("%s: %s: gone or damaged; forgotten", self.where, pack.name)
            del self._doubted[pack.id]
            self.catalogue.forget(pack.id)
            return
        self._doubted[pack.id] = None
        if len(self._doubted) > DOUBTED_PACKS_MAX:
            del self._doubted[next(iter(self._doubted))]

    async def probe(self) -> bool:
        """Whether the bucket answers."""
        try:
            await self._objects.head(MARKER)
        except ObjectError:
            return False
        return True

    # -- persisting --

    async def persist(
        self, header: PackHeader, records: Sequence[memoryview], stored_s: int, kept_until_s: int
    ) -> bool:
        """Put a pack, and have it announced soon: whether it was put. stored_s, kept_until_s: see `Announced`.

        It counts as held from now on, so that nobody here packs it again.
        """
        if self.erasure.forbids(header.spec, header.parent + header.hashes):
            return False
        try:
            pack = await put_pack(self._objects, header, records, self.codec)
        except (PackDamaged, ObjectError) as error:
            log.warning("a pack was not put: %s", error)
            return False
        self.catalogue.expect(pack)
        self._begin(self.announce(Announced(pack, stored_s, kept_until_s=kept_until_s)))
        return True

    async def renew(self, kept_until_s: Mapping[bytes, int]) -> None:
        """By key, until when the packs with these blocks are worth keeping: announced again where that is longer."""
        try:
            spots = self.catalogue.find(list(kept_until_s))
        except CatalogueDamaged as error:
            self._mend(error)
            return
        longer: dict[bytes, Announced] = {}
        for spot, until_s in zip(spots, kept_until_s.values(), strict=True):
            if spot is None or not 0 < spot.announced.kept_until_s < until_s:
                continue
            pack_id = spot.announced.pack.id
            if self._upkeep.may_renew(spot.announced):
                longer[pack_id] = msgspec.structs.replace(spot.announced, kept_until_s=until_s)
            else:
                self.catalogue.forget(pack_id)  # and is put again when it is asked for next
        await asyncio.gather(*map(self.announce, longer.values()))

    async def announce(self, announced: Announced) -> None:
        """Say that this pack, which is in the bucket, is durable. Returns when it is said, however long that takes."""
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unannounced.append((announced, said))
        if self._announcing is None or self._announcing.done():
            self._announcing = self._begin(self._announce())
        await said

    async def _announce(self) -> None:
        """All that waits, in order; what cannot be said now is said again before anything else."""
        while self._unannounced:
            waiting, self._unannounced = self._unannounced, []
            entries = [announced for announced, _ in waiting]
            while not await self._is_said(entries):
                await asyncio.sleep(ANNOUNCE_RETRY_S)
            for _, said in waiting:
                if not said.done():
                    said.set_result(None)
            await asyncio.sleep(announce_interval_s(self._tail.status().writers))

    async def _is_said(self, entries: Sequence[Announced]) -> bool:
        try:
            await self._writer.announce(entries)
        except ObjectError as error:
            log.warning("%d packs are not announced yet: %s", len(entries), error)
            return False
        try:
            self.catalogue.add_packs(entries)
        except CatalogueDamaged as error:
            self._mend(error)  # and is made anew from the feed, where they are
        return True

    # -- for people --

    def status(self) -> dict[str, object]:
        """The fields are documented in docs/cli.md."""
        counts, feed = self.catalogue.counts, self._tail.status()
        return {
            "name": self.region,
            "bucket": self.where,
            "packs": counts.packs,
            "blocks": counts.blocks,
            "bytes": counts.bytes,
            "fetched_records": self.fetched,
            "fetched_bytes": self.fetched_bytes,
            "missing_records": self.missing,
            "corrupt_records": self.corrupt,
            "failed_records": self.failed,
            "expired_packs": self._upkeep.forgotten,
            "erased_packs": self.erasure.erased,
            "tombstones": len(self.erasure.tombstones),
            "writers": feed.writers,
            "feed_age_s": feed.age_s,
            "feed_segments": feed.segments,
            "feed_packs": feed.entries,
            "feed_damaged": feed.damaged,
            "feed_gaps": len(feed.gaps),
            "feed_failures": feed.failures,
            "feed_failure": feed.failure,
            "snapshot": feed.snapshot,
            "catalogue_renewals": feed.renewals,
        }


def announce_interval_s(writers: int) -> float:
    """Between two announcements of one writer: everybody reads each of them."""
    return max(ANNOUNCE_INTERVAL_S, ANNOUNCE_INTERVAL_PER_WRITER_S * writers)


def _fits(spot: Spot, wanted: Wanted) -> bool:
    """Whether the record is as long as the place for it."""
    return len(wanted.into) == spot.announced.pack.header.spec.record_bytes
