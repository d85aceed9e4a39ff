"""Mirrors: what is copied, in which order, at which rate, what becomes of what cannot be copied, and what is told of it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from replication import constants as limits
from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueDamaged
from replication.feed.snapshots import Snapshots
from replication.feed.tail import POLL_INTERVAL_S
from replication.formats.mirror_state import (
    IN_TIME_S,
    MIRROR_STATE_FORMAT,
    MIRRORS,
    MirrorState,
    judged,
    read_mirrors,
    read_state,
)
from replication.formats.rules import Rule, choice_of, sources_for
from replication.formats.segment import FEED
from replication.formats.tombstones import TOMBSTONES, Tombstone, bury
from replication.mirror.copying import COPY_BACKOFF_S_MAX, DAMAGED_BACKOFF_S_MAX, LOST_AFTER_S
from replication.mirror.mirror import HEARTBEAT_S, MIRROR_JOIN_PAUSE_S, STATE_INTERVAL_S, STATE_READS_MAX
from replication.mirror.pull import SWEEP_INTERVAL_S
from tests.objects import Faults, MemoryObjects, flip
from tests.replication.memory_rows import MemoryRows
from tests.replication.mirrored import (
    ALL,
    SKEW_S,
    SOON_S,
    STARTED_S,
    World,
    in_memory,
    pack,
    pulled,
    simulate,
)
from tiers.bucket.objects import Bytes
from tiers.errors import ObjectRefused, ObjectUnavailable
from tiers.packs.packs import PACKS

catalogues_in_memory = in_memory  # a fixture of every test here, too


def test_what_a_region_makes_is_soon_in_the_other_one() -> None:
    """Packs that were there before and packs that are announced later are copied byte by byte, announced with their origin
    and when they were stored, once; the source is not written to; the state says all of it."""

    async def main(world: World) -> None:
        old, new = pack("old"), pack("new")
        await world.na.make(old)
        await world.mirror()
        await asyncio.sleep(SOON_S)
        assert world.eu.has(old)
        await world.na.make(new)
        await asyncio.sleep(SOON_S)
        assert world.eu.has(old, new)
        assert [(entry.pack, entry.origin) for entry in world.eu.announced()] == [
            (old[0].pack, "na"),
            (new[0].pack, "na"),
        ]
        await asyncio.sleep(2 * SWEEP_INTERVAL_S)
        assert len(world.eu.copies()) == 2
        assert not world.na.way.requests["put"] and not world.na.way.requests["delete"]
        [state] = await read_mirrors(world.eu.objects)
        assert (state.source, state.problem, state.watermark) == ("na", "", {"a" * 16: 2})
        assert (state.pending, state.failed, state.lost, state.is_sweeping) == (0, 0, 0, False)
        assert (state.copied_packs, state.copied_bytes) == (
            2,
            old[0].pack.size_bytes + new[0].pack.size_bytes,
        )
        assert state.oldest_age_s is not None and state.oldest_age_s < 2 * POLL_INTERVAL_S
        assert state.lag_max_s is not None and state.lag_max_s < SOON_S and state.in_time_share == 1.0
        assert world.clock() - state.at_s <= HEARTBEAT_S + STATE_INTERVAL_S

    simulate(main)


def test_copies_are_not_copied() -> None:
    """What a source has from somewhere else stays there, whether it is heard of or found by a sweep; what it made itself is
    copied even if somebody else made it, too."""

    async def main(world: World) -> None:
        copy, both = pack("copy"), pack("both")
        await world.na.objects.put(copy[0].pack.name, copy[1])
        for origin, one in (("apac", copy), ("apac", both), ("", both)):
            await world.na.objects.put(one[0].pack.name, one[1])
            await world.na.writer.announce([msgspec.structs.replace(one[0], origin=origin)])
        await world.mirror()
        await asyncio.sleep(SOON_S)
        assert world.eu.copies() == [both[0].pack.id]
        await world.na.writer.announce([msgspec.structs.replace(pack("copy 2")[0], origin="apac")])
        await asyncio.sleep(SOON_S)
        assert world.eu.copies() == [both[0].pack.id]
        [state] = await read_mirrors(world.eu.objects)
        assert state.watermark == {"a" * 16: 4}

    simulate(main)


def test_rules_decide() -> None:
    """Only what a rule lets through is copied, from the regions it names; the watermark passes the rest."""

    async def main(world: World) -> None:
        secret, good, other = pack("1", tenant="secret"), pack("2", tenant="x"), pack("3", model="other")
        await world.na.make(secret, good, other)
        await world.apac.make(pack("4"))
        rules = Rule(tenants=("sec*",), copies=False), Rule(sources=("na",), models=("m",))
        assert sources_for(rules, "eu", world.buckets) == ["na"]
        mirrors = await world.mirror(*rules, sources=("na", "apac"))
        await asyncio.sleep(SOON_S)
        assert world.eu.copies() == [good[0].pack.id]
        assert [mirror.state().watermark for mirror in mirrors] == [{"a" * 16: 1}] * 2

    simulate(main)


def test_sources_are_those_that_a_rule_names() -> None:
    """A rule without names is for all regions but the own one; one that skips makes nobody a source."""
    regions = ("na", "eu", "apac")
    assert sources_for([Rule()], "eu", regions) == ["na", "apac"]
    assert sources_for([Rule(to=("apac",))], "eu", regions) == []
    assert sources_for([Rule(sources=("na", "eu"), to=("eu",))], "eu", regions) == ["na"]
    assert sources_for([Rule(copies=False)], "eu", regions) == []


def test_higher_priorities_go_first_and_then_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what waits, the higher priority goes first, also where it was found by a sweep; within one, the older."""
    monkeypatch.setattr("replication.mirror.copying.COPIES_MAX", 1)
    monkeypatch.setattr("replication.catalogue.catalogue.CATALOGUE_CHUNK_PACKS", 2)

    async def main(world: World) -> None:
        low, high = [pack(n, "low") for n in range(6)], [pack(n, "high") for n in range(6)]
        for one, other in zip(low, high, strict=True):
            await world.na.make(one, other)
        world.eu.way.faults.delay_s = 2.0  # all is heard of before the first copy ends
        await world.mirror(Rule(models=("low",)), Rule(models=("high",), priority=3))
        await asyncio.sleep(120)
        got = [entry.pack.id for entry in world.eu.announced()]
        assert got[:6] == [one[0].pack.id for one in high] and got[6:] == [one[0].pack.id for one in low]

    simulate(main)


