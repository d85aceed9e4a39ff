"""Expiry: what is over is a miss at once and dropped by a sweep, whatever restarts, clocks and slices do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.commands import retention_commands
from kvstore.constants import EXPIRY_SLICE_S
from kvstore.index import forest
from kvstore.index.block import Block, Namespace
from kvstore.protocol.frames import Acquired
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.retention import expiry
from kvstore.retention.clock import Clock
from kvstore.retention.expiry import EXPIRY_SWEEP_S_MAX, EXPIRY_SWEEP_S_MIN, NEVER, Expiry
from kvstore.retention.rules import RuleFile
from kvstore.steps import finish
from tests.engine.test_retention import Node, chain, joined
from tests.engine.test_turns import Counted
from tiers.namespace_spec import NamespaceSpec

START_S = 1_700_000_000
DAY_S = 86_400


def live(of: Expiry, space: Namespace, hashes: bytes, count: int) -> int:
    return finish(of.live_steps(space, hashes, count))


class Shelf:
    """One namespace of blocks whose rows survive restarts; a model that tells their times in the plainest way."""

    def __init__(self) -> None:
        self.mono_s = 1000.0
        self.wall_s = float(START_S)
        self.rows: dict[bytes, tuple[bytes, int, int]] = {}  # hash -> parent, tier, time of storing
        self.stored_s: dict[bytes, int] = {}  # the same for what is held, or since when it is new
        self.ttl_s: float | None = None
        self.prefixes: dict[bytes, float | None] = {}
        self.asked: list[Callable[[], None]] = []  # answers of rows that are still to come
        self.clock = Clock(lambda: self.mono_s)
        self.clock.move_to(self.wall_s)
        self.start()

    def start(self) -> None:
        self.expiry = Expiry()
        self.expiry.rows = self.ask
        self.space = Namespace(0, NamespaceSpec(b"n" * 16, 1000, 8))
        self.expiry.start(self.clock, lambda digest: self.space, self.drop)
        if self.ttl_s is not None:
            self.expiry.set_ttl(self.space.digest, self.ttl_s, self.now_s)
        for block_hash, ttl_s in self.prefixes.items():
            self.expiry.set_prefix(self.space.digest, block_hash, ttl_s, self.now_s, True)

    @property
    def now_s(self) -> int:
        return int(self.clock.now_s())

    def ask(self, blocks: Sequence[Block], found: Callable[[Sequence[int]], None]) -> None:
        keys = [block.hash for block in blocks]
        self.asked.append(lambda: found([self.rows[key][2] if key in self.rows else 0 for key in keys]))

    def drop(self, block: Block) -> bool:
        assert self.is_over(block), "dropped before its time"
        self.leave(block)
        return True

    # -- what happens --

    def put(self, names: list[str], tier: int) -> None:
        """Blocks of one prefix in turn; those that are held and over are offered again."""
        hashes = [joined(name) for name in names]
        above = [b"", *hashes]
        for block_hash, parent in zip(hashes, above, strict=False):
            block = self.space.blocks.get(block_hash)
            if block is None or not block.where & IN_ANY:
                block = forest.arrived(self.space, block_hash, parent, tier)
                self.rows[block_hash] = parent, tier, self.now_s
            elif block not in self.expiry.over([block]):
                continue
            self.stored_s[block_hash] = self.now_s
            self.expiry.stored(block)

    def leave(self, block: Block) -> None:
        for bit in (IN_DRAM, IN_NVME):
            if block.where & bit:
                forest.left([block], bit)
        self.expiry.gone(block)
        del self.rows[block.hash], self.stored_s[block.hash]

    def restart(self) -> None:
        """The machine is up all the time: the clock goes on. Rows are read in any order."""
        kept_s = self.clock.ahead_s
        self.clock = Clock(lambda: self.mono_s)
        self.clock.move_to(self.wall_s)
        self.clock.move_to(self.mono_s + kept_s)
        self.asked.clear()
        self.start()
        for block_hash, (parent, tier, stored_s) in sorted(self.rows.items(), key=hash):
            block = forest.arrived(self.space, block_hash, parent, tier)
            self.expiry.adopted(block, stored_s)
        self.stored_s = {block_hash: row[2] for block_hash, row in self.rows.items()}

    def set_ttl(self, ttl_s: float | None) -> None:
        self.governed()
        self.ttl_s = ttl_s
        self.expiry.set_ttl(self.space.digest, ttl_s, self.now_s)

    def set_prefix(self, name: str, ttl_s: float | None, is_set: bool = True) -> None:
        self.governed()
        self.prefixes.pop(joined(name), None)
        if is_set:
            self.prefixes[joined(name)] = ttl_s
        self.expiry.set_prefix(self.space.digest, joined(name), ttl_s, self.now_s, is_set)

    def governed(self) -> None:
        """With a first rule times are what rows say."""
        if not self.expiry:
            self.stored_s = {block_hash: row[2] for block_hash, row in self.rows.items()}

    def work(self) -> None:
        """Sweeps and answers, until there is no more to do."""
        self.expiry.tick()
        while self.expiry.has_work or self.asked:
            self.expiry.step(lambda: True)
            if self.asked:
                self.asked.pop()()

    # -- what must be true --

    def ttl_of(self, above: Sequence[bytes]) -> float:
        ttl_s = next((self.prefixes[h] for h in reversed(above) if h in self.prefixes), self.ttl_s)
        return NEVER if ttl_s is None else ttl_s

    def is_over(self, block: Block) -> bool:
        above: list[bytes] = []
        at: Block | None = block
        while at is not None:
            above.insert(0, at.hash)
            at = at.parent
        return self.stored_s[block.hash] + self.ttl_of(above) <= self.now_s

    def check(self) -> None:
        assert not any(self.expiry.check_slices({self.space.digest: self.space}))
        ruled = self.expiry._spaces.get(self.space.digest)
        if ruled is not None and len(ruled.times) < len(self.rows):
            return  # some times are still to be told
        for name in "ab":
            hashes = [joined(name) for name in chain(name, 6)]
            count = forest.rooted_prefix(self.space, b"".join(hashes), len(hashes))
            plain = (
                at
                for at in range(count)
                if self.stored_s[hashes[at]] + self.ttl_of(hashes[: at + 1]) <= self.now_s
            )
            assert live(self.expiry, self.space, b"".join(hashes), count) == next(plain, count)
            held = [b for h in hashes if (b := self.space.blocks.get(h)) is not None and b.where & IN_ANY]
            assert self.expiry.over(held) == {block for block in held if self.is_over(block)}


TTLS = (None, 5.0, 20.0, 60.0)
OPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "put",
                "put",
                "put",
                "leave",
                "ttl",
                "prefix",
                "unset",
                "time",
                "time",
                "step",
                "work",
                "answer",
                "kill",
                "wall",
            ]
        ),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=60,
)


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS", 2)
    monkeypatch.setattr(expiry, "EXPIRY_FIND_BLOCKS", 2)
    monkeypatch.setattr(expiry, "EXPIRY_CHILDREN_COMPARED", 1)
    monkeypatch.setattr(expiry, "EXPIRY_SECONDS_SHARED", 2)


def apply(shelf: Shelf, what: str, number: int, which: int) -> None:
    name = f"{'ab'[which % 2]}{number:02d}"
    if what == "put":
        shelf.put(chain(name[0], number + 1), (IN_DRAM, IN_NVME)[which // 2])
    elif what == "leave" and joined(name) in shelf.rows:
        shelf.leave(shelf.space.blocks[joined(name)])
    elif what == "ttl":
        shelf.set_ttl(TTLS[which])
    elif what == "prefix":
        shelf.set_prefix(name, TTLS[which])
    elif what == "unset":
        shelf.set_prefix(name, None, is_set=False)
    elif what == "time":
        shelf.mono_s += (1, 4, 9, 15)[which]
    elif what == "step":
        turns = iter(range(number))
        shelf.expiry.tick()
        shelf.expiry.step(lambda: next(turns, None) is not None)
    elif what == "work":
        shelf.work()
    elif what == "answer" and shelf.asked:
        shelf.asked.pop()()
    elif what == "kill":
        shelf.restart()
    elif what == "wall":
        shelf.wall_s -= 5000 * which


@given(OPS)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_nearest_rule_and_the_time_of_storing_decide(
    tight: None, ops: list[tuple[str, int, int]]
) -> None:
    """Any rules, stores, evictions, slices, late answers, kills and clocks set back: a lookup finds what is not
    over and nothing else, a sweep drops what is over and nothing else."""
    shelf = Shelf()
    for op in ops:
        apply(shelf, *op)
        shelf.check()
    shelf.work()
    shelf.mono_s += EXPIRY_SWEEP_S_MAX
    shelf.work()
    shelf.check()
    assert not any(shelf.is_over(shelf.space.blocks[block_hash]) for block_hash in shelf.rows)


@given(OPS)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_times_that_nobody_tells_make_nothing_immortal(tight: None, ops: list[tuple[str, int, int]]) -> None:
    """Rows that are never read, and rows without a time: every block goes when the TTL is over that was set last."""
    shelf = Shelf()
    for what, number, which in ops:
        if what not in ("answer", "work", "kill", "step"):
            apply(shelf, what, number, which)
    shelf.prefixes.clear()
    shelf.expiry = Expiry()
    shelf.expiry.rows = lambda blocks, found: None
    shelf.expiry.start(shelf.clock, lambda digest: shelf.space, shelf.drop)
    shelf.set_ttl(20.0)
    shelf.mono_s += 20
    names = [joined(name) for name in chain("a", 6)]
    assert live(shelf.expiry, shelf.space, b"".join(names), bool(names[0] in shelf.rows)) == 0
    shelf.expiry.tick()
    shelf.expiry.step(lambda: True)
    assert not shelf.rows


# -- times of storing --


def test_a_first_ttl_counts_from_when_blocks_were_stored() -> None:
    """The rows of what is held say when; until they are read, it counts from when the TTL was set."""
    shelf = Shelf()
    shelf.put(chain("a", 3), IN_NVME)
    shelf.mono_s += 50
    shelf.put(chain("a", 4), IN_NVME)
    shelf.set_ttl(60.0)
    shelf.mono_s += 10
    names = b"".join(joined(name) for name in chain("a", 4))
    assert live(shelf.expiry, shelf.space, names, 4) == 4
    shelf.work()
    assert live(shelf.expiry, shelf.space, names, 4) == 0
    shelf.work()
    assert set(shelf.rows) == {joined("a03")}


def test_what_was_stored_anew_meanwhile_keeps_its_new_time() -> None:
    """An answer of the rows that comes late is about a block that has left since."""
    shelf = Shelf()
    shelf.put(["a00"], IN_DRAM)
    shelf.mono_s += 50
    shelf.set_ttl(60.0)
    shelf.expiry.step(lambda: True)
    shelf.leave(shelf.space.blocks[joined("a00")])
    shelf.put(["a00"], IN_DRAM)
    shelf.rows[joined("a00")] = b"", IN_DRAM, START_S
    shelf.asked.pop()()
    shelf.mono_s += 59
    assert live(shelf.expiry, shelf.space, joined("a00"), 1) == 1


def test_a_row_from_the_future_is_over() -> None:
    """The clock went back over a reboot: nobody knows how old such a block is, and it is at least that late."""
    shelf = Shelf()
    shelf.set_ttl(DAY_S)
    for block_hash, stored_s in ((b"old", START_S - DAY_S), (b"late", START_S + 3600), (b"zero", 0)):
        shelf.expiry.adopted(forest.arrived(shelf.space, block_hash.ljust(8), b"", IN_NVME), stored_s)
    assert shelf.now_s == START_S + 3600
    found = [live(shelf.expiry, shelf.space, name.ljust(8), 1) for name in (b"old", b"late", b"zero")]
    assert found == [0, 0, 1]


def test_only_namespaces_with_a_ttl_keep_times() -> None:
    """Without a rule nothing is remembered; with the last rule all of it goes, in slices."""
    shelf = Shelf()
    shelf.put(chain("a", 12), IN_DRAM)
    assert not shelf.expiry and not shelf.expiry._spaces
    shelf.set_ttl(60.0)
    shelf.work()
    times = shelf.expiry._spaces[shelf.space.digest].times
    assert len(times) == 12
    shelf.set_ttl(None)
    assert not shelf.expiry
    shelf.work()
    assert not any(times.dicts())


def test_a_lookup_of_blocks_stored_in_order_looks_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the prompt: the first block is over first."""
    shelf = Shelf()
    shelf.set_ttl(60.0)
    names = [f"a{number:05d}" for number in range(3000)]
    shelf.put(names, IN_DRAM)
    looks: list[bytes] = []
    time = expiry._Space.time
    monkeypatch.setattr(expiry._Space, "time", lambda space, h: (looks.append(h), time(space, h))[1])
    assert live(shelf.expiry, shelf.space, b"".join(map(joined, names)), 3000) == 3000
    shelf.mono_s += 60
    assert live(shelf.expiry, shelf.space, b"".join(map(joined, names)), 3000) == 0
    assert len(looks) == 2


