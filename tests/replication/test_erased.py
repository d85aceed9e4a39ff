"""What tombstones forbid of a prompt: the same as looking at each of them and each block, and quickly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from replication.erasure.erased import Erased
from replication.formats.tombstones import Tombstone, bury
from replication.store_clock import StoreClock, over_by
from replication.waits import passed_s
from tests.objects import MemoryObjects
from tests.replication.virtual_loop import run
from tiers.namespace_spec import NamespaceSpec

SIZE = 2
SPECS = [NamespaceSpec(bytes([n]) * 16, 64, SIZE, 16, {"tenant": "ab"[n % 2]}) for n in range(4)]


def first_erased(
    spec: NamespaceSpec, blocks: Sequence[bytes], stones: Sequence[Tombstone], now_s: float
) -> int | None:
    """The slow way. None: nothing is erased, -1: the namespace is."""
    alive = [stone for stone in stones if stone.names(spec) and now_s < stone.watched_until_s]
    if any(not stone.block_hash for stone in alive):
        return -1
    found = [at for at, block in enumerate(blocks) if any(stone.block_hash == block for stone in alive)]
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(100))
def test_it_is_what_each_tombstone_says(seed: int) -> None:
    """Of random tombstones that become known one after the other and end at different times, on random prompts whose blocks
    contain each other's bytes across their borders."""
    chance, now_s = random.Random(seed), 0.0
    objects, erased = MemoryObjects(), Erased(lambda: now_s)
    stones: dict[str, Tombstone] = {}
    for _ in range(12):
        block = bytes(chance.choices(b"xy", k=SIZE)) if chance.random() < 0.8 else b""
        spec = chance.choice(SPECS)
        stone = Tombstone(
            tenant=chance.choice(("", spec.fields["tenant"])),
            namespaces=(spec.digest,) if block or chance.random() < 0.5 else (),
            block_hash=block,
            watched_until_s=chance.randrange(200),
        )
        if not stone.tenant and not stone.namespaces:
            continue
        buried = run(bury(objects, stone))
        news = run(erased.look(objects))
        known = stones.get(stone.id, stone)
        assert buried.watched_until_s == max(stone.watched_until_s, known.watched_until_s)
        assert news == [buried] * (now_s < buried.watched_until_s)  # whether it was erased before or not
        stones[stone.id] = buried
        now_s += chance.randrange(20)
        for spec in SPECS:
            blocks = [bytes(chance.choices(b"xyz", k=SIZE)) for _ in range(chance.randrange(8))]
            start, prompt = chance.randint(0, len(blocks)), b"".join(blocks)
            at = first_erased(spec, blocks, list(stones.values()), now_s)
            assert erased.forbids(spec, prompt) == (at is not None)
            behind = first_erased(spec, blocks[start:], list(stones.values()), now_s)
            end = len(blocks) if behind is None else start + max(0, behind)
            assert erased.end(spec, prompt, start, len(blocks)) == end


def test_nothing_is_over_while_nobody_knows_the_time() -> None:
    """A machine's clock is a year ahead, and the store was not asked yet: what is read then erases, and forbids, until the time is known."""

    async def main() -> None:
        own_s = 365 * 24 * 3600.0
        clock, objects = StoreClock(lambda: own_s), MemoryObjects()
        over = await bury(objects, Tombstone(namespaces=(SPECS[0].digest,), watched_until_s=50))
        live = await bury(objects, Tombstone(namespaces=(SPECS[1].digest,), watched_until_s=150))
        erased = Erased(over_by(clock))
        assert clock() == own_s and sorted(await erased.look(objects), key=lambda one: one.id) == sorted(
            [over, live], key=lambda one: one.id
        )
        assert all(map(erased.forbids, SPECS[:2])) and not any(map(erased.forbids, SPECS[2:]))
        clock.learn(100.0, passed_s(asyncio.get_running_loop()))
        assert [*map(erased.forbids, SPECS)] == [False, True, False, False] and erased.tombstones == [live]

    run(main())


def test_thousands_of_tombstones_cost_only_what_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace is held against those that name it, or its tenant, once, and against no other."""
    asked: list[str] = []
    names = Tombstone.names
    monkeypatch.setattr(Tombstone, "names", lambda one, spec: asked.append(one.tenant) or names(one, spec))
    others = [Tombstone(tenant=f"gone {number}", watched_until_s=9) for number in range(3000)]
    of_tenant = Tombstone(tenant="a", watched_until_s=9, block_hash=b"xy")
    of_both = Tombstone(tenant="a", namespaces=(SPECS[2].digest,), watched_until_s=9)
    over = Tombstone(namespaces=(SPECS[1].digest,), watched_until_s=1)
    erased = Erased(lambda: 1.0, [*others, of_tenant, of_both, over])
    for _ in range(2):
        assert [erased.naming(spec) for spec in SPECS] == [[of_tenant], [], [of_both, of_tenant], []]
    assert sorted(asked) == ["", "a", "a", "a"]