def test_a_rule_has_one_rate_for_all_sources() -> None:
    """A rule with a rate copies so many bytes a second from all sources together; others do not wait for it."""

    async def main(world: World) -> None:
        slow = [pack(("slow", n), "slow") for n in range(40)]
        await world.na.make(*slow[:20])
        await world.apac.make(*slow[20:], fast := pack("fast", "fast"))
        size_bytes = slow[0][0].pack.size_bytes
        await world.mirror(
            Rule(models=("slow",), bytes_per_s=size_bytes, priority=1), ALL, sources=("na", "apac")
        )
        await asyncio.sleep(SOON_S)
        assert world.eu.has(fast)
        assert sum(map(world.eu.has, slow)) <= SOON_S + 1
        await asyncio.sleep(40)
        assert world.eu.has(*slow)

    simulate(main)


def test_memory_for_copies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs under way together stay below the limit; one that is larger goes alone."""
    small, large = pack("small", record_bytes=1024), pack("large", record_bytes=8192)
    limit_bytes = 3 * small[0].pack.size_bytes
    monkeypatch.setattr("replication.mirror.copying.COPY_BYTES_MAX", limit_bytes)
    held = most = 0

    async def main(world: World) -> None:
        class Counting(MemoryObjects):
            async def get(self, name: str) -> memoryview:
                nonlocal held, most
                size_bytes = len(self.stored.get(name, b"")) if name.startswith(PACKS) else 0
                held += size_bytes
                most = max(most, held)
                await asyncio.sleep(1.0)
                held -= size_bytes
                return await super().get(name)

        counting = Counting("na", world.clock)
        counting.__dict__.update(world.na.objects.__dict__)
        world.na.way.inner = counting
        await world.na.make(large, *(pack(n, record_bytes=1024) for n in range(20)))
        await world.mirror()
        await asyncio.sleep(60)
        assert len(world.eu.copies()) == 21

    simulate(main)
    assert most == large[0].pack.size_bytes > limit_bytes


def test_gets_and_puts_go_on_together() -> None:
    """With links that all transfers of a side share, a mirror takes little longer than one side alone."""
    packs, pieces = 64, 16

    class Link:
        """Passes a pack in a second, if it is the only one."""

        free_s = 0.0

        async def carry(self) -> None:
            for _ in range(pieces):
                now_s = asyncio.get_running_loop().time()
                self.free_s = max(now_s, self.free_s) + 1 / pieces
                await asyncio.sleep(self.free_s - now_s)

    class Linked(MemoryObjects):
        link = Link()

        async def get(self, name: str) -> memoryview:
            if name.startswith(PACKS):
                await self.link.carry()
            return await super().get(name)

        async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
            if name.startswith(PACKS):
                await self.link.carry()
            return await super().put(name, content, only_new)

    async def main(world: World) -> None:
        await world.na.make(*(pack(n) for n in range(packs)))
        for name, region in (("na", world.na), ("eu", world.eu)):
            linked = Linked(name, world.clock)
            linked.__dict__.update(region.objects.__dict__)
            linked.link = Link()
            region.way.inner = linked
        await world.mirror()
        await asyncio.sleep(SOON_S / 4 + 1.15 * packs)
        assert len(world.eu.copies()) == packs

    simulate(main)


@pytest.mark.parametrize("damage", ["flipped", "cut", "other", "header"])
def test_a_damaged_pack_is_never_at_home(damage: str) -> None:
    """A pack of which a byte is wrong in the source, that is cut off or another one is not put at home, is told with the
    reason, holds the watermark, does not delay others, is tried less and less often, and copied when it is right again."""

    async def main(world: World) -> None:
        bad, good = pack("bad"), pack("good")
        contents = {
            "flipped": flip(bad[1], 8 * len(bad[1]) - 1),
            "cut": bad[1][:-1],
            "other": pack("another")[1],
            "header": flip(bad[1], 8 * 40),
        }
        await world.na.make((bad[0], contents[damage]))
        await world.na.make(good)
        [mirror] = await world.mirror()
        await asyncio.sleep(6 * 3600)
        assert world.eu.has(good) and bad[0].pack.name not in world.eu.objects.stored
        assert world.eu.copies() == [good[0].pack.id]
        [state] = await read_mirrors(world.eu.objects)
        assert (state.watermark, state.pending, state.failed) == ({}, 1, 1)
        assert state.failures[0].pack == bad[0].pack.id.hex() and bad[0].pack.name in state.failures[0].reason
        assert 10 < state.failures[0].attempts < 6 * 2 + 14
        assert state.oldest_age_s is None  # it was there before the mirror
        await world.na.objects.put(bad[0].pack.name, bad[1])
        await asyncio.sleep(DAMAGED_BACKOFF_S_MAX + SOON_S)
        assert world.eu.has(bad) and mirror.state().watermark == {"a" * 16: 2}

    simulate(main)


def test_the_watermark_stops_at_what_waits() -> None:
    """Segments behind one whose pack cannot be copied are copied, and not passed; the age grows, from when it was announced."""

    async def main(world: World) -> None:
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        for n in range(5):
            await world.na.make(pack(n), puts=n != 2)
        await asyncio.sleep(1800)
        state = mirror.state()
        assert (state.watermark, state.read, state.pending) == ({"a" * 16: 2}, {"a" * 16: 5}, 1)
        assert len(world.eu.copies()) == 4 and state.behind(state.read) == 3
        assert state.oldest_age_s is not None and 1800 <= state.oldest_age_s < 1800 + SOON_S
        await world.na.make(pack(2))
        await asyncio.sleep(COPY_BACKOFF_S_MAX + SOON_S)
        assert mirror.state().watermark == {"a" * 16: 6}
        age_s = mirror.state().oldest_age_s
        assert age_s is not None and age_s < 2 * POLL_INTERVAL_S

    simulate(main)


def test_what_the_source_lost_is_told_and_passed() -> None:
    """A pack that its source has not had for an hour is lost: told once, and no sweep finds it again."""

    async def main(world: World) -> None:
        lost = pack("lost")
        await world.na.make(lost, puts=False)
        [mirror] = await world.mirror()
        await asyncio.sleep(LOST_AFTER_S - 60)
        assert (mirror.state().lost, mirror.state().pending, mirror.state().watermark) == (0, 1, {})
        await asyncio.sleep(2 * COPY_BACKOFF_S_MAX + 5 * SWEEP_INTERVAL_S)
        state = mirror.state()
        assert (state.lost, state.pending, state.watermark) == (1, 0, {"a" * 16: 1})
        assert state.lost_packs == [lost[0].pack.id.hex()] and not world.eu.copies()

    simulate(main)


def test_a_source_that_is_gone_has_lost_nothing() -> None:
    """Where not even the marker is there any more (a directory that is not mounted), packs are not taken for lost."""

    async def main(world: World) -> None:
        await world.na.make(pack("a"))
        world.na.way.faults.delay_s = 30.0
        [mirror] = await world.mirror()
        while mirror.pull is None or not len(mirror.pull.jobs):
            await asyncio.sleep(1.0)
        stored = world.na.objects.stored
        kept = dict(stored)
        await world.na.objects.delete(list(stored))
        await asyncio.sleep(3 * LOST_AFTER_S)
        assert (mirror.state().lost, mirror.state().failed) == (0, 1)
        for name, content in kept.items():
            await world.na.objects.put(name, content)
        await asyncio.sleep(2 * COPY_BACKOFF_S_MAX)
        assert world.eu.has(pack("a"))

    simulate(main)


def test_a_source_that_is_away_stops_no_other() -> None:
    """While one source refuses everything the other one is mirrored, and the state of the first says why it is not."""

    async def main(world: World) -> None:
        await world.apac.make(pack("apac"))
        world.na.way.faults.refuse = ObjectRefused("na: no permission")
        await world.mirror(sources=("na", "apac"))
        await asyncio.sleep(300)
        assert world.eu.has(pack("apac"))
        apac, na = await read_mirrors(world.eu.objects)
        assert "no permission" in na.problem and not apac.problem
        assert world.clock() - na.at_s <= HEARTBEAT_S + STATE_INTERVAL_S
        world.na.way.faults = Faults()
        await world.na.make(pack("na"))
        await asyncio.sleep(60)
        assert world.eu.has(pack("na"))

    simulate(main)


def test_a_partition_shows_in_the_age_though_nothing_is_known_to_wait() -> None:
    """While the source does not answer, the age grows: what it may have announced since is not here."""

    async def main(world: World) -> None:
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        world.na.way.faults.refuse = ObjectUnavailable("partition")
        await asyncio.sleep(1000)
        state = mirror.state()
        assert state.pending == 0 and state.oldest_age_s is not None
        assert 1000 <= state.oldest_age_s <= 1000 + 2 * POLL_INTERVAL_S
        assert "partition" in state.problem

    simulate(main)


@pytest.mark.parametrize("wrong_s", [-(10.0**9), 10.0**9])
def test_wrong_clocks_do_not_change_the_age(wrong_s: float) -> None:
    """A writer whose clock is decades off makes no pack look older than since the feed was last read, or younger."""

    async def main(world: World) -> None:
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        world.na.writer._clock = lambda: world.clock() + wrong_s
        await world.na.make(pack("a"), puts=False)
        await asyncio.sleep(600)
        age_s = mirror.state().oldest_age_s
        assert age_s is not None and 600 <= age_s <= 600 + 2 * POLL_INTERVAL_S

    simulate(main)


def test_a_new_start_takes_over_and_sweeps() -> None:
    """A mirror begun anew goes on with watermark, age and totals of the one before, and finds what that one had only heard of."""

    async def main(world: World) -> None:
        await world.na.make(pack("a"))
        await world.mirror()
        await asyncio.sleep(60)
        await world.na.make(pack("b"), puts=False)
        await asyncio.sleep(600)
        await world.stop()
        [mirror] = await world.mirror()
        await asyncio.sleep(5.0)
        state = mirror.state()
        assert state.watermark == {"a" * 16: 1} and state.copied_packs == 1
        assert state.oldest_age_s is not None and state.oldest_age_s > 590
        await world.na.objects.put(pack("b")[0].pack.name, pack("b")[1])
        await asyncio.sleep(SOON_S)
        assert world.eu.has(pack("b"))
        assert mirror.state().watermark == {"a" * 16: 2} and mirror.state().copied_packs == 2
        lag_s = mirror.state().lag_max_s
        assert lag_s is not None and lag_s > 590

    simulate(main)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"at_s": 0.0, "problem": "no bucket"}, "never ran"),
        ({"at_s": 1.0, "problem": "no bucket"}, "stopped"),
        ({"problem": "no bucket", "failed": 1}, "problem"),
        ({"failed": 1}, "failed"),
        ({}, "copying what was there before"),
        ({"oldest_age_s": IN_TIME_S + 1.0}, "late"),
        ({"oldest_age_s": 1.0}, "ok"),
    ],
)
def test_a_mirror_is_judged_by_the_worst_of_it(facts: dict[str, Any], word: str) -> None:
    """What failed is said before that the first copy goes on, and what keeps all of it back before either."""
    assert judged(MirrorState(source="na", **{"at_s": 1e6, **facts}), 1e6 + 1.0) == word


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([Rule(tenants=("one",))], [Rule(tenants=("one", "two"))]),
        ([Rule(tenants=("two",), copies=False), ALL], [ALL]),
        ([Rule(models=("x",))], [Rule(models=("*",))]),
        ([Rule(sources=("apac",)), Rule(tenants=("one",))], [Rule(sources=("na",))]),
    ],
)
def test_a_watermark_of_other_rules_says_nothing(before: list[Rule], after: list[Rule]) -> None:
    """When rules change, watermark and age begin anew, and are never ahead of what is at home by the new ones."""

    async def main(world: World) -> None:
        made = [pack(tenant, tenant=tenant) for tenant in ("one", "two")]
        await world.na.make(*made)
        await world.mirror(*before)
        await asyncio.sleep(3600)
        await world.stop()
        world.na.way.faults = Faults(delay_s=30.0)
        [mirror] = await world.mirror(*after)
        for _ in range(600):
            await asyncio.sleep(1.0)
            state = await read_state(world.eu.objects, "na")
            if state.rules == mirror.state().rules and (state.watermark or state.oldest_age_s is not None):
                assert world.eu.has(*made)
        assert mirror.state().watermark == {"a" * 16: 1}

    simulate(main)


def test_other_rates_are_no_other_rules() -> None:
    """Priority and rate of a rule, and rules between other regions, change nothing of what a watermark says."""
    rule = Rule(tenants=("one",))
    same = [Rule(sources=("apac",)), Rule(tenants=("one",), priority=3, bytes_per_s=7)]
    assert choice_of([rule], "na", "eu") == choice_of(same, "na", "eu") != choice_of([ALL], "na", "eu")


def test_a_source_that_was_made_anew_is_another_one() -> None:
    """The watermark of a region that is gone says nothing of the one that has its name now."""

    async def main(world: World) -> None:
        old = MirrorState(
            source="na", identity="acme/na/1.0", at_s=1.0, watermark={"a" * 16: 7}, copied_packs=5
        )
        await world.eu.objects.put(MIRRORS + "na", MIRROR_STATE_FORMAT.seal(old))
        await world.na.make(pack("a"))
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        state = mirror.state()
        assert state.watermark == {"a" * 16: 1} and state.copied_packs == 1 and state.identity != old.identity

    simulate(main)


def test_a_state_that_is_damaged_is_done_without() -> None:
    """A damaged state is told in one line by who reads it, and delays a start by a few tries only."""

    async def main(world: World) -> None:
        await world.eu.objects.put(
            MIRRORS + "na", flip(MIRROR_STATE_FORMAT.seal(MirrorState(source="na")), 300)
        )
        [state] = await read_mirrors(world.eu.objects)
        assert "checksum" in state.problem and "\n" not in state.problem
        await world.eu.objects.put(MIRRORS + "apac", MIRROR_STATE_FORMAT.seal(MirrorState(source="na")))
        assert "says it is mirrors/na" in (await read_mirrors(world.eu.objects))[0].problem
        await world.na.make(pack("a"))
        await world.mirror()
        await asyncio.sleep(STATE_READS_MAX * MIRROR_JOIN_PAUSE_S + SOON_S)
        assert world.eu.has(pack("a")) and not (await read_state(world.eu.objects, "na")).problem
        assert [one.source for one in await read_mirrors(world.eu.objects, ["x"])] == ["apac", "na", "x"]

    simulate(main)


def test_more_than_there_is_room_for_is_left_to_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs stay below their limit however much is heard at once; everything is copied in the end, and the watermark waits."""
    monkeypatch.setattr("replication.mirror.pull.JOBS_MAX", 20)
    monkeypatch.setattr("replication.catalogue.catalogue.CATALOGUE_CHUNK_PACKS", 4)

    async def main(world: World) -> None:
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        world.na.way.faults.delay_s = 3.0
        made = [pack(n) for n in range(100)]
        for at in range(0, 100, 5):
            await world.na.make(*made[at : at + 5])
        most = 0
        for _ in range(600):
            await asyncio.sleep(0.5)
            most = max(most, len(pulled(mirror).jobs))
            last = mirror.state().watermark.get("a" * 16, 0)
            assert all(world.eu.has(one) for one in made[: 5 * last])
        assert 10 < most <= 20 and last == 20

    simulate(main)


