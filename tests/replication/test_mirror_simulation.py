"""Simulated regions that copy from each other: the real daemons and mirrors, over buckets and ways that do their worst.

    chance ─▶ regions, rules │ daemons, who persist, renew, keep up and erase │ packs that rot or are gone where they were made
           ─▶ tombstones of tenants, namespaces, prefixes, in some of the buckets
           ─▶ daemons and mirrors, killed and begun again, at once or later, with the rows they had written, or with none
           ─▶ a source whose bucket is restored to what it was, so that numbers fall
           ─▶ a daemon that is away for longer than segments are kept │ processes suspended at any step │ two who believe to keep
           ─▶ things that are not ours in every folder │ one object of each bucket that is refused, damaged, or never answered for
           ─▶ faults of each way to a bucket: fail, hang, lose answers, answer twice, cut off, flip, delay; a minute of nothing

Everything is drawn from one seed, time is virtual. At every moment: what a watermark has passed is at home, byte by byte,
or not for it; so is what is older than the age that a state tells; nothing is announced that is not there, or not by the rules,
or under a wrong origin; nothing is removed whose life is not over, and that no tombstone names, or that is not ours; nothing that is
erased is served a minute after it is known; no source is written to. After
the faults every region has what the rules say and no tombstone names, no more, every catalogue knows it, and nothing is
copied any more.

SEEDS=10000 runs more of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from replication.catalogue.catalogue import Catalogue
from replication.feed.snapshots import MANIFESTS
from replication.formats.manifests import CHUNKS as MODEL_CHUNKS
from replication.formats.region import init_region
from replication.formats.rules import Rule, sources_for
from replication.formats.segment import FEED
from replication.formats.tombstones import Tombstone, bury
from replication.keeper.keeper import Keeper
from tests.objects import Faults, FaultyObjects, flip
from tests.replication.memory_rows import small_catalogues
from tests.replication.simulated import (
    FOREIGN,
    KINDS,
    POOL,
    SKEW_S,
    Around,
    MirrorProcess,
    Node,
    Process,
    Witness,
    by_id,
    by_name,
    disks,
    is_covered,
    made,
    opened,
)
from tests.replication.virtual_loop import VirtualLoop, run
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.packs.packs import PACKS

SEEDS = int(os.environ.get("SEEDS", "120"))
CHUNKS = 2  # tests that share the seeds
DAY_S = 86400.0
CHAOS_S = 100.0  # of faults and kills
CALM_S = 1200.0  # within which everything must be as it should
QUIET_S = 120.0  # in which nothing may be copied any more: more than a sweep's interval
WATCHED_UNTIL_S = 2 * 10**9
AWAY_S = (300.0, 700.0)  # longer than segments are kept, most of the time
SICK_FROM_S = 20.0

holds = Keeper.holds.fget
believers: set[Keeper] = set()  # of one world: they take themselves for the keeper whatever they see


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Hours become minutes, few jobs are many, catalogues are small; no log."""
    caplog.set_level(logging.CRITICAL, "replication")
    small_catalogues(monkeypatch)
    for name, value in {
        "feed.tail.POLL_INTERVAL_S": 24.0,
        "feed.tail.BACKOFF_S_MAX": 30.0,
        "feed.tail.SNAPSHOT_SEGMENTS_MIN": 5,
        "feed.tail.SEGMENT_COST_BYTES": 2000,
        "feed.snapshots.RETENTION_S": 250.0,
        "feed.feed.WRITER_SILENT_S": 5.0,
        "feed.feed.WRITER_ALIVE_S": 30.0,
        "feed.feed.LISTED_S": 30.0,
        "feed.tail.SILENT_WRITERS_MAX": 2,
        "feed.tail.CROWD_INTERVAL_S": 60.0,
        "region.region_node.ANNOUNCE_INTERVAL_S": 8.0,
        "feed.feed.FULL_LOOK_EVERY": 5,
        "mirror.copying.COPIES_MAX": 3,
        "mirror.copying.COPY_BACKOFF_S_MAX": 20.0,
        "mirror.copying.DAMAGED_BACKOFF_S_MAX": 40.0,
        "mirror.copying.LOST_AFTER_S": 30.0,
        "mirror.mirror.MIRROR_JOIN_PAUSE_S": 5.0,
        "mirror.mirror.STATE_INTERVAL_S": 15.0,
        "mirror.pull.SETTLE_S_MAX": 20.0,
        "mirror.pull.SWEEP_INTERVAL_S": 100.0,
        "mirror.pull.SOURCE_TOMBSTONES_S": 25.0,
        "mirror.pull.JOBS_MAX": 24,
        "erasure.erasure.ERASE_INTERVAL_S": 12.0,
        "erasure.erasure.TOMBSTONES_INTERVAL_S": 20.0,
        "audit.auditing.AUDIT_LOOK_S": 3600.0,  # never: audits have their own simulation
        "region.order_watch.ORDERS_LOOK_S": 3600.0,
        "catalogue.catalogue.CATALOGUE_CHUNK_PACKS": 8,
    }.items():
        monkeypatch.setattr(f"replication.{name}", value)
    monkeypatch.setattr(Catalogue, "open", opened)
    monkeypatch.setattr(Keeper, "holds", property(lambda self: self in believers or holds(self)))
    monkeypatch.setattr("replication.models.collecting.boot_s", lambda: asyncio.get_running_loop().time())


