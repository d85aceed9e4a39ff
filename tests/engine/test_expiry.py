"""Expiry at its limits: what is over goes soon, in slices, and times that cannot be written make nothing young."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import expiry, lifetimes, retention, stored_times, unsaved_times
from kvstore.blocks import IN_ANY, Block
from kvstore.leases import Acquired
from kvstore.lifetimes import NEVER
from kvstore.queues import queues
from kvstore.stored_times import Changes, StoredTimes
from tests.engine.test_retention import Node, chain, joined

TIGHT = (
    (expiry, "EXPIRY_LOOKS_PER_TURN", 2),
    (expiry, "EXPIRY_REFILED_MAX", 2),
    (lifetimes, "EXPIRY_NOTE_BLOCKS", 3),
    (lifetimes, "EXPIRY_STALE_ENTRIES_MIN", 8),
    *((module, "EXPIRY_ROWS_PER_SAVE", 4) for module in (unsaved_times, stored_times, retention)),
    (unsaved_times, "EXPIRY_UNSAVED_MAX", 10),
    (unsaved_times, "EXPIRY_FORGOTTEN_MAX", 2),
)


@pytest.fixture
def node() -> Iterator[Node]:
    """96 slots of DRAM."""
    node = Node(slabs=12)
    yield node
    node.settle()
    assert node.engine.check() == []
    node.close()


class Disk:
    """Whether the times can be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails = False
        write = StoredTimes.write
        monkeypatch.setattr(StoredTimes, "write", lambda at, what: not self.fails and write(at, what))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def singles(name: str, count: int) -> list[str]:
    return [f"{name}{number:03d}" for number in range(count)]


def put_each(node: Node, names: list[str]) -> None:
    for name in names:
        assert node.put(name) == 1


def in_file(node: Node, space: int = 0) -> dict[bytes, int]:
    return StoredTimes(node.directory / "times.sqlite").read()[0].get(node.space(space).digest, {})


def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, limit in TIGHT:
        monkeypatch.setattr(module, name, limit)


# -- dropping --


def test_a_short_ttl_of_a_prefix_waits_for_nobody(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty older blocks under a long TTL: with four looks a slice the prefix goes in the first one, all of it."""
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS_PER_SLICE", 4)
    node.ttl(3600)
    put_each(node, singles("x", 80))
    node.ttl(3, "a00")
    node.settle(5)
    node.put(*chain("a", 4))
    node.settle()
    node.clock_s += 3
    assert node.engine.retention.step() is False
    assert node.used("acme") == 80


def test_rules_take_turns(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is over at once, the few of one prefix are gone long before the many of the namespace."""
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS_PER_TURN", 2)
    monkeypatch.setattr(expiry, "EXPIRY_LOOKS_PER_SLICE", 4)
    node.ttl(60)
    node.ttl(30, "a00")
    put_each(node, singles("x", 80))
    node.put(*chain("a", 4))
    node.clock_s += 100
    for _ in range(4):
        assert node.engine.retention.step() is True
    assert not any(node.space(0).holds(joined(name)) for name in chain("a", 4))
    assert node.used("acme") > 60


def test_a_slice_ends_in_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops that take 1 ms each: a slice stops at its time, says that there is more, and the next one goes on."""
    node.ttl(60)
    put_each(node, singles("x", 80))
    node.clock_s += 100
    begun_s = node.clock_s

    def clock() -> float:
        node.clock_s += 0.001
        return node.clock_s

    monkeypatch.setattr(node.engine.retention, "_clock", clock)
    left = node.used("acme")
    while node.engine.retention.step():
        assert 0 < left - node.used("acme") <= 5
        assert node.clock_s - begun_s <= retention.EXPIRY_SLICE_S + 0.003
        left, begun_s = node.used("acme"), node.clock_s
    assert node.used("acme") == 0


def test_what_is_in_use_keeps_nobody_busy(node: Node) -> None:
    """A block that is over and in use is tried again with the next tick, not at once and for ever."""
    node.ttl(60)
    node.put("a00")
    answers: list[Acquired] = []
    node.engine.acquire(node.session, node.spaces[0], joined("a00"), answers.append)
    node.clock_s += 100
    for _ in range(3):
        assert node.engine.retention.step() is False
        assert node.held("a00") == 0
    node.engine.release(node.session, answers[0].lease)
    node.settle()
    assert node.used("acme") == 0


def test_outdated_entries_are_cleaned_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that leave and come back for hours under a long TTL do not pile up entries."""
    tight(monkeypatch)
    node.ttl(1e6)
    space = node.engine.room.expiry._spaces[node.space(0).digest]
    for turn in range(60):
        put_each(node, singles(f"x{turn % 3}", 40))
        for name in singles(f"x{turn % 3}", 40):
            block = node.space(0).blocks.get(joined(name))
            assert block is not None
            node.engine.room.left_dram(block)
        node.settle(1)
        while node.engine.retention.step():
            pass
        assert sum(lane.entries for lane in space.lanes.values()) <= 100
    assert not space.times


Op = tuple[str, int, int]
OPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "alone", "ttl", "prefix", "unset", "time", "use", "tick", "kill"]),
        st.integers(0, 7),
        st.integers(0, 3),
    ),
    max_size=40,
)
TTLS = (None, 5.0, 20.0, 60.0)


