"""Speeds and break-even: what is learned of a tier, and how far a prefix is worth loading."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.health.breaker import Job
from kvstore.health.breakeven import BreakEven, Slow
from kvstore.health.speed import TierSpeed
from kvstore.index import forest
from kvstore.index.block import Namespace
from kvstore.ledger.accounts import NOBODY_IN_PARTICULAR, Asking
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.steps import Steps, finish
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
BLOCK_TOKENS = 16


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Disk:
    """Jobs on a tier of known latency and throughput, one after the other."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.clock = Clock()
        self.speed = TierSpeed(self.clock)
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s

    def load(self, *sizes_bytes: int) -> float:
        """Load these at once; answers how long it took."""
        begun_s = self.clock.now_s
        jobs = [Job(size, begun_s) for size in sizes_bytes]
        for job in jobs:
            self.speed.wait(job.size_bytes)
            self.speed.begin(job)
        self.clock.now_s += self.latency_s
        for job in jobs:
            self.clock.now_s += job.size_bytes / self.bytes_per_s
            self.speed.arrive(job.size_bytes)
            self.speed.end(job, job.size_bytes)
        took_s = self.clock.now_s - begun_s
        self.clock.now_s += 1.0  # idle
        return took_s


def space(number: int = 0, record_bytes: int = MIB) -> Namespace:
    return Namespace(number, NamespaceSpec(bytes([number]) * 16, record_bytes, 8, BLOCK_TOKENS))


def hashes(count: int) -> bytes:
    return b"".join(n.to_bytes(8, "big") for n in range(1, count + 1))


def fill(namespace: Namespace, places: str) -> bytes:
    """A chain whose blocks are in DRAM (d), on NVMe (n), or both (b)."""
    names = forest.split_hashes(hashes(len(places)), 8)
    for parent, name, place in zip([b"", *names], names, places, strict=False):
        for bit, letters in ((IN_DRAM, "db"), (IN_NVME, "nb")):
            if place in letters:
                forest.arrived(namespace, name, parent, bit)
    return b"".join(names)


def test_nothing_is_predicted_before_anything_is_measured() -> None:
    """A tier that was never used is expected to take no time: the first loads are the measurement."""
    disk = Disk(0.01, 1e9)
    assert disk.speed.load_s(100 * MIB) == 0.0
    disk.load(MIB)
    assert disk.speed.load_s(100 * MIB) > 0.0


@pytest.mark.parametrize("latency_s", [0.0, 0.0001, 0.02])
@pytest.mark.parametrize("bytes_per_s", [1e8, 3e9])
def test_predictions_come_close(latency_s: float, bytes_per_s: float) -> None:
    """After a mix of large and small loads, a large one is predicted within a factor of two."""
    disk = Disk(latency_s, bytes_per_s)
    for _ in range(10):
        disk.load(*[8 * MIB] * 4)
        disk.load(2 * MIB)
    predicted_s = disk.speed.load_s(64 * MIB)
    assert disk.load(*[8 * MIB] * 8) / 2 < predicted_s < 2 * disk.load(*[8 * MIB] * 8)


@pytest.mark.parametrize("factor", [100, 0.01])
def test_a_change_is_noticed_within_a_few_loads(factor: float) -> None:
    """A tier that becomes a hundred times slower, or faster, is known to be so after six loads."""
    disk = Disk(0.0, 1e9)
    for _ in range(5):
        disk.load(8 * MIB)
    disk.bytes_per_s /= factor
    for _ in range(6):
        took_s = disk.load(8 * MIB)
    assert took_s / 2 < disk.speed.load_s(8 * MIB) < 2 * took_s


def test_what_is_queued_is_waited_for() -> None:
    """Bytes that others asked for come first."""
    disk = Disk(0.0, 1e9)
    disk.load(8 * MIB)
    alone_s = disk.speed.load_s(MIB)
    disk.speed.wait(1000 * MIB)
    assert disk.speed.load_s(MIB) == pytest.approx(alone_s + 1000 * MIB / 1e9, rel=0.01)
    disk.speed.arrive(1000 * MIB)
    assert disk.speed.load_s(MIB) == alone_s


def test_a_late_job_makes_others_wait() -> None:
    """While a job is late, a new load is expected to wait at least as long again."""
    disk = Disk(0.0, 1e9)
    disk.load(8 * MIB)
    disk.speed.begin(Job(MIB, disk.clock.now_s))
    disk.clock.now_s += 0.5
    assert disk.speed.load_s(MIB) > 0.49


