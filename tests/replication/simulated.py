"""Regions to simulate: packs there are, buckets that watch over what is put and deleted, processes that can be killed.

    Node           ─▶ Way (faults) ─▶ Witness: a bucket        a daemon: persists, renews, follows, keeps up, erases
    MirrorProcess  ─▶ Way (faults) ─▶ Witness at home
                   ─▶ ReadOnly     ─▶ Witness of each source

What a process keeps when it is killed are the rows of its catalogues. Everything else is drawn anew, from the seed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvstore.steps import finish
from replication.catalogue.catalogue import Catalogue
from replication.errors import ReplicationError
from replication.formats.announced import Announced, merged
from replication.formats.announced_models import AnnouncedModel, merged_models
from replication.formats.manifests import CHUNKS
from replication.formats.manifests import MANIFESTS as MODEL_MANIFESTS
from replication.formats.mirror_state import MIRRORS, MirrorState, read_state
from replication.formats.region import MARKER, open_region
from replication.formats.rules import Rule, rule_for, sources_for, weights_rule_for
from replication.formats.segment import FEED, HEAD_FORMAT, HEADS, Segment, decode, segment_number
from replication.formats.tombstones import TOMBSTONES, Tombstone, read_tombstones
from replication.mirror.mirror import Joined, Mirror
from replication.region.region_node import RegionNode
from tests.objects import Faults, FaultyObjects, MemoryObjects
from tests.replication.memory_rows import MemoryRows
from tests.replication.models import MadeModel, make_model
from tiers.bucket.objects import Bytes
from tiers.checksum import digest
from tiers.errors import ObjectDamaged, ObjectError, ObjectRefused, ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACKS, Pack, PackHeader, describe

POOL = 117  # packs there are: 13 of each of 9 namespaces, in trees
KINDS = 9
CLOCK_SET_S = 40.0  # between two times that a wrong clock is set
SKEW_S = 40.0  # by which clocks differ, where packs have lives
FOR_EVER_S = 3 * 10**9
_START_S = 10**9


class Made(NamedTuple):
    """A pack of the pool. above: the pack that it hangs on. path: the blocks from the beginning of its prompt to its end."""

    number: int
    pack: Pack
    content: bytes
    records: list[memoryview]
    above: Made | None
    path: frozenset[bytes]


@cache
def made(number: int) -> Made:
    """Packs of a namespace are a tree of two branches: one goes on behind the last block of a pack, one behind any."""
    kind, place = number % KINDS, number // KINDS
    fields = {"model": f"model-{kind % 3}", "tenant": ("", "open", "secret")[kind // 3]}
    spec = NamespaceSpec(digest(repr(fields).encode()), 48, 16, 16, fields)
    names = [f"{number} {index}".encode() for index in range(1 + number % 3)]
    records = [digest(name) * 3 for name in names]
    above, parent, before = None, b"", frozenset[bytes]()
    if place:
        above = made((place - 1) // 2 * KINDS + kind)
        known = list(above.pack.header.each_hash())
        at = len(known) if place % 2 else 1 + place % len(known)
        parent = known[at - 1]
        before = (above.path - frozenset(known)) | frozenset(known[:at])
    hashes = list(map(digest, names))
    header = PackHeader(spec, parent, b"".join(hashes), b"".join(map(digest, records)))
    pack, first = describe(header)
    content = first + b"".join(records)
    return Made(
        number, pack, content, [memoryview(record) for record in records], above, before | frozenset(hashes)
    )


@cache
def prompt(number: int) -> list[bytes]:
    """The blocks from the beginning of its prompt to its end, in order."""
    one = made(number)
    before = prompt(one.above.number) if one.above is not None else []
    parent = one.pack.header.parent
    return before[: before.index(parent) + 1 if parent else 0] + list(one.pack.header.each_hash())


@cache
def by_name() -> dict[str, Made]:
    return {one.pack.name: one for one in map(made, range(POOL))}


@cache
def by_id() -> dict[bytes, Made]:
    return {one.pack.id: one for one in by_name().values()}


MODELS = 6


@cache
def made_model(number: int) -> MadeModel:
    """Revisions of two models; those of one share their first chunk."""
    name, shared = f"model-{number % 2}", make_model(f"model-{number % 2}", "shared", chunks=1)
    own = make_model(name, f"r{number}", chunks=1 + number % 3)
    chunks = [*own.manifest.chunks, *shared.manifest.chunks]  # files name their chunks by their places
    return MadeModel(msgspec.structs.replace(own.manifest, chunks=chunks), {**shared.chunks, **own.chunks})


@cache
def models_by_name() -> dict[str, MadeModel]:
    return {one.name: one for one in map(made_model, range(MODELS))}


@cache
def chunk_contents() -> dict[str, bytes]:
    return {name: content for one in models_by_name().values() for name, content in one.chunks.items()}


@cache
def is_covered(pack_id: bytes, tombstone: Tombstone) -> bool:
    """What erasing means, said with whole paths."""
    one = by_id()[pack_id]
    if not tombstone.names(one.pack.header.spec):
        return False
    return not tombstone.block_hash or tombstone.block_hash in one.path


# Folders of a bucket, and beside them: something else lies there, which is nobody's business.
FOREIGN = tuple(
    f"{folder}{name}"
    for folder in (
        "", "audits/", "behind/", "doubts/", "erased/", "feed/", f"feed/{'0' * 16}/", "heads/", "keeper/", "manifests/", "mirrors/",
        "models/chunks/", "models/manifests/", "models/manifests/a/", "models/publishing/", "models/removed/", "nodes/", "orders/",
        "packs/", f"packs/{'0' * 32}/", "snapshots/", "stuck/", "tombstones/", "warming/",
    )
    for name in ("a-note.txt", "0", "f" * 16, f"{'f' * 32}", "deep/er/note")
)  # fmt: skip


class SickObjects(MemoryObjects):
    """sick: by name, what an object answers when it is read, put or deleted, and to which of these."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.sick: dict[str, tuple[ObjectError, frozenset[str]]] = {}

    def _ask(self, name: str, what: str) -> None:
        error, refused = self.sick.get(name, (None, frozenset[str]()))
        if error is not None and what in refused:
            raise error

    def _found(self, name: str) -> bytes:
        content = super()._found(name)
        self._ask(name, "read")
        return content

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        self._ask(name, "put")
        return await super().put(name, content, only_new)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._ask(name, "delete")
        await super().delete(names)

    def fall_sick(self, name: str, chance: random.Random) -> None:
        """It cannot be deleted, for ever; and perhaps not be read or replaced, until somebody lets it."""
        kinds = (ObjectRefused, ObjectRefused, ObjectUnavailable, ObjectDamaged)
        refused = {"delete"} if chance.random() < 0.5 or name == MARKER else {"delete", "read", "put"}
        if name.startswith(TOMBSTONES):
            refused -= {"read"}  # what cannot be read erases nothing
        self.sick[name] = (chance.choice(kinds)(f"{self.where}: {name}: sick"), frozenset(refused))

    def recover(self) -> None:
        self.sick = {name: (error, frozenset({"delete"})) for name, (error, _) in self.sick.items()}

    async def put_foreign(self) -> None:
        for name in FOREIGN:
            if name not in self.stored:
                await MemoryObjects.put(self, name, b"somebody else's")


