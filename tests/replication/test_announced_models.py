"""Models in feeds, catalogues and snapshots: announced, known, and passed over by who knows none."""

from __future__ import annotations

import asyncio
import random

import msgspec

from replication.catalogue.catalogue import Catalogue
from replication.feed.announcing import announce_models
from replication.feed.feed import FeedReader, FeedWriter
from replication.feed.snapshots import Snapshots
from replication.formats.announced_models import AnnouncedModel, merged_models
from replication.formats.removed import Reason, removed
from replication.formats.sealed import seal
from replication.formats.segment import Segment, decode, encode
from tests.objects import MemoryObjects
from tests.replication.durable import pack_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.models import make_model

WRITER = "a" * 16
MODEL = make_model().announced


def test_a_segment_says_its_models() -> None:
    """Beside its packs, or none."""
    for models in ((), (MODEL,)):
        segment = Segment(WRITER, 7, 1.5, [pack_of([1, 2])], models=models)
        assert decode(encode(segment), WRITER, 7) == segment


def test_a_model_that_cannot_be_true_takes_no_other_one_with_it() -> None:
    """A name that leads elsewhere, and a digest that is none, are left out and counted."""
    bad = [msgspec.structs.replace(MODEL, name="models/manifests/../m"), (MODEL.name, b"short", 3, "")]
    segment = decode(seal(b"KVFEED1\n", (WRITER, 1, 1.5, [], [], [*bad, MODEL])), WRITER, 1)
    assert segment.models == (MODEL,) and segment.unsound == 2 and "models/manifests/../m" in segment.reason


def test_what_is_announced_is_read_once() -> None:
    """Models go behind packs, in order; saying them again adds what is said again, and a reader has all of it."""

    async def main() -> None:
        objects, models = MemoryObjects(), [make_model(f"m{n}").announced for n in range(300)]
        writer = FeedWriter(objects, WRITER, lambda: 1.0, random.Random(0))
        await writer.announce([pack_of([1])], models)
        assert writer.number == 3
        await announce_models(objects, models[:1], lambda: 1.0, random.Random(0))
        reader, found = FeedReader(objects, {}), list[AnnouncedModel]()
        while (page := await reader.poll()).segments or page.more:
            found += [model for segment in page.segments for model in segment.models]
        assert found == [*models, models[0]] or found == [models[0], *models]

    asyncio.run(main())


def test_a_catalogue_knows_models_over_a_restart() -> None:
    """Of one name the latest content; an announcement of who made it overrules a copy's; what is forgotten is gone."""
    rows = MemoryRows()
    catalogue = Catalogue(rows)
    copy = msgspec.structs.replace(MODEL, origin="na")
    other = msgspec.structs.replace(make_model(seed="other").announced, said_s=2.0)
    catalogue.add(Segment(WRITER, 1, 1.0, [], models=[copy, make_model("n").announced]))
    assert catalogue.models[MODEL.name].origin == "na"
    catalogue.add(Segment(WRITER, 2, 1.0, [], models=(MODEL,)))
    assert merged_models(MODEL, copy) is MODEL
    again = Catalogue(rows)
    assert again.models == catalogue.models and msgspec.structs.replace(MODEL, said_s=1.0) == again.model(
        MODEL.id
    )
    again.add_packs((), [other])
    assert again.models[MODEL.name] == other and again.model(MODEL.id) is None
    assert [again.remove([removed(other, Reason.GONE)]) for _ in range(2)] == [1, 0]
    assert set(Catalogue(rows).models) == {make_model("n").name}


def test_snapshots_have_models() -> None:
    """Of a part of its own; without models there is none, and the parts are as they always were."""

    async def main() -> None:
        for models in ([], [make_model(f"m{n}").announced for n in range(300)]):
            objects, chance = MemoryObjects(), random.Random(0)
            catalogue = Catalogue(MemoryRows())
            catalogue.add(Segment(WRITER, 1, 1.0, [pack_of([1])], models=models))
            written = await Snapshots(objects, lambda: 1.0, chance).write(catalogue)
            assert len(written.parts) == 1 + (2 if models else 0)
            other = Catalogue(MemoryRows())
            await Snapshots(objects, lambda: 1.0, chance).read_newest(other)
            assert other.models == catalogue.models and other.counts == catalogue.counts
            assert other.positions == {WRITER: 1}

    asyncio.run(main())