class World:
    """All of it, from a seed."""

    def __init__(self, seed: int) -> None:
        disks.clear()
        believers.clear()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.chance = chance = random.Random(seed)
        names = ["na", "eu", "apac"][: chance.choice((2, 2, 2, 3))]
        rules = self.draw_rules(names)
        buckets = {name: Witness(name, rules, self.clock) for name in names}
        has_lives = chance.random() < 0.4
        skews_s: tuple[float, ...] = (0.0,)
        if chance.random() < 0.3:
            skews_s = (
                0.0,
                0.0,
                SKEW_S / 2,
                -SKEW_S / 2,
                500.0,
                -500.0,
                8 * DAY_S,
                -30 * DAY_S,
                1000 * DAY_S,
                -1e9,
            )
        self.around = Around(
            self.clock, chance, rules, buckets, self.draw_faults(), self.draw_faults(), CHAOS_S, has_lives, skews_s
        )  # fmt: skip
        home, source = self.around.home_faults, self.around.source_faults
        self.buckets = buckets
        for bucket in buckets.values():
            bucket.others = buckets
            # A state that is not read for long is done without, a clock that goes wrong is believed for minutes, and
            # heads that come late hide what is new.
            is_wrong = home.flipped or home.truncated or home.late or home.twice or len(skews_s) > 1
            bucket.trusts_ages = not is_wrong
        self.is_over = False  # all that goes wrong
        self.has_kills = chance.random() < 0.5
        self.has_damage = chance.random() < 0.3
        self.has_erasure = chance.random() < 0.6
        self.around.has_models = chance.random() < 0.5
        self.has_foreign = chance.random() < 0.4
        self.has_sick = chance.random() < 0.3
        self.has_suspended = chance.random() < 0.3
        self.has_believers = chance.random() < 0.2
        homes = [name for name in names if sources_for(rules, name, names)]
        self.mirrors = [MirrorProcess(self.around, name) for name in homes]
        self.nodes = [
            Node(self.around, name, f"{name} {n}") for name in names for n in range(chance.choice((1, 1, 2)))
        ]
        is_source_only = not sources_for(rules, "na", names)
        self.is_restored = is_source_only and not self.around.has_models and chance.random() < 0.6
        self.sleeper = chance.choice(self.nodes) if chance.random() < 0.3 else None
        is_odd = (
            self.is_restored
            or self.has_sick
            or self.has_suspended
            or self.has_believers
            or self.sleeper is not None
        )
        self.is_calm = (
            not is_odd
            and not self.has_kills
            and not self.has_damage
            and not has_lives
            and home == source == Faults()
        )
        self.has_partitions = not self.is_calm and chance.random() < 0.7
        for bucket in buckets.values():
            bucket.may_be_late = self.has_partitions or home != Faults()

    @property
    def processes(self) -> list[Process]:
        return [*self.mirrors, *self.nodes]

    def clock(self) -> float:
        return 1e9 + self.loop.now_s

    def draw_rules(self, names: list[str]) -> list[Rule]:
        """Active-active or from one region, less what is secret, some of it first, some slowly."""
        chance = self.chance
        rules = [Rule(tenants=("sec*",), copies=False)] if chance.random() < 0.5 else []
        if chance.random() < 0.3:
            rules.append(Rule(sources=("na",), models=("model-1",), copies=False))
        if chance.random() < 0.5:
            rules.append(Rule(models=("model-2",), priority=5))
        sources = () if chance.random() < 0.6 else ("na",)
        if chance.random() < 0.7:
            models = ("model-0",) if chance.random() < 0.5 else ()
            rules.append(
                Rule(sources=sources, models=models, of_weights=True, priority=chance.choice((0, 2)))
            )
        rate = chance.choice((0, 0, 300))
        return [*rules, Rule(sources=sources, bytes_per_s=rate)]

    def draw_faults(self) -> Faults:
        chance = self.chance
        if chance.random() < 0.2:
            return Faults()

        def share() -> float:
            return chance.choice((0.0, 0.0, 0.02, 0.1, 0.3))

        return Faults(
            failed=share(), hung=share() / 10, lost=share(), late=share() / 2, twice=share() / 2, truncated=share() / 3,
            flipped=share() / 3, delay_s=chance.choice((0.0, 0.5, 3.0)), hang_s=30.0, late_s=30.0,
        )  # fmt: skip

    async def live(self) -> None:
        for name, bucket in self.buckets.items():
            await init_region(bucket, "acme", name, lambda: 0.0)
        if self.has_foreign:
            await asyncio.gather(*(bucket.put_foreign() for bucket in self.buckets.values()))
        for process in self.processes:
            process.start()
        if self.sleeper is not None:
            self.loop.call_later(
                self.chance.uniform(0, CHAOS_S), asyncio.ensure_future, self.be_away(self.sleeper)
            )
        backup, backup_s = self.buckets["na"].backup(), self.chance.uniform(0, CHAOS_S)
        while self.loop.time() < CHAOS_S:
            await asyncio.sleep(self.chance.expovariate(1 / 25))
            await self.disturb()
            if self.loop.time() < backup_s:
                backup = self.buckets["na"].backup()
        if self.is_restored:
            await self.restore(self.buckets["na"], backup)
        await self.end_faults()
        await self.converge()
        for process in self.processes:
            await process.kill()

    async def disturb(self) -> None:
        """Kill somebody, erase, damage, or take away a way for a minute."""
        for process in self.processes:
            process.look()
        chance = self.chance
        if self.has_erasure and chance.random() < 0.4:
            await self.erase()
        if self.has_damage and chance.random() < 0.5:
            await self.damage(chance.choice(list(self.buckets.values())))
        if self.has_sick and self.loop.time() > SICK_FROM_S:
            self.sicken()
        if self.has_suspended and chance.random() < 0.6:
            process = chance.choice(self.processes)
            process.suspend()
            self.loop.call_later(chance.uniform(5, 80), process.go_on)
            self.around.seen["suspended"] += 1
        if self.has_believers and (process := chance.choice(self.processes)).node is not None:
            believers.add(process.node.keeper)
            self.loop.call_later(60.0, believers.discard, process.node.keeper)
            self.around.seen["believed"] += 1
        if self.has_kills:
            process = chance.choice([one for one in self.processes if one is not self.sleeper])
            await process.kill()
            await asyncio.sleep(chance.choice((0.0, 1.0, 20.0, 60.0)))
            process.start()
        if self.has_partitions and chance.random() < 0.25:
            process = chance.choice(self.processes)
            way = chance.choice(process.ways)
            kinds = (ObjectUnavailable,) if way is process.ways[0] else (ObjectUnavailable, ObjectMissing)
            faults, way.faults = way.faults, Faults(refuse=chance.choice(kinds)("partition"))
            self.loop.call_later(60.0, self.give_back, way, faults)

    async def restore(self, bucket: Witness, backup: Any) -> None:
        """Its daemons are killed, all but packs is as it was a while ago, and they begin again, and go on asking."""
        nodes = [node for node in self.nodes if node.bucket is bucket and node.task and not node.task.done()]
        for node in nodes:
            node.go_on()
            await node.kill()
        for node in nodes:
            await node.way.settle()
        bucket.restore(backup)
        for node in nodes:
            node.busy_until_s = self.around.now_s() + 60.0
            node.start()
        self.around.seen["restored"] += 1

    async def be_away(self, sleeper: Node) -> None:
        """And ask for more when it is back."""
        await sleeper.kill()
        away_s = self.chance.uniform(*AWAY_S)
        sleeper.busy_until_s = self.around.now_s() + away_s + 60.0
        await asyncio.sleep(away_s)
        sleeper.start()
        self.around.seen["away"] += 1

    def sicken(self) -> None:
        """One object of a bucket, once."""
        bucket = self.chance.choice(list(self.buckets.values()))
        names = sorted(bucket.stored.keys() - set(FOREIGN))
        if not bucket.sick and names:
            kind = self.chance.choice(sorted({name.partition("/")[0] for name in names}))
            bucket.fall_sick(
                self.chance.choice([name for name in names if name.startswith(kind)]), self.chance
            )
            self.around.seen["sick"] += 1

    def give_back(self, way: FaultyObjects, faults: Faults) -> None:
        if not self.is_over:
            way.faults = faults

    async def erase(self) -> None:
        """A tenant, a namespace, or what goes on behind a block of it; not every region is reached."""
        chance = self.chance
        header = made(
            chance.randrange(chance.choice((2 * KINDS, POOL)))
        ).pack.header  # much hangs on the first ones
        stone = Tombstone(namespaces=(header.spec.digest,), watched_until_s=WATCHED_UNTIL_S)
        kind = chance.random()
        if kind < 0.15:
            stone = Tombstone(tenant=chance.choice(("open", "secret")), watched_until_s=WATCHED_UNTIL_S)
        elif kind < 0.8:
            stone = msgspec.structs.replace(stone, block_hash=chance.choice(list(header.each_hash())))
        for bucket in chance.sample(list(self.buckets.values()), chance.randint(1, len(self.buckets))):
            with suppress(
                ObjectRefused, ObjectUnavailable, ObjectDamaged
            ):  # who erases is told, and may try again
                await bury(bucket, stone)

    async def damage(self, bucket: Witness) -> None:
        """A pack rots where it was made, or is gone: only where nobody else made it, so that it is told what to expect. So does a
        chunk, until all that goes wrong is over."""
        chunks = [
            name for name in bucket.stored if name.startswith(MODEL_CHUNKS) and name not in bucket.rotten
        ]
        if chunks and self.chance.random() < 0.5:
            name = self.chance.choice(chunks)
            bucket.rotten[name] = content = bucket.stored[name]
            bucket.stored[name] = flip(content, self.chance.randrange(8 * len(content)))
            self.around.seen["rotten chunks"] += 1
        others = [other for other in self.buckets.values() if other is not bucket]
        packs = [
            pack_id
            for pack_id, entry in bucket.lives.items()
            if entry.pack.name in bucket.stored and entry.pack.name not in bucket.rotten and not entry.origin
            if not any(entry.pack.name in other.stored or pack_id in other.put_here for other in others)
        ]
        if not packs:
            return
        name = by_id()[self.chance.choice(packs)].pack.name
        if self.chance.random() < 0.5:
            content = bucket.stored[name]
            bucket.rotten[name] = content
            bucket.stored[name] = flip(content, self.chance.randrange(8 * len(content)))
            self.around.seen["rotten packs"] += 1
        else:
            bucket.gone.add(by_name()[name].pack.id)
            bucket.rotten.pop(name, None)
            await bucket.lose(name)

    async def end_faults(self) -> None:
        self.is_over = True
        for process in self.processes:
            process.look()
            process.go_on()
            for way in process.ways:
                way.faults = Faults()
                await way.settle()
        believers.clear()
        for bucket in self.buckets.values():
            bucket.recover()
            for name, content in bucket.rotten.items():
                if name in bucket.stored:
                    bucket.stored[name] = content
            bucket.rotten.clear()

    async def settle(self) -> None:
        until_s = self.loop.time() + CALM_S
        while problem := self.problem():
            assert self.loop.time() < until_s, problem
            await asyncio.sleep(15.0)
            for process in self.processes:
                process.look()

    async def converge(self) -> None:
        await self.settle()
        if self.is_calm and len(self.buckets) == 2:
            most = max((max(mirror.home.puts.values(), default=0) for mirror in self.mirrors), default=0)
            assert most <= 1, "copied twice"
        if self.chance.random() < 0.2:
            before = [mirror.home.puts.copy() for mirror in self.mirrors]
            await asyncio.sleep(QUIET_S)
            for mirror, puts in zip(self.mirrors, before, strict=True):
                bucket, late = mirror.bucket, mirror.home.puts - puts
                expected = bucket.expected()
                more = [
                    name
                    for name, times in late.items()
                    # What its source announced before it was restored from a backup may still come, once.
                    # What was damaged may be found so late that it comes once more now.
                    if times > 1
                    or ((pack_id := by_name()[name].pack.id) in expected and not self.has_damage)
                    or not bucket.may_come(pack_id)
                ]
                assert not more, f"{mirror.name}: copied in circles: {more}"
            await self.settle()  # a sweep tries for a while to copy what its source lost

    def problem(self) -> str:
        """What is not yet as it should be."""
        if any(self.around.now_s() < process.busy_until_s for process in self.processes):
            return "somebody is at work"
        expected = {name: bucket.expected() for name, bucket in self.buckets.items()}
        for process in self.processes:
            if problem := process.problem(expected[process.region]):
                return f"{process.name}: {problem}"
        for name, bucket in self.buckets.items():
            if problem := bucket.problem(expected[name]):
                return f"{name}: {problem}"
        return ""

    def count(self, seen: Counter[str]) -> None:
        """What has happened in this world."""
        seen.update(self.around.seen)
        for process in self.processes:
            for way in process.ways:
                seen.update(way.injected)
        for mirror in self.mirrors:
            for state in (one.state() for one in mirror.mirrors):
                seen["copied"] += state.copied_packs
                seen["copied models"] += state.copied_models
                seen["lost packs"] += state.lost
        for bucket in self.buckets.values():
            seen.update(bucket.removed)
            seen["spared"] += any(
                not is_covered(pack_id, stone) and stone.names(by_id()[pack_id].pack.header.spec)
                for stone in bucket.stones.values()
                for pack_id in bucket.lives
            )
            seen["packs"] += sum(name.startswith(PACKS) for name in bucket.stored)
            seen["snapshots"] += any(name.startswith(MANIFESTS) for name in bucket.stored)
            seen["retired"] += len(bucket.segments) - sum(
                name.startswith(FEED) for name in bucket.stored.keys() - set(FOREIGN)
            )


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_whatever_happens_mirrors_bring_what_the_rules_say_and_tell_the_truth(chunk: int) -> None:
    """In every simulated deployment the promises of daemons, mirrors and erasure hold, at each moment and at the end."""
    seen: Counter[str] = Counter()

    async def main(seed: int) -> None:
        world = World(seed)
        try:
            await world.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        world.count(seen)

    for seed in range(chunk, SEEDS, CHUNKS):
        run(main(seed))
    faults = ("failed", "hung", "lost", "late", "twice", "truncated", "flipped", "reordered", "overtaken")
    work = (
        "packs",
        "copied",
        "published",
        "copied models",
        "rotten chunks",
        "lost packs",
        "rotten packs",
        "renewed",
        "over",
        "erased",
        "spared",
        "snapshots",
        "retired",
        "away",
        "restored",
        "suspended",
        "believed",
        "sick",
    )
    missing = [kind for kind in (*faults, *work) if not seen[kind]]
    assert not missing or SEEDS < 60 * CHUNKS, f"never happened: {missing}"
