"""Models in feeds, catalogues and snapshots: announced, known, and passed over by who knows none."""

from __future__ import annotations

import asyncio
import hashlib
import random
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueDamaged
from replication.feed.announcing import announce_models
from replication.feed.feed import FeedReader, FeedWriter
from replication.feed.snapshots import Snapshots
from replication.formats.announced_models import AnnouncedModel, merged_models
from replication.formats.ranges import Number, UnixS, WriterName
from replication.formats.removed import Reason, removed
from replication.formats.sealed import Sealed, seal
from replication.formats.segment import Segment, decode, encode
from tests.objects import MemoryObjects
from tests.replication.durable import pack_of
from tests.replication.memory_rows import MemoryRows
from tests.replication.models import make_model
from tiers.namespace_spec import NamespaceSpec

WRITER = "a" * 16
MODEL = make_model().announced
SEGMENT_SHA256 = "0552774456deb60171330e713ea52f36cecc667dfbf623a2ea5d40eeafa404ff"


class OldBody(msgspec.Struct, array_like=True):
    """A segment, as versions read it that know no models."""

    writer: WriterName
    number: Number
    written_s: UnixS
    specs: Annotated[list[NamespaceSpec], Meta(max_length=1024)]
    entries: Annotated[list[msgspec.Raw], Meta(max_length=1024)]


def test_a_segment_without_models_is_as_it_always_was() -> None:
    """Byte for byte, by a digest that was taken before there were models."""
    content = encode(Segment(WRITER, 7, 1.5, [pack_of([1, 2])]))
    assert hashlib.sha256(content).hexdigest() == SEGMENT_SHA256
    assert decode(content, WRITER, 7).models == ()


def test_a_segment_with_models_is_read_and_passed_over_by_older_versions() -> None:
    """They read its packs, and go on behind it."""
    segment = Segment(WRITER, 7, 1.5, [pack_of([1, 2])], models=(MODEL,))
    content = encode(segment)
    assert decode(content, WRITER, 7) == segment
    old = Sealed(b"KVFEED1\n", OldBody, 1 << 20).unseal(content, "x")
    assert (old.number, len(old.entries)) == (7, 1)


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


def test_a_catalogue_of_an_older_version_is_made_anew() -> None:
    """An older version has passed over what it could not read."""
    rows = MemoryRows()
    Catalogue(rows).add(Segment(WRITER, 1, 1.0, [pack_of([1])]))
    assert Catalogue(rows).positions == {WRITER: 1}
    rows.write((), [b"v"])
    with pytest.raises(CatalogueDamaged, match="an older version"):
        Catalogue(rows)


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