def test_a_block_older_than_its_parent_is_found() -> None:
    """A parent that was stored anew, by itself or after it had left, and one whose row was read first."""
    shelf = Shelf()
    shelf.set_ttl(20.0)
    shelf.put(["a00"], IN_DRAM)
    offered, back = [joined("a00"), joined("a01")], [joined("b00"), joined("b01")]
    shelf.mono_s += 10
    shelf.put(["a00", "a01"], IN_DRAM)
    shelf.mono_s += 10
    shelf.put(["a00"], IN_DRAM)
    shelf.mono_s += 10
    assert live(shelf.expiry, shelf.space, b"".join(offered), 2) == 1

    shelf = Shelf()
    shelf.set_ttl(20.0)
    shelf.put(["b00", "b01"], IN_DRAM)
    shelf.mono_s += 10
    shelf.leave(shelf.space.blocks[back[0]])
    shelf.put(["b00"], IN_DRAM)
    shelf.mono_s += 10
    assert live(shelf.expiry, shelf.space, b"".join(back), 2) == 1

    shelf = Shelf()
    shelf.set_ttl(20.0)
    shelf.mono_s += 20
    for block_hash, parent, stored_s in ((back[0], b"", 15), (back[1], back[0], 0)):
        block = forest.arrived(shelf.space, block_hash, parent, IN_DRAM)
        shelf.expiry.adopted(block, START_S + stored_s)
    assert live(shelf.expiry, shelf.space, b"".join(back), 2) == 1


