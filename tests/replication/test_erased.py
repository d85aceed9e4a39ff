"""What tombstones forbid of a prompt: the same as looking at each of them and each block, and quickly."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from replication.erasure.erased import Erased
from replication.formats.tombstones import Tombstone, bury
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
            end = len(blocks) if at is None else max(0, at)
            assert erased.end(spec, prompt, start, len(blocks)) == max(start, end)
