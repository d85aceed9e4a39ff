"""One object that cannot be deleted takes no other one with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from replication.deleting import REFUSED_MAX, delete_each, unchanged
from replication.formats.orders import ORDERS, clear_over, put_order
from replication.models.collecting import publishing
from tests.fuzz.test_buckets import ORDER
from tests.objects import MemoryObjects
from tests.replication.simulated import SickObjects
from tests.replication.test_manifests import manifest_of
from tests.replication.virtual_loop import run
from tiers.errors import ObjectRefused, ObjectUnavailable

NAMES = [f"packs/{number:03}" for number in range(300)]


def full_of(sick: Sequence[str]) -> SickObjects:
    objects = SickObjects()
    for name in NAMES:
        asyncio.run(objects.put(name, b"x"))
    objects.sick = {name: (ObjectRefused(f"{name}: a lock"), frozenset({"delete"})) for name in sick}
    return objects


@pytest.mark.parametrize("seed", range(20))
def test_all_that_can_be_deleted_are(seed: int) -> None:
    """Of any names, with any of them locked: the others are gone, and each that stays is told with its reason."""
    chance = random.Random(seed)
    names = chance.sample(NAMES, chance.randrange(len(NAMES)))
    sick = chance.sample(NAMES, chance.choice((0, 1, 2, REFUSED_MAX)))
    objects = full_of(sick)
    left = asyncio.run(delete_each(objects.delete, names))
    assert left == {name: f"{name}: a lock" for name in names if name in sick}
    assert objects.stored.keys() == set(NAMES) - set(names) | left.keys()


def test_a_place_that_refuses_everything_is_not_asked_for_each() -> None:
    """Some dozens of refusals are enough: the last one is raised."""
    objects, calls = full_of(NAMES), 0

    async def counted(names: Sequence[str]) -> None:
        nonlocal calls
        calls += 1
        await objects.delete(names)

    with pytest.raises(ObjectRefused):
        asyncio.run(delete_each(counted, NAMES))
    assert calls < 3 * REFUSED_MAX


def test_a_place_that_is_away_is_said_at_once() -> None:
    """An object has no part in that."""

    async def away(names: Sequence[str]) -> None:
        raise ObjectUnavailable("away")

    with pytest.raises(ObjectUnavailable):
        asyncio.run(delete_each(away, NAMES))


def test_few_that_do_not_answer_are_objects_and_more_are_the_place() -> None:
    """Whoever remembers what was away goes on behind two of them, also one by one; whatever can be deleted clears that."""
    objects, away = full_of([]), set[str]()
    objects.sick = {
        name: (ObjectUnavailable(f"{name}: no answer"), frozenset({"delete"})) for name in NAMES[:3]
    }

    def deleted(*names: str) -> dict[str, str]:
        return asyncio.run(delete_each(objects.delete, names, away))

    assert deleted(*NAMES[1:60]) == {name: f"{name}: no answer" for name in NAMES[1:3]}
    assert objects.stored.keys() == {*NAMES[:3], *NAMES[60:]} and not away
    assert deleted(NAMES[0]) and deleted(NAMES[1]) and len(away) == 2
    for _ in range(2):
        with pytest.raises(ObjectUnavailable):
            deleted(NAMES[2])
    objects.sick.clear()
    assert not deleted(NAMES[2]) and not away


def test_an_order_that_stays_stops_no_new_one() -> None:
    """`kvstore warm` clears what is over before it puts an order."""
    objects = SickObjects()
    name = ORDERS + ORDER.id
    objects.sick = {name: (ObjectRefused("a lock"), frozenset({"delete"}))}

    async def main() -> None:
        await put_order(objects, ORDER)
        await clear_over(objects, ORDER.until_s + 1)

    asyncio.run(main())
    assert name in objects.stored


def test_who_may_put_and_not_delete_can_publish() -> None:
    """What was named while it was published is kept for a day; the publisher has no error."""
    objects, manifest = SickObjects(), manifest_of({"f": [b"a"]})

    async def main() -> None:
        async with publishing(objects, manifest, "me") as intent:
            await intent.require()
            objects.sick[intent.name] = ObjectRefused("no right to"), frozenset({"delete"})

    asyncio.run(main())
    assert len(objects.stored) == 1


def test_what_was_put_again_is_seen() -> None:
    """By its time or its size; what is gone is as it was."""

    async def main() -> None:
        objects = MemoryObjects()
        for name in "abcd":
            await objects.put(name, b"x")
        infos = [await objects.head(name) for name in "abcd"]
        await asyncio.sleep(10)
        await objects.put("b", b"x")
        objects.stored["c"] = b"longer"
        await objects.delete(["d"])
        assert await unchanged(objects, infos) == ["a", "d"]

    run(main())
