"""What is erased is gone from the bucket within minutes, whether anybody had announced it or not; and the keeper says so, or what is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from replication.catalogue.catalogue import Catalogue
from replication.erasure.erasure import STRAYS_AGAIN_S, STRAYS_LOOKS_S, STRAYS_UNREAD_S, Erasure
from replication.erasure.strays import HEADERS_TRIED_MAX
from replication.formats.announced import Announced
from replication.formats.carried_out import CARRIED_OUT, CARRIED_OUT_FORMAT
from replication.formats.removed import Removed
from replication.formats.tombstones import BEHIND, Tombstone, bury
from tests.objects import MemoryObjects
from tests.replication.durable import hash_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Range
from tiers.checksum import digest
from tiers.errors import ObjectRefused
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PackHeader

SPECS = [
    NamespaceSpec(digest(name.encode()), 64, 32, 16, {"tenant": name[:-1], "model": name[-1]})
    for name in ("acme1", "acme2", "umbrella1")
]
RECORD = memoryview(b"r" * 64)
SOON_S = 60.0
Path = tuple[str, ...]


class Bucket(MemoryObjects):
    """Some objects of it cannot be deleted. deleting: who deletes now."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: set[str] = set()
        self.reads = 0
        self.delete_s = 0.0  # that each request takes

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        self.reads += 1
        return await super().get_ranges(name, ranges)

    async def delete(self, names: Sequence[str]) -> None:
        await asyncio.sleep(self.delete_s)
        if not self.refused.isdisjoint(names):
            raise ObjectRefused(f"{names}: a lock (injected)")
        await super().delete(names)


