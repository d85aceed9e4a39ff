"""A simulated region: writers, readers, snapshots and retention, the real code, over a store that does its worst.

    chance ─▶ writers (put pack, announce), killed and restarted, some with a copied data directory
           ─▶ readers (Tail), killed and restarted with the rows they had written
           ─▶ a bucket that is restored: all are killed, it is as it was a while ago, all begin again │ daemons suspended at any step
           ─▶ things that are not ours in every folder │ one object that is refused, damaged, or never answered for
           ─▶ faults of the store: fail, hang, lose answers, do it late or twice, rot, cut off, flip, delay

Everything is drawn from one seed, time is virtual. While it runs: a pack is there before it is announced, no number has
a gap before it or two contents, and whoever has a position knows all that lies before it. After the faults: every
reader knows exactly what was announced, and so does one that begins with nothing. What a restored bucket lost, who knew it may know still.

SEEDS=10000 runs more of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

from replication.catalogue.catalogue import Catalogue
from replication.errors import Damaged
from replication.feed.feed import FeedWriter, fresh_writer
from replication.feed.snapshots import MANIFESTS
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from replication.formats.announced_models import AnnouncedModel
from replication.formats.region import init_region
from replication.formats.segment import FEED, Segment, decode, segment_number
from replication.keeper.keeper import Keeper
from tests.objects import Faults, FaultyObjects
from tests.replication.durable import pack_of, spec_of
from tests.replication.memory_rows import MemoryRows, small_catalogues
from tests.replication.models import MadeModel, make_model
from tests.replication.simulated import FOREIGN, SickObjects
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Bytes
from tiers.errors import ObjectError
from tiers.packs.packs import PACKS

SEEDS = int(os.environ.get("SEEDS", "120"))
CHUNKS = 2  # tests that share the seeds
CHAOS_S = 200.0  # of faults and kills
CALM_S = 600.0  # within which everybody must know everything: more than enough for a full look


@pytest.fixture(autouse=True)
def _small_limits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Snapshots, retention and full looks within minutes, several parts and pages of everything; no log."""
    caplog.set_level(logging.CRITICAL, "replication")
    small_catalogues(monkeypatch)
    monkeypatch.setattr("replication.feed.tail.POLL_INTERVAL_S", 10.0)
    monkeypatch.setattr("replication.feed.tail.SNAPSHOT_SEGMENTS_MIN", 4)
    monkeypatch.setattr("replication.feed.tail.SEGMENT_COST_BYTES", 5000)
    monkeypatch.setattr("replication.feed.snapshots.SNAPSHOT_PART_BYTES", 3000)
    monkeypatch.setattr("replication.feed.snapshots.RETENTION_S", 180.0)
    monkeypatch.setattr("replication.feed.feed.WRITER_SILENT_S", 5.0)
    monkeypatch.setattr("replication.feed.feed.WRITER_ALIVE_S", 30.0)
    monkeypatch.setattr("replication.feed.tail.SILENT_WRITERS_MAX", 2)
    monkeypatch.setattr("replication.feed.tail.CROWD_INTERVAL_S", 40.0)
    monkeypatch.setattr("replication.feed.feed.LISTED_S", 20.0)
    monkeypatch.setattr("replication.catalogue.catalogue.LOAD_KEYS", 20)
    monkeypatch.setattr("replication.feed.feed.FULL_LOOK_EVERY", 8)
    monkeypatch.setattr("replication.feed.feed.FEED_PAGE_SEGMENTS", 8)
    monkeypatch.setattr("replication.feed.tail.BACKOFF_S_MAX", 40.0)


@cache
def made_model(number: int) -> MadeModel:
    return make_model(f"m{number}", chunks=1)


@cache
def made(name: int) -> Announced:
    return pack_of([name, f"{name} b"], spec_of(name % 3))


