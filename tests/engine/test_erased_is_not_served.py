"""What is erased is handed out to nobody who asks later, whatever was leased, on its way, being written or read from disks meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.engine.engine import Engine
from kvstore.engine.sessions import Session
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.frames import Acquired, Reserved
from kvstore.residency.levels import Drive
from replication.formats.tombstones import Tombstone
from tests.engine.fakes import FaultyDevice, SteppedIo, granted, held
from tests.engine.shared_memory import SharedMemoryLevel
from tiers.base import Record
from tiers.checksum import digest
from tiers.dram.arena import open_arena
from tiers.namespace_spec import NamespaceSpec

MIB = 1 << 20
SIZE = 65536
SLABS = 4  # of 32 records
SPECS = [
    NamespaceSpec(name.encode().ljust(16), SIZE, 16, 16, {"tenant": name[0]}) for name in ("a1", "a2", "b")
]

Block = tuple[int, ...]  # where it is in its tree: the steps to it


def name(path: Block) -> bytes:
    return digest(repr(path).encode()) if path else b""


def content(birth: int) -> bytes:
    return birth.to_bytes(8, "little") * (SIZE // 8)


class World:
    """One daemon's life after the other over the same disk, and an oracle. Each computation of a block has a number, its birth."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.chance = path, random.Random(seed)
        self.now_s, self.pace_s = 0.0, (0.001, 3.0)[seed % 2]  # breakers trip where it is slow
        self.births = 0
        self.erased: dict[
            tuple[int, Block], int
        ] = {}  # by namespace and block: what was born before is erased
        self.buried: dict[str, Tombstone] = {}
        self.told: set[str] = set()  # in this life
        self.later: list[Callable[[], None]] = []
        self.durable = SharedMemoryLevel(lambda delay_s, call: self.later.append(call), seed=seed)
        self.device = FaultyDevice(100, seed)
        self.trees: list[list[Block]] = [[] for _ in SPECS]
        self.served = 0
        self.begin()

    def begin(self) -> None:
        self.io = SteppedIo()
        self.later.clear()
        self.told.clear()
        self.arena = open_arena(self.path / "arena", SLABS * 2 * MIB, 2 * MIB, SIZE)
        drive = Drive(self.device, self.io)
        self.engine = Engine(
            self.arena, [drive], NamespaceRegistry(), self.io, clock=lambda: self.now_s, shared=[self.durable]
        )
        self.engine.adopt()
        self.session: Session = self.engine.open_session(0)
        self.reading: list[int] = []
        self.writing: list[tuple[int, list[Block], Reserved, int]] = []

    def restart(self) -> None:
        """Killed; DRAM may be lost. Names of namespaces are, always."""
        self.arena.close(unlink=self.chance.random() < 0.5)
        self.begin()

    # -- what happens --

    def prompt(self, which: int) -> list[Block]:
        """A path that goes on from one that is known, mostly."""
        known = self.trees[which]
        path = self.chance.choice(known) if known and self.chance.random() < 0.85 else ()
        for _ in range(self.chance.randrange(3)):
            path = (*path, self.chance.randrange(3))
        return [path[: depth + 1] for depth in range(len(path))]

    def reserve(self) -> None:
        which = self.chance.randrange(len(SPECS))
        run = self.prompt(which)
        start = self.chance.randrange(len(run)) if run else 0
        run, before = run[start:], run[start - 1] if start else ()
        if not run:
            return
        space = self.engine.register(SPECS[which])
        answer = self.engine.reserve(self.session, space, b"".join(map(name, run)), name(before))
        self.births += 1
        self.writing.append((which, run, answer, self.births))

    def commit(self) -> None:
        if not self.writing:
            return
        which, run, answer, birth = self.writing.pop(self.chance.randrange(len(self.writing)))
        slots = granted(answer)
        for slot in slots:
            self.arena.mapping[slot.offset : slot.offset + SIZE] = content(birth)
        if slots:
            self.engine.commit(
                self.session, answer.lease, [s.position for s in slots], digest(content(birth)) * len(slots)
            )
        self.trees[which] += [block for block in run if block not in self.trees[which]]

    def persisted(self) -> None:
        """By another daemon, which keeps what is erased out of the bucket."""
        which = self.chance.randrange(len(SPECS))
        for block in self.prompt(which):
            is_erased = any(self.names(stone, which, block) for stone in self.buried.values())
            key, parent = SPECS[which].digest + name(block), SPECS[which].digest + name(block[:-1])
            if is_erased:
                return
            if self.durable.held(
                self.engine.namespaces.get(self.engine.register(SPECS[which])), name(block), 0
            ):
                continue
            self.births += 1
            data = content(self.births)
            record = Record(key, parent if block[:-1] else b"", SIZE, digest(data))
            self.durable.put(record, data)
            if block not in self.trees[which]:
                self.trees[which].append(block)

    def ask(self) -> None:
        """Whoever asks gets nothing that was erased, as far as this life was told, before he asked."""
        which = self.chance.randrange(len(SPECS))
        space, run = self.engine.register(SPECS[which]), self.prompt(which)
        hashes = b"".join(map(name, run))
        usable = self.engine.find([space], hashes).usable if hashes else 0
        start = self.chance.randrange(len(run)) if run and self.chance.random() < 0.3 else 0
        end = usable if self.chance.random() < 0.7 else len(run)
        asked, before = run[start:end], run[start - 1] if start else ()
        if not asked:
            return
        floors = [self.erased.get((which, block), 0) for block in asked] if self.is_told(which) else None

        def ready(answer: Acquired) -> None:
            for position, slot in enumerate(held(answer)):
                if slot is not None:
                    birth = int.from_bytes(self.arena.mapping[slot.offset : slot.offset + 8], "little")
                    self.served += 1
                    assert floors is None or birth > floors[position], f"{asked[position]} was erased"
            if answer.lease:
                self.reading.append(answer.lease)

        self.engine.acquire(self.session, space, b"".join(map(name, asked)), ready, name(before))

    def release(self) -> None:
        if self.reading:
            self.engine.release(self.session, self.reading.pop(self.chance.randrange(len(self.reading))))

    def bury(self) -> None:
        """Known in the bucket first; this node is told a moment later."""
        which = self.chance.randrange(len(SPECS))
        spec, known = SPECS[which], self.trees[which]
        stone = self.chance.choice(
            [
                Tombstone(tenant=spec.fields["tenant"], watched_until_s=1),
                Tombstone(namespaces=(spec.digest,), watched_until_s=1),
                *[
                    Tombstone(
                        namespaces=(spec.digest,),
                        block_hash=name(self.chance.choice(known)),
                        watched_until_s=1,
                    )
                    for _ in range(4)
                    if known
                ],
            ]
        )
        self.births += 1
        stone = Tombstone(
            tenant=stone.tenant,
            namespaces=stone.namespaces,
            block_hash=stone.block_hash,
            watched_until_s=1,
            serial=self.births,
        )
        self.buried[stone.id] = stone
        self.told.discard(stone.id)
        for each in range(len(SPECS)):
            for block in self.trees[each]:
                if self.names(stone, each, block):
                    self.durable._records.pop(SPECS[each].digest + name(block), None)
        for _ in range(self.chance.randrange(4)):
            self.go_on()
        self.tell()

    def tell(self) -> None:
        for stone in self.buried.values():
            if stone.id not in self.told:
                self.told.add(stone.id)
                self.engine.erasing.erase(stone)
                for which, tree in enumerate(self.trees):
                    for block in tree:
                        if self.names(stone, which, block):
                            self.erased[which, block] = max(stone.serial, self.erased.get((which, block), 0))

    def names(self, stone: Tombstone, which: int, block: Block) -> bool:
        behind = [name(block[: depth + 1]) for depth in range(len(block))]
        return stone.names(SPECS[which]) and (not stone.block_hash or stone.block_hash in behind)

    def is_told(self, which: int) -> bool:
        return all(stone.id in self.told for stone in self.buried.values() if stone.names(SPECS[which]))

    def go_on(self) -> None:
        """A little of everything that goes on by itself."""
        self.now_s += self.pace_s
        what = self.chance.random()
        if what < 0.4 and self.io.waiting:
            self.io.step(self.chance.randrange(len(self.io.waiting)))
        elif what < 0.7 and self.later:
            self.later.pop(self.chance.randrange(len(self.later)))()
        elif what < 0.9:
            self.engine.erasing.step()
        else:
            self.engine.tick()

    def settle(self) -> None:
        """All leases are given back, all that is on its way comes."""
        for _, _, answer, _ in self.writing:
            if answer.lease in self.session.leases:
                self.engine.release(self.session, answer.lease)
        self.writing.clear()
        for _ in range(200):
            while self.reading:
                self.release()
            self.io.run()
            while self.later:
                self.later.pop()()
            self.engine.erasing.step()
            self.now_s += 1.0
            self.engine.tick()