class Witness(SickObjects):
    """A bucket as it is. Whatever is put or deleted is checked against what may be.

    segments: all there ever were. put_here: packs that nodes of this region have put. lives: what was
    announced of each pack, together. stones: tombstones that are here, by id. gone: packs that are announced and need not be
    here: taken away by the test, or announced too late. late: packs that were announced anew after nobody may renew them any more.
    may_be_late: an announcement may have to wait. removed: how many were deleted, by reason.
    """

    def __init__(self, region: str, rules: Sequence[Rule], clock: Callable[[], float]) -> None:
        super().__init__(region, clock, page_names=50)
        self.region, self.clock = region, clock
        self.others: dict[str, Witness] = {}  # all of them, by region
        self.segments: dict[tuple[str, int], Segment] = {}
        self.lost: set[tuple[str, int]] = set()  # segments that a restored bucket does not have any more
        self.before: dict[bytes, Announced] = {}  # what was announced before it was restored
        self.told: dict[str, list[tuple[float, int]]] = {}  # by writer, when a head told of which number
        self.put_here: set[bytes] = set()
        self.lives: dict[bytes, Announced] = {}
        self.said_s: dict[bytes, float] = {}  # when a pack was announced last
        self.put_s: dict[bytes, float] = {}  # when a pack was put last
        self.stones: dict[str, Tombstone] = {}
        self.lost_stones: list[Tombstone] = []  # when it was restored: who had read one has erased
        self.gone: set[bytes] = set()
        self.late: set[bytes] = set()
        self.may_be_late = True
        self.models: dict[str, AnnouncedModel] = {}  # what was announced of each, together
        self.published_here: set[str] = set()  # models that nodes of this region have published
        self.begun_here: set[str] = set()  # … or have begun to
        self.wrong: AssertionError | None = None
        self.rotten: dict[str, bytes] = {}  # packs that are damaged here, as they were
        self.removed: Counter[str] = Counter()  # why
        self.trusts_ages = True
        self._rules = rules
        self._chosen: dict[tuple[str, bytes], bool] = {}
        self._passed: Counter[tuple[str, str]] = Counter()  # by source and writer, where the watermark was
        self._complete: Counter[tuple[str, str]] = Counter()  # the same, for what is said to be old enough

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        try:
            return await self._put(name, content, only_new)
        except AssertionError as error:  # whoever put it may be a task that nobody waits for
            self.wrong = error
            raise

    async def _put(self, name: str, content: Bytes, only_new: bool) -> bool:
        self._ask(name, "put")
        if name.startswith(PACKS):
            one = by_name()[name]
            assert content == one.content, f"{self.region}: {name}: other bytes than it should have"
            self.put_s[one.pack.id] = self.clock()
            self.rotten.pop(name, None)
        if name.startswith(CHUNKS):
            assert content == chunk_contents()[name], (
                f"{self.region}: {name}: other bytes than it should have"
            )
            self.rotten.pop(name, None)
        if name.startswith(MODEL_MANIFESTS):
            assert content == models_by_name()[name].objects[name]
            assert self.has_chunks(name), f"{self.region}: {name}: put before its chunks"
        done = await super().put(name, content, only_new)
        if done and name.startswith(FEED):
            self._witness(name, bytes(content))
        if name.startswith(HEADS):
            number = HEAD_FORMAT.unseal(bytes(content), name).number
            self.told.setdefault(name[len(HEADS) :], []).append((self.clock(), number))
        if name.startswith(TOMBSTONES):
            self.stones = {stone.id: stone for stone in (await read_tombstones(self)).by_key.values()}
        if name.startswith(MIRRORS):
            self.check(await read_state(self, name[len(MIRRORS) :]))
        return done

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            assert name not in FOREIGN, f"{self.region}: {name} is not ours"
            self._ask(name, "delete")
        for name in names:
            if name.startswith(PACKS) and name in self.stored:
                self._witness_delete(by_name()[name].pack.id)
        await super().delete(names)

    async def lose(self, name: str) -> None:
        """It is gone, and nobody did it."""
        await MemoryObjects.delete(self, [name])

    def _witness_delete(self, pack_id: bytes) -> None:
        now_s = self.clock()
        is_over, is_erased = self.is_over(pack_id, now_s - SKEW_S), self.is_erased(pack_id)
        if is_over and now_s - self.put_s[pack_id] < SKEW_S:
            self.gone.add(pack_id)  # put anew between the last look at it and this
        if not is_over and not is_erased and pack_id in self.late:
            self.gone.add(pack_id)
            return
        assert is_over or is_erased, f"{self.region}: removed, and nobody asked for it: {pack_id.hex()}"
        self.removed["erased" if is_erased else "over"] += 1

    def _witness(self, name: str, content: bytes) -> None:
        writer, number = name[len(FEED) :].partition("/")[0], segment_number(name)
        segment = decode(content, writer, number)
        now_s = self.clock()
        known = self.segments.setdefault((writer, number), segment)
        assert known == segment, f"{self.region}: {name} has two contents"
        for entry in segment.entries:
            pack_id = entry.pack.id
            may_be_away = self.is_erased(pack_id) or self.is_over(pack_id, now_s) or pack_id in self.gone
            if not entry.origin and self.is_over(pack_id, now_s - SKEW_S):
                self.late.add(pack_id)
                is_put_anew = now_s - self.put_s[pack_id] < 2 * SKEW_S
                may_be = self.may_be_late or is_put_anew or not self.is_over(pack_id, now_s - 2 * SKEW_S)
                may_be = may_be or self._carries_a_copy(entry)
                assert may_be, f"{self.region}: renewed when nobody may any more: {pack_id.hex()}"
            self.lives[pack_id] = merged(self.lives.get(pack_id, entry), entry)
            self.said_s[pack_id] = now_s
            if not self.has(entry):
                assert may_be_away, f"{self.region}: announces what is not there"
                self.gone.add(pack_id)
            if not entry.origin:
                assert pack_id in self.put_here, f"{self.region}: a copy without an origin"
                continue
            own = self.others[entry.origin].said(pack_id)
            assert own is not None and not own.origin, f"of another origin: {entry.origin}"
            assert self.is_wanted(entry, entry.origin), f"{self.region}: against the rules"

        for model in segment.models:
            assert self.has_model(model.name), f"{self.region}: announces a model that is not there"
            self.models[model.name] = merged_models(self.models.get(model.name, model), model)
            if not model.origin:
                assert model.name in self.published_here, f"{self.region}: a copy without an origin"
                continue
            theirs = self.others[model.origin].models.get(model.name)
            assert theirs is not None and not theirs.origin, f"of another origin: {model.origin}"
            assert self.is_model_wanted(model.model, model.origin), f"{self.region}: against the rules"

    def _carries_a_copy(self, entry: Announced) -> bool:
        """Whether a copy of its namespace lives as long: what that hangs on is given its life by the keeper, who alone deletes."""
        digest = entry.pack.header.spec.digest
        return any(
            copy.origin and copy.kept_until_s == entry.kept_until_s and copy.pack.header.spec.digest == digest
            for copy in self.lives.values()
        )

    def has_model(self, name: str) -> bool:
        return name in self.stored and self.has_chunks(name)

    def has_chunks(self, name: str) -> bool:
        """Of the manifest of this name; what rotted here, where it was made, is no mirror's fault."""
        chunks = models_by_name()[name].chunks
        return all(self.stored.get(one) == content or one in self.rotten for one, content in chunks.items())

    def is_model_wanted(self, model: str, source: str) -> bool:
        return weights_rule_for(self._rules, source, self.region, model) is not None

    def expected_models(self) -> set[str]:
        """The names of those that should be here in the end."""
        found = {name for name, model in self.models.items() if not model.origin}
        for source in sources_for(self._rules, self.region, self.others):
            own = (model for model in self.others[source].models.values() if not model.origin)
            found |= {model.name for model in own if self.is_model_wanted(model.model, source)}
        return found

    def has(self, entry: Announced) -> bool:
        """Whether a pack is here; if it rotted here, where it was made, that is no mirror's fault."""
        name = entry.pack.name
        return name in self.rotten or self.stored.get(name) == by_name()[name].content

    def is_wanted(self, entry: Announced, source: str) -> bool:
        spec = entry.pack.header.spec
        key = source, spec.digest
        if key not in self._chosen:
            self._chosen[key] = rule_for(self._rules, source, self.region, spec) is not None
        return self._chosen[key]

    def is_erased(self, pack_id: bytes) -> bool:
        return any(is_covered(pack_id, stone) for stone in self.stones.values())

    def is_over(self, pack_id: bytes, at_s: float) -> bool:
        known = self.lives.get(pack_id)
        return known is not None and 0 < known.kept_until_s <= at_s

    def check(self, state: MirrorState) -> None:
        """What a state of a mirror promises."""
        source = self.others[state.source]
        for writer, position in state.watermark.items():
            for number in range(self._passed[state.source, writer] + 1, position + 1):
                self._check_segment((writer, number), source, "watermark")
            self._passed[state.source, writer] = max(self._passed[state.source, writer], position)
        if self.trusts_ages and state.oldest_age_s is not None:
            complete_s = state.at_s - state.oldest_age_s - 1e-6
            for writer, told in source.told.items():
                last = max((number for at_s, number in told if at_s < complete_s), default=0)
                for number in range(self._complete[state.source, writer] + 1, last + 1):
                    self._check_segment((writer, number), source, f"complete to {complete_s}")
                    self._complete[state.source, writer] = number

    def _check_segment(self, at: tuple[str, int], source: Witness, what: str) -> None:
        if at in source.lost:
            return  # nobody owes what the source has not any more
        segment = source.segments[at]
        for entry in segment.entries:
            is_over = (
                0 < entry.kept_until_s <= self.clock() + SKEW_S
            )  # a longer life is said by another segment
            if entry.origin or is_over or source.is_no_more(entry.pack.id):
                continue
            if self.is_wanted(entry, source.region):
                is_here = self.has(entry) or self.is_no_more(entry.pack.id)
                assert is_here, f"{source.region} to {self.region}: {what}: a pack is missing"
        for model in segment.models:
            if not model.origin and self.is_model_wanted(model.model, source.region):
                assert self.has_model(model.name), (
                    f"{source.region} to {self.region}: {what}: a model is missing"
                )

    def said(self, pack_id: bytes) -> Announced | None:
        """Of a pack that was announced here at some time."""
        return self.lives.get(pack_id) or self.before.get(pack_id)

    def is_no_more(self, pack_id: bytes) -> bool:
        """Whether a pack that was announced here need not be here."""
        return pack_id in self.gone or self.is_erased(pack_id) or self.is_over(pack_id, self.clock() + SKEW_S)

    def highest(self) -> dict[str, int]:
        """Of each writer that is not retired, the number of its last segment."""
        ours = self.stored.keys() - set(FOREIGN)
        there = {name[len(FEED) :].partition("/")[0] for name in ours if name.startswith(FEED)}
        return {writer: number for writer, number in sorted(self.segments) if writer in there}

    def backup(self) -> tuple[dict[str, bytes], dict[tuple[str, int], Segment], dict[bytes, Announced]]:
        return dict(self.stored), dict(self.segments), dict(self.lives)

    def restore(
        self, backup: tuple[dict[str, bytes], dict[tuple[str, int], Segment], dict[bytes, Announced]]
    ) -> None:
        """All but packs is as it was then."""
        stored, segments, lives = backup
        self.before = {**self.before, **self.lives}
        self.lives = lives
        packs = {name: content for name, content in self.stored.items() if name.startswith(PACKS)}
        self.lost |= self.segments.keys() - segments.keys()
        self.stored, self.segments = {**stored, **packs}, segments
        self._names = sorted(self.stored)
        self._modified_s = {name: self._modified_s.get(name, self.clock()) for name in self.stored}
        self.lost_stones += [
            stone for one, stone in self.stones.items() if TOMBSTONES + one not in self.stored
        ]
        self.stones = {one: stone for one, stone in self.stones.items() if TOMBSTONES + one in self.stored}

    def own(self) -> Iterable[Announced]:
        """What was made here, and is needed still."""
        for pack_id, entry in self.lives.items():
            if not entry.origin and not self.is_no_more(pack_id):
                yield entry

    def expected(self) -> dict[bytes, Announced]:
        """The packs that should be here in the end, and for how long."""
        found = {entry.pack.id: entry for entry in self.own()}
        for source in sources_for(self._rules, self.region, self.others):
            for entry in self.others[source].own():
                if self.is_wanted(entry, source) and not self.is_erased(entry.pack.id):
                    found[entry.pack.id] = merged(found.get(entry.pack.id, entry), entry)
        return {pack_id: entry for pack_id, entry in found.items() if pack_id not in self.gone}

    def problem(self, expected: dict[bytes, Announced]) -> str:
        """What is not yet here as it should be; "" if all is."""
        packs = {one.pack.id for name, one in by_name().items() if name in self.stored}
        if missing := expected.keys() - packs:
            return f"not everything is there: {len(missing)} are missing"
        for pack_id, entry in expected.items():
            here = self.lives.get(pack_id)
            if here is None:
                return "there, and not announced"
            if merged(here, entry).kept_until_s != here.kept_until_s:
                return "it is not kept as long as in its source"
        for pack_id in packs - expected.keys():
            is_announced = self.said_s.get(pack_id, -1.0) >= self.put_s[pack_id]
            if self.is_erased(pack_id) and is_announced and by_id()[pack_id].pack.name not in self.sick:
                return "it is erased, and here"
            if pack_id not in self.put_here and not self.may_come(pack_id):
                return "more is there than the rules say"
        models = {name for name in self.stored if name.startswith(MODEL_MANIFESTS)} - set(FOREIGN)
        if self.models.keys() != self.expected_models() or models - self.models.keys() - self.begun_here:
            return "not the models that should be here"
        for source in sources_for(self._rules, self.region, self.others):
            if self.others[source].stones.keys() - self.stones.keys():
                return "a tombstone is not here"
        return ""

    def may_come(self, pack_id: bytes) -> bool:
        """Whether a pack is let through by the rules, from a region that had it."""
        return any(
            pack_id in self.others[source].put_here and self.is_wanted(entry, source)
            for source in sources_for(self._rules, self.region, self.others)
            if (entry := self.others[source].said(pack_id)) is not None
        )