class Witness(SickObjects):
    """The store as it is. It remembers every sound segment that was ever in it, and checks each when it comes. lost: those that a
    restored bucket does not have any more."""

    def __init__(self, clock: asyncio.AbstractEventLoop) -> None:
        super().__init__("region", clock.time, page_names=7)
        self.segments: dict[tuple[str, int], Segment] = {}
        self.lost: dict[tuple[str, int], Segment] = {}
        self._contents: dict[str, bytes] = {}

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        done = await super().put(name, content, only_new)
        if done and name.startswith(FEED):
            self._witness(name, bytes(content))
        return done

    def _witness(self, name: str, content: bytes) -> None:
        writer, number = name[len(FEED) :].partition("/")[0], segment_number(name)
        try:
            segment = decode(content, writer, number)
        except Damaged:
            assert name not in self._contents, f"{name}: a sound segment was replaced by damage"
            return
        assert self._contents.setdefault(name, content) == content, f"{name}: has two contents"
        assert number == 1 or (writer, number - 1) in self.segments, f"{name}: there is a gap before it"
        for entry in segment.entries:
            assert entry.pack.name in self.stored, f"{name}: announces a pack that is not there"
        for model in segment.models:
            assert model.name in self.stored, f"{name}: announces a model that is not there"
        self.segments[writer, number] = segment

    def backup(self) -> tuple[dict[str, bytes], dict[tuple[str, int], Segment]]:
        return dict(self.stored), dict(self.segments)

    def restore(self, backup: tuple[dict[str, bytes], dict[tuple[str, int], Segment]]) -> None:
        """As it was then. What nobody has any more is not durable; packs stay, as their names say what is in them."""
        stored, segments = backup
        packs = {name: content for name, content in self.stored.items() if name.startswith(PACKS)}
        now_s = asyncio.get_running_loop().time()
        self.lost.update(self.segments)
        self.stored, self.segments = {**stored, **packs}, dict(segments)
        self._names = sorted(self.stored)
        self._modified_s = dict.fromkeys(self.stored, now_s)

    def highest(self) -> dict[str, int]:
        """Of each writer that is not retired, the number of its last segment."""
        ours = self.stored.keys() - set(FOREIGN)
        there = {name[len(FEED) :].partition("/")[0] for name in ours if name.startswith(FEED)}
        return {writer: number for writer, number in sorted(self.segments) if writer in there}

    def announced(self) -> set[bytes]:
        return {one for segment in self.segments.values() for one in ids_of(segment)}


def ids_of(segment: Segment) -> list[bytes]:
    return [entry.pack.id for entry in segment.entries] + [model.id for model in segment.models]


class WatchedCatalogue(Catalogue):
    """A catalogue that is checked against the store whenever it learns."""

    def __init__(self, rows: MemoryRows, witness: Witness) -> None:
        super().__init__(rows)
        self._witness = witness
        self.ids = {entry.pack.id for chunk in self.chunks() for entry in chunk}
        self.ids |= {model.id for model in self.models.values()}
        self.check(self.positions)

    @property
    def known(self) -> dict[str, int]:
        """By writer, retired ones included, up to which segment all is known."""
        return {**self.retired, **self.positions}

    def _apply(  # type: ignore[override]  # narrower on purpose
        self, entries: Sequence[Announced], positions: dict[str, int], models: Sequence[AnnouncedModel] = ()
    ) -> None:
        before = self.positions
        super()._apply(entries, positions, models)
        self.ids |= {model.id for model in models}
        for entry in entries:
            assert entry.pack.name in self._witness.stored, "knows a pack that is not there"
            self.ids.add(entry.pack.id)
        for writer, number in positions.items():
            assert number > before.get(writer, 0), "a position went back"
        self.check(positions, before)

    def check(self, positions: dict[str, int], before: dict[str, int] | None = None) -> None:
        """All that was announced up to these positions is known."""
        for writer, position in positions.items():
            for number in range((before or {}).get(writer, 0) + 1, position + 1):
                at = writer, number
                segment = self._witness.segments.get(at) or self._witness.lost.get(at)
                assert segment is not None, f"{writer}: position {position} is behind what there is"
                missing = [one for one in ids_of(segment) if one not in self.ids]
                assert not missing, f"{writer}: position {position} has passed segment {number}"