# -- sweeps --


@pytest.fixture
def node() -> Iterator[Node]:
    """96 slots of DRAM."""
    node = Node(slabs=12)
    yield node
    node.settle()
    assert node.engine.check() == []
    node.close()


def put_each(node: Node, count: int, space: int = 0) -> None:
    for number in range(count):
        assert node.put(f"x{number:03d}", space=space) == 1


def test_namespaces_take_turns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is over at once, the few of one namespace are gone long before the many of another."""
    for module in (expiry, forest):
        monkeypatch.setattr(module, "EXPIRY_LOOKS", 4)
    node.ttl(60)
    node.ttl(60, space=2)
    put_each(node, 80)
    put_each(node, 3, space=2)
    node.clock_s += 100
    turns = iter(range(8))
    node.engine.blocks.expiry.tick()
    node.engine.blocks.expiry.step(lambda: next(turns, None) is not None)
    assert node.used("beta") == 0 and node.used("acme") > 60


def test_a_slice_ends_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops that take 1 ms each: a slice stops at its time, says that there is more, and the next one goes on."""
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS", 1)
    node.ttl(60)
    put_each(node, 80)
    node.clock_s += 100
    node.engine.blocks.expiry.tick()
    monkeypatch.setattr(node.engine.retention, "_expired", None)
    drop = node.engine.blocks.expiry._drop

    def slow_drop(block: Block) -> bool:
        node.clock_s += 0.001
        return drop(block)

    monkeypatch.setattr(node.engine.blocks.expiry, "_drop", slow_drop)
    left, begun_s = node.used("acme"), node.clock_s
    while node.engine.retention.step():
        assert left - node.used("acme") <= 4
        assert node.clock_s - begun_s <= EXPIRY_SLICE_S + 0.0011
        left, begun_s = node.used("acme"), node.clock_s
    assert node.used("acme") == 0


