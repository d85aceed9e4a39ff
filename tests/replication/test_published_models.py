"""Which revision a name alone stands for: the one that was published last, in whichever order revisions came into a bucket."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from coldstart.published.models import find
from replication.formats.announced_models import announced_model
from replication.mirror.ordered_models import newest_revision
from replication.models.copy_model import ModelCopy
from tests.objects import MemoryObjects
from tests.replication.models import MadeModel, make_model, put_model

OLD, NEW = (
    make_model(revision=revision, published_s=at_s)
    for revision, at_s in (("r2-old", 1000.0), ("r1-new", 2000.0))
)


def bucket() -> MemoryObjects:
    """Its clock goes on with each put, and is far from that of those who published."""
    ticks = count(5000)
    return MemoryObjects(clock=lambda: next(ticks))


async def latest(objects: MemoryObjects, model: str = "m") -> str:
    """Nodes, commands and mirrors agree."""
    found = (await find(objects, model)).revision
    assert await newest_revision(objects, model) == found
    return found


async def copied(source: MemoryObjects, home: MemoryObjects, made: MadeModel) -> None:
    await ModelCopy(source, home, announced_model(made.manifest), "a mirror", lambda: 1.0).run()


async def filled(*made: MadeModel) -> MemoryObjects:
    objects = bucket()
    for one in made:
        await put_model(objects, one)
    return objects


@pytest.mark.parametrize("order", [[OLD, NEW], [NEW, OLD]])
def test_the_order_in_which_copies_come_does_not_count(order: list[MadeModel]) -> None:
    """A mirror copies two at once, and either may end last."""

    async def main() -> None:
        source, home = await filled(OLD, NEW), bucket()
        for made in order:
            await copied(source, home, made)
        assert await latest(home) == NEW.manifest.revision

    asyncio.run(main())


@pytest.mark.parametrize("lost", sorted(OLD.objects))
def test_an_older_revision_that_is_mended_stays_the_older_one(lost: str) -> None:
    """Whatever of it was lost; and its manifest is not put anew where it is there."""

    async def main() -> None:
        source, home = await filled(OLD, NEW), await filled(OLD, NEW)
        before = await home.head(OLD.name)
        await home.delete([lost])
        await copied(source, home, OLD)
        assert home.stored == source.stored and await latest(home) == NEW.manifest.revision
        assert lost == OLD.name or await home.head(OLD.name) == before

    asyncio.run(main())


def test_where_no_manifest_says_when() -> None:
    """The time of its object counts: of one without a time, with one that cannot be, or that cannot be read; two of one moment are in
    the order of their names."""

    async def main() -> None:
        for published_s in (0.0, float(1 << 39)):
            silent = make_model(revision="silent", published_s=published_s)
            assert await latest(await filled(silent, NEW)) == "silent"
        late = make_model(revision="late", published_s=1e10)
        home = await filled(make_model(revision="silent", published_s=0.0), late)
        assert await latest(home) == "late"
        await home.put(late.name, b"damaged")
        assert await latest(home) == "late"
        await home.delete([late.name])
        assert await latest(home) == "silent"
        twins = [make_model("twins", revision=revision, published_s=7.0) for revision in ("b", "c", "a")]
        assert await latest(await filled(*twins), "twins") == "c"

    asyncio.run(main())
