"""Simulated regions that copy from each other: the real mirrors, over buckets and ways that do their worst.

    chance ─▶ regions, rules │ writers, who put and announce all the time │ packs that rot or are gone in their source
           ─▶ mirrors, killed and begun again with the rows they had written, or with none
           ─▶ faults of each way between mirror and bucket: fail, hang, lose answers, cut off, flip, delay; a minute of nothing

Everything is drawn from one seed, time is virtual. At every moment: what a watermark has passed is at home, byte by byte,
or not for it; so is what is older than the age that a state tells; nothing is announced that is not there, or not by the rules,
or under a wrong origin; no source is written to. After the faults every region has what the rules say, no more, and
nothing is copied any more.

SEEDS=5000 runs more of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replication.announced import Announced, lasts_longer, merged
from replication.catalogue import Catalogue
from replication.errors import ReplicationError
from replication.feed import FeedWriter
from replication.mirror import Joined, Mirror
from replication.mirror_state import MIRRORS, MirrorState, read_state
from replication.region import init_region, open_region
from replication.region_node import RegionNode
from replication.rules import Rule, rule_for, sources_for
from replication.segment import FEED, Segment, decode, segment_number
from tests.objects import Faults, FaultyObjects, MemoryObjects, flip
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.errors import ObjectError, ObjectMissing, ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec
from tiers.objects import Bytes
from tiers.packs import PACKS, PackHeader, describe

SEEDS = int(os.environ.get("SEEDS", "300"))
CHAOS_S = 120.0  # of faults and kills
CALM_S = 1200.0  # within which everything must be there
QUIET_S = 120.0  # in which nothing may be copied any more: more than a sweep's interval
POOL = 120  # packs there are


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Hours become minutes, few jobs are many, catalogues are kept in memory; no log."""
    caplog.set_level(logging.CRITICAL, "replication")
    for name, value in {
        "tail.POLL_INTERVAL_S": 20.0,
        "tail.BACKOFF_S_MAX": 30.0,
        "region_node.ANNOUNCE_INTERVAL_S": 8.0,
        "feed.FULL_LOOK_EVERY": 8,
        "copying.COPIES_MAX": 3,
        "copying.COPY_BACKOFF_S_MAX": 20.0,
        "copying.DAMAGED_BACKOFF_S_MAX": 40.0,
        "copying.LOST_AFTER_S": 40.0,
        "mirror.MIRROR_JOIN_PAUSE_S": 5.0,
        "mirror.STATE_INTERVAL_S": 15.0,
        "pull.SETTLE_S_MAX": 20.0,
        "pull.SWEEP_INTERVAL_S": 100.0,
        "pull.JOBS_MAX": 24,
        "catalogue.CATALOGUE_CHUNK_PACKS": 8,
    }.items():
        monkeypatch.setattr(f"replication.{name}", value)
    for part in ("upkeep.Upkeep", "erasure.Erasure"):  # no life ends here, and nothing is erased
        monkeypatch.setattr(f"replication.{part}.run", _nothing)
    monkeypatch.setattr(Catalogue, "open", _opened)


_disks: dict[Path, dict[bytes, bytes]] = {}  # of one world: rows by path


def _opened(path: Path, identity: str) -> Catalogue:
    return Catalogue(MemoryRows(_disks.setdefault(path, {})))


async def _nothing(_: object) -> None:
    await asyncio.Event().wait()