class Model:
    """What the rules of one namespace say of chains a and b, told in the plainest way."""

    def __init__(self) -> None:
        self.ttl_s: float | None = None
        self.prefixes: dict[str, float | None] = {}

    def ttl_of(self, block: Block) -> float:
        above: Block | None = block
        while above is not None:
            name = above.hash.decode().strip()
            if name in self.prefixes:
                found = self.prefixes[name]
                return NEVER if found is None else found
            above = above.parent
        return NEVER if self.ttl_s is None else self.ttl_s


def over(node: Node, model: Model) -> list[Block]:
    """Held blocks whose time is over, looking at all of them; times that are still to be noted are left out."""
    rules = node.engine.room.expiry
    space = rules._spaces.get(node.space(0).digest)
    times = space.times if space is not None else {}
    return [
        block
        for block in list(node.space(0).blocks.values())
        if block.where & IN_ANY and times.get(block.hash, NEVER) + model.ttl_of(block) <= rules.now_s()
    ]


def apply(node: Node, model: Model, op: Op) -> None:
    what, depth, which = op
    name = f"{'ab'[which % 2]}{depth:02d}"
    if what == "put":
        node.put(
            *chain(name[0], depth + 1 + which, depth), parent=f"{name[0]}{depth - 1:02d}" if depth else ""
        )
    elif what == "alone":
        node.put(name)  # nobody says what it hangs on
    elif what == "ttl" and node.ttl(TTLS[which], is_set=TTLS[which] is not None) is None:
        model.ttl_s = TTLS[which]
    elif what == "prefix":
        assert node.ttl(TTLS[which], name) is None
        model.prefixes[name] = TTLS[which]
    elif what == "unset" and node.ttl(1.0, name, is_set=False) is None:
        del model.prefixes[name]
    elif what == "use":
        answers: list[Acquired] = []
        node.engine.acquire(node.session, node.spaces[0], joined(name), answers.append)
    elif what == "tick":
        node.engine.tick()
    elif what == "kill":
        node.kill()
    elif what == "time":
        node.settle(TTLS[which] or 1.0)


