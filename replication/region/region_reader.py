"""A region as it is read: its catalogue says what it holds, and records come from its bucket.

    held ───▶ catalogue's filter                                  any thread, memory only
    fetch ──▶ catalogue ─▶ which packs ─▶ ranges of each, once    all that was asked for in one turn of the loop together

    RegionReader ◀── RegionNode     our own region: packs are put there, too
                 ◀── ReadThrough    another one: nothing of it is ever changed

Everything but `held` is called on one event loop, and nothing else happens there.

Invariants: a record that is a HIT has the checksum that was announced for its key. A pack that is gone
or wrong is doubted by this reader for a while (doubts.py), if the place proves to be the place; no catalogue forgets it because of
that. What is known to be erased is neither held nor a HIT.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

from replication.catalogue.catalogue import Catalogue, Spot
from replication.constants import MIB, PROBLEM_LASTS_S, PROBLEMS_TOLD
from replication.erasure.erased import Erased
from replication.errors import CatalogueDamaged, ReplicationError
from replication.feed.tail import Tail, TailStatus
from replication.formats.region import MARKER, Region, open_region
from replication.problems import Problem, Problems
from replication.region.doubts import Doubts, Holes
from replication.store_clock import StoreClock
from replication.tasks import Tasks, kept_going
from replication.watched import Watched
from tiers.base import Get, Record
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import fetch_records
from tiers.packs.packs import Pack
from tiers.together import together

FETCH_RANGE_BYTES: Final = 8 * MIB  # of a pack, read with one request
CHAIN_HASHES_MAX: Final = 1 << 20  # of a prefix that somebody names: no prompt has more blocks
HELD_TURN_BLOCKS: Final = 2048  # in one piece: about 2 ms where something is erased or in doubt
FEED_LATE_S: Final = 60.0  # since all of it was read
GAP_FIX: Final = "kvstore region verify says what is there, and whether more is damaged; an audit goes on behind it within hours"
UNKNOWN: Final = "is of a later version, or sealed with a key that is not known here"
UNKNOWN_FIX: Final = "update this node, or give it the keys that others have"
CLOCK_FIX: Final = "set this machine's clock: chrony or systemd-timesyncd"
FEED_FIX: Final = (
    "see what is wrong with its bucket; what others have made durable since then is computed again meanwhile"
)

log = logging.getLogger("replication.region_reader")

Answer = tuple[Get, Record | None]
_BAD = frozenset({Get.MISS, Get.CORRUPT, Get.REFUSED})


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


class RegionReader(ABC):
    """What reads of a region; who extends it says what else goes on there."""

    def __init__(
        self,
        objects: Objects,
        region: Region,
        catalogue: Catalogue,
        tail: Tail,
        erased: Sequence[Erased],
        clock: StoreClock,
        problems: Problems | None = None,
    ) -> None:
        """erased: what may not be read, whoever says so. clock: of its store. problems: where those with this region are noted."""
        self.where = objects.where
        self.region = region.region
        self.catalogue = catalogue
        self._objects = objects
        self._tail = tail
        self._erased = erased
        self.clock = clock
        self.problems = Problems(objects.where) if problems is None else problems
        tail.problems = self.problems
        self._seen = Problems()  # of the feed, as it is when somebody looks
        self._asked: list[_Asked] = []
        self._tasks = Tasks(self.problems)
        if isinstance(objects, Watched):
            objects.when_it_works_again = tail.wake
        self._identity = region
        self.doubts = Doubts(asyncio.get_running_loop().time)
        self._holes = Holes(catalogue.may_have)
        self.fetched = self.missing = self.corrupt = self.failed = 0  # records
        self.fetched_bytes = 0

    @abstractmethod
    def work(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What goes on for ever, by what it is called."""

    async def run(self) -> None:
        """Follow the feed, and what else is to be done, until cancelled. What fails of it is begun again, and costs the rest
        nothing."""
        await together(kept_going(name, work, self.problems) for name, work in self.work().items())

    async def stop(self) -> None:
        """End what was begun for fetches and announcements, and wait for it; before `close`."""
        await self._tasks.close()
        for asked in self._asked:
            asked.done.cancel()

    def close(self) -> None:
        self.catalogue.close()

    @property
    def caught_up(self) -> asyncio.Event:
        """All of the feed was read, once."""
        return self._tail.caught_up

    def held_steps(self, spec: NamespaceSpec, hashes: bytes, start: int) -> Generator[None, None, int]:
        """The end of the durable prefix behind the first `start` blocks; see `Catalogue.held`. In pieces of two milliseconds at most."""
        end = self.catalogue.held(spec.digest, spec.hash_bytes, hashes, start)
        for at in range(0, end if end > start else 0, HELD_TURN_BLOCKS):
            if at:
                yield
            upto = found = min(end, at + HELD_TURN_BLOCKS)
            for erased in self._erased:
                found = erased.end(spec, hashes, at, found)
            if found > start:
                behind = max(at, start)
                found = self._holes.end(spec, hashes, behind, self.doubts.end(spec, hashes, behind, found))
            if found < upto:
                return max(start, found)
        return end

    async def chains(
        self, namespaces: Sequence[bytes], block_hash: bytes, most: int
    ) -> dict[bytes, Sequence[bytes]]:
        """By namespace, the hashes of the prefix that ends with this block, the first one first, where all of it is known;
        of so many namespaces at most."""
        found: dict[bytes, Sequence[bytes]] = {}
        for namespace in namespaces:
            if self.catalogue.may_have(namespace + block_hash):
                hashes = await self._chain(namespace, block_hash)
                if hashes:
                    found[namespace] = hashes
                if len(found) == most:
                    break
        return found

    async def _chain(self, namespace: bytes, block_hash: bytes) -> list[bytes]:
        found: list[bytes] = []
        above = block_hash
        try:
            while above and len(found) < CHAIN_HASHES_MAX:
                [spot] = self.catalogue.find([namespace + above])
                if spot is None:
                    return []
                header = spot.announced.pack.header
                found += [header.hash_at(index) for index in range(spot.index, -1, -1)]
                above = header.parent
                await asyncio.sleep(0)
        except CatalogueDamaged as error:
            self._mend(error)
            return []
        return found[::-1] if not above else []

    # -- fetching --

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Answer]:
        """Records into their views: one answer each, as `tiers.base.Get` says. Never raises for a record."""
        asked = _Asked(wanted, [(Get.MISS, None)] * len(wanted), asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        if len(self._asked) == 1:
            self._tasks.begin("fetching", self._fetch_asked())
        await asked.done
        return asked.answers

    async def _fetch_asked(self) -> None:
        """All that is asked for now: others of the same turn of the loop are let in first."""
        await asyncio.sleep(0)
        calls, self._asked = self._asked, []
        try:
            groups = await self._planned(calls)
        except CatalogueDamaged as error:
            self._mend(error)
            groups = []
        except BaseException:
            for call in calls:
                call.done.cancel()
            raise
        left = {id(call): 0 for call in calls}
        for group in groups:
            for part in group:
                left[id(part.asked)] += 1
        for call in calls:
            if not left[id(call)]:
                call.done.set_result(None)
        for group in groups:
            self._tasks.begin("fetching", self._fetch_group(group, left))

    def _mend(self, error: CatalogueDamaged) -> None:
        self._tail.mend(error)

    async def _planned(self, calls: Sequence[_Asked]) -> list[list[_Part]]:
        """What is read with one request each: neighbours in a pack, up to FETCH_RANGE_BYTES."""
        packs: dict[bytes, list[_Part]] = {}
        for call in calls:
            spots = await self.catalogue.find_all([one.key for one in call.wanted], self.doubts.ids)
            for position, spot in enumerate(spots):
                if spot is not None and _fits(spot, call.wanted[position]):
                    packs.setdefault(spot.announced.pack.id, []).append(_Part(call, position, spot))
                else:
                    self.missing += 1
                    if spot is None:
                        self._holes.add(call.wanted[position].key)
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
            if not _BAD.isdisjoint(results):
                results = await self._judged(results)
        except BaseException:
            results = [Get.FAILED] * len(group)
            raise
        finally:
            readable = self._readable(pack)
            for part, result in zip(group, results, strict=True):
                if result is Get.HIT and part.spot.index < readable:
                    part.asked.answers[part.position] = result, self._record(part)
                elif result is not Get.HIT:
                    answer = Get.MISS if result is Get.UNKNOWN else result
                    part.asked.answers[part.position] = answer, None
                left[id(part.asked)] -= 1
                if not left[id(part.asked)] and not part.asked.done.done():
                    part.asked.done.set_result(None)
        await self._count(group, results)

    async def _judged(self, results: Sequence[Get]) -> list[Get]:
        """What is gone, wrong or refused is a failure of that object where the place proves behind it to be the place; else the place
        fails: it is away, or another one."""
        if not await self._is_the_place():
            return [Get.FAILED if result in _BAD else result for result in results]
        return [Get.MISS if result is Get.REFUSED else result for result in results]

    async def _is_the_place(self) -> bool:
        try:
            found = await open_region(self._objects, self._identity.deployment, self.region)
        except (ObjectError, ReplicationError):
            return False
        return found.identity == self._identity.identity

    def _readable(self, pack: Pack) -> int:
        """How many records of a pack are not erased by now: a tombstone may have become known while they came."""
        header = pack.header
        above = 1 if header.parent else 0
        end = above + header.count
        for erased in self._erased:
            end = erased.end(header.spec, header.parent + header.hashes, 0, end)
        return end - above

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
            self.clock.ours(announced.stored_s),
            spec.columns,
        )

    async def _count(self, group: Sequence[_Part], results: Sequence[Get]) -> None:
        pack = group[0].spot.announced.pack
        self.fetched += results.count(Get.HIT)
        self.fetched_bytes += results.count(Get.HIT) * pack.header.spec.record_bytes
        self.missing += results.count(Get.MISS) + results.count(Get.UNKNOWN)
        self.corrupt += results.count(Get.CORRUPT)
        self.failed += results.count(Get.FAILED)
        if Get.MISS in results or Get.CORRUPT in results:
            await self._doubt(pack, "came back with other bytes" if Get.CORRUPT in results else "is gone")
        elif Get.UNKNOWN in results:
            await self._doubt(pack, UNKNOWN, is_ours=True)
        elif Get.FAILED not in results and self.doubts.over(pack.id) and not len(self.doubts):
            self.problems.over("packs", "lost")
            self.problems.over("packs", "unknown")

    async def _doubt(self, pack: Pack, what: str, is_ours: bool = False) -> None:
        """It was not there, not handed out, or not what was announced. Blocks that another pack has are not doubted with it. what: the
        matter with it. is_ours: others may read it."""
        header = pack.header
        but = self.doubts.ids | {pack.id}
        try:
            keys = [header.spec.digest + block for block in header.each_hash()]
            spots = await self.catalogue.find_all(keys, but)
        except CatalogueDamaged as error:
            self._mend(error)
            return
        lacking = [block for block, spot in zip(header.each_hash(), spots, strict=True) if spot is None]
        if self.doubts.add(pack, lacking, is_ours):
            self.problems.note(
                "packs", f"{pack.name} {what}: what it holds is a miss, and asked for again later",
                "unknown" if is_ours else "lost",
                UNKNOWN_FIX if is_ours else f"kvstore region verify {self.region} --deep says what else is", "warning", PROBLEM_LASTS_S,
            )  # fmt: skip

    async def probe(self) -> bool:
        """Whether the bucket answers."""
        try:
            await self._objects.head(MARKER)
        except ObjectError:
            return False
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
            "writers": feed.writers,
            "feed_age_s": feed.age_s,
            "feed_segments": feed.segments,
            "feed_packs": feed.entries,
            "feed_damaged": feed.damaged,
            "feed_gaps": len(feed.gaps),
            "feed_failures": feed.failures,
            "feed_failure": feed.failure,
            "feed_unsound": feed.unsound,
            "snapshot": feed.snapshot,
            "catalogue_renewals": feed.renewals,
            "untrusted_objects": self._objects.untrusted,
            "clock_off_s": round(self.clock.off_s, 1) if self.clock.is_known else None,
        }

    def wrong(self) -> list[Problem]:
        """What is wrong now, and takes nothing else with it."""
        self._seen.only(self._states(self._tail.status()))
        found = (self._seen, self.problems, *dict.fromkeys(erased.problems for erased in self._erased))
        return [problem for problems in found for problem in problems.all()]

    def _states(self, feed: TailStatus) -> Iterator[Problem]:
        """What is not as it should be, whenever somebody looks."""
        for gap, reason in zip(feed.gaps[:PROBLEMS_TOLD], feed.gap_reasons, strict=False):
            writer = f"feed/{gap.writer}"
            text = reason.removeprefix(f"{writer}: ")
            yield Problem("gap", f"{self.where}: {writer}", text, GAP_FIX, "warning")
        if feed.unsound:
            text = f"{feed.unsound} entries cannot be true, and are left out: {feed.unsound_reason}"
            fix = "nothing: an audit finds their packs; look which node runs another version"
            yield Problem("unsound", self.region, text, fix, "warning", count=feed.unsound)
        if self.clock.is_off:
            way = "ahead of" if self.clock.off_s > 0 else "behind"
            text = f"this machine's clock is {abs(self.clock.off_s):.0f} s {way} the store's: nothing is deleted from here"
            yield Problem("clock", self.region, text, CLOCK_FIX)
        if feed.age_s is not None and feed.age_s > FEED_LATE_S:
            why = f": {feed.failure}" if feed.failures else ""
            text = f"its feed was read {feed.age_s:.0f} s ago{why}"
            yield Problem("feed", self.region, text, FEED_FIX, "warning", count=max(1, feed.failures))


def _fits(spot: Spot, wanted: Wanted) -> bool:
    """Whether the record is as long as the place for it."""
    return len(wanted.into) == spot.announced.pack.header.spec.record_bytes
