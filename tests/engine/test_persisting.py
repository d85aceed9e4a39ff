"""Persisting: what is asked for often enough lies in the bucket, whole, true and closed under prefixes; serving goes first."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvstore.constants import DAY_S, PERSIST_JOBS_MAX
from kvstore.durable.demand import DEMAND_SET_PLACES, Demand, name_of
from kvstore.durable.persister import PERSIST_DELAY_S, PERSIST_LOOKS_MAX, Life, Persisting
from kvstore.durable.worth import LONGEST_S, Cost, Prices, Seen, Worth
from kvstore.durable.worth import Block as Weight
from kvstore.engine.engine import Engine
from kvstore.index.block import Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.accounts import Asking
from kvstore.residency.levels import Drive
from kvstore.steps import Steps, finish
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader, validate

MIB = 1 << 20
SIZE = 64 << 10
SPACE = NamespaceSpec(b"p" * 16, SIZE, 8, 128)  # two blocks a granule


class Bucket:
    """Durable blocks; a pack that comes must hang on what is durable, and its records must be true."""

    def __init__(self, chance: random.Random, fault_rate: float = 0.0) -> None:
        self.is_open = True
        self.durable: dict[bytes, bytes] = {}  # block hash -> content
        self.packs: list[PackHeader] = []
        self.waiting: list[tuple[PackHeader, list[bytes], Life, Callable[[bool], None]]] = []
        self.kept_until_s: dict[bytes, int] = {}
        self._chance, self._fault_rate = chance, fault_rate

    def held_steps(self, namespace: Namespace, hashes: bytes, start: int) -> Steps[int]:
        at = start
        while at < len(hashes) // 8 and hashes[at * 8 : at * 8 + 8] in self.durable:
            at += 1
            yield
        return at

    def renew(self, namespace: Namespace, kept_until_s: Mapping[bytes, int]) -> None:
        assert kept_until_s.keys() <= self.durable.keys()
        self.kept_until_s.update(kept_until_s)

    def persist(
        self,
        header: PackHeader,
        records: Sequence[memoryview],
        life: Life,
        done: Callable[[bool], None],
        prefix: bytes = b"",
    ) -> None:
        validate(header)
        assert not header.parent or header.parent in self.durable, "a pack without its ancestors"
        assert prefix[-8:] == header.parent, "not all that is before it"
        for index, record in enumerate(records):
            assert digest(record) == header.checksum_at(index)
        self.waiting.append((header, [bytes(record) for record in records], life, done))

    def answer(self) -> None:
        header, records, life, done = self.waiting.pop(self._chance.randrange(len(self.waiting)))
        if self._chance.random() < self._fault_rate:
            done(False)
            return
        self.durable.update(zip(header.each_hash(), records, strict=True))
        self.packs.append(header)
        self.kept_until_s.update(dict.fromkeys(header.each_hash(), life.kept_until_s))
        done(True)


class Node:
    """An engine with one attached client, over a bucket."""

    def __init__(
        self,
        path: Path,
        rule: Worth | None = None,
        bucket: Bucket | None = None,
        slabs: int = 8,
        device: FaultyDevice | None = None,
        bytes_per_s: int = 1 << 40,
    ) -> None:
        self.now_s = 1000.0
        self.io = SteppedIo()
        self.arena = open_arena(path, slabs * 2 * MIB, 2 * MIB, 16384)
        self.bucket = bucket or Bucket(random.Random(0))
        self.engine = Engine(
            self.arena,
            [Drive(device, self.io)] if device is not None else [],
            NamespaceRegistry(),
            self.io,
            clock=lambda: self.now_s,
            wall_clock=lambda: self.now_s,
            persisting=Persisting(
                self.bucket, Demand(1024), rule or Seen(2, 3600.0, 7200.0), bytes_per_s, 4 * SIZE
            ),
        )
        self.engine.adopt()
        self.io.run()
        self.session = self.engine.open_session(0)
        self.space = self.engine.register(SPACE)
        self.contents: dict[bytes, bytes] = {}

    def store(self, hashes: bytes, first: int = 0) -> None:
        parent = hashes[first * 8 - 8 : first * 8] if first else b""
        answer = self.engine.reserve(self.session, self.space, hashes[first * 8 :], parent)
        sums = []
        for slot in granted(answer):
            block_hash = hashes[(first + slot.position) * 8 :][:8]
            data = random.Random(block_hash).randbytes(SIZE)
            self.contents[block_hash] = data
            self.arena.mapping[slot.offset : slot.offset + SIZE] = data
            sums.append(digest(data))
        if sums:
            positions = [slot.position for slot in granted(answer)]
            self.engine.commit(self.session, answer.lease, positions, b"".join(sums))

    def ask(self, hashes: bytes, ticket: int = 0) -> None:
        asking = Asking(ticket, tokens=len(hashes) // 8 * 128)
        found = self.engine.find([self.space], hashes, asking)
        self.engine.book([self.space], hashes, found, asking)

    def serve(self, hashes: bytes) -> None:
        """A request: asked for, and what was not held is stored."""
        self.ask(hashes)
        self.store(hashes, 0)

    def step(self) -> bool:
        """Whether there is more to count."""
        persister = self.engine.persister
        assert persister is not None
        finish(persister.steps())
        while self.engine.background.step():
            pass
        return persister.is_late

    def persist(self, seconds: float = PERSIST_DELAY_S) -> None:
        """Time passes, and everything that can be persisted is."""
        self.step()
        self.now_s += seconds
        for _ in range(1000):
            self.now_s += 1e-6
            self.step()
            self.io.run()
            if not self.bucket.waiting:
                return
            self.bucket.answer()
        raise AssertionError("there is always more to persist")

    def durable(self, hashes: bytes) -> int:
        return finish(self.bucket.held_steps(self.engine.namespaces.get(self.space), hashes, 0))

    def close(self) -> None:
        assert self.engine.check() == []
        for block_hash, data in self.bucket.durable.items():
            assert self.contents[block_hash] == data
        assert sum(pack.count for pack in self.bucket.packs) == len(self.bucket.durable), "packed twice"
        self.arena.close(unlink=True)


def prompt(*numbers: int) -> bytes:
    return b"".join(f"{number:08d}".encode() for number in numbers)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path / "arena")
    yield made
    made.close()


def test_what_is_seen_twice_lasts(node: Node) -> None:
    """A prompt asked for once is not persisted; asked for again, its whole granules are, in packs of the right size."""
    asked = prompt(*range(9))
    node.serve(asked)
    node.persist()
    assert node.durable(asked) == 0
    node.serve(asked)
    node.persist()
    assert node.durable(asked) == 8  # the ninth block is no whole granule
    assert [pack.count for pack in node.bucket.packs] == [4, 4]
    assert node.bucket.packs[1].parent == prompt(3)


def test_what_is_being_put_is_not_packed_twice(node: Node) -> None:
    """A prompt that is asked for again while its pack is on its way makes no second one, however long that takes."""
    asked, persister = prompt(0, 1), node.engine.persister
    assert persister is not None
    for _ in range(2):
        node.serve(asked)
    for _ in range(20):
        node.now_s += PERSIST_DELAY_S
        node.ask(asked)
        node.step()
        node.io.run()
    assert len(node.bucket.waiting) == 1
    node.persist()
    assert len(node.bucket.packs) == 1 and node.durable(asked) == 2


def test_prompts_that_begin_alike_are_packed_one_after_the_other(node: Node) -> None:
    """The part that they share is in one pack, however many of them are due at once; other prompts do not wait for it."""
    alike = [prompt(0, 1, 10 * number, 10 * number + 1) for number in range(1, 6)]
    for asked in [*alike, *alike, prompt(90, 91), prompt(90, 91)]:
        node.serve(asked)
    persister = node.engine.persister
    assert persister is not None
    for _ in range(15):
        node.step()
        node.now_s += PERSIST_DELAY_S / 5
    node.io.run()
    assert [header.hashes[:8] for header, *_ in node.bucket.waiting] == [prompt(0), prompt(90)]
    for _ in range(3):
        node.persist()
    assert [node.durable(asked) for asked in alike] == [4] * 5 and persister.candidates == 0


def test_a_look_at_many_candidates_is_short(node: Node) -> None:
    """However many prompts begin like the one whose pack is under way, few of them are looked at in one go."""
    node.store(prompt(0, 1))
    for number in range(10, 170, 2):
        for _ in range(2):
            node.ask(prompt(0, 1, number, number + 1))
    persister, held_steps = node.engine.persister, node.bucket.held_steps
    assert persister is not None
    while node.step():
        pass
    node.now_s += PERSIST_DELAY_S
    assert persister.candidates == 80 + 1  # what they share, too
    looks: list[bytes] = []

    def counted(namespace: Namespace, hashes: bytes, start: int) -> Steps[int]:
        looks.append(hashes)
        return held_steps(namespace, hashes, start)

    node.bucket.held_steps = counted  # type: ignore[method-assign]
    persister.pump()
    while node.engine.background.step():
        pass
    assert len(looks) == 1 and len(persister.pinned()) == 2
    node.now_s += 1.0
    persister.pump()
    persister.pump()
    assert len(looks) == 2, "a look is in pieces, and there is one at a time"
    while node.engine.background.step():
        pass
    assert len(looks) == 1 + PERSIST_LOOKS_MAX


def test_only_what_is_shared_lasts(node: Node) -> None:
    """Of two prompts that begin alike, the common part is persisted, and a third one adds its part behind it."""
    first, second = prompt(0, 1, 2, 3, 4, 5), prompt(0, 1, 2, 3, 14, 15)
    node.serve(first)
    node.serve(second)
    node.persist()
    assert (node.durable(first), node.durable(second)) == (4, 4)
    node.serve(second)
    node.persist()
    assert (node.durable(first), node.durable(second)) == (4, 6)
    assert node.bucket.packs[-1].parent == prompt(3) and node.bucket.packs[-1].count == 2


def test_a_ticket_counts_once(node: Node) -> None:
    """An engine that asks again for the request it waits for has not asked for it twice."""
    asked = prompt(0, 1)
    node.store(asked)
    for _ in range(3):
        node.ask(asked, ticket=7)
    node.persist()
    assert node.durable(asked) == 0
    node.ask(asked, ticket=8)
    node.persist()
    assert node.durable(asked) == 2


def test_blocks_that_come_after_their_lookup_are_waited_for(node: Node) -> None:
    """A candidate whose blocks are not stored yet is looked at again, and given up in the end."""
    asked = prompt(0, 1)
    node.ask(asked)
    node.ask(asked)
    node.persist()
    node.store(asked)
    node.persist(10 * PERSIST_DELAY_S)
    assert node.durable(asked) == 2
    node.ask(prompt(8, 9))
    node.ask(prompt(8, 9))
    for _ in range(10):
        node.persist(100.0)
    assert node.engine.persister is not None and node.engine.persister.candidates == 0
    assert node.engine.counters.persist_given_up == 1


def test_what_never_comes_holds_up_nothing_else(node: Node) -> None:
    """A prompt that an engine asked for and never stored is waited for longer and longer; the others are persisted meanwhile as ever, in
    their order, and each look is at a few."""
    for number in range(40):
        for _ in range(2):
            node.ask(prompt(1000 + 2 * number, 1001 + 2 * number))
    for _ in range(20):
        node.persist(PERSIST_DELAY_S / 2)
    assert node.engine.persister is not None and node.engine.persister.candidates == 40
    good = [prompt(2 * number, 2 * number + 1) for number in range(8)]
    for asked in (*good, *good):
        node.serve(asked)
    node.persist(PERSIST_DELAY_S)
    for _ in range(4):
        node.persist(0.1)
    assert [node.durable(asked) for asked in good] == [2] * 8
    assert [pack.hashes for pack in node.bucket.packs] == good


def test_demand_is_counted_at_a_stop(node: Node) -> None:
    """What was asked for while the bucket was away counts, and nothing is begun."""
    node.bucket.is_open = False
    node.serve(prompt(0, 1))
    persister = node.engine.persister
    assert persister is not None and not node.step() and persister.asks.waiting
    finish(persister.count_all())
    assert not persister.asks.waiting and not persister.candidates
    node.bucket.is_open = True
    node.serve(prompt(0, 1))
    node.persist()
    assert node.durable(prompt(0, 1)) == 2


def test_what_is_asked_for_again_is_kept_longer(node: Node) -> None:
    """A durable prefix is told to be kept longer when its life has grown by half, and not with every ask."""
    asked = prompt(0, 1, 2, 3)
    node.serve(asked)
    node.serve(asked)
    node.persist()
    put = dict(node.bucket.kept_until_s)
    assert set(put.values()) == {1000 + 7200}
    node.ask(asked)
    node.persist(1000.0)
    first = node.bucket.kept_until_s[prompt(3)]
    for _ in range(3):
        node.ask(asked)
        node.persist(1000.0)
    assert node.bucket.kept_until_s[prompt(3)] == first
    node.ask(asked)
    node.persist()
    assert node.bucket.kept_until_s[prompt(3)] == node.bucket.kept_until_s[prompt(1)] > first + 3600


def test_what_only_nvme_holds_is_read_from_there(tmp_path: Path) -> None:
    """Blocks that have left DRAM are persisted from their device."""
    node = Node(tmp_path / "arena", device=FaultyDevice(64), slabs=1)
    asked = prompt(*range(4))
    node.serve(asked)
    node.io.run()
    node.store(prompt(*range(100, 132)))  # takes all of DRAM
    node.io.run()
    node.ask(asked)
    node.persist()
    assert node.durable(asked) == 4
    node.close()


def test_blocks_under_a_ttl_are_not_persisted(node: Node) -> None:
    """A bucket does not forget in time, so what must be forgotten does not get there."""
    node.engine.blocks.expiry.set_ttl(SPACE.digest, 3600.0, 0.0)
    for _ in range(3):
        node.serve(prompt(0, 1))
    node.persist()
    assert not node.bucket.durable


@pytest.mark.parametrize("is_read", [False, True], ids=["waits", "is being read"])
def test_a_ttl_that_is_set_meanwhile_counts(node: Node, is_read: bool) -> None:
    """What waits to be persisted, or is being read for it, when it gets a TTL does not get into the bucket; nothing stays pinned."""
    for _ in range(2):
        node.serve(prompt(0, 1))
    persister = node.engine.persister
    assert persister is not None
    node.step()
    node.now_s += PERSIST_DELAY_S if is_read else 0.0
    node.step()
    assert (len(persister.pinned()), persister.candidates) == (2 * is_read, 1)
    node.engine.blocks.expiry.set_ttl(SPACE.digest, 3600.0, 0.0)
    node.persist()
    assert not node.bucket.durable and persister.candidates == 0 and not persister.pinned()


def test_serving_goes_first(tmp_path: Path) -> None:
    """Packs are built at the rate that is allowed, few at once, and one at a time while engines wait for loads."""
    node = Node(tmp_path / "arena", bytes_per_s=2 * SIZE)
    prompts = [prompt(*range(number, number + 2)) for number in range(0, 100, 10)]
    for asked in prompts * 2:
        node.serve(asked)
    persister = node.engine.persister
    assert persister is not None
    for expected in (1, 2, 3):
        node.persist(1.0 if expected > 1 else PERSIST_DELAY_S)
        assert len(node.bucket.packs) == expected
    persister._bytes_per_s = 1 << 40
    for _ in range(10):
        node.now_s += 10.0
        node.step()
    assert len(persister._jobs) == PERSIST_JOBS_MAX
    node.io.run()
    persister._loads_waiting = lambda: 5
    while len(persister._jobs) > 1:
        node.bucket.answer()
    node.bucket.answer()
    node.now_s += 10.0
    node.step()
    node.now_s += 10.0
    node.step()
    assert len(persister._jobs) == 1
    node.io.run()
    while node.bucket.waiting:
        node.bucket.answer()
    node.close()


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_the_durable_set_stays_closed_and_true(tmp_path: Path, seed: int) -> None:
    """Shared prompts, a small DRAM, a device and a bucket that fail: packs always hang on durable blocks, and are true."""
    chance = random.Random(seed)
    node = Node(
        tmp_path / "arena",
        bucket=Bucket(chance, chance.choice([0.0, 0.3])),
        slabs=2,
        device=FaultyDevice(48, seed, chance.choice([0.0, 0.2])) if chance.random() < 0.7 else None,
    )
    stems = [range(first, first + chance.randrange(1, 8)) for first in range(1000, 1600, 100)]
    for _ in range(80):
        stem = chance.choice(stems)
        node.serve(prompt(*stem, *range(stem[0] + 50, stem[0] + 50 + chance.randrange(3))))
        if chance.random() < 0.3:
            node.io.run()
        if chance.random() < 0.4:
            node.persist(chance.choice([0.0, PERSIST_DELAY_S, 20.0]))
        node.bucket.is_open = chance.random() < 0.9
    node.bucket.is_open = True
    node.persist(1000.0)
    assert node.bucket.packs, "nothing was persisted at all"
    node.io.run()
    node.close()


# -- demand --


def test_demand_is_a_model_of_counts(tmp_path: Path) -> None:
    """While a set has room, counts are those of a dict; a snapshot goes on where they were; damage is told."""
    chance = random.Random(3)
    demand, model = Demand(1 << 12), dict[int, tuple[float, int]]()
    rule = Seen(3, 50.0, 1.0)
    names = [name_of(b"n" * 16, chance.randbytes(8)) for _ in range(100)]
    for now_s in range(1, 3000):
        name = chance.choice(names)
        count, at_s = model.get(name, (0.0, 0))
        model[name] = (rule.grown(count, now_s - at_s) if count else 1.0), now_s
        assert demand.count[demand.asked(name, now_s, rule.grown)] == model[name][0]
    content = demand.snapshot()
    other = Demand(1 << 12)
    assert other.restore(content)
    assert other.snapshot() == content
    for damaged in (
        content[:-1],
        bytes([content[0] ^ 1]) + content[1:],
        content[:-1] + bytes([content[-1] ^ 1]),
    ):
        assert not other.restore(damaged)
    assert not Demand(1 << 11).restore(content) and other.snapshot() == content


def test_a_full_set_forgets_what_was_asked_for_longest_ago() -> None:
    """The table never grows, and keeps the newest."""
    demand, rule = Demand(DEMAND_SET_PLACES), Seen(2, 1e9, 1.0)
    for number in range(1, DEMAND_SET_PLACES + 2):
        assert demand.count[demand.asked(number, number, rule.grown)] == 1.0
    assert demand.count[demand.asked(2, 100, rule.grown)] == 2.0
    assert demand.count[demand.asked(1, 101, rule.grown)] == 1.0


# -- worth --


def test_seen_means_so_many_times_without_a_long_pause() -> None:
    """The count begins anew behind a pause that is longer than allowed."""
    rule = Seen(3, 60.0, 9.0)
    assert rule.grown(rule.grown(1.0, 60), 60) == 3.0 == rule.least(Weight(1, 1.0, 1))
    assert rule.grown(2.0, 61) == 1.0


def test_cost_is_the_formula_of_the_docs() -> None:
    """A block of 5 MiB that takes 1.6 ms of eight GPUs: worth some asks at rest, many more where copies cost egress."""
    prices = Prices(2.0, 0.023, 5.0, 0.0, 0.1)
    weight = Weight(5 << 20, 0.0016, 8)
    saved = 0.1 * 0.0016 * 8 * 2.0 / 3600
    kept = (5 << 20) / 1e9 * 0.023 * (21600 / math.log(2)) / (365.25 / 12 * 86400)
    put = 5e-6 * (5 << 20) / (16 << 20)
    rule = Cost(prices, 21600.0, 16 << 20)
    assert rule.least(weight) == pytest.approx((kept + put) / saved)
    mirrored = Cost(Prices(2.0, 0.023, 5.0, 0.04, 0.1), 21600.0, 16 << 20)
    assert mirrored.least(weight) > 10 * rule.least(weight)
    assert rule.grown(8.0, 21600) == 5.0
    assert rule.keep_s(8.0, 2.0) == 2 * 21600
    assert rule.least(Weight(5 << 20, 0.0, 8)) == math.inf  # nobody knows what it saves
    assert Cost(Prices(0.0, 0.023, 5.0, 0.0, 0.1), 21600.0, 16 << 20).least(weight) == math.inf


@pytest.mark.parametrize("put_price", [0.0, 5e-324, 1e-300, 1e-9])
def test_nothing_is_kept_for_longer_than_a_second_can_be_counted(tmp_path: Path, put_price: float) -> None:
    """Where storage costs next to nothing, and a half life is a year, a prompt is persisted, for ten years, however often it is asked for."""
    node = Node(tmp_path / "arena", Cost(Prices(1e6, 0.0, put_price, 0.0, 1.0), 365 * DAY_S, MIB))
    node.now_s = 1.8e9
    assert node.engine.persister is not None
    node.engine.persister._prefill_rate = lambda namespace: 1.0
    for _ in range(60):
        node.serve(prompt(0, 1))
        node.persist()
    assert node.durable(prompt(0, 1)) == 2
    assert max(node.bucket.kept_until_s.values()) - node.now_s <= LONGEST_S
    node.close()
