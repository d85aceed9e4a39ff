"""One daemon's part in its region: what it finds and fetches there (`RegionReader`), and what it makes durable.

    persist ▶ put the pack ─▶ announce it ─▶ know it              what became ready meanwhile is announced together
    run ────▶ the tail of the feed, upkeep, erasure and audits, for ever; what is removed is announced by the keeper

Invariants: a pack is announced when it is in the bucket, and packs are announced in the order in which they were put, so
that a prefix is announced before what hangs on it, and with a life that is as long.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from replication.audit.audit import Audit
from replication.audit.auditing import Auditing, NodeHands
from replication.catalogue.catalogue import TURN_LOOKS, Catalogue
from replication.constants import CLOCK_SKEW_S, NODE_FORGOTTEN_S, PROBLEM_LASTS_S
from replication.deleting import REFUSED_MAX, delete_each, unchanged
from replication.erasure.erased import Erased
from replication.erasure.erasure import Erasure
from replication.errors import CatalogueDamaged
from replication.feed.feed import FeedWriter, fresh_writer
from replication.feed.tail import Tail, TailStatus
from replication.formats.announced import Announced, lasts_longer
from replication.formats.announced_models import AnnouncedModel
from replication.formats.doubts import DOUBTED_TOLD_MAX, put_doubts
from replication.formats.keeping import clock_of, measure
from replication.formats.nodes import silent_nodes
from replication.formats.region import Region, open_region, require_place
from replication.formats.removed import Reason, Removed, Said
from replication.formats.tombstones import Tombstone
from replication.keeper.keeper import Keeper
from replication.problems import Problem
from replication.region.region_reader import RegionReader
from replication.region.upkeep import Upkeep
from replication.store_clock import StoreClock
from replication.watched import Watched
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectMissing, ObjectUnavailable, PackDamaged
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import Pack, PackHeader
from tiers.together import together

ANNOUNCE_INTERVAL_S: Final = 1.0  # between two announcements of one writer, which everybody reads
ANNOUNCE_INTERVAL_PER_WRITER_S: Final = 0.1
ANNOUNCE_RETRY_S: Final = 5.0  # after one that failed
MUTE_S: Final = 60.0  # that nothing can be announced, of a place that works: who is mute keeps no region
MUTE_FIX: Final = (
    "may this process put objects below feed/ and heads/? What it puts is of use to nobody else meanwhile"
)
MIRROR_SILENT_S: Final = 40.0  # without a sign of a mirror, which beats every 15 s
DOUBTS_INTERVAL_S: Final = 30.0  # between two looks whether there are new ones to be told
KEEPER_LATE_S: Final = 120.0  # without a sign of a keeper; somebody else takes over within a minute
UP_TO_DATE_PAUSE_S: Final = 0.5  # between two looks whether a pass that was asked for is over
# Between two looks for what killed processes left half written in a directory.
SWEEP_STAGED_S: Final = 3600.0
SWEEP_HOLDS_PAUSE_S: Final = 10.0  # between two looks whether this process keeps the region

log = logging.getLogger("replication.region_node")


class RegionNode(RegionReader):
    """Made by `join`."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        catalogue: Catalogue,
        writer: FeedWriter,
        tail: Tail,
        erasure: Erasure,
        keeper: Keeper,
        skew_s: float,
        clock: Callable[[], float],
        chance: random.Random,
    ) -> None:
        super().__init__(objects, region, catalogue, tail, (erasure.known,), keeper.clock, keeper.problems)
        self.name = writer.id  # of this daemon, the same after each start
        self.codec = ""  # of packs that are put from now on, see tiers/packs/codecs.py
        self._writer = writer
        self.hands = NodeHands(self.announce, keeper)
        self._upkeep = Upkeep(objects, catalogue, tail, keeper, self.hands, skew_s, clock, chance)
        self.erasure = erasure
        erasure.remove = self.hands.announce
        tail.ours = lambda: writer.id if writer.number else ""
        self.keeper = keeper
        self.sources: Sequence[str] = ()  # regions that a mirror is to copy from into this one
        self.auditing: Auditing | None = None
        self._unannounced: list[tuple[Said, asyncio.Future[None]]] = []
        self._announcing: asyncio.Task[None] | None = None
        self._mute_s = float("inf")  # since when nothing could be announced

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
        erased: Callable[[Sequence[Tombstone]], None] = lambda tombstones: None,
        tombstones: Erased | None = None,
        is_mirror: bool = False,
    ) -> RegionNode:
        """instance: names this daemon, the same after each start. clock: this machine's, unix seconds. skew_s: by which it may differ from the store's.
        erased: called with tombstones that become known. tombstones: where others look them up, too. is_mirror: it copies from other
        regions, and keeps its own before daemons do.

        Raises RegionError (not this region), CatalogueBusy, CatalogueDamaged, ObjectError.
        """
        marker = await open_region(objects, deployment, region)
        now = await clock_of(
            objects, StoreClock(clock, skew_s)
        )  # where it cannot be had, it is asked for again
        keeper = Keeper(objects, marker, chance, is_mirror, now)
        writer = FeedWriter(objects, fresh_writer(chance), now, chance, lambda: keeper.needs_bell)
        catalogue = Catalogue.open(catalogue_path, marker.identity)
        catalogue.clock = now
        tail = Tail(objects, catalogue, now, chance, keeper=keeper)
        erasure = Erasure(objects, catalogue, now, erased, tombstones, lambda: keeper.holds, keeper)
        node = cls(objects, marker, catalogue, writer, tail, erasure, keeper, skew_s, now, chance)
        node.name = xxhash.xxh3_64_hexdigest(instance.encode())
        audit = Audit(objects, marker, catalogue, erasure, node.hands, now)
        node.auditing = Auditing(objects, audit, tail, keeper, skew_s, now, chance)
        return node

    @property
    def objects(self) -> Objects:
        """The bucket."""
        return self._objects

    @property
    def writer(self) -> str:
        """The id under which it writes now: another one in each life."""
        return self._writer.id

    async def stop(self) -> None:
        await self.keeper.resign()
        await super().stop()

    def mend(self, error: CatalogueDamaged) -> None:
        """Somebody found the catalogue damaged."""
        self._mend(error)

    async def up_to_date(self) -> None:
        """Returns when all is known that is announced now."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        while (age_s := self._tail.age_s) is None or loop.time() - age_s < begun_s:
            self._tail.wake()
            await asyncio.sleep(UP_TO_DATE_PAUSE_S)

    def work(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Follow the feed; and, for as long as this process keeps the region, remove what is over, erased or half written, and audit
        the bucket."""
        work = {
            "keeping": self.keeper.run,
            "following the feed": self._tail.run,
            "upkeep": self._keep_up,
            "erasing": self.erasure.run,
            "sweeping": self._sweep,
            "telling doubts": self._tell_doubts,
        }
        return {**work, "auditing": self.auditing.run} if self.auditing is not None else work

    async def _keep_up(self) -> None:
        """At once when all of the feed was read: it tells of packs whose life was over before this daemon began."""
        await self.caught_up.wait()
        await self._upkeep.run()

    async def _tell_doubts(self) -> None:
        """To the keeper, where there are new ones. Those of packs that were removed meanwhile are over."""
        told: set[bytes] = set()
        while True:
            await asyncio.sleep(DOUBTS_INTERVAL_S)
            ids = self.doubts.told
            try:
                known = await self.catalogue.packs_all(list(ids))
                removed = [one for one, pack in zip(ids, known, strict=True) if pack is None]
                told &= ids
                some = sorted(ids.difference(removed), key=told.__contains__)[:DOUBTED_TOLD_MAX]
                if not told.issuperset(some):
                    await put_doubts(self._objects, self.name, some)
                    told.update(some)
            except CatalogueDamaged as error:
                self._mend(error)
            except ObjectError as error:
                log.debug("%s: doubts are told later: %s", self.where, error)
            else:
                for one in removed:
                    self.doubts.over(one)

    async def _sweep(self) -> None:
        """Now and then, as whoever was killed in the middle of a put, or comes back no more, has nobody else to clear up."""
        while True:
            while not self.keeper.holds:
                await asyncio.sleep(SWEEP_HOLDS_PAUSE_S)
            try:
                count = await self._objects.sweep()
                silent = await silent_nodes(self._objects, self.clock() - NODE_FORGOTTEN_S)
                for at in range(0, len(silent), REFUSED_MAX):
                    await self.keeper.delete(await unchanged(self._objects, silent[at : at + REFUSED_MAX]))
            except ObjectError as error:
                log.debug("%s: what others left is looked for later: %s", self.where, error)
            else:
                if count:
                    log.info("%s: %d half-written objects of killed processes are removed", self.where, count)
            await asyncio.sleep(SWEEP_STAGED_S)

    def known(self, pack_ids: Sequence[bytes]) -> list[Announced | None]:
        """What is known of these packs; None of those that are not there, or may be deleted any moment."""
        try:
            found = self.catalogue.packs(pack_ids)
        except CatalogueDamaged as error:
            self._mend(error)
            return [None] * len(pack_ids)
        return [pack if pack is not None and self._upkeep.may_renew(pack) else None for pack in found]

    # -- persisting --

    async def persist(
        self,
        header: PackHeader,
        records: Sequence[memoryview],
        stored_s: int,
        kept_until_s: int,
        prefix: bytes = b"",
    ) -> bool:
        """Put a pack, and have it announced soon: whether it was put, which nothing is that is erased. stored_s, kept_until_s: see
        `Announced`. prefix: the hashes of all blocks before it.

        It counts as held from now on, so that nobody here packs it again.
        """
        blocks = (prefix or header.parent) + header.hashes
        if self.erasure.forbids(header.spec, blocks):
            return False
        try:
            pack = await put_pack(self._objects, header, records, self.codec)
        except PackDamaged as error:
            self.problems.note("packing", str(error), "bug", "please report it", lasts_s=PROBLEM_LASTS_S)
            return False
        except ObjectError as error:
            log.debug("a pack was not put: %s", error)  # the bucket is watched: replication/watched.py
            return False
        if self.erasure.forbids(header.spec, blocks):  # since it was begun
            with suppress(ObjectUnavailable):  # or the keeper finds it
                await delete_each(self._objects.delete, [pack.name])
            return False
        self.catalogue.expect(pack)
        self.doubts.over(pack.id)
        self._tasks.begin("announcing", self.announce(Announced(pack, stored_s, kept_until_s=kept_until_s)))
        return True

    async def renew(self, kept_until_s: Mapping[bytes, int]) -> None:
        """By key, until when the packs with these blocks are worth keeping: announced again where that is longer."""
        try:
            spots = await self.catalogue.find_all(list(kept_until_s))
        except CatalogueDamaged as error:
            self._mend(error)
            return
        longer: dict[bytes, Announced] = {}
        for spot, until_s in zip(spots, kept_until_s.values(), strict=True):
            if spot is None or not 0 < spot.announced.kept_until_s < until_s:
                continue
            pack_id = spot.announced.pack.id
            if self._upkeep.may_renew(
                spot.announced
            ):  # else it is removed, and put again when it is asked for
                longer[pack_id] = msgspec.structs.replace(spot.announced, kept_until_s=until_s)
        await together(map(self.announce, longer.values()))

    async def announce(self, announced: Said) -> None:
        """Say that this pack, or this model with all of its chunks, which is in the bucket, is durable; or that it is removed, which
        whoever keeps the region says. Returns when it is said, however long that takes. Raises ValueError where nobody would believe it."""
        if isinstance(announced, Announced) and not (
            0 <= announced.stored_s < 1 << 32 and 0 <= announced.kept_until_s < 1 << 40
        ):
            raise ValueError(
                f"{announced.pack.name}: stored {announced.stored_s}, kept until {announced.kept_until_s}"
            )
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unannounced.append((announced, said))
        if self._announcing is None or self._announcing.done():
            self._announcing = self._tasks.begin("announcing", self._announce())
        await said

    async def _announce(self) -> None:
        """All that waits, in order; what cannot be said now is said again before anything else."""
        while self._unannounced:
            waiting, self._unannounced = self._unannounced, []
            said_now = [announced for announced, _ in waiting]
            try:
                while not await self._is_said(said_now):
                    await asyncio.sleep(ANNOUNCE_RETRY_S)
            except BaseException as error:
                _fail(waiting, error)  # else whoever waits would wait for ever
                raise
            for _, said in waiting:
                if not said.done():
                    said.set_result(None)
            await asyncio.sleep(announce_interval_s(self._tail.status().writers))

    async def _is_said(self, said: Sequence[Said]) -> bool:
        packs = [one for one in said if isinstance(one, Announced)]
        models = [one for one in said if isinstance(one, AnnouncedModel)]
        removed = [one for one in said if isinstance(one, Removed)]
        try:
            if not self.clock.is_known:  # what goes into the bucket has its times
                await measure(self._objects, self.clock)
            packs = await self._there(packs)
            if not (packs or models or removed):
                return True
            entries = [*await self._paths(packs), *packs]
            ids = [entry.pack.id for entry in entries] + [model.name_id for model in models]
            after_s = self.catalogue.void_until_s(ids)
            segments = await self._writer.announce(entries, models, removed, after_s)
        except CatalogueDamaged as error:
            self._mend(error)
            return False
        except ObjectError as error:
            log.debug("%d packs and models are not announced yet: %s", len(said), error)
            await self._note_mute(error)
            return False
        self._mute_s = float("inf")
        self.problems.over("announcing")
        try:
            for segment in segments:
                await self.catalogue.take_in(segment, is_own=True)
        except CatalogueDamaged as error:
            self._mend(error)  # and is made anew from the feed, where they are
        return True

    async def _note_mute(self, error: ObjectError) -> None:
        """A keeper whose removals nobody hears of is none."""
        now_s = asyncio.get_running_loop().time()
        self._mute_s = min(self._mute_s, now_s)
        if now_s < self._mute_s + MUTE_S or (isinstance(self._objects, Watched) and self._objects.is_failing):
            return
        self.problems.note("announcing", str(error).removeprefix(f"{self.where}: "), fix=MUTE_FIX)
        await self.keeper.stand_back()

    async def _there(self, packs: Sequence[Announced]) -> list[Announced]:
        """Without those that were removed while they waited to be announced. Raises CatalogueDamaged, ObjectError."""
        found = []
        for pack in packs:
            try:
                if self.catalogue.void_until_s([pack.pack.id]):
                    await self._objects.head(pack.pack.name)
            except ObjectMissing:
                await require_place(self._objects)
            else:
                found.append(pack)
        return found

    async def _paths(self, packs: Sequence[Announced]) -> list[Announced]:
        """What these hang on, with longer lives where they need it: nothing outlives what is before it, whoever asks for what.
        Raises CatalogueDamaged."""
        longer: dict[bytes, Announced] = {}
        for pack in packs:
            child, header = pack, pack.pack.header
            while header.parent:
                [spot] = self.catalogue.find([header.spec.digest + header.parent])
                if spot is None:
                    break
                parent = longer.get(spot.announced.pack.id, spot.announced)
                if not lasts_longer(child, parent) or not self._upkeep.may_renew(parent):
                    break  # one that may be deleted any moment is put again when it is asked for next
                child = msgspec.structs.replace(parent, kept_until_s=child.kept_until_s)
                longer[child.pack.id], header = child, child.pack.header
                if len(longer) % TURN_LOOKS == 0:
                    await asyncio.sleep(0)
        return list(longer.values())[::-1]

    def _readable(self, pack: Pack) -> int:
        header = pack.header
        return 0 if self.erasure.forbids(header.spec, header.parent) else super()._readable(pack)

    # -- for people --

    def _states(self, feed: TailStatus) -> Iterator[Problem]:
        yield from super()._states(feed)
        silent_s = self.keeper.silent_s
        if silent_s > KEEPER_LATE_S and not feed.failures:
            text = f"nobody has kept it for {silent_s:.0f} s: nothing is deleted, audited or made short"
            fix = "a daemon or mirror of the region takes it over that may write keeper/ there: look at their problems"
            yield Problem("keeper", self.region, text, fix, "warning")
        silent_s = self.keeper.news.mirror_silent_s
        if self.sources and silent_s > MIRROR_SILENT_S:
            text = f"no mirror has been heard of for {silent_s:.0f} s: nothing of {', '.join(self.sources)} is copied into it"
            fix = "does kvstore mirror run (systemctl status kvstore-mirror), with a right clock? kvstore region status says how far it came"
            yield Problem("mirror", self.region, text, fix)

    def status(self) -> dict[str, object]:
        """The fields are documented in docs/cli.md."""
        return {
            **super().status(),
            "expired_packs": self.catalogue.removed_by[Reason.OVER],
            "erased_packs": self.catalogue.removed_by[Reason.ERASED],
            "tombstones": len(self.erasure.tombstones),
            **self.keeper.status(),
            **(self.auditing.status() if self.auditing is not None else {}),
        }


def _fail(waiting: Sequence[tuple[Said, asyncio.Future[None]]], error: BaseException) -> None:
    for _, said in waiting:
        if not said.done():
            if isinstance(error, Exception):
                said.set_exception(error)
            else:
                said.cancel()


def announce_interval_s(writers: int) -> float:
    """Between two announcements of one writer: everybody reads each of them."""
    return max(ANNOUNCE_INTERVAL_S, ANNOUNCE_INTERVAL_PER_WRITER_S * writers)