def test_what_hung_says_nothing_about_the_speed() -> None:
    """The time of jobs that were under way at a trip does not count, however long they took."""
    disk = Disk(0.0, 1e9)
    disk.load(8 * MIB)
    known = disk.speed.bytes_per_s
    job = Job(MIB, disk.clock.now_s)
    disk.speed.begin(job)
    disk.speed.drop()
    disk.clock.now_s += 100.0
    disk.speed.end(job, MIB)
    assert disk.speed.bytes_per_s == known


class Decided(BreakEven):
    """Over one source of known speed, which has all that DRAM has not."""

    def __init__(self, speed: TierSpeed, configured: float = 0.0) -> None:
        super().__init__()
        self.configured = configured
        self.speed = speed
        self.walked = 0

    def load_s(self, size_bytes: int) -> float:
        return self.speed.load_s(size_bytes)

    def slow(self, spaces: list[Namespace], names: bytes, count: int, skip: int) -> Steps[list[Slow]]:
        self.walked += 1
        yield
        return [
            Slow(position, self, space.record_bytes)
            for position in range(skip, count)
            for space in spaces
            if not space.blocks[names[8 * position : 8 * position + 8]].where & IN_DRAM
        ]

    def of(self, spaces: list[Namespace], names: bytes, count: int, asking: Asking) -> int:
        skip = asking.local_tokens // BLOCK_TOKENS
        return finish(
            self.usable(spaces, count, asking, [self], lambda: self.slow(spaces, names, count, skip))
        )


def break_even(load_s_per_block: float, latency_s: float = 0.0, configured: float = 0.0) -> Decided:
    speed = TierSpeed(Clock())
    speed.bytes_per_s, speed.latency_s = MIB / load_s_per_block, latency_s
    return Decided(speed, configured)


def test_unknown_prefill_rates_refuse_nothing() -> None:
    """Where nobody knows how fast the engine computes, every held block is used."""
    namespace = space()
    names = fill(namespace, "nnnn")
    assert break_even(10.0).of([namespace], names, 4, NOBODY_IN_PARTICULAR) == 4


def test_the_rate_is_that_of_the_request_else_learned_else_configured() -> None:
    """Each stands in for the one before it; what is learned belongs to one namespace."""
    told = Asking(prefill_tokens_per_s=500.0)
    decided = break_even(1.0, configured=100.0)
    first, other = space(0), space(1)
    assert decided.rate(first, NOBODY_IN_PARTICULAR) == 100.0
    decided.learn(first, 200.0)
    assert decided.rate(first, NOBODY_IN_PARTICULAR) == 200.0
    assert decided.rate(first, told) == 500.0
    assert decided.rate(other, NOBODY_IN_PARTICULAR) == 100.0


def test_a_slow_tier_is_refused_and_a_fast_one_used() -> None:
    """The same blocks, ten times slower and ten times faster to load than to compute."""
    namespace = space()
    names = fill(namespace, "ddnnnn")
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / 0.01)
    assert break_even(0.1).of([namespace], names, 6, asking) == 2
    assert break_even(0.001).of([namespace], names, 6, asking) == 6


def test_latency_must_be_paid_off() -> None:
    """A latency of four blocks' prefill is worth it for eight blocks, not for two."""
    namespace = space()
    names = fill(namespace, "n" * 8)
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / 0.01)
    decided = break_even(0.001, latency_s=0.04)
    assert decided.of([namespace], names, 8, asking) == 8
    assert decided.of([namespace], names[:16], 2, asking) == 0


def test_dram_behind_a_slow_block_can_pay_for_it() -> None:
    """One block that is slow to load is loaded where many in DRAM hang on it."""
    namespace = space()
    names = fill(namespace, "n" + "d" * 20)
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / 0.01)
    assert break_even(0.1).of([namespace], names, 21, asking) == 21
    assert break_even(0.5).of([namespace], names, 21, asking) == 0


def test_what_the_engine_holds_is_neither_loaded_nor_computed() -> None:
    """Slow blocks within the engine's own cache cost nothing; those behind it are refused."""
    namespace = space()
    names = fill(namespace, "nnnddn")
    asking = Asking(local_tokens=3 * BLOCK_TOKENS, prefill_tokens_per_s=BLOCK_TOKENS / 0.01)
    assert break_even(0.1).of([namespace], names, 6, asking) == 5


def test_all_namespaces_of_a_lookup_are_loaded() -> None:
    """Two ranks' records are twice the bytes."""
    ranks = [space(0), space(1)]
    for rank in ranks:
        names = fill(rank, "nnnn")
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / 0.015)
    assert break_even(0.01).of(ranks[:1], names, 4, asking) == 4
    assert break_even(0.01).of(ranks, names, 4, asking) == 0