def test_a_snapshot_is_swept() -> None:
    """A mirror that finds its next segment retired takes the source's snapshot, and copies what that brought."""

    async def main(world: World) -> None:
        await world.na.make(pack(0))
        [mirror] = await world.mirror()
        await asyncio.sleep(60)
        await world.stop()
        for n in range(1, 9):
            await world.na.make(pack(n))
        reader = Catalogue(MemoryRows())
        reader.add_packs(world.na.announced())
        reader.jump({"a" * 16: 9})
        await Snapshots(world.na.objects, world.clock, random.Random(0)).write(reader)
        await world.na.objects.delete([f"{FEED}{'a' * 16}/{n:016x}" for n in range(1, 7)])
        [mirror] = await world.mirror()
        await asyncio.sleep(60)
        assert world.eu.has(*(pack(n) for n in range(9)))
        assert mirror.state().watermark == {"a" * 16: 9}

    simulate(main)


class FailingRows(MemoryRows):
    """Rows whose next read fails, when told to."""

    fails = False

    def get(self, keys: Any) -> list[bytes | None]:
        if self.fails:
            self.fails = False
            raise CatalogueDamaged("the disk fails")
        return super().get(keys)


def test_a_damaged_catalogue_of_the_source_is_made_anew() -> None:
    """A mirror whose copy of the source's catalogue fails while it works fills it again, and goes on."""

    async def main(world: World) -> None:
        rows = world.rows["na"] = FailingRows()
        [mirror] = await world.mirror()
        for n in range(12):
            await world.na.make(pack(n))
            await asyncio.sleep(0.7 * POLL_INTERVAL_S)
            rows.fails = True
        await asyncio.sleep(120)
        assert world.eu.has(*(pack(n) for n in range(12)))
        assert mirror.state().watermark == {"a" * 16: 12} and len(world.eu.copies()) == 12
        assert pulled(mirror).tail.status().renewals

    simulate(main)