class Daemon:
    """A process that can be killed: what it keeps is the rows."""

    def __init__(self, world: World, name: int) -> None:
        self.world, self.name = world, name
        self.task: asyncio.Task[None] | None = None
        self.chance = random.Random(world.chance.random())
        self.objects = FaultyObjects(world.store, random.Random(world.chance.random()), world.faults)

    def start(self) -> None:
        self.task = asyncio.ensure_future(self.live())

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            ended, self.task = self.task, None
            await asyncio.wait([ended])
            if not ended.cancelled():
                ended.result()  # it had failed before

    async def live(self) -> None:
        raise AssertionError("a kind of daemon lives")


class Writing(Daemon):
    """Puts packs, one or a few at a time, and announces them until it worked."""

    def __init__(self, world: World, name: int, writer_id: str) -> None:
        super().__init__(world, name)
        self.first_id = writer_id
        self.lives = 0
        self.conflicts = 0
        self.waiting: list[Announced] = []  # to be announced
        self.models: list[AnnouncedModel] = []  # the same

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        writer_id = fresh_writer(self.chance) if self.lives else self.first_id
        writer = FeedWriter(self.objects, writer_id, loop.time, self.chance)
        self.lives += 1
        self.waiting, self.models = [], []
        while True:
            await asyncio.sleep(self.chance.expovariate(1 / 12))
            if loop.time() < self.world.busy_until_s:
                self.waiting += [pack for pack in self.fresh() if await self.tried(self.put(pack))]
                self.models += [
                    one.announced for one in self.fresh_models() if await self.tried(self.publish(one))
                ]
            if not (self.waiting or self.models) or not await self.tried(
                writer.announce(self.waiting, self.models)
            ):
                continue
            self.world.durable |= {pack.pack.id for pack in self.waiting} | {one.id for one in self.models}
            self.waiting, self.models = [], []
            self.conflicts = max(self.conflicts, writer.conflicts)

    def fresh(self) -> list[Announced]:
        """Packs, some of which others make, too."""
        names = [self.world.chance.randrange(200) for _ in range(self.chance.choice((1, 1, 1, 2, 12)))]
        return list(map(made, names))

    def fresh_models(self) -> list[MadeModel]:
        return [
            made_model(self.world.chance.randrange(20)) for _ in range(self.chance.choice((0, 0, 0, 1, 3)))
        ]

    async def publish(self, model: MadeModel) -> None:
        await self.objects.put(model.name, b"manifest")

    async def put(self, pack: Announced) -> None:
        await self.objects.put(pack.pack.name, b"pack")

    async def tried(self, work: object) -> bool:
        try:
            await work  # type: ignore[misc]  # any coroutine of a writer
        except ObjectError:
            return False
        return True


class Reading(Daemon):
    """Follows the feed. Sometimes its disk is new."""

    def __init__(self, world: World, name: int) -> None:
        super().__init__(world, name)
        self.rows: dict[bytes, bytes] = {}
        self.catalogue: WatchedCatalogue | None = None

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        if self.chance.random() < 0.2:
            self.rows = {}
        self.catalogue = WatchedCatalogue(MemoryRows(self.rows), self.world.store)
        keeper = Keeper(self.objects, self.world.region, self.chance)
        tail = Tail(self.objects, self.catalogue, loop.time, self.chance, keeper=keeper)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(keeper.run())
            tasks.create_task(tail.run())