@cache
def made(number: int) -> tuple[Announced, bytes]:
    """A pack of the pool, and its bytes."""
    fields = {"model": f"model-{number % 3}", "tenant": ("", "open", "secret")[number // 3 % 3]}
    spec = NamespaceSpec(digest(repr(fields).encode()), 48, 16, 16, fields)
    names = [f"{number} {index}".encode() for index in range(1 + number % 3)]
    records = [digest(name) * 3 for name in names]
    header = PackHeader(spec, b"", b"".join(map(digest, names)), b"".join(map(digest, records)))
    pack, first = describe(header)
    return Announced(pack, number), first + b"".join(records)


@cache
def truth() -> dict[str, bytes]:
    return {announced.pack.name: content for announced, content in map(made, range(POOL))}


class Witness(MemoryObjects):
    """A bucket as it is. Whatever is put is checked against what may be there."""

    def __init__(self, world: World, region: str) -> None:
        super().__init__(region, world.clock, page_names=50)
        self.world, self.region = world, region
        self.segments: dict[tuple[str, int], tuple[Segment, float]] = {}
        self.made: dict[bytes, Announced] = {}  # here, by writers
        self._passed: Counter[tuple[str, str]] = Counter()  # by source and writer, where the watermark was

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if name.startswith(PACKS):
            assert content == truth()[name], f"{self.region}: {name}: other bytes than it should have"
        done = await super().put(name, content, only_new)
        if done and name.startswith(FEED):
            self._witness(name, bytes(content))
        if name.startswith(MIRRORS):
            self.check(await read_state(self, name[len(MIRRORS) :]))
        return done

    def _witness(self, name: str, content: bytes) -> None:
        writer, number = name[len(FEED) :].partition("/")[0], segment_number(name)
        segment = decode(content, writer, number)
        known = self.segments.setdefault((writer, number), (segment, self.world.clock()))
        assert known[0] == segment, f"{self.region}: {name} has two contents"
        for entry in segment.entries:
            if not entry.origin:
                assert entry.pack.id in self.made, f"{self.region}: a copy without an origin"
                continue
            assert self.has(entry), f"{self.region}: announces what is not there"
            assert entry.pack.id in self.world.buckets[entry.origin].made, (
                f"of another origin: {entry.origin}"
            )
            assert self.is_wanted(entry, entry.origin), f"{self.region}: against the rules"

    def has(self, entry: Announced) -> bool:
        """Whether a pack is here; if it rotted here, where it was made, that is no mirror's fault."""
        name = entry.pack.name
        bucket, content = self.world.rotten.get(name, (None, b""))
        return (content if bucket is self else self.stored.get(name)) == truth()[name]

    def is_wanted(self, entry: Announced, source: str) -> bool:
        return rule_for(self.world.rules, source, self.region, entry.pack.header.spec) is not None

    def check(self, state: MirrorState) -> None:
        """What a state of a mirror promises."""
        source = self.world.buckets[state.source]
        for writer, position in state.watermark.items():
            for number in range(self._passed[state.source, writer] + 1, position + 1):
                self._check_segment(source.segments[writer, number][0], source, "watermark")
            self._passed[state.source, writer] = max(self._passed[state.source, writer], position)
        if self.world.trusts_ages and state.oldest_age_s is not None:
            complete_s = state.at_s - state.oldest_age_s - 1e-6
            for segment, at_s in source.segments.values():
                if at_s < complete_s:
                    self._check_segment(segment, source, f"complete to {complete_s}, and at {at_s}")

    def _check_segment(self, segment: Segment, source: Witness, what: str) -> None:
        for entry in segment.entries:
            if not entry.origin and self.is_wanted(entry, source.region) and entry.pack.id not in source.gone:
                assert self.has(entry), f"{source.region} to {self.region}: {what}: a pack is missing"

    def highest(self) -> dict[str, int]:
        return dict(sorted(self.segments))  # the highest of each comes last

    @property
    def gone(self) -> set[bytes]:
        return self.world.gone[self.region]

    def expected(self) -> set[bytes]:
        """The packs that should be here in the end."""
        found = {pack_id for pack_id in self.made if pack_id not in self.gone}
        for source in sources_for(self.world.rules, self.region, self.world.buckets):
            bucket = self.world.buckets[source]
            found |= {
                pack_id
                for pack_id, entry in bucket.made.items()
                if pack_id not in bucket.gone and self.is_wanted(entry, source)
            }
        return found

    def announced(self) -> set[bytes]:
        return {entry.pack.id for segment, _ in self.segments.values() for entry in segment.entries}

    def lives(self) -> dict[bytes, Announced]:
        """By pack, all that was announced of it here, together."""
        found: dict[bytes, Announced] = {}
        for segment, _ in self.segments.values():
            for entry in segment.entries:
                found[entry.pack.id] = merged(found.get(entry.pack.id, entry), entry)
        return found


class AtHome(FaultyObjects):
    """The way to the bucket at home. copies: how often each pack was put."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.copies: Counter[str] = Counter()

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        self.copies[name] += name.startswith(PACKS)
        return await super().put(name, content, only_new)


class ReadOnly(FaultyObjects):
    """The way to a source."""

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        raise AssertionError(f"{name}: a mirror writes to its source")

    async def delete(self, names: object) -> None:
        raise AssertionError(f"{names}: a mirror deletes in its source")


@dataclass
class Life:
    """One life of a mirror process."""

    mirrors: list[Mirror] = field(default_factory=list)
    node: RegionNode | None = None


class MirrorProcess:
    """`kvstore mirror` of one region; what it keeps are rows of catalogues."""

    def __init__(self, world: World, region: str) -> None:
        self.world, self.region = world, region
        self.chance = random.Random(world.chance.random())
        self.home = AtHome(world.buckets[region], self._fresh(), world.home_faults)
        sources = sources_for(world.rules, region, world.buckets)
        self.sources = {
            name: ReadOnly(world.buckets[name], self._fresh(), world.source_faults) for name in sources
        }
        self.path = Path(region)
        self.life = Life()
        self.task: asyncio.Task[None] | None = None

    def _fresh(self) -> random.Random:
        return random.Random(self.chance.random())

    @property
    def ways(self) -> list[FaultyObjects]:
        return [self.home, *self.sources.values()]

    def start(self) -> None:
        if self.chance.random() < 0.2:  # a new disk
            for path in (self.path, *(self.path / name for name in self.sources)):
                _disks.pop(path, None)
        self.life = Life()
        self.task = asyncio.ensure_future(self.live(self.life))

    async def live(self, life: Life) -> None:
        clock, rules = self.world.clock, self.world.rules
        life.node = node = await self.joined()
        paces: dict[Rule, float] = {}
        for name in self.sources:
            join = partial(self.source, name)
            life.mirrors.append(Mirror(node, self.home, name, join, rules, paces, clock, self._fresh()))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            for mirror in life.mirrors:
                tasks.create_task(mirror.run())

    async def joined(self) -> RegionNode:
        instance, clock = f"mirror of {self.region}", self.world.clock
        while True:
            try:
                return await RegionNode.join(
                    self.home, "acme", self.region, self.path, instance, self._fresh(), clock
                )
            except (ObjectError, ReplicationError):
                await asyncio.sleep(5.0)

    async def source(self, name: str) -> Joined:
        marker = await open_region(self.sources[name], "acme", name)
        return Joined(marker.identity, self.sources[name], Catalogue.open(self.path / name, marker.identity))

    async def kill(self) -> None:
        assert self.task is not None
        announcing = () if self.life.node is None else self.life.node._fetching  # they die with their process
        for task in (self.task, *announcing):
            task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()  # it had failed before

    def look(self) -> None:
        """One that has failed of itself has a bug; and the promises are checked where nothing is written down yet."""
        assert self.task is not None
        if self.task.done() and not self.task.cancelled():
            self.task.result()
        for mirror in self.life.mirrors:
            if mirror.pull is not None:
                self.world.buckets[self.region].check(mirror.state())

    def is_done(self) -> bool:
        """Whether all that is announced in its sources was copied."""
        states = [mirror.state() for mirror in self.life.mirrors]
        heads = {name: self.world.buckets[name].highest() for name in self.sources}
        return len(states) == len(self.sources) and all(
            state.watermark == heads[state.source] and not state.pending for state in states
        )


class World:
    """All of it, from a seed."""

    def __init__(self, seed: int) -> None:
        _disks.clear()
        self.loop = asyncio.get_running_loop()
        self.chance = chance = random.Random(seed)
        names = ["na", "eu", "apac"][: chance.choice((2, 2, 2, 3))]
        self.rules = self.draw_rules(names)
        self.source_faults, self.home_faults = self.draw_faults(), self.draw_faults()
        self.skew_s = chance.choice((0.0, 0.0, 500.0, -500.0))
        # A state that is not read for long is done without; and a clock that goes wrong is believed for minutes.
        self.trusts_ages = not (self.home_faults.flipped or self.home_faults.truncated or self.skew_s)
        self.buckets = {name: Witness(self, name) for name in names}
        self.gone: dict[str, set[bytes]] = {name: set() for name in names}
        self.rotten: dict[str, tuple[Witness, bytes]] = {}
        self.has_kills = chance.random() < 0.5
        self.has_damage = chance.random() < 0.3
        homes = [name for name in names if sources_for(self.rules, name, names)]
        self.processes = [MirrorProcess(self, name) for name in homes]
        faults = (self.source_faults, self.home_faults)
        self.is_calm = not self.has_kills and not self.has_damage and faults == (Faults(), Faults())
        self.has_partitions = not self.is_calm

    def clock(self) -> float:
        return 1e9 + self.loop.time()

    def draw_rules(self, names: list[str]) -> list[Rule]:
        """Active-active or from one region, less what is secret, some of it first, some slowly."""
        chance = self.chance
        rules = [Rule(tenants=("sec*",), copies=False)] if chance.random() < 0.5 else []
        if chance.random() < 0.3:
            rules.append(Rule(sources=("na",), models=("model-1",), copies=False))
        if chance.random() < 0.5:
            rules.append(Rule(models=("model-2",), priority=5))
        sources = () if chance.random() < 0.6 else ("na",)
        rate = chance.choice((0, 0, 100))
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
        for process in self.processes:
            process.start()
        writers = [
            asyncio.ensure_future(self.write(bucket, f"{n:016x}"))
            for bucket in self.buckets.values()
            for n in range(self.chance.randint(1, 2))
        ]
        while self.loop.time() < CHAOS_S:
            await asyncio.sleep(self.chance.expovariate(1 / 25))
            await self.disturb()
        await asyncio.gather(*writers)
        await self.end_faults()
        await self.converge()
        for process in self.processes:
            await process.kill()

    async def write(self, bucket: Witness, writer_id: str) -> None:
        """Put and announce packs, some of which others make, too; some are announced again with a longer life."""
        chance = random.Random(self.chance.random())
        writer = FeedWriter(bucket, writer_id, lambda: self.clock() + self.skew_s, chance)
        while self.loop.time() < CHAOS_S:
            await asyncio.sleep(chance.expovariate(1 / 20))
            fresh = [made(chance.randrange(POOL)) for _ in range(chance.choice((1, 2, 3, 8)))]
            fresh = [
                pair for pair in fresh if not any(pair[0].pack.id in gone for gone in self.gone.values())
            ]
            for announced, content in fresh:
                if announced.pack.id not in bucket.made:
                    await bucket.put(announced.pack.name, content)
                    bucket.made[announced.pack.id] = announced
            until_s = chance.choice((0, 2 * 10**9, 3 * 10**9))
            await writer.announce([msgspec.structs.replace(pair[0], kept_until_s=until_s) for pair in fresh])
            if fresh and self.has_damage and chance.random() < 0.1:
                await self.damage(bucket, fresh[0][0])

    async def damage(self, bucket: Witness, announced: Announced) -> None:
        """A pack rots where it was made, or is gone: only where nobody else made it, so that it is told what to expect."""
        name = announced.pack.name
        others = [other for other in self.buckets.values() if other is not bucket]
        if any(name in other.stored or announced.pack.id in other.made for other in others):
            return
        if name in self.rotten or name not in bucket.stored:
            return
        if self.chance.random() < 0.5:
            self.rotten[name] = (bucket, bucket.stored[name])
            bucket.stored[name] = flip(
                bucket.stored[name], self.chance.randrange(8 * len(bucket.stored[name]))
            )
        else:
            self.gone[bucket.region].add(announced.pack.id)
            await bucket.delete([name])

    async def disturb(self) -> None:
        """Kill a mirror, or take away a way for a minute."""
        for process in self.processes:
            process.look()
        process = self.chance.choice(self.processes)
        if self.has_kills:
            await process.kill()
            await asyncio.sleep(self.chance.choice((0.0, 1.0, 20.0)))
            process.start()
        if self.has_partitions and self.chance.random() < 0.15:
            way = self.chance.choice(process.ways)
            kinds = (ObjectUnavailable, ObjectMissing) if way is not process.home else (ObjectUnavailable,)
            faults, way.faults = way.faults, Faults(refuse=self.chance.choice(kinds)("partition"))
            self.loop.call_later(60.0, lambda: setattr(way, "faults", faults))

    async def end_faults(self) -> None:
        await asyncio.sleep(60.0)
        for process in self.processes:
            process.look()
            for way in process.ways:
                way.faults = Faults()
                await way.settle()
        for name, (bucket, content) in self.rotten.items():
            bucket.stored[name] = content

    async def converge(self) -> None:
        until_s = self.loop.time() + CALM_S
        while not all(process.is_done() for process in self.processes):
            assert self.loop.time() < until_s, f"not there: {[self.states()]}"
            await asyncio.sleep(25.0)
            for process in self.processes:
                process.look()
        self.compare()
        if self.chance.random() < 0.3:
            before = [process.home.copies.copy() for process in self.processes]
            await asyncio.sleep(QUIET_S)
            assert before == [process.home.copies for process in self.processes], "copied in circles"
            self.compare()

    def compare(self) -> None:
        for process in self.processes:
            bucket = self.buckets[process.region]
            expected = {name_of(pack_id) for pack_id in bucket.expected()}
            packs = {name for name in bucket.stored if name.startswith(PACKS)}
            lost = {name_of(pack_id) for gone in self.gone.values() for pack_id in gone}
            assert expected <= packs, "not everything is there"
            assert packs <= expected | lost, "more is there than the rules say"
            assert {name_of(pack_id) for pack_id in bucket.announced()} <= packs | lost
            lives = bucket.lives()
            for name in process.sources:
                for pack_id, entry in self.buckets[name].lives().items():
                    if name_of(pack_id) in packs and not entry.origin and bucket.is_wanted(entry, name):
                        assert not lasts_longer(entry, lives[pack_id]), (
                            "it is not kept as long as in its source"
                        )
            if self.is_calm and len(self.buckets) == 2:
                assert max(process.home.copies.values(), default=1) == 1, "copied twice"

    def states(self) -> list[MirrorState]:
        return [mirror.state() for process in self.processes for mirror in process.life.mirrors]


@cache
def name_of(pack_id: bytes) -> str:
    return next(entry.pack.name for entry, _ in map(made, range(POOL)) if entry.pack.id == pack_id)


def test_whatever_happens_mirrors_bring_what_the_rules_say_and_tell_the_truth() -> None:
    """In every simulated deployment the promises of mirrors hold, at each moment and at the end."""
    seen: Counter[str] = Counter()

    async def main(seed: int) -> None:
        world = World(seed)
        try:
            await world.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        for process in world.processes:
            for way in process.ways:
                seen.update(way.injected)
        for state in world.states():
            seen["copied"] += state.copied_packs
            seen["lost packs"] += state.lost
        seen["rotten packs"] += len(world.rotten)

    for seed in range(SEEDS):
        run(main(seed))
    kinds = (
        "failed",
        "hung",
        "lost",
        "late",
        "twice",
        "truncated",
        "flipped",
        "copied",
        "lost packs",
        "rotten packs",
    )
    missing = [kind for kind in kinds if not seen[kind]]
    assert not missing or SEEDS < 50, f"never happened: {missing}"
