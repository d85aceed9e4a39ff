"""Clearing a node by hand: what is named leaves DRAM and NVMe for good; what is pinned, in use or not named stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from kvstore.commands import clearing, uncleared
from kvstore.commands.uncleared import Uncleared
from kvstore.engine.engine import Engine
from kvstore.errors import BadRequest, LimitExceeded, NotFound, NotReady, UnknownNamespace
from kvstore.index import namespaces
from kvstore.index.block import Block
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_ANY
from kvstore.residency.levels import Drive
from kvstore.steps import finish
from replication.formats.tombstones import Tombstone
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SIZE = 16384
Path_ = tuple[int, ...]


def block(path: Path_) -> bytes:
    return digest(repr(path).encode())


class Node:
    """An engine with trees of blocks of two tenants, some in both tiers, some only in one."""

    def __init__(self, directory: Path, chance: random.Random, arena_bytes: int = 8 * MIB) -> None:
        self.now_s = 1000.0
        self.io = SteppedIo()
        self.device = FaultyDevice(400, slot_bytes=SIZE)
        self.arena = open_arena(directory / "arena", arena_bytes, 2 * MIB, SIZE)
        self.engine = Engine(
            self.arena, [Drive(self.device, self.io)], NamespaceRegistry(), self.io, clock=lambda: self.now_s
        )
        self.engine.adopt()
        self.io.run()
        self.session = self.engine.open_session(0)
        names = ("a", "b")
        self.specs = [NamespaceSpec(n.encode().ljust(16), SIZE, 16, 16, {"tenant": n}) for n in names]
        self.spaces = [self.engine.register(spec) for spec in self.specs]
        self.held: set[tuple[int, Path_]] = set()
        for _ in range(30):
            self._put(chance)

    def _put(self, chance: random.Random) -> None:
        which = chance.randrange(2)
        known = sorted(path for w, path in self.held if w == which)
        top = chance.choice(known) if known and chance.random() < 0.8 else ()
        first = (*top, chance.randrange(4))
        steps = [first, (*first, chance.randrange(4))]
        hashes = b"".join(map(block, steps))
        answer = self.engine.reserve(self.session, self.spaces[which], hashes, block(top) if top else b"")
        found = granted(answer)
        sums = b"".join(digest(self.arena.mapping[s.offset : s.offset + SIZE]) for s in found)
        if sums:
            self.engine.commit(self.session, answer.lease, [s.position for s in found], sums)
        self.held.update((which, step) for step in steps)
        self.io.run()

    def paths(self, which: int) -> list[Path_]:
        return sorted(path for w, path in self.held if w == which)

    def still(self) -> set[tuple[int, Path_]]:
        """What the index holds."""
        return {
            (w, path)
            for w, path in self.held
            for space in [self.engine.namespaces.of_key(self.specs[w].digest)]
            if space is not None and space.holds(block(path))
        }

    def clear(self, dry: bool = False, **scope: Any) -> dict[str, Any]:
        told: list[dict[str, Any]] = []
        what = {"selector": "", "block_hash": b"", "tenant": None, "everything": False, **scope}
        self.engine.clear(**what, dry=dry, done=told.append)
        for _ in range(500):
            self.io.run()
            self.engine.clearing.step()
            self.now_s += 0.05
            if told:
                break
        return told[0]

    def pin(self, which: int, path: Path_) -> None:
        done: list[object] = []
        digest_ = self.specs[which].digest.hex()
        self.engine.retention.pin(digest_, block(path), True, lambda error, _: done.append(error))
        self.io.run()
        assert done == [None]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, random.Random(7))
    yield node
    assert node.engine.check() == []


@pytest.mark.parametrize("seed", range(12))
def test_what_is_named_leaves_and_the_rest_stays(tmp_path: Path, seed: int) -> None:
    """A tenant, a namespace, a prefix, or everything: that leaves, but for a pinned prefix and what is in use with all
    that these hang on; the numbers are those of the index, the books balance, and a new engine finds no more."""
    chance = random.Random(seed)
    node = Node(tmp_path, chance)
    top = chance.choice(node.paths(0))
    kind = seed % 4
    scope: dict[str, Any] = [
        {"tenant": "a"},
        {"selector": node.specs[0].digest.hex()[:6]},
        {"block_hash": block(top), "selector": node.specs[0].digest.hex()},
        {"everything": True},
    ][kind]
    named = {
        (w, path) for w, path in node.held if kind == 3 or (w == 0 and (kind != 2 or path[: len(top)] == top))
    }
    inside = sorted(path for w, path in named if w == 0)
    pinned_at, used_at = chance.choice(inside), chance.choice(inside)
    node.pin(0, pinned_at)
    lease = node.engine.acquire(node.session, node.spaces[0], block(used_at), lambda _: None)
    node.io.run()

    def above(path: Path_, of: Path_) -> bool:
        return of[: len(path)] == path

    pinned = {(w, path) for w, path in named if w == 0 and above(path, pinned_at)}
    used = {(w, path) for w, path in named if w == 0 and above(path, used_at)} - pinned
    dry = node.clear(dry=True, **scope)
    assert node.still() == node.held
    told = node.clear(**scope)
    assert node.still() == (node.held - named) | pinned | used
    for answer in (dry, told):
        assert answer["blocks"] == len(named)
        assert (answer["pinned_blocks"], answer["used_blocks"]) == (len(pinned), len(used))
        assert answer["dram_bytes"] >= answer["blocks"] * SIZE  # the arena holds them all
    assert (dry["cleared_blocks"], told["cleared_blocks"]) == (0, len(named) - len(pinned) - len(used))
    assert told["rows_left"] == 0
    assert node.engine.check() == []
    node.engine.release(node.session, lease.number)
    assert node.clear(**scope)["used_blocks"] == 0
    left = node.still()
    assert left == (node.held - named) | pinned
    node.arena.close()
    arena = open_arena(tmp_path / "arena", 8 * MIB, 2 * MIB, SIZE)
    again = Engine(arena, [Drive(node.device, node.io)], NamespaceRegistry(), node.io)
    again.adopt()
    node.io.run()
    found = {
        (w, path)
        for w, path in node.held
        if (space := again.namespaces.of_key(node.specs[w].digest)) is not None and space.holds(block(path))
    }
    assert found == left


def test_a_later_miss_says_why(node: Node) -> None:
    """What was cleared misses as "cleared", and counts as that: it did not expire."""
    path = next(path for path in node.paths(0) if len(path) == 1)
    node.engine.namespaces.get(node.spaces[0]).users = 1  # or it would be forgotten
    node.clear(tenant="a")
    _, why, _ = finish(node.engine.explain_steps([node.spaces[0]], block(path)))
    assert list(why) == [outcomes.CLEARED]
    assert node.engine.counters.cleared and not node.engine.counters.expired


def test_a_namespace_that_is_empty_is_forgotten_unless_somebody_uses_it(node: Node) -> None:
    """Not while a connection has it registered, a write lease is open or blocks of it are on their way."""
    first, second = (node.engine.namespaces.get(number) for number in node.spaces)
    first.users = 1
    told = node.clear(everything=True)
    assert told["forgotten_namespaces"] == 1 and sorted(told["namespaces"]) == [
        s.digest.hex() for s in node.specs
    ]
    assert list(node.engine.namespaces) == [first]
    with pytest.raises(UnknownNamespace):
        node.engine.namespaces.get(second.id)
    assert node.engine.register(node.specs[1]) != second.id  # as new
    first.users = 0
    reserved = node.engine.reserve(node.session, first.id, block((9, 9)), b"")
    assert node.clear(tenant="a")["forgotten_namespaces"] == 0
    node.engine.release(node.session, reserved.lease)
    assert node.clear(tenant="a", dry=True)["forgotten_namespaces"] == 0  # nor by asking what would be
    assert node.clear(tenant="a")["forgotten_namespaces"] == 1


def test_blocks_in_use_are_tried_again_for_a_while(node: Node) -> None:
    """A lease that is given back within seconds does not spare its blocks, and a longer one does not hold up the answer."""
    path = max(node.paths(0), key=len)
    lease = node.engine.acquire(node.session, node.spaces[0], block(path), lambda _: None)
    node.io.run()
    told: list[dict[str, Any]] = []
    node.engine.clear("", b"", "a", False, False, told.append)
    for _ in range(5):
        node.io.run()
        node.engine.clearing.step()
        node.now_s += 0.2
    assert not told
    node.engine.release(node.session, lease.number)
    while not told:
        node.io.run()
        node.engine.clearing.step()
        node.now_s += 0.2
    assert told[0]["used_blocks"] == 0 and not {w for w, _ in node.still() if w == 0}


def test_rows_that_cannot_be_cleared_are_told(node: Node) -> None:
    """A device that does not take the deletes: the answer comes all the same, and says how many rows are left."""
    node.device.clear = node.device.clear_rows = lambda slots: False  # type: ignore[method-assign]
    told = node.clear(tenant="a")
    assert told["rows_left"] == len(node.paths(0)) == told["cleared_blocks"]


def test_what_cannot_be_cleared_is_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown names, no name, two names, a node that still reads its rows, and too many at a time."""
    for scope, error in [
        ({"tenant": "nobody"}, NotFound),
        ({"selector": "ff"}, NotFound),
        ({"block_hash": b"\xff" * 16}, NotFound),
        ({}, BadRequest),
        ({"tenant": "a", "everything": True}, BadRequest),
        ({"selector": "61", "everything": True}, BadRequest),
    ]:
        with pytest.raises(error):
            node.clear(**scope)
    node.engine.adoption._reading[0] = node.now_s
    with pytest.raises(NotReady, match="still being read"):
        node.clear(everything=True)
    node.engine.adoption._reading.clear()
    monkeypatch.setattr(clearing, "CLEARS_MAX", 0)
    with pytest.raises(LimitExceeded):
        node.clear(everything=True)
    assert node.still() == node.held


