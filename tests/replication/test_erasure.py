"""Erasure: what a tombstone names leaves catalogue and bucket, and does not come back; nothing else goes."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from replication.catalogue.catalogue import LOST_KEPT_S, Catalogue
from replication.erasure.erasure import Erasure
from replication.formats.announced import Announced
from replication.formats.region import MARKER
from replication.formats.removed import Reason
from replication.formats.tombstones import (
    BEHIND,
    TOMBSTONES,
    Tombstone,
    bring,
    bury,
    read_tombstones,
    take_back,
)
from tests.objects import MemoryObjects
from tests.replication.durable import forget, hash_of, spec_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.virtual_loop import run
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PackHeader, describe

LONG_S = 10**9
TENANTS = ("acme", "umbrella")
SPECS = [
    NamespaceSpec(digest(f"{tenant} {model}".encode()), 64, 32, 16, {"tenant": tenant, "model": model})
    for tenant in TENANTS
    for model in ("small", "large")
]


class Node:
    """A bucket, a catalogue of it, and the erasure of one daemon."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s, self.said_s = now_s, 0.0
        self.objects = MemoryObjects()
        run(self.objects.put(MARKER, b"this place"))
        self.told: list[Tombstone] = []
        self.catalogue = Catalogue(MemoryRows())
        self.begin()
        self.trees: dict[bytes, list[tuple[str, ...]]] = {spec.digest: [()] for spec in SPECS}

    def begin(self) -> None:
        """A life of the daemon."""
        self.erasure = Erasure(self.objects, self.catalogue, lambda: self.now_s, self.told.extend)
        self.erasure.remove = self.catalogue.remove_all

    def grow(self, chance: random.Random) -> Announced:
        """A pack of one to three blocks behind a block that another pack has, or at the beginning."""
        spec = chance.choice(SPECS)
        path = chance.choice(self.trees[spec.digest])
        return self.add(spec, path, tuple(str(chance.randrange(3)) for _ in range(chance.randint(1, 3))))

    def add(self, spec: NamespaceSpec, path: tuple[str, ...], steps: tuple[str, ...]) -> Announced:
        names = [(*path, *steps[: n + 1]) for n in range(len(steps))]
        hashes = b"".join(map(hash_of, names))
        header = PackHeader(spec, hash_of(path) if path else b"", hashes, bytes(16 * len(names)))
        announced = Announced(describe(header)[0])
        self.objects_put(announced)
        self.announce(announced)
        self.trees[spec.digest] += names
        return announced

    def announce(self, announced: Announced) -> None:
        self.said_s += 1
        self.catalogue.add_packs([replace(announced, said_s=self.said_s)])

    def objects_put(self, announced: Announced) -> None:
        run(self.objects.put(announced.pack.name, b"a pack"))

    def work(self) -> None:
        async def once() -> None:
            await self.erasure.look()
            await self.erasure.step()

        run(once())

    def known(self) -> set[bytes]:
        return {one.pack.id for chunk in self.catalogue.chunks() for one in chunk}

    def stored(self) -> set[bytes]:
        return {
            bytes.fromhex(name.rsplit("/", 1)[1]) for name in self.objects.stored if name.startswith("packs/")
        }