class Way(FaultyObjects):
    """The way to the bucket at home. puts: how often each pack was put; made: where ids of packs are added that were."""

    def __init__(self, *arguments: Any, made: set[bytes] | None = None) -> None:
        super().__init__(*arguments)
        self.puts: Counter[str] = Counter()
        self._made = made

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if name.startswith(PACKS):
            self.puts[name] += 1
            if self._made is not None:
                self._made.add(by_name()[name].pack.id)
        return await super().put(name, content, only_new)


class ReadOnly(FaultyObjects):
    """The way to a source."""

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        raise AssertionError(f"{name}: a mirror writes to its source")

    async def delete(self, names: object) -> None:
        raise AssertionError(f"{names}: a mirror deletes in its source")


disks: dict[Path, dict[bytes, bytes]] = {}  # of one world: rows by path. They outlive processes


def opened(path: Path, _identity: str) -> Catalogue:
    return Catalogue(MemoryRows(disks.setdefault(path, {})))


@dataclass
class Around:
    """What processes know of their world: time, chance, when it becomes quiet, and how much goes wrong."""

    clock: Callable[[], float]
    chance: random.Random
    rules: Sequence[Rule]
    buckets: dict[str, Witness]
    source_faults: Faults
    home_faults: Faults
    busy_until_s: float
    has_lives: bool
    skews_s: tuple[float, ...]
    has_models: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def now_s(self) -> float:
        return self.clock() - _START_S