@pytest.mark.parametrize("seed", range(40))
def test_what_is_erased_is_not_handed_out(tmp_path: Path, seed: int) -> None:
    """Trees of three namespaces of two tenants in DRAM, on NVMe and in a bucket; leases, loads, writes and adoption at every stage;
    tombstones of tenants, namespaces and prefixes, the same ones again, told late, and again in each life."""
    world = World(tmp_path, seed)
    for _ in range(400):
        what = world.chance.random()
        for share, act in (
            (0.15, world.reserve), (0.3, world.commit), (0.36, world.persisted), (0.56, world.ask),
            (0.66, world.release), (0.69, world.bury), (0.7, world.restart), (0.71, world.tell), (1.0, world.go_on),
        ):  # fmt: skip
            if what < share:
                act()
                break
    world.tell()
    for _ in range(30):
        world.ask()
        world.go_on()
    world.settle()
    left = {stone.id: world.engine.erasing.left(stone) for stone in world.buried.values()}
    assert set(left.values()) <= {(0, False)}, left
    assert not any(namespace.hidden for namespace in world.engine.namespaces)
    assert world.engine.check() == []
    for which in range(len(SPECS)):  # and what is computed anew is served as ever
        space = world.engine.register(SPECS[which])
        run = [(9,), (9, 9)]
        hashes = b"".join(map(name, run))
        answer = world.engine.reserve(world.session, space, hashes, b"")
        world.births += 1
        world.writing.append((which, run, answer, world.births))
        while world.writing:
            world.commit()
        assert world.engine.find([space], hashes).usable == 2
    assert world.served
    world.arena.close(unlink=True)