class World:
    """A bucket, and two processes of its region, of which one keeps it at a time."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.objects = Bucket()
        self.keeps = 0
        self.catalogues = [Catalogue(MemoryRows()), Catalogue(MemoryRows())]
        self.erasures = [self.erasure(0), self.erasure(1)]
        self.tasks = [asyncio.ensure_future(erasure.run()) for erasure in self.erasures]
        self.trees: dict[bytes, list[Path]] = {spec.digest: [()] for spec in SPECS}
        self.packs: dict[str, tuple[NamespaceSpec, list[Path]]] = {}  # that were put, by name
        self.stones: dict[str, Tombstone] = {}

    def erasure(self, number: int) -> Erasure:
        clock = asyncio.get_running_loop().time
        erasure = Erasure(self.objects, self.catalogues[number], clock, holds=lambda: self.keeps == number)
        erasure.remove = self.remove
        return erasure

    async def remove(self, some: Sequence[Removed]) -> None:
        """Everybody reads it."""
        for catalogue in self.catalogues:
            await catalogue.remove_all(some)

    async def put(self, is_announced: bool) -> None:
        """A pack behind a block that another one has; what is erased is put by nobody who knows."""
        spec = self.chance.choice(SPECS)
        path = self.chance.choice(self.trees[spec.digest])
        steps = [str(self.chance.randrange(3)) for _ in range(self.chance.randint(1, 3))]
        names = [(*path, *steps[: n + 1]) for n in range(len(steps))]
        if any(self.is_named(stone, spec, names) for stone in self.stones.values()):
            return
        hashes = b"".join(map(hash_of, names))
        header = PackHeader(spec, hash_of(path) if path else b"", hashes, digest(RECORD) * len(names))
        pack = await put_pack(self.objects, header, [RECORD] * len(names))
        self.packs[pack.name] = spec, names
        self.trees[spec.digest] += names
        if is_announced:
            for catalogue in self.catalogues:
                catalogue.add_packs([Announced(pack)])

    async def bury(self) -> None:
        spec = self.chance.choice(SPECS)
        blocks = [path for path in self.trees[spec.digest] if path]
        block = hash_of(self.chance.choice(blocks)) if blocks and self.chance.random() < 0.7 else b""
        is_tenant = not block and self.chance.random() < 0.5
        stone = await bury(
            self.objects,
            Tombstone(
                tenant=spec.fields["tenant"] if is_tenant else "",
                namespaces=() if is_tenant else (spec.digest,),
                block_hash=block,
                watched_until_s=10**9,
            ),
        )
        self.stones[stone.id] = stone

    def is_named(self, stone: Tombstone, spec: NamespaceSpec, names: Sequence[Path]) -> bool:
        blocks = {hash_of(names[-1][: n + 1]) for n in range(len(names[-1]))}
        return stone.names(spec) and (not stone.block_hash or stone.block_hash in blocks)

    def erased(self) -> set[str]:
        return {
            name
            for name, (spec, names) in self.packs.items()
            if any(self.is_named(stone, spec, names) for stone in self.stones.values())
        }

    def there(self) -> set[str]:
        return {name for name in self.objects.stored if name.startswith("packs/")}


@pytest.mark.parametrize("named", ["tenant", "prefix", "namespace", "another tenant"])
def test_what_nobody_can_read_may_be_left(named: str) -> None:
    """A pack of a later version, of which nobody here can say whether it is erased, is left and counted; it goes with its whole namespace,
    and concerns nobody whose namespace is another one."""

    async def main() -> None:
        world, spec, other = World(random.Random(0)), SPECS[0], SPECS[2]
        blocks = [hash_of("a"), hash_of("b")]
        for one, block in ((spec, blocks[0]), (spec, blocks[1]), (other, blocks[0])):
            pack = await put_pack(world.objects, PackHeader(one, b"", block, digest(RECORD)), [RECORD])
            if (one, block) == (spec, blocks[1]) or (one == spec and named == "tenant"):
                content = world.objects.stored[pack.name]
                world.objects.stored[pack.name] = b"KVPACK7\n" + content[8:]
        stone = Tombstone(
            tenant={"tenant": "acme", "another tenant": "umbrella"}.get(named, ""),
            namespaces=() if "tenant" in named else (spec.digest,),
            block_hash=blocks[0] if named == "prefix" else b"",
            watched_until_s=10**9,
        )
        await bury(world.objects, stone)
        await asyncio.sleep(SOON_S)
        said = await CARRIED_OUT_FORMAT.hint(world.objects, CARRIED_OUT + stone.id)
        assert said is not None and said.left == {"tenant": 2, "prefix": 1}.get(named, 0), said
        assert not said.left or "of a later version" in said.why[0]
        there = {"tenant": 3, "prefix": 2, "namespace": 1, "another tenant": 2}
        assert len(world.there()) == there[named]
        await asyncio.sleep(2 * STRAYS_UNREAD_S)
        before = world.objects.reads
        await asyncio.sleep(4 * STRAYS_UNREAD_S)
        assert world.objects.reads - before <= 4 * HEADERS_TRIED_MAX

    run(main())


@pytest.mark.parametrize("is_announced", [True, False])
def test_thousands_of_packs_leave_the_bucket_within_a_minute(is_announced: bool) -> None:
    """Where a request takes what one to S3 does they go together, announced or not; one among them that cannot be deleted is told."""

    async def main() -> None:
        world, spec = World(random.Random(0)), SPECS[0]
        world.objects.delete_s = 0.04
        for number in range(2000):
            header = PackHeader(spec, b"", hash_of(number), digest(RECORD))
            pack = await put_pack(world.objects, header, [RECORD])
            if is_announced:
                for catalogue in world.catalogues:
                    catalogue.add_packs([Announced(pack)])
        world.objects.refused = {pack.name}
        stone = await bury(world.objects, Tombstone(tenant="acme", watched_until_s=10**9))
        await asyncio.sleep(SOON_S)
        assert world.there() == {pack.name}
        said = await CARRIED_OUT_FORMAT.hint(world.objects, CARRIED_OUT + stone.id)
        assert said is not None and said.left == 1 and pack.name in said.why[0]

    run(main())


@pytest.mark.parametrize("seed", range(16))
def test_what_is_erased_leaves_the_bucket(seed: int) -> None:
    """Trees of packs, announced or not; tombstones of tenants, namespaces and prefixes; keepers that change in the middle, objects
    that cannot be deleted: soon what is named is gone, but for those, which the keeper names, and nothing else is."""

    async def whatever_happens() -> None:
        chance = random.Random(seed)
        world = World(chance)
        for _ in range(40):
            what = chance.random()
            if what < 0.6:
                await world.put(is_announced=chance.random() < 0.5)
            elif what < 0.7:
                await world.bury()
            elif what < 0.75:
                world.keeps = chance.randrange(3)  # 2: nobody
            elif what < 0.8 and world.there():
                world.objects.refused.add(chance.choice(sorted(world.there())))
            await asyncio.sleep(chance.choice((0.0, 1.0, 20.0)))
        for _ in range(3):
            await world.bury()
        world.keeps = chance.randrange(2)
        await asyncio.sleep(SOON_S)
        stuck = world.erased() & world.objects.refused
        assert world.there() == world.packs.keys() - world.erased() | stuck
        for catalogue in world.catalogues:
            known = {one.pack.name for chunk in catalogue.chunks() for one in chunk}
            assert not known & (world.erased() - stuck)
        for stone in world.stones.values():
            said = await CARRIED_OUT_FORMAT.hint(world.objects, CARRIED_OUT + stone.id)
            assert said is not None and said.serial == stone.serial
            concerned = {name for name in stuck if stone.names(world.packs[name][0])}
            assert said.left == len(concerned) and all(
                any(name in why for name in concerned) for why in said.why
            )
        await asyncio.sleep(STRAYS_LOOKS_S[-1])
        world.objects.refused.clear()
        await asyncio.sleep(STRAYS_AGAIN_S + SOON_S)
        assert world.there() == world.packs.keys() - world.erased()
        told = [
            await CARRIED_OUT_FORMAT.hint(world.objects, CARRIED_OUT + stone_id) for stone_id in world.stones
        ]
        assert [said.left for said in told if said is not None] == [0] * len(world.stones)
        for task in world.tasks:
            task.cancel()

    run(whatever_happens())


def test_what_was_put_by_one_who_did_not_know_goes_later() -> None:
    """A node that was cut off puts a pack of an erased tenant, and dies before it announces it: it is gone with the next look. Who
    does not keep the region deletes nothing, and puts nothing down."""

    async def late() -> None:
        world = World(random.Random(0))
        world.keeps = 2
        stone = Tombstone(namespaces=(SPECS[0].digest,), block_hash=hash_of(("0",)), watched_until_s=10**9)
        header = PackHeader(SPECS[0], b"", hash_of(("0",)) + hash_of(("0", "1")), digest(RECORD) * 2)
        world.catalogues[0].add_packs([Announced(await put_pack(world.objects, header, [RECORD] * 2))])
        before = dict(world.objects.stored)
        await bury(world.objects, stone)
        await bury(world.objects, Tombstone(tenant="acme", watched_until_s=10**9))
        await asyncio.sleep(SOON_S)
        assert before.items() <= world.objects.stored.items()
        assert not [name for name in world.objects.stored if name.startswith((BEHIND, "erased/"))]
        header = PackHeader(SPECS[1], b"", hash_of("late"), digest(RECORD))
        pauses_s = (STRAYS_LOOKS_S[1] + SOON_S, STRAYS_LOOKS_S[2], SOON_S, SOON_S)
        for world.keeps, pause_s in zip(
            (1, 1, 0, 1), pauses_s, strict=True
        ):  # another one keeps it: it looks at once
            pack = await put_pack(world.objects, header, [RECORD])
            await asyncio.sleep(pause_s)
            assert pack.name not in world.objects.stored
        for task in world.tasks:
            task.cancel()

    run(late())