class Process:
    """One that can be killed: what it keeps are rows of catalogues."""

    def __init__(self, around: Around, region: str, name: str, paths: Iterable[str]) -> None:
        self.around, self.region, self.name = around, region, name
        self.chance = random.Random(around.chance.random())
        self.bucket = around.buckets[region]
        self.ways: list[FaultyObjects] = []
        self.node: RegionNode | None = None
        self.path = Path(name)
        self.busy_until_s = around.busy_until_s
        self.task: asyncio.Task[None] | None = None
        self._known_s: dict[str, float] = {}  # by tombstone, when it was seen to be known here
        self._paths = [self.path, *(self.path / other for other in paths)]
        self._wrong_s = [self.chance.choice(around.skews_s) for _ in range(3)]

    def clock(self) -> float:
        """Of this machine: wrong, and set now and then, until all that goes wrong is over."""
        now_s = self.around.now_s()
        is_wrong = now_s < self.around.busy_until_s
        return self.around.clock() + (self._wrong_s[int(now_s / CLOCK_SET_S) % 3] if is_wrong else 0.0)

    def fresh(self) -> random.Random:
        return random.Random(self.chance.random())

    def start(self) -> None:
        if self.chance.random() < 0.2:  # a new disk
            for path in self._paths:
                disks.pop(path, None)
        self.task = asyncio.ensure_future(self.live())

    async def live(self) -> None:
        raise AssertionError("a kind of process lives")

    async def joined(self, objects: FaultyObjects, is_mirror: bool = False) -> RegionNode:
        while True:
            try:
                return await RegionNode.join(
                    objects, "acme", self.region, self.path, self.name, self.fresh(), self.clock, SKEW_S,
                    is_mirror=is_mirror,
                )  # fmt: skip
            except (ObjectError, ReplicationError):
                await asyncio.sleep(5.0)

    async def kill(self) -> None:
        assert self.task is not None
        working = () if self.node is None else self.node._tasks.all  # they die with their process
        for task in (self.task, *working):
            task.cancel()
        await asyncio.wait([self.task])
        self.node = None
        self._known_s.clear()
        if not self.task.cancelled():
            self.task.result()  # it had failed before

    def look(self) -> None:
        """One that has failed of itself has a bug, and so has one that did what may not be."""
        assert self.task is not None
        if self.bucket.wrong is not None:
            raise self.bucket.wrong
        if self.task.done() and not self.task.cancelled():
            self.task.result()
        if self.node is not None:
            self._look_for_erased(self.node)

    def _look_for_erased(self, node: RegionNode) -> None:
        """What is erased is not served a minute after it is known."""
        now_s = self.around.clock()
        known = {stone.id: stone for stone in node.erasure.tombstones}
        self._known_s = {one: self._known_s.get(one, now_s) for one in known}
        for number in self.chance.sample(range(POOL), 10):
            spec, hashes = made(number).pack.header.spec, prompt(number)
            for one, stone in known.items():
                if now_s - self._known_s[one] < 60.0 or not stone.names(spec):
                    continue
                most = hashes.index(stone.block_hash) if stone.block_hash in hashes else len(hashes)
                most = most if stone.block_hash else 0
                held = finish(node.held_steps(spec, b"".join(hashes), 0))
                assert held <= most, f"{self.name}: {held} blocks of {number} served, {most} are not erased"

    def suspend(self) -> None:
        for way in self.ways:
            way.suspend()

    def go_on(self) -> None:
        for way in self.ways:
            way.go_on()

    def problem(self, expected: dict[bytes, Announced]) -> str:
        """What this process does not know yet as it should, of what is here; "" if it does."""
        if self.node is None:
            return "it has not joined"
        if self.node._unannounced:
            return "it has not announced all that it has put"
        catalogue = self.node.catalogue
        known = {**catalogue.retired, **catalogue.positions}
        if not _has_read(known, self.bucket.highest()):
            return "it has not read all of the feed"
        ids = {entry.pack.id for chunk in catalogue.chunks() for entry in chunk}
        sick = {pack_id for pack_id in ids if by_id()[pack_id].pack.name in self.bucket.sick}
        if any(map(self.bucket.is_erased, ids - sick)):
            return "it knows what is erased"
        if not all(
            any(is_covered(one, stone) for stone in self.bucket.lost_stones) for one in expected.keys() - ids
        ):
            return "it does not know all that is there"
        if catalogue.models.keys() != self.bucket.expected_models():
            return "it does not know the models"
        return ""


