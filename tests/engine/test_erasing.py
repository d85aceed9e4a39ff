"""Erasing on a node: what a tombstone names leaves DRAM and NVMe for good, once nobody uses it; the rest stays."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from kvstore.commands.clearing import Task
from kvstore.engine.engine import Engine
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.residency.levels import Drive
from replication.formats.tombstones import Tombstone
from tests.engine.fakes import FaultyDevice, SteppedIo, granted
from tests.engine.test_retention import Node
from tests.engine.test_turns import Counted
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SIZE = 16384


def block(path: tuple[int, ...]) -> bytes:
    return digest(repr(path).encode())


@pytest.mark.parametrize("seed", range(20))
def test_what_is_named_leaves_for_good(tmp_path: Path, seed: int) -> None:
    """Trees of blocks of two tenants, some in use, some only on NVMe: a tombstone drops what it names and no more, a block
    in use when it is given back, and an engine that starts anew does not find them."""
    chance, io, device = random.Random(seed), SteppedIo(), FaultyDevice(400, seed)
    arena = open_arena(tmp_path / "arena", 8 * MIB, 2 * MIB, SIZE)
    engine = Engine(arena, [Drive(device, io)], NamespaceRegistry(), io)
    engine.adopt()
    io.run()
    session = engine.open_session(0)
    specs = [
        NamespaceSpec(tenant.encode().ljust(16), SIZE, 16, 16, {"tenant": tenant}) for tenant in ("a", "b")
    ]
    spaces = [engine.register(spec) for spec in specs]
    held: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(40):
        which = chance.randrange(2)
        path = (
            next((p for w, p in chance.sample(held, len(held)) if w == which), ())
            if chance.random() < 0.8
            else ()
        )
        steps = [(*path, *(chance.randrange(4) for _ in range(n + 1))) for n in range(2)]
        steps[1] = (*steps[0], chance.randrange(4))
        answer = engine.reserve(
            session, spaces[which], b"".join(map(block, steps)), block(path) if path else b""
        )
        sums = b"".join(digest(arena.mapping[s.offset : s.offset + SIZE]) for s in granted(answer))
        if sums:
            engine.commit(session, answer.lease, [s.position for s in granted(answer)], sums)
        held += [(which, step) for step in steps if (which, step) not in held]
        io.run()
    top = chance.choice([path for which, path in held if which == 0])
    is_prefix = chance.random() < 0.6
    stone = Tombstone(
        tenant="" if is_prefix else "a",
        namespaces=(specs[0].digest,) if is_prefix else (),
        block_hash=block(top) if is_prefix else b"",
        watched_until_s=1,
    )
    named = {p for w, p in held if w == 0 and (not is_prefix or p[: len(top)] == top)}
    kept = {(w, p) for w, p in held if w == 1 or p not in named}
    in_use = chance.choice(sorted(named))
    lease = engine.acquire(session, spaces[0], block(in_use), lambda _: None)
    io.run()
    engine.erasing.erase(stone)
    for _ in range(200):
        engine.erasing.step()
    blocks = [engine.namespaces.get(space).blocks for space in spaces]
    found = blocks[0].get(block(in_use))
    assert found is None or found.where
    if lease.number in session.leases:
        engine.release(session, lease.number)
    while engine.erasing.step():
        pass
    engine.erasing.step()
    assert {(w, p) for w, p in held if blocks[w].get(block(p)) and blocks[w][block(p)].where & 3} == kept
    for _ in range(5):
        engine.tick()
        io.run()
    assert engine.check() == []
    arena.close()
    again = open_arena(tmp_path / "arena", 8 * MIB, 2 * MIB, SIZE)
    engine = Engine(again, [Drive(device, io)], NamespaceRegistry(), io)
    engine.adopt()
    io.run()
    blocks = [engine.namespaces.get(engine.register(spec)).blocks for spec in specs]
    assert {(w, p) for w, p in held if blocks[w].get(block(p)) and blocks[w][block(p)].where & 3} == kept
    again.close(unlink=True)


def test_rows_of_a_disk_that_comes_back_are_looked_at(tmp_path: Path) -> None:
    """A prefix was erased while a disk was away: what comes back with it is hidden, and gone when all of it was read."""
    io = SteppedIo()
    arena = open_arena(tmp_path / "arena", 8 * MIB, 2 * MIB, SIZE)
    engine = Engine(arena, [], NamespaceRegistry(), io)
    engine.adopt()
    session = engine.open_session(0)
    spec = NamespaceSpec(b"a".ljust(16), SIZE, 16, 16, {"tenant": "a"})
    space = engine.register(spec)
    path = [block(steps) for steps in ((1,), (1, 2), (1, 2, 3))]

    def store() -> None:
        answer = engine.reserve(session, space, b"".join(path), b"")
        sums = b"".join(digest(arena.mapping[s.offset : s.offset + SIZE]) for s in granted(answer))
        engine.commit(session, answer.lease, [s.position for s in granted(answer)], sums)

    def there() -> int:
        blocks = engine.namespaces.get(space).blocks
        return sum(bool(one.where & 3) for one in map(blocks.get, path) if one is not None)

    def steps() -> None:
        for _ in range(20):
            engine.erasing.step()

    store()
    engine.erasing.erase(Tombstone(namespaces=(spec.digest,), block_hash=path[1], watched_until_s=1))
    steps()
    assert there() == 1
    engine.erasing._is_adopted = lambda: False
    steps()
    store()  # as rows come in
    assert there() == 3 and path[1] in engine.namespaces.get(space).hidden
    engine.erasing._is_adopted = lambda: True
    steps()
    assert there() == 1 and not engine.namespaces.get(space).hidden
    assert engine.check() == []
    arena.close()


def test_a_tombstone_of_thousands_of_namespaces_is_many_turns() -> None:
    """Of a tenant: each of its namespaces is looked at in one of them, and until then not all was; a clear of empty ones looks at some
    at a time, too. One that is taken back meanwhile goes no further."""
    node, turns = Node(), Counted()
    for number in range(1000):
        spec = NamespaceSpec(number.to_bytes(16, "big"), SIZE, 16, 16, {"tenant": "many"})
        node.engine.register(spec)
    spaces = [space for space in node.namespaces if space.spec.fields["tenant"] == "many"]
    erasing, background = node.engine.erasing, node.engine.blocks.background
    stone = Tombstone(tenant="many", watched_until_s=1)
    with turns.turn("erase"):
        erasing.erase(stone)
    while (left := erasing.left(stone)) is not None and left.is_looking:
        with turns.turn("step"):
            background.step()
    assert {space.erasures for space in spaces} == {1} and len(spaces) == 1000
    with turns.turn("clear"):
        assert len(list(islice(Task(spaces, b"", True, lambda _: None).walk, 16))) == 16
    assert max(turns.most.values()) < 10_000
    again = Tombstone(tenant="many", watched_until_s=1, serial=2)
    erasing.erase(again)
    erasing.erase(Tombstone(tenant="many", watched_until_s=0, serial=3))
    while background.step():
        pass
    assert erasing.left(again) is None and {space.erasures for space in spaces} == {1, 2}
    node.close()