def test_a_longer_life_is_copied_without_bytes() -> None:
    """A pack that its source keeps longer is announced again at home, not copied again; one whose life is over is not copied."""

    async def main(world: World) -> None:
        lives = [int(STARTED_S) + hours * 3600 for hours in (1, 2, 3)]
        await world.na.make(pack("a"), kept_until_s=lives[0])
        await world.na.make(pack("over"), kept_until_s=int(STARTED_S) - 1)
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        world.na.way.requests.clear()
        for until_s in lives:
            await world.na.make(pack("a"), kept_until_s=until_s, puts=False)
            await asyncio.sleep(SOON_S)
        assert [entry.kept_until_s for entry in world.eu.announced()] == lives
        assert {entry.origin for entry in world.eu.announced()} == {"na"}
        state = mirror.state()
        assert state.copied_packs == 1 and state.watermark == {"a" * 16: 5} and not state.pending

    simulate(main)


def test_a_longer_life_waits_behind_no_copy() -> None:
    """A renewal is at home at once though copies wait for hours at their rule's rate, and takes nothing of that rate."""

    async def main(world: World) -> None:
        now_s = int(world.clock())
        lasting, *waiting = (pack(number, record_bytes=1 << 14) for number in range(21))
        await world.na.make(lasting, kept_until_s=now_s + 600)
        rate = lasting[0].pack.size_bytes // 600
        [mirror] = await world.mirror(Rule(bytes_per_s=rate))
        await asyncio.sleep(SOON_S)
        await world.na.make(*waiting)
        await asyncio.sleep(SOON_S)
        await world.na.make(lasting, kept_until_s=now_s + 7200, puts=False)
        await asyncio.sleep(SOON_S)
        assert [entry.kept_until_s for entry in world.eu.announced() if entry.pack == lasting[0].pack] == [
            now_s + 600,
            now_s + 7200,
        ]
        assert len(world.eu.copies()) == 2 and mirror.state().pending == len(waiting)
        await asyncio.sleep(650 * len(waiting))
        assert world.eu.has(*waiting) and not mirror.state().pending

    simulate(main)