def _has_read(positions: Mapping[str, int], numbers: Mapping[str, int]) -> bool:
    """Numbers fall where a bucket was restored."""
    return all(positions.get(writer, 0) >= number for writer, number in numbers.items())


class Node(Process):
    """A daemon: what is asked for is persisted, with all before it; what is asked for again lives longer."""

    def __init__(self, around: Around, region: str, name: str) -> None:
        super().__init__(around, region, name, ())
        self.way = Way(self.bucket, self.fresh(), around.home_faults, made=self.bucket.put_here)
        self.ways = [self.way]

    async def live(self) -> None:
        self.node = node = await self.joined(self.way)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            tasks.create_task(self.work(node))

    async def work(self, node: RegionNode) -> None:
        around, chance = self.around, self.chance
        await asyncio.sleep(chance.expovariate(1 / 20))
        while around.now_s() < self.busy_until_s:
            for _ in range(chance.choice((1, 1, 2, 4))):
                await self.ask(node, made(chance.randrange(POOL)))
            if around.has_models and chance.random() < 0.2:
                await self.publish(node, made_model(chance.randrange(MODELS)))
            await asyncio.sleep(chance.expovariate(1 / 20))

    async def publish(self, node: RegionNode, model: MadeModel) -> None:
        """As a publisher does: chunks, manifest, announcement."""
        self.bucket.begun_here.add(model.name)
        try:
            for name, content in model.objects.items():
                if name not in self.bucket.stored or name.startswith(MODEL_MANIFESTS):
                    await self.way.put(name, content)
        except ObjectError:
            return  # and does not come back; perhaps the manifest is there, and not announced
        self.bucket.published_here.add(model.name)
        self.around.seen["published"] += 1
        await node.announce(model.announced)

    async def ask(self, node: RegionNode, wanted: Made) -> None:
        """A prompt that ends with this pack."""
        path: list[Made] = []
        above: Made | None = wanted
        while above is not None:
            path.insert(0, above)
            above = above.above
        if any(one.pack.id in bucket.gone for one in path for bucket in self.around.buckets.values()):
            return
        until_s = self.until_s()
        for one, known in zip(path, node.known([one.pack.id for one in path]), strict=True):
            header = one.pack.header
            if known is None and not await node.persist(header, one.records, one.number, until_s):
                return
            if known is not None and known.kept_until_s > 0:
                self.around.seen["renewed"] += 1
                node._tasks.begin(
                    "renewing", node.renew({header.spec.digest + header.hash_at(0): until_s or FOR_EVER_S})
                )

    def until_s(self) -> int:
        """For ever, for a long time, or until about the end of all that goes wrong."""
        if not self.around.has_lives or self.chance.random() < 0.5:
            return self.chance.choice((0, FOR_EVER_S - 10**9))
        return int(self.around.clock() + self.chance.uniform(10, 90))