def paths_of(announced: Announced, names: dict[bytes, tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [names[block] for block in announced.pack.header.each_hash()]


@pytest.mark.parametrize("seed", range(200))
def test_exactly_what_is_named_goes(seed: int) -> None:
    """Trees of packs, tombstones of tenants, namespaces and prefixes at any time, packs that come later: what is left
    is what no tombstone names; of a prefix goes its block and all that hangs on it, and no sibling."""
    chance, node = random.Random(seed), Node()
    made: list[Announced] = []
    stones: list[Tombstone] = []
    for _ in range(60):
        if chance.random() < 0.8:
            one = node.grow(chance)
            made.append(one)
        elif len(stones) < 5:
            spec = chance.choice(SPECS)
            names = [path for path in node.trees[spec.digest] if path]
            stone = chance.choice(
                [
                    Tombstone(tenant=spec.fields["tenant"], watched_until_s=LONG_S),
                    Tombstone(namespaces=(spec.digest,), watched_until_s=LONG_S),
                    *[
                        Tombstone(
                            namespaces=(spec.digest,),
                            block_hash=hash_of(chance.choice(names)),
                            watched_until_s=LONG_S,
                        )
                        for _ in range(4)
                        if names
                    ],
                ]
            )
            stones.append(stone)
            run(bury(node.objects, stone))
        if chance.random() < 0.3:
            node.work()
    node.work()
    names = {hash_of(path): path for paths in node.trees.values() for path in paths if path}
    expected = {one.pack.id for one in made if not any(is_named(one, stone, names) for stone in stones)}
    assert node.known() == expected == node.stored()
    assert {stone.id for stone in node.told} == {stone.id for stone in stones}
    for one in made:
        header = one.pack.header
        path = paths_of(one, names)[0]
        before = b"".join(hash_of(path[:n]) for n in range(1, len(path)))
        is_gone = any(is_named(one, stone, names) for stone in stones)
        assert not is_gone or node.erasure.forbids(header.spec, before + header.hashes)


def is_named(one: Announced, stone: Tombstone, names: dict[bytes, tuple[str, ...]]) -> bool:
    """What erasing means, said with whole paths."""
    spec = one.pack.header.spec
    if stone.tenant and spec.fields["tenant"] != stone.tenant:
        return False
    if stone.namespaces and spec.digest not in stone.namespaces:
        return False
    if not stone.block_hash:
        return True
    top = names[stone.block_hash]
    return any(path[: len(top)] == top for path in paths_of(one, names))


def test_a_tombstone_whose_time_is_over_forbids_nothing() -> None:
    """Until then what comes is removed; afterwards it stays."""
    node = Node()
    run(bury(node.objects, Tombstone(tenant="acme", watched_until_s=100)))
    first = node.add(SPECS[0], (), ("0",))
    node.work()
    assert not node.known() and node.erasure.forbids(SPECS[0])
    node.now_s = 100.0
    node.objects_put(first)
    node.announce(first)
    node.work()
    assert node.known() == {first.pack.id} and not node.erasure.forbids(SPECS[0])


def test_erasing_again_erases_again_and_never_shortens() -> None:
    """The same thing has one tombstone; the longer time holds. A daemon is told each time that it is erased, and what came since goes:
    while it is watched for, and when that was over."""
    node = Node()
    for now_s, until_s, longest_s in ((0, 100, 100), (1, 50, 100), (2, 200, 200), (300, 400, 400)):
        node.now_s = now_s
        node.add(SPECS[0], (), (str(now_s),))
        buried = run(bury(node.objects, Tombstone(tenant="acme", watched_until_s=until_s)))
        node.work()
        assert node.told[-1] == buried and [stone.watched_until_s for stone in node.erasure.tombstones] == [
            longest_s
        ]
        assert not node.known() and not node.stored()
    assert [stone.serial for stone in node.told] == [0, 1, 2, 3]


def test_of_two_regions_the_later_erasing_holds() -> None:
    """A tombstone that is brought erases at home, again if it was erased again there; an older one changes nothing."""
    home, source = Node(), Node()
    old = run(bury(source.objects, Tombstone(tenant="acme", watched_until_s=100)))
    new = run(bury(source.objects, Tombstone(tenant="acme", watched_until_s=100)))
    for tombstone, is_put in ((old, True), (new, True), (old, False), (new, False)):
        assert run(bring(home.objects, tombstone)) is is_put
        home.work()
    assert home.told == [old, new]


def test_one_that_is_taken_back_names_nothing_any_more() -> None:
    """Wherever it was brought: not by an older one that is brought later either; erased again, it erases again."""
    home, source = Node(), Node()
    old = run(bury(source.objects, Tombstone(tenant="acme", watched_until_s=LONG_S)))
    assert run(bring(home.objects, old))
    home.work()
    kept = home.add(SPECS[0], (), ("late",))
    assert run(take_back(source.objects, old.id)) == old
    (back,) = run(read_tombstones(source.objects)).by_key.values()
    assert back.is_taken_back and run(bring(home.objects, back)) and not run(bring(home.objects, old))
    home.work()
    assert home.told == [old, back] and not home.erasure.tombstones
    assert home.known() == {kept.pack.id} and not home.erasure.forbids(SPECS[0])
    again = run(bury(source.objects, Tombstone(tenant="acme", watched_until_s=LONG_S)))
    assert run(bring(home.objects, again))
    home.work()
    assert home.told[-1] == again and not home.known()
    assert run(take_back(source.objects, "0" * 32)) is None


def test_damaged_tombstones_are_left_out() -> None:
    """One that cannot be read erases nothing, and hides no other one."""
    node = Node()
    run(bury(node.objects, Tombstone(tenant="acme", watched_until_s=LONG_S)))
    for name, content in list(node.objects.stored.items()):
        if name.startswith(TOMBSTONES):
            run(node.objects.put(TOMBSTONES + "0" * 32, content[:-1] + b"\1"))
    assert len(run(read_tombstones(node.objects)).found) == 1


def test_what_hangs_on_what_is_gone_goes_too() -> None:
    """A prefix of three packs is erased where two are known. The third one comes later, to a daemon that never knew the
    others: it goes as well, its sibling stays, and a daemon does not persist behind them."""
    first, late = Node(), Node()
    for made in (first.add(SPECS[0], (), ("a",)), first.add(SPECS[0], ("a",), ("b",))):
        run(
            bury(
                first.objects,
                Tombstone(namespaces=(SPECS[0].digest,), block_hash=hash_of(("a",)), watched_until_s=LONG_S),
            )
        )
        assert made.pack.id in first.known()
    first.work()
    assert not first.known()
    late.objects = late.erasure._objects = first.objects
    late.add(SPECS[0], ("a", "b"), ("c",))
    sibling = late.add(SPECS[0], ("x",), ("c",))
    late.work()
    assert late.known() == {sibling.pack.id} == late.stored()
    assert late.erasure.forbids(SPECS[0], hash_of(("a", "b")) + hash_of(("a", "b", "d")))
    assert not late.erasure.forbids(SPECS[0], hash_of(("x",)))


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_other", [False, True])
def test_what_hangs_on_a_block_that_lived_goes_with_what_is_before_it(is_late: bool, is_other: bool) -> None:
    """A pack goes for its last block; what hangs on its first one stays, until a block before that is erased: whether
    it was there or came later, and whoever erases."""
    node, (stays, late) = Node(), (("a", "b", "y"), ("a", "b", "z"))
    node.add(SPECS[0], (), ("a",))
    node.add(SPECS[0], ("a",), ("b", "c", "d"))
    known = node.add(SPECS[0], stays[:-1], stays[-1:])
    erase(node, "a", "b", "c")
    node.work()
    assert {known.pack.id} < node.known() == node.stored()
    if is_other:
        before, node = node, Node()
        node.objects = node.erasure._objects = before.objects
        node.add(SPECS[0], (), ("a",))
        node.add(SPECS[0], stays[:-1], stays[-1:])
    if is_late:
        erase(node, "a")
        node.work()
        node.add(SPECS[0], late[:-1], late[-1:])
        node.work()
    else:
        node.add(SPECS[0], late[:-1], late[-1:])
        erase(node, "a")
        node.work()
    assert not node.known() and not node.stored()
    assert node.erasure.forbids(SPECS[0], hash_of(("a", "b")))


@pytest.mark.parametrize("is_other", [False, True])
def test_what_hangs_on_a_pack_that_was_lost_goes_with_what_is_before_it(is_other: bool) -> None:
    """Two packs of a prefix rot; what hangs on them is erased with the prefix, in a later life of the daemon, too, and by a
    daemon that never knew them. What hangs on others stays."""
    node = Node()
    node.add(SPECS[0], (), ("a",))
    lost = [node.add(SPECS[0], ("a", "b"), ("c",)), node.add(SPECS[0], ("a",), ("b",))]
    node.add(SPECS[0], ("a", "b", "c"), ("d",))
    sibling = node.add(SPECS[0], ("x", "b"), ("c",))
    for announced in lost:
        run(node.objects.delete([announced.pack.name]))
        assert forget(node.catalogue, announced.pack.id, Reason.GONE)
    node.catalogue = Catalogue(node.catalogue._rows)
    node.begin()
    node.work()
    assert len(node.known()) == 3
    erase(node, "a")
    node.work()
    assert node.known() == {sibling.pack.id} == node.stored()
    if is_other:
        before, node = node, Node()
        node.objects = node.erasure._objects = before.objects
        node.add(SPECS[0], ("a", "b", "c"), ("e",))
        node.work()
        assert not node.known()


def test_lost_packs_are_remembered_until_their_life_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more of them than there is room for; those that were forgotten, or erased, are not among them."""
    monkeypatch.setattr("replication.catalogue.catalogue.LOST_PACKS_MAX", 2)
    node, elsewhere = Node(), Node()
    packs = [elsewhere.add(SPECS[0], (), (name,)) for name in "abcde"]
    ends = [
        replace(one, kept_until_s=until_s) for one, until_s in zip(packs, (0, 10, 20, 30, 40), strict=True)
    ]
    node.catalogue.add_packs(ends)
    forget(node.catalogue, packs[0].pack.id)
    for one in packs[1:4]:
        forget(node.catalogue, one.pack.id, Reason.GONE)

    def lost(now_s: float) -> list[bytes]:
        return [one.pack.id for chunk in node.catalogue.lost(now_s) for one in chunk]

    assert lost(15.0) == [packs[1].pack.id, packs[2].pack.id]
    lost(15.0 + LOST_KEPT_S)
    forget(node.catalogue, packs[4].pack.id, Reason.DAMAGED)
    assert lost(0.0) == [packs[2].pack.id, packs[4].pack.id]


def erase(node: Node, *path: str) -> None:
    run(
        bury(
            node.objects,
            Tombstone(namespaces=(SPECS[0].digest,), block_hash=hash_of(path), watched_until_s=LONG_S),
        )
    )


def test_what_became_known_before_what_it_hangs_on_goes_too() -> None:
    """Packs of a prefix become known in the wrong order, as copies do: all of them go."""
    node = Node()
    steps = (("a", "b", "c"), ("a", "b"), ("a",))
    for path in steps:
        node.add(SPECS[0], path[:-1], path[-1:])
    run(
        bury(
            node.objects,
            Tombstone(namespaces=(SPECS[0].digest,), block_hash=hash_of(("a",)), watched_until_s=LONG_S),
        )
    )
    node.work()
    assert not node.known() and not node.stored()


def test_blocks_behind_are_put_down_once() -> None:
    """Who begins again, and who finds the same, writes nothing; a tombstone behind which nothing was found has no blocks."""
    node = Node()
    for name in ("a", "x"):
        run(
            bury(
                node.objects,
                Tombstone(namespaces=(SPECS[0].digest,), block_hash=hash_of((name,)), watched_until_s=LONG_S),
            )
        )
    node.add(SPECS[0], (), ("a", "b"))
    node.work()
    names = [name for name in node.objects.stored if name.startswith(BEHIND)]
    assert len(names) == 1
    again = Node()
    again.objects = again.erasure._objects = node.objects
    again.add(SPECS[0], (), ("a", "b"))
    again.work()
    assert names == [name for name in node.objects.stored if name.startswith(BEHIND)]


def test_a_tombstone_that_names_nothing_erases_nothing() -> None:
    """Without a tenant and without namespaces it is about nobody."""
    assert not Tombstone(watched_until_s=LONG_S).names(spec_of())