def test_what_is_in_use_keeps_nobody_busy(node: Node) -> None:
    """A block that is over and in use is tried again by the next sweep, not at once and for ever."""
    node.ttl(60)
    node.put("a00")
    answers: list[Acquired] = []
    node.engine.acquire(node.session, node.spaces[0], joined("a00"), answers.append)
    node.clock_s += 100
    for _ in range(3):
        node.engine.tick()
        assert node.engine.retention.step() is False
        assert node.held("a00") == 0 and node.used("acme") == 1
    node.engine.release(node.session, answers[0].lease)
    node.settle(EXPIRY_SWEEP_S_MIN)
    assert node.used("acme") == 0


def test_the_pause_between_sweeps(node: Node) -> None:
    """A tenth of the shortest TTL; a shorter TTL does not wait for that."""
    node.ttl(1000)
    put_each(node, 3)
    node.settle(1)
    node.clock_s += 960
    node.settle()
    node.clock_s += 40
    node.settle()
    assert node.used("acme") == 3 and node.held("x000") == 0
    node.settle(60)
    assert node.used("acme") == 0
    put_each(node, 3)
    node.settle(10)
    node.ttl(5, "x000")
    node.settle()
    assert node.used("acme") == 2


# -- the clock --


@pytest.mark.parametrize("back_s", [0.0, 3600.0, 1e8])
def test_a_clock_set_back_and_a_kill_prolong_nothing(node: Node, back_s: float) -> None:
    """A TTL of 20 s is over after 20 s, whatever happens to the wall clock before a daemon is killed."""
    node.ttl(20)
    node.put("a00")
    node.settle(12)
    node.wall_s -= back_s
    node.kill()
    node.clock_s += 7
    assert node.held("a00") == 1
    node.clock_s += 1
    assert node.held("a00") == 0