class MirrorProcess(Process):
    """`kvstore mirror` of one region."""

    def __init__(self, around: Around, region: str) -> None:
        sources = sources_for(around.rules, region, around.buckets)
        super().__init__(around, region, f"mirror of {region}", sources)
        self.home = Way(self.bucket, self.fresh(), around.home_faults)
        self.sources = {
            name: ReadOnly(around.buckets[name], self.fresh(), around.source_faults) for name in sources
        }
        self.ways = [self.home, *self.sources.values()]
        self.mirrors: list[Mirror] = []

    async def live(self) -> None:
        self.mirrors = []
        self.node = node = await self.joined(self.home, is_mirror=True)
        paces: dict[Rule, float] = {}
        for name in self.sources:
            join = partial(self.source, name)
            self.mirrors.append(
                Mirror(node, self.home, name, join, self.around.rules, paces, self.clock, self.fresh())
            )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            for mirror in self.mirrors:
                tasks.create_task(mirror.run())

    async def source(self, name: str) -> Joined:
        marker = await open_region(self.sources[name], "acme", name)
        catalogue = opened(self.path / name, marker.identity)
        return Joined(marker.identity, self.sources[name], catalogue)

    def look(self) -> None:
        """And the promises are checked where nothing is written down yet."""
        super().look()
        for mirror in self.mirrors:
            if mirror.pull is not None:
                self.bucket.check(mirror.state())

    def problem(self, expected: dict[bytes, Announced]) -> str:
        states = [mirror.state() for mirror in self.mirrors]
        heads = {name: self.around.buckets[name].highest() for name in self.sources}
        for state in states:
            if not _has_read(state.watermark, heads[state.source]) or state.pending:
                return f"not all is copied: {state}"
        return super().problem(expected) if len(states) == len(self.sources) else "it has not begun"
