"""Digests: equal sets have equal ones, and what differs is in the buckets that are named."""

from __future__ import annotations

import random

from replication.digests import BUCKETS, Digest, Seen, bucket_of


def packs(chance: random.Random, count: int) -> dict[bytes, int]:
    return {chance.randbytes(16): chance.randrange(1 << 26) for _ in range(count)}


def digest_of(packs: dict[bytes, int], chance: random.Random) -> Digest:
    """In any order."""
    made, items = Digest(), list(packs.items())
    chance.shuffle(items)
    for pack_id, size_bytes in items:
        made.add(pack_id, size_bytes)
    return made


def test_exactly_the_buckets_of_what_differs_differ() -> None:
    """Packs that one side lacks, or has with another size, are in the buckets that differ; equal sets in any order do not."""
    chance = random.Random(1)
    for _ in range(5):
        one = packs(chance, 20_000)
        assert digest_of(one, chance).differing(digest_of(one, chance)) == []
        other = dict(one)
        wrong = chance.sample(sorted(one), chance.randint(1, 30))
        for pack_id in wrong:
            if chance.random() < 0.5:
                del other[pack_id]
            else:
                other[pack_id] += 1
        found = digest_of(one, chance).differing(digest_of(other, chance))
        assert found == sorted({bucket_of(pack_id) for pack_id in wrong})
        assert all(0 <= bucket < BUCKETS for bucket in found)


def test_ids_that_begin_alike_do_not_cancel_out() -> None:
    """Two packs of one bucket that swap their sizes, or their place, are seen."""
    one, two = b"ab" + bytes(14), b"ab" + b"\1" * 14
    first, second = Digest(), Digest()
    for made, sizes in ((first, (1, 2)), (second, (2, 1))):
        made.add(one, sizes[0])
        made.add(two, sizes[1])
    assert first.differing(second) == [bucket_of(one)]
    assert (first.packs, first.size_bytes) == (second.packs, second.size_bytes) == (2, 3)


def test_seen_is_a_set_of_numbers() -> None:
    """As a set of Python's, near zero and far away, at the borders of its pieces."""
    chance = random.Random(2)
    numbers = [0, 1, 7, 8, 65_535, 65_536, 10**12, *(chance.randrange(1 << 20) for _ in range(2000))]
    seen, model = Seen(), set()
    for number in numbers:
        seen.add(number)
        model.add(number)
    for number in [*numbers, *range(3000), *(number + 1 for number in numbers)]:
        assert (number in seen) == (number in model)