def test_time_goes_on_while_the_machine_sleeps(node: Node) -> None:
    """A TTL that ends during a suspension is over after it, for who serves then and for who starts then."""
    node.ttl(20)
    node.put("a00")
    node.settle(12)
    node.asleep_s += 4
    node.kill()
    node.clock_s += 3
    assert node.held("a00") == 1
    node.asleep_s += 1
    assert node.held("a00") == 0


def test_the_clock_is_kept_over_a_reboot(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another boot, its clock behind: time begins where the latest rule was set, and is on disk with the first tick
    that can write it, so that the next kill prolongs nothing either."""
    node.ttl(20)
    since_s = node.wall_s + node.clock_s
    node.wall_s -= 1e6
    monkeypatch.setattr(retention_commands, "boot_id", lambda: "another")
    write = RuleFile.write
    monkeypatch.setattr(RuleFile, "write", lambda file, book: "disk full")
    node.kill()
    assert node.engine.blocks.expiry.now_s() == since_s
    node.settle()
    monkeypatch.setattr(RuleFile, "write", write)
    node.settle()
    node.put("a00")
    node.settle(12)
    node.kill()
    assert node.engine.blocks.expiry.now_s() == since_s + 12
    node.clock_s += 8
    assert node.held("a00") == 0


def test_the_wall_clock_may_run_ahead(node: Node) -> None:
    """Set forward between two daemons, blocks become older; the next daemon does not go back behind that."""
    node.ttl(20)
    node.put("a00")
    node.wall_s += 100
    node.kill()
    node.settle()
    node.wall_s -= 100
    node.kill()
    assert node.held("a00") == 0 and node.engine.blocks.expiry.now_s() == node.wall_s + 100


def test_sweeps_of_many_namespaces_begin_some_at_a_time() -> None:
    """All are due with the TTL of their tenant: a tick begins none, and each piece of work a few; all are swept."""
    spaces = [Namespace(n, NamespaceSpec(n.to_bytes(16, "big"), 1, 8)) for n in range(2000)]
    known, dropped = {space.digest: space for space in spaces}, list[Block]()
    expiry = Expiry()
    expiry.start(expiry.clock, known.get, lambda block: dropped.append(block) is None)
    for space in spaces:
        forest.arrived(space, b"12345678", b"", IN_DRAM)
        expiry.set_ttl(space.digest, 5.0, 0.0)
    expiry.clock.move_to(100.0)
    turns = Counted()
    with turns.turn("tick"):
        expiry.tick()
    while expiry.has_work:
        with turns.turn("piece"):
            expiry.step(iter([True, False]).__next__)
    assert len(dropped) == 2000
    assert turns.most["piece"] < 1000 and turns.most["tick"] < 20_000