def test_a_pack_that_may_be_deleted_at_home_is_put_again() -> None:
    """Where the copy at home has outlived itself, so that anybody may delete it, a longer life brings the bytes once more."""

    async def main(world: World) -> None:
        await world.na.make(pack("a"), kept_until_s=int(STARTED_S) + 100)
        [mirror] = await world.mirror()
        await asyncio.sleep(100 + SKEW_S + 1)
        await world.na.make(pack("a"), kept_until_s=int(STARTED_S) + 10**6, puts=False)
        await asyncio.sleep(4 * SKEW_S)
        assert world.eu.has(pack("a")) and mirror.state().copied_packs == 2

    simulate(main)


def test_what_is_erased_at_home_is_not_copied() -> None:
    """What a tombstone at home names is not copied, heard of or swept, and the watermark passes it."""

    async def main(world: World) -> None:
        gone, kept = pack("1", tenant="gone"), pack("2", tenant="kept")
        await world.na.make(gone, kept)
        until_s = int(world.clock() + 10**6)
        await bury(world.eu.objects, Tombstone(tenant="gone", watched_until_s=until_s))
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        await world.na.make(pack("3", tenant="gone"))
        await asyncio.sleep(SOON_S)
        assert world.eu.copies() == [kept[0].pack.id] and mirror.state().watermark == {"a" * 16: 2}

    simulate(main)