def test_a_block_on_its_way_to_nvme_is_cleared_as_well(tmp_path: Path) -> None:
    """Cleared while the device is writing it: it leaves when the write is over, and no row of it stays."""
    node = Node(tmp_path, random.Random(3))
    path = (7,)
    answer = node.engine.reserve(node.session, node.spaces[0], block(path), b"")
    (slot,) = granted(answer)
    node.engine.commit(
        node.session, answer.lease, [0], digest(node.arena.mapping[slot.offset : slot.offset + SIZE])
    )
    assert node.io.waiting  # the write is under way
    told = node.clear(everything=True)
    assert told["blocks"] == len(node.held) + 1 == told["cleared_blocks"]
    assert not any(b.where & IN_ANY for n in node.engine.namespaces for b in n.blocks.values())
    assert all(row is None for row in node.device.rows(range(400)))
    assert node.engine.check() == []


@pytest.mark.parametrize("seed", range(4))
def test_an_ended_namespace_goes_piece_by_piece(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep its trees, a few blocks are looked at in one go; what is in use goes later, and nothing of others does."""
    monkeypatch.setattr(namespaces, "NAMESPACE_DROP_LOOKS", 16)
    monkeypatch.setattr(namespaces, "NAMESPACE_DROP_BLOCKS", 3)
    node = Node(tmp_path, random.Random(seed))
    used_at = max(node.paths(0), key=len)
    lease = node.engine.acquire(node.session, node.spaces[0], block(used_at), lambda _: None)
    node.io.run()
    node.engine.end_namespace(node.spaces[0])
    for _ in range(1000):
        held = len(node.still())
        is_more = node.engine.drop_ended()
        assert held - len(node.still()) <= 3
        node.io.run()
        if not is_more:
            break
    assert {path for w, path in node.still() if w == 0} == {
        used_at[:end] for end in range(1, len(used_at) + 1)
    }
    node.engine.release(node.session, lease.number)
    while node.engine.drop_ended():
        node.io.run()
    assert node.still() == {(w, path) for w, path in node.held if w == 1}
    assert node.engine.check() == []


class Restarted:
    """An engine that begins with an empty arena: what it holds, devices gave it."""

    def __init__(self, directory: Path, devices: list[FaultyDevice], known: list[str] | None = None) -> None:
        self.now_s = 1000.0
        self.io = SteppedIo()
        arena = open_arena(directory / f"arena {uuid4()}", 8 * MIB, 2 * MIB, SIZE)
        drives = [Drive(device, self.io) for device in devices]
        self.engine = Engine(arena, drives, NamespaceRegistry(), self.io, clock=lambda: self.now_s)
        disks = [device.disk for device in devices] if known is None else known
        self.engine.clearing.keep(Uncleared(directory / "uncleared.json", lambda: disks))
        self.engine.adopt()
        self.io.run()

    def put(self, names: list[str]) -> None:
        for name in names:
            space = self.engine.register(spec_of(name[0]))
            session = self.engine.open_session(0)
            answer = self.engine.reserve(session, space, digest(name.encode()), b"")
            (slot,) = granted(answer)
            sums = digest(self.engine.arena.mapping[slot.offset : slot.offset + SIZE])
            self.engine.commit(session, answer.lease, [0], sums)
            self.io.run()

    def evict(self, name: str) -> None:
        """Out of all tiers, as a full one does it."""
        block = self.block(name)
        assert block is not None
        self.engine.blocks.left_nvme(block)
        self.engine.blocks.left_dram(block)

    def block(self, name: str) -> Block | None:
        space = self.engine.namespaces.of_key(spec_of(name[0]).digest)
        return space.blocks.get(digest(name.encode())) if space is not None else None

    def held(self, names: list[str]) -> set[str]:
        return {name for name in names if (b := self.block(name)) is not None and b.where & IN_ANY}

    def clear(self, tenant: str) -> dict[str, Any]:
        told: list[dict[str, Any]] = []
        self.engine.clear("", b"", tenant or None, not tenant, False, told.append)
        before_s = self.now_s
        while not told:
            self.io.run()
            self.engine.clearing.step()
            self.now_s += 0.05
            assert self.now_s < before_s + 60
        self.took_s = self.now_s - before_s
        self.rest()
        return told[0]

    def rest(self) -> None:
        for _ in range(50):
            self.io.run()
            self.engine.clearing.step()
            self.engine.tick()
        assert self.engine.check() == []


def spec_of(tenant: str) -> NamespaceSpec:
    return NamespaceSpec(tenant.encode().ljust(16), SIZE, 16, 16, {"tenant": tenant})


NAMES = ["a1", "a2", "a3", "b1", "b2", "b3"]


@pytest.mark.parametrize("tenant", ["a", ""])
def test_what_had_left_nvme_before_is_not_found_again(tmp_path: Path, tenant: str) -> None:
    """The row of a block that was evicted stays until its slot is used again: a clear clears it, those of others stay;
    and no block that comes while it is looked for loses its row."""
    device = FaultyDevice(400)
    node = Restarted(tmp_path, [device])
    node.put(NAMES)
    for name in ("a1", "b1"):
        node.evict(name)
    assert node.clear(tenant)["rows_left"] == 0
    node.put(["a4"])
    assert Restarted(tmp_path, [device]).held([*NAMES, "a4"]) == (
        {"b1", "b2", "b3", "a4"} if tenant else {"a4"}
    )


def test_a_disk_that_was_away_does_not_bring_back_what_was_cleared(tmp_path: Path) -> None:
    """It could not be opened, or was not in the settings: when it is back nothing of it is served, and everything else of the
    disk is; what comes later is not touched."""
    here, away = FaultyDevice(400), FaultyDevice(400)
    Restarted(tmp_path, [away]).put(["a1", "b1"])
    Restarted(tmp_path, [here]).put(["a2", "b2"])
    node = Restarted(tmp_path, [here], [here.disk, away.disk])
    node.put(["a3"])
    assert node.clear("a")["rows_left"] == 0 and node.took_s < clearing.CLEAR_ROWS_S
    again = Restarted(tmp_path, [here, away])
    assert again.held(NAMES) == {"b1", "b2"}
    again.rest()
    assert {row.key[16:] for row, _ in away.table.values()} == {digest(b"b1")}
    again.put(["a1"])
    assert Restarted(tmp_path, [here, away]).held(NAMES) == {"a1", "b1", "b2"}


def test_a_disk_that_dies_holds_up_no_clear(tmp_path: Path) -> None:
    """It is not waited for, its rows are told, and do not come back; nor is one waited for that hangs while it is opened."""
    here, dead = FaultyDevice(400), FaultyDevice(400)
    node = Restarted(tmp_path, [here, dead])
    node.put(NAMES)
    assert here.table and dead.table
    lost = len(dead.table)
    breaker = node.engine.nvme.members[1].loads
    breaker.state, breaker._retry_at_s = "open", 1e9
    told = node.clear("")
    assert told["cleared_blocks"] == len(NAMES) and told["rows_left"] == lost == len(dead.table)
    assert node.took_s < clearing.CLEAR_ROWS_S and not here.table
    assert Restarted(tmp_path, [here, dead]).held(NAMES) == set()
    breaker.close()
    node.rest()
    assert not dead.table

    hung = Restarted(tmp_path, [here])
    hung.put(["b1"])
    hung.engine.adoption._reading[1] = hung.now_s
    with pytest.raises(NotReady):
        hung.clear("b")
    hung.now_s += 60
    assert hung.clear("b")["cleared_blocks"] == 1


def test_what_is_still_to_be_cleared_is_bounded(tmp_path: Path) -> None:
    """Of a disk with very many namespaces to clear, everything is; a damaged file is put aside."""
    io, path = SteppedIo(), tmp_path / "uncleared.json"
    known = Uncleared(path)
    known.add(["x", "y", ""], [n.to_bytes(16) for n in range(uncleared.UNCLEARED_NAMESPACES_MAX)])
    known.add(["x"], [b"more" * 4])
    assert not known.is_kept(io)
    io.run()
    assert known.is_kept(io)
    again = Uncleared(path)
    assert (
        again.names("x", bytes(15) + b"\xff")
        and again.names("x", b"never" * 3 + b"!")
        and not again.names("", b"")
    )
    assert again.names("y", bytes(16)) and not again.names("y", b"more" * 4)
    path.write_text("{")
    assert not Uncleared(path).of("x") and (tmp_path / "uncleared.unreadable").exists()


def test_what_is_erased_is_not_found_in_free_slots(tmp_path: Path) -> None:
    """When its tombstone is forgotten, long after."""
    device = FaultyDevice(400)
    node = Restarted(tmp_path, [device])
    node.put(NAMES)
    node.evict("a1")
    node.engine.erasing.erase(Tombstone(tenant="a", watched_until_s=1))
    while node.engine.erasing.step():
        node.io.run()
    node.rest()
    assert Restarted(tmp_path, [device]).held(NAMES) == {"b1", "b2", "b3"}