class World:
    """All of it, from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.store = Witness(asyncio.get_running_loop())
        self.durable: set[bytes] = set()
        self.busy_until_s = CHAOS_S
        self.faults = self.draw_faults()
        self.writers = [Writing(self, n, f"{n:016x}") for n in range(chance.randint(1, 4))]
        if chance.random() < 0.3 and not self.faults.rotten:
            self.writers.append(Writing(self, 9, self.writers[0].first_id))  # a copied machine
        self.has_clone = len({writer.first_id for writer in self.writers}) < len(self.writers)
        self.readers = [Reading(self, n) for n in range(3)]
        self.kill_every_s = chance.choice((20.0, 60.0, 1e9))
        self.has_foreign = chance.random() < 0.3
        self.has_sick = chance.random() < 0.3
        self.has_suspended = chance.random() < 0.3
        self.is_restored = chance.random() < 0.3
        self.seen: Counter[str] = Counter()

    def draw_faults(self) -> Faults:
        chance = self.chance

        def share() -> float:
            return chance.choice((0.0, 0.0, 0.02, 0.1, 0.3))

        faults = Faults(
            failed=share(), hung=share() / 10, lost=share(), truncated=share() / 3, flipped=share() / 3,
            delay_s=chance.choice((0.0, 0.5, 3.0)), hang_s=60.0, late_s=40.0,
        )  # fmt: skip
        # What is stored damaged and comes once more, later, damages what was repaired meanwhile: no writer can help that.
        if chance.random() < 0.4:
            return replace(faults, rotten=share() / 3)
        return replace(faults, late=share() / 2, twice=share() / 2)

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        self.region = await init_region(self.store, "acme", "na", loop.time)
        daemons: list[Daemon] = [*self.writers, *self.readers]
        await self.begin(daemons)
        sleeper = self.readers[-1]  # falls behind what is kept
        loop.call_later(self.chance.uniform(0, CHAOS_S), lambda: asyncio.ensure_future(sleeper.kill()))
        daemons.remove(sleeper)
        backup_s, backup = self.chance.uniform(0, CHAOS_S), self.store.backup()
        while loop.time() < CHAOS_S:
            if loop.time() < backup_s:
                backup = self.store.backup()
            await asyncio.sleep(
                self.chance.expovariate(1 / self.kill_every_s) if self.kill_every_s < 1e9 else 50
            )
            self.look(daemons)
            if self.kill_every_s < 1e9:
                victim = self.chance.choice(daemons)
                await victim.kill()
                await asyncio.sleep(self.chance.choice((0.0, 1.0, 50.0)))
                victim.start()
        await sleeper.kill()
        sleeper.start()
        daemons.append(sleeper)
        if self.is_restored:
            await self.restore(daemons, backup)
        self.store.recover()
        for daemon in daemons:
            daemon.objects.go_on()
            daemon.objects.faults = Faults()
        for daemon in daemons:
            await daemon.objects.settle()
        newcomer = Reading(self, 99)
        newcomer.objects.faults = Faults()
        newcomer.start()
        daemons.append(newcomer)
        self.readers.append(newcomer)
        until_s = loop.time() + CALM_S
        while problem := self.problem():
            assert loop.time() < until_s, problem
            await asyncio.sleep(20.0)
            self.look(daemons)
        await self.compare(daemons)

    async def begin(self, daemons: Sequence[Daemon]) -> None:
        loop = asyncio.get_running_loop()
        if self.has_foreign:
            await self.store.put_foreign()
        for daemon in daemons:
            daemon.start()
        if self.has_sick:
            loop.call_later(self.chance.uniform(5, CHAOS_S), self.sicken)
        if self.has_suspended:
            for daemon in daemons:
                begin_s = self.chance.uniform(0, CHAOS_S)
                loop.call_later(begin_s, daemon.objects.suspend)
                loop.call_later(begin_s + self.chance.uniform(5, 80), daemon.objects.go_on)
            self.seen["suspended"] += 1

    async def restore(
        self, daemons: Sequence[Daemon], backup: tuple[dict[str, bytes], dict[tuple[str, int], Segment]]
    ) -> None:
        """Somebody stops all, puts back what there was, and begins again; some work goes on."""
        for daemon in daemons:
            daemon.objects.go_on()
            await daemon.kill()
        for daemon in daemons:
            await daemon.objects.settle()
        self.store.restore(backup)
        self.durable &= self.store.announced()
        for daemon in daemons:
            daemon.start()
        self.busy_until_s = asyncio.get_running_loop().time() + 60.0
        await asyncio.sleep(60.0)
        self.seen["restored"] += 1

    def sicken(self) -> None:
        names = sorted(self.store.stored.keys() - set(FOREIGN))
        kind = self.chance.choice(sorted({name.partition("/")[0] for name in names}))
        self.store.fall_sick(
            self.chance.choice([name for name in names if name.startswith(kind)]), self.chance
        )
        self.seen["sick"] += 1

    def look(self, daemons: Sequence[Daemon]) -> None:
        """A daemon that has failed of itself has a bug."""
        for daemon in daemons:
            if daemon.task is not None and daemon.task.done():
                daemon.task.result()

    def problem(self) -> str:
        """What is not yet as it should be."""
        if any(writer.waiting or writer.models for writer in self.writers):
            return "not all is announced"
        announced = self.store.announced()
        for reader in self.readers:
            if reader.catalogue is None or not self.is_up_to_date(reader.catalogue.known):
                return f"reader {reader.name} is not up to date"
            if not announced <= reader.catalogue.ids:
                return f"reader {reader.name} does not know all"
        return ""

    def is_up_to_date(self, known: Mapping[str, int]) -> bool:
        """As far as the store is, or at a segment that was whole until a bucket was put back, and is damaged there."""
        highest, lost = self.store.highest(), self.store.lost
        read = {writer: known.get(writer, 0) for writer in highest}
        return all(
            read[writer] == number or (read[writer] > number and (writer, read[writer]) in lost)
            for writer, number in highest.items()
        )

    async def compare(self, daemons: Sequence[Daemon]) -> None:
        announced = self.store.announced()
        assert self.durable <= announced, "said to be durable, and is not"
        if not self.has_clone and not self.faults.late and not self.faults.twice:
            assert not any(writer.conflicts for writer in self.writers), "took itself for somebody else"
        for reader in self.readers:
            assert reader.catalogue is not None
            await reader.kill()
            ever = announced | {one for segment in self.store.lost.values() for one in ids_of(segment)}
            assert announced <= reader.catalogue.ids <= ever
            again = WatchedCatalogue(MemoryRows(reader.rows), self.store)
            await again.load()
            assert announced <= again.ids <= ever and self.is_up_to_date(again.known)
            for segment in self.store.segments.values():
                for entry in segment.entries:
                    header = entry.pack.header
                    assert again.held(header.spec.digest, header.spec.hash_bytes, header.hashes, 0) == 2
        for daemon in daemons:
            await daemon.kill()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_whatever_the_store_does_everybody_knows_what_was_announced(chunk: int) -> None:
    """In every simulated region the promises of feed, catalogue and snapshots hold, at each moment and at the end."""
    seen: Counter[str] = Counter()

    async def main(seed: int) -> None:
        world = World(seed)
        try:
            await world.live()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        seen.update(world.seen)
        for daemon in (*world.writers, *world.readers):
            seen.update(daemon.objects.injected)
        seen["segments"] += len(world.store.segments)
        seen["models"] += sum(len(segment.models) for segment in world.store.segments.values())
        seen["retired"] += len(world.store.segments) - sum(
            name.startswith(FEED) for name in world.store.stored.keys() - set(FOREIGN)
        )
        seen["snapshots"] += max(
            (
                int(name[len(MANIFESTS) :][:16], 16)
                for name in world.store.stored.keys() - set(FOREIGN)
                if name.startswith(MANIFESTS)
            ),
            default=0,
        )

    for seed in range(chunk, SEEDS, CHUNKS):
        run(main(seed))
    kinds = (
        "failed", "hung", "lost", "late", "twice", "rotten", "truncated", "flipped", "reordered", "overtaken",
    )  # fmt: skip
    odd = ("restored", "suspended", "sick")
    missing = [kind for kind in (*kinds, "retired", "snapshots", "models", *odd) if not seen[kind]]
    assert not missing or SEEDS < 60 * CHUNKS, f"never happened: {missing}"