def test_what_is_erased_at_the_source_is_erased_at_home() -> None:
    """A mirror brings the tombstone: the copy goes, and a pack that the source says again does not come back."""

    async def main(world: World) -> None:
        erased, kept = pack("erased", tenant="acme"), pack("kept", tenant="umbrella")
        await world.na.make(erased, kept)
        await world.mirror()
        await asyncio.sleep(SOON_S)
        assert world.eu.has(erased, kept)
        stone = Tombstone(tenant="acme", watched_until_s=int(world.clock() + 1e6))
        await bury(world.na.objects, stone)
        await asyncio.sleep(limits.SOURCE_TOMBSTONES_S + limits.TOMBSTONES_INTERVAL_S + SOON_S)
        assert world.eu.has(kept) and not world.eu.has(erased)
        await world.na.make(erased)
        await asyncio.sleep(SOON_S)
        assert not world.eu.has(erased)

    simulate(main)


def test_a_tombstone_that_home_refuses_keeps_no_other_one_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a problem with its name; the others are brought, and it is, too, as soon as home takes it."""

    async def main(world: World) -> None:
        packs = [pack(tenant, tenant=tenant) for tenant in ("a", "b", "c")]
        await world.na.make(*packs)
        [mirror] = await world.mirror()
        await asyncio.sleep(SOON_S)
        until_s = int(world.clock() + 1e6)
        stones = [Tombstone(tenant=tenant, watched_until_s=until_s) for tenant in ("a", "b", "c")]
        refused, put = TOMBSTONES + min(stone.id for stone in stones), world.eu.objects.put

        async def picky(name: str, content: Bytes, only_new: bool = False) -> bool:
            if name == refused:
                raise ObjectRefused(f"{name}: a lock")
            return await put(name, content, only_new)

        monkeypatch.setattr(world.eu.objects, "put", picky)
        for stone in stones:
            await bury(world.na.objects, stone)
        wait_s = limits.SOURCE_TOMBSTONES_S + limits.TOMBSTONES_INTERVAL_S + SOON_S
        await asyncio.sleep(wait_s)
        assert sum(map(world.eu.has, packs)) == 1
        assert [problem.subject for problem in pulled(mirror).problems.all()] == [f"na: {refused}"]
        monkeypatch.undo()
        await asyncio.sleep(wait_s)
        assert not any(map(world.eu.has, packs))

    simulate(main)


def test_the_age_that_is_told_falls_with_the_age() -> None:
    """A source that answers slowly for a while makes the age grow; when it has fallen again the state says so at once, and not
    only with its next heartbeat, which would tell of minutes that are over."""

    async def main(world: World) -> None:
        [mirror] = await world.mirror()
        await asyncio.sleep(200.0)
        for number in range(10):
            world.na.way.faults = Faults(delay_s=300.0)
            await world.na.make(pack(number))
            await asyncio.sleep(100.0)
            world.na.way.faults = Faults()
            young_s = 0.0
            for _ in range(300):
                await asyncio.sleep(1.0)
                [state] = await read_mirrors(world.eu.objects)
                age_s, told_s = mirror.state().oldest_age_s, state.oldest_age_now_s(world.clock())
                assert age_s is not None and told_s is not None and told_s >= age_s
                young_s = young_s + 1.0 if age_s < SOON_S else 0.0
                if young_s > STATE_INTERVAL_S + 1.0:
                    assert told_s - age_s < 1.6 * HEARTBEAT_S
            assert young_s

    simulate(main)