class Flowing:
    """A source that takes so long until bytes flow, and then so long for each record."""

    def __init__(self, latency_s: float, record_s: float) -> None:
        self.latency_s, self.record_s = latency_s, record_s

    def load_s(self, size_bytes: int) -> float:
        return self.latency_s + size_bytes / MIB * self.record_s


@settings(max_examples=300, deadline=None)
@given(
    places=st.lists(st.sampled_from("dnhf"), min_size=1, max_size=12).map("".join),
    speeds=st.tuples(
        *[st.tuples(st.sampled_from([0.0, 3.0, 30.0, 300.0]), st.sampled_from([0.1, 9.0, 11.0, 100.0]))] * 3
    ),
    ranks=st.integers(1, 2),
)
def test_a_slow_source_takes_nothing_from_a_fast_one(
    places: str, speeds: tuple[tuple[float, float], ...], ranks: int
) -> None:
    """Of NVMe, home and far, each with its own latency and flow: no prefix gains more than the one that is chosen."""
    sources = {which: Flowing(a / 1e3, b / 1e3) for which, (a, b) in zip("nhf", speeds, strict=True)}
    slow = [
        Slow(at, sources[which], MIB) for at, which in enumerate(places) for _ in range(ranks) if which != "d"
    ]

    def gain_s(count: int) -> float:
        loads = [
            sources[which].load_s(ranks * places[:count].count(which) * MIB)
            for which in set(places[:count]) - {"d"}
        ]
        return count * 0.01 - max(loads, default=0.0)

    used = [sources[which] for which in sorted(set(places) - {"d"})]
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / 0.01)
    spaces = [space(number) for number in range(ranks)]

    def found() -> Steps[list[Slow]]:
        yield
        return slow

    usable = finish(BreakEven().usable(spaces, len(places), asking, used, found))
    assert gain_s(usable) >= max(map(gain_s, range(len(places) + 1))) - 1e-9


@settings(max_examples=300, deadline=None)
@given(
    places=st.lists(st.sampled_from("dnb"), min_size=1, max_size=12).map("".join),
    local=st.integers(0, 40),
    load_ms=st.sampled_from([0.1, 5.0, 9.0, 11.0, 100.0]),
    latency_ms=st.sampled_from([0.0, 3.0, 30.0]),
)
def test_never_slower_than_recomputing_and_never_less_than_best(
    places: str, local: int, load_ms: float, latency_ms: float
) -> None:
    """The prefix chosen gains as much as the best of all prefixes, and never loses."""
    namespace = space()
    names = fill(namespace, places)
    rate = BLOCK_TOKENS / 0.01
    asking = Asking(local_tokens=local, prefill_tokens_per_s=rate)

    def gain_s(count: int) -> float:
        slow = sum(place == "n" for place in places[local // BLOCK_TOKENS : count])
        saved_s = max(0, count * BLOCK_TOKENS - local) / rate
        return saved_s - (latency_ms + slow * load_ms) / 1e3 if slow else saved_s

    decided = break_even(load_ms / 1e3, latency_ms / 1e3)
    usable = decided.of([namespace], names, len(places), asking)
    assert gain_s(usable) >= -1e-9
    assert gain_s(usable) >= max(map(gain_s, range(len(places) + 1))) - 1e-9


def test_most_lookups_walk_nothing() -> None:
    """Where one block is sooner loaded than computed, latency included, no block is looked at."""
    namespace = space()
    names = fill(namespace, "n" * 8)
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / 0.01)
    quick, late = break_even(0.001, latency_s=0.005), break_even(0.001, latency_s=0.02)
    assert quick.of([namespace], names, 8, asking) == 8
    assert not quick.walked
    late.of([namespace], names, 8, asking)
    assert late.walked


@pytest.mark.parametrize("seed", range(5))
def test_few_loads_lose_when_the_disk_changes(seed: int) -> None:
    """On a disk that changes its speed, hardly a load is slower than computing, and none where it pays is refused for long."""
    draw = random.Random(seed)
    disk = Disk(0.001, 1e9)
    decided = Decided(disk.speed)
    namespace = space()
    names = fill(namespace, "n" * 64)
    block_s = 0.002
    asking = Asking(prefill_tokens_per_s=BLOCK_TOKENS / block_s)
    lost = refused = 0
    for request in range(400):
        if request % 100 == 0:
            disk.bytes_per_s = draw.choice([1e8, 3e8, 1e9, 5e9])
        count = draw.randint(8, 64)
        usable = decided.of([namespace], names, count, asking)
        if usable:
            lost += disk.load(*[MIB] * usable) > usable * block_s
        else:
            refused += count * (block_s - MIB / disk.bytes_per_s) > disk.latency_s
            disk.load(*[MIB] * 4)  # a probe, which nobody waits for
    assert lost <= 4 * 5 and refused <= 4 * 5