@given(OPS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_over_goes_and_nothing_else(ops: list[Op]) -> None:
    """Any rules of prefixes and the namespace, gaps that close, blocks in use: the nearest rule decides, always."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tight(monkeypatch)
        node, model = Node(slabs=4), Model()
        for op in ops:
            apply(node, model, op)
            assert node.engine.check() == []
            assert all(block in node.engine.room.expiry.over([block]) for block in over(node, model))
        for _ in range(12):
            node.engine.tick()
            node.io.run()
        assert all(block.pins for block in over(node, model))
        node.close()


def test_nothing_is_dropped_before_its_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that never expires outlives its namespace, from the rule on; without the rule it goes as well."""
    tight(monkeypatch)
    node.ttl(60)
    node.put(*chain("a", 9))
    put_each(node, singles("x", 20))
    node.ttl(None, "a03")
    node.settle(100)
    for _ in range(10):
        node.settle()
    assert node.used("acme") == 6
    node.ttl(None, "a03", is_set=False)
    for _ in range(10):
        node.settle()
    assert node.used("acme") == 0


# -- writing times --


def test_times_that_cannot_be_written_are_bounded(
    node: Node, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the file cannot be written the queue stays within its limit; then the file has all, and only that."""
    tight(monkeypatch)
    monkeypatch.setattr("kvstore.queues.limits.EXPIRY_UNSAVED_MAX", 10)
    node.ttl(1000)
    put_each(node, singles("x", 30))
    for _ in range(20):
        node.settle(1)
    assert len(in_file(node)) == 30
    disk.fails = True
    for turn in range(40):
        block = node.space(0).blocks.get(joined(f"x{turn % 30:03d}"))
        if block is not None:
            node.engine.room.left_dram(block)
        node.put(f"y{turn:03d}")
        node.settle(1)
        rows = {str(row["name"]): row for row in queues(node.engine)}
        assert int(str(rows["unsaved_times"]["length"])) <= 10
    disk.fails = False
    for _ in range(40):
        node.settle(1)
    space = node.engine.room.expiry._spaces[node.space(0).digest]
    assert in_file(node) == space.times and len(space.times) == 40
    assert not node.engine.room.expiry.unsaved


def test_old_rows_go_after_the_new_ones_are_there(
    node: Node, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a namespace is written anew, at no moment a row is missing of a block that had one."""
    tight(monkeypatch)
    node.ttl(1000)
    put_each(node, singles("x", 30))
    for _ in range(20):
        node.settle(1)
    disk.fails = True
    put_each(node, singles("y", 30))
    node.settle(1)
    disk.fails = False
    assert node.engine.room.expiry.unsaved.anew
    before = in_file(node)
    while node.engine.room.expiry.unsaved:
        node.engine.tick()
        while node.io.waiting:
            node.io.step()
            assert before.items() <= in_file(node).items()
        node.clock_s += 1
    assert len(in_file(node)) == 60


def test_a_failed_slice_is_written_again(node: Node, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails in the midst of writing a namespace anew: nothing of it is forgotten."""
    tight(monkeypatch)
    put_each(node, singles("x", 30))
    node.ttl(1000)
    for turn in range(60):
        disk.fails = turn % 3 == 1
        node.engine.tick()
        node.io.step() if node.io.waiting else None
        node.clock_s += 1
    disk.fails = False
    for _ in range(20):
        node.settle(1)
    assert len(in_file(node)) == 30


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "leave", "tick", "step", "fail", "work", "kill"]), st.integers(0, 25)),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_restart_makes_a_block_younger(steps: list[tuple[str, int]]) -> None:
    """Times that are written, refused, let go and written anew, with kills in between: never later than it was."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tight(monkeypatch)
        disk, node = Disk(monkeypatch), Node(slabs=4)
        node.ttl(100_000)
        stored_s: dict[bytes, float] = {}
        for what, number in steps:
            name = joined(f"x{number:03d}")
            block = node.space(0).blocks.get(name)
            if what == "put" and block is None:
                node.put(f"x{number:03d}")
                stored_s[name] = node.wall_s + node.clock_s
            elif what == "leave" and block is not None:
                node.engine.room.left_dram(block)
            elif what == "tick":
                node.engine.tick()
            elif what == "step" and node.io.waiting:
                node.io.half_step()
            elif what in ("fail", "work"):
                disk.fails = what == "fail"
            elif what == "kill":
                node.kill()
            node.clock_s += 1
            assert node.engine.check() == [] and len(node.engine.room.expiry.unsaved) <= 10
            space = node.engine.room.expiry._spaces[node.space(0).digest]
            held = [h for h, block in node.space(0).blocks.items() if block.where & IN_ANY]
            assert all(space.times.get(h, space.assumed_s) <= stored_s[h] for h in held)
        node.close()


def test_the_last_write_has_everything(node: Node, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop after the disk had failed writes all times at once, and says that they are complete."""
    tight(monkeypatch)
    node.ttl(1000)
    disk.fails = True
    put_each(node, singles("x", 30))
    node.settle(1)
    disk.fails = False
    write = node.engine.retention.last_changes()
    assert write is not None and write()
    times, saved_s = StoredTimes(node.directory / "times.sqlite").read()
    assert len(times[node.space(0).digest]) == 30 and saved_s >= node.wall_s


def test_pages_of_a_namespace(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page goes on behind the one before, and has no row of another namespace."""
    monkeypatch.setattr(stored_times, "EXPIRY_ROWS_PER_SAVE", 3)
    file = StoredTimes(node.directory / "other.sqlite")
    rows = [(digest, bytes([n]) * 8, n) for digest in (b"a" * 16, b"b" * 16) for n in range(7)]
    assert file.write(Changes(list(rows), [], None))
    found: list[bytes] = []
    while page := file.page(b"a" * 16, found[-1] if found else b""):
        assert len(page) <= 3
        found += page
    assert found == [bytes([n]) * 8 for n in range(7)]
