"""Audits of models: what was announced is there with all of its chunks; what is there is announced; what is not is found and said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replication.audit.audit import Report
from replication.audit.orphans import Finding, Kind, Terms
from replication.catalogue.catalogue import Catalogue
from replication.erasure.removed_models import Removal, put_removal
from replication.errors import ModelDiffers, RegionError
from replication.feed.announcing import announce_models
from replication.formats.keeping import BELL
from replication.formats.manifests import encode
from replication.formats.region import open_region
from replication.formats.rules import Rule
from replication.mirror.mirror import Joined, Mirror, elsewhere
from replication.mirror.verify import Deep, Outside
from replication.models.copy_model import ModelCopy
from replication.region.region_node import RegionNode
from tests.objects import flip
from tests.replication.audited import Region, opened
from tests.replication.models import make_model, publish, put_model
from tests.replication.virtual_loop import run

OLD_S = 4 * 3600.0
WEIGHTS = Rule(of_weights=True)


@pytest.fixture(autouse=True)
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalogue, "open", opened({}))


def simulate(main: Callable[[Region], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        region = Region()
        await region.begin()
        await main(region)
        await region.end()

    run(whole())


async def known(node: RegionNode) -> None:
    """All that was announced until now."""
    await asyncio.sleep(1.0)
    await node.up_to_date()


async def audited(node: RegionNode, region: Region) -> tuple[Report, list[Finding]]:
    assert node.auditing is not None
    found: list[Finding] = []
    await known(node)
    report = await node.auditing._audit.run(Terms(region.clock() - 7200.0), found.append)
    return report, found


async def removed(region: Region, made: Any) -> None:
    stone = Removal(
        made.manifest.model, made.manifest.revision, region.clock(), "me", int(region.clock() + 1e6)
    )
    await put_removal(region.inner, stone)


def test_a_manifest_that_nobody_announced_is_announced_when_it_is_old_and_whole() -> None:
    """A publisher died between its put and its announcement. A young one is left alone; one that lacks chunks is said, and not
    announced; what lies there under another name is strange."""

    async def main(region: Region) -> None:
        whole, lacks, young = make_model("whole"), make_model("lacks"), make_model("young")
        await put_model(region.inner, whole)
        await put_model(region.inner, lacks)
        await region.inner.delete([next(iter(lacks.chunks))])
        await region.inner.put("models/manifests/README", b"?")
        await asyncio.sleep(OLD_S)
        await put_model(region.inner, young)
        node = await region.node("a")
        report, found = await audited(node, region)
        assert {(one.kind, one.pack) for one in found} == {
            (Kind.ORPHAN, whole.name),
            (Kind.MISSING, lacks.name),
            (Kind.STRANGE, "models/manifests/README"),
        }
        known_now = dict(node.catalogue.models)
        said_s = known_now[whole.name].said_s
        assert known_now == {whole.name: msgspec.structs.replace(whole.announced, said_s=said_s)} and said_s
        assert report.models._asdict() == {
            "listed": 3, "missing": 1, "damaged": 0, "restored": 1, "removed": 0, "left": 1,
        }  # fmt: skip
        other = await region.node("b")
        await known(other)
        assert set(other.catalogue.models) == {whole.name}
        report, found = await audited(node, region)
        assert report.models.restored == 0

    simulate(main)


def test_what_was_announced_and_is_gone_is_found() -> None:
    """A manifest that is gone, one that lacks a chunk, one with a chunk that was cut off, a damaged one: each is said and
    forgotten; the damaged one is deleted, so that it can be put again."""

    async def main(region: Region) -> None:
        gone, lacks, cut, rotten, good = (
            make_model(name) for name in ("gone", "lacks", "cut", "rotten", "good")
        )
        node = await region.node("a")
        await publish(region.inner, gone, lacks, cut, rotten, good, clock=region.clock)
        await known(node)
        assert len(node.catalogue.models) == 5
        await asyncio.sleep(OLD_S)
        await region.inner.delete([gone.name, next(iter(lacks.chunks))])
        name, content = next(iter(cut.chunks.items()))
        region.inner.stored[name] = content[:-1]
        region.inner.stored[rotten.name] = flip(encode(rotten.manifest), 999)
        report, found = await audited(node, region)
        assert {(one.kind, one.pack) for one in found} == {
            (Kind.MISSING, gone.name),
            (Kind.MISSING, lacks.name),
            (Kind.MISSING, cut.name),
            (Kind.DAMAGED, rotten.name),
        }
        assert "1 of its 3 chunks" in next(one.reason for one in found if one.pack == lacks.name)
        assert set(node.catalogue.models) == {good.name} and rotten.name not in region.inner.stored
        assert (report.models.missing, report.models.damaged) == (3, 1)
        await put_model(region.inner, lacks)
        await asyncio.sleep(OLD_S)
        await audited(node, region)
        assert set(node.catalogue.models) == {good.name, lacks.name}

    simulate(main)


def test_a_manifest_from_the_future_stays() -> None:
    """Nobody who does not know its version deletes it, or puts another one in its place."""

    async def main(region: Region) -> None:
        made = make_model()
        await put_model(region.inner, made)
        future = b"KVMODEL9" + made.objects[made.name][8:]
        region.inner.stored[made.name] = future
        await asyncio.sleep(OLD_S)
        node = await region.node("a")
        report, found = await audited(node, region)
        assert [(one.kind, one.repaired) for one in found] == [
            (Kind.STRANGE, "")
        ] and not report.models.damaged
        source = Region(name="eu")
        await put_model(source.inner, made)
        copy = ModelCopy(source.inner, region.inner, made.announced, "a test", region.clock)
        with pytest.raises(ModelDiffers, match="a later version"):
            await copy.run()
        assert region.inner.stored[made.name] == future

    simulate(main)


def test_nothing_is_forgotten_because_a_place_is_away() -> None:
    """Without its marker nothing that is missing is judged."""

    async def main(region: Region) -> None:
        made = make_model()
        node = await region.node("a")
        await publish(region.inner, made, clock=region.clock)
        await known(node)
        stored = dict(region.inner.stored)
        for name in stored:
            await region.inner.delete([name])
        assert node.auditing is not None
        with pytest.raises(RegionError, match="no region"):
            await node.auditing._audit.run(Terms(region.clock() - 7200.0))
        assert node.catalogue.models
        for name, content in stored.items():
            await region.inner.put(name, content)

    simulate(main)


def test_what_was_removed_leaves() -> None:
    """The keeper says that it is removed, so all catalogues forget it, and deletes its manifest and caches; what comes back or is announced
    once more goes as well; others stay."""

    async def main(region: Region) -> None:
        made, other = make_model(revision="1"), make_model(revision="2")
        caches = make_model(revision="1", seed="c", about={"vllm": "0.32"})
        node = await region.node("a")
        await publish(region.inner, made, other, caches, clock=region.clock)
        await known(node)
        reader = await region.node("b")
        await known(reader)
        await removed(region, made)
        await asyncio.sleep(60.0)
        assert set(reader.catalogue.models) == set(node.catalogue.models) == {other.name}
        assert not {made.name, caches.name} & region.inner.stored.keys()
        await put_model(region.inner, made)
        await put_model(region.inner, caches)
        await announce_models(region.inner, [made.announced], region.clock, random.Random())
        await asyncio.sleep(60.0)
        assert set(reader.catalogue.models) == {other.name} and made.name not in region.inner.stored
        await put_model(region.inner, made)
        report, found = await audited(node, region)
        assert report.models.removed == 2 and {one.kind for one in found} == {Kind.ERASED}
        assert set(node.catalogue.models) == {other.name}
        assert not {made.name, caches.name} & region.inner.stored.keys()

    simulate(main)


def test_a_mirror_brings_what_its_audit_found_to_be_gone() -> None:
    """Lost chunks of a copy come back from its source, and only those are copied."""

    async def main(source: Region) -> None:
        home = Region(name="eu")
        await home.begin()
        made = make_model(chunks=10)
        await publish(source.inner, made, clock=source.clock)
        node = await home.node("mirror")

        async def join() -> Joined:
            marker = await open_region(source.way, "acme", "na")
            return Joined(marker.identity, source.way, Catalogue.open(Path("source"), marker.identity))

        mirror = Mirror(node, home.way, "na", join, [WEIGHTS], {}, home.clock, random.Random(3))
        task = asyncio.ensure_future(mirror.run())
        assert node.auditing is not None
        node.auditing.elsewhere = elsewhere([mirror])
        await asyncio.sleep(60.0)
        assert made.name in home.inner.stored
        lost = list(made.chunks)[3:5]
        await home.inner.delete(lost)
        await node.auditing._run(())
        await asyncio.sleep(120.0)
        assert node.auditing.status()["missing_models"] == 1
        assert all(home.inner.stored[name] == content for name, content in made.objects.items())
        assert mirror.state().copied_model_bytes == 1200 and set(node.catalogue.models) == {made.name}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await home.end()

    simulate(main)


def test_verify_reads_chunks_and_brings_models_from_another_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """From outside: a flipped chunk is found by reading it, deleted with repair, and brought from the region that has it; without
    repair nothing is written."""
    monkeypatch.setattr("replication.mirror.verify.LACKING_AGAIN_S", 0.1)

    async def main(source: Region) -> None:
        home = Region(name="eu")
        await home.begin()
        made, other = make_model(chunks=6), make_model("other")
        await publish(source.inner, made, other, clock=source.clock)
        await publish(home.inner, made, clock=home.clock)
        name = list(made.chunks)[2]
        home.inner.stored[name] = flip(made.chunks[name], 5)
        rules = [WEIGHTS]

        def stored() -> dict[str, bytes]:
            return {name: content for name, content in home.inner.stored.items() if name != BELL}

        async def verified(number: int, repairs: bool) -> tuple[list[Finding], dict[str, int]]:
            found: list[Finding] = []
            follow: list[Outside] = []
            for region, label in ((home, "eu"), (source, "na")):
                outside = await Outside.open(
                    region.inner, "acme", label, Path(f"{label} {number}"), 10.0, random.Random(1)
                )
                await outside.follow(found.append, repairs)
                follow.append(outside)
            at_home, there = follow
            await at_home.audit(repairs, found.append, lambda *_: None, Report())
            read = await at_home.read_models(Deep(), repairs, found.append, lambda *_: None)
            lacking = await at_home.lacking_models(there, rules, found.append, repairs)
            return found, {"chunks": read.chunks, "damaged": read.damaged, "lacking": lacking}

        before = stored()
        found, figures = await verified(1, repairs=False)
        assert figures == {"chunks": 6, "damaged": 1, "lacking": 1} and before == stored()
        assert {(one.kind, one.pack, one.repaired) for one in found} == {
            (Kind.DAMAGED, name, ""), (Kind.LACKING, other.name, ""),
        }  # fmt: skip
        found, figures = await verified(2, repairs=True)
        assert figures["lacking"] == 2 and all(one.repaired for one in found)
        assert all(
            home.inner.stored[key] == value for one in (made, other) for key, value in one.objects.items()
        )
        found, figures = await verified(3, repairs=True)
        assert not found and figures == {"chunks": 9, "damaged": 0, "lacking": 0}
        assert not [key for key in source.inner.stored.keys() - {"region.json"} if key.startswith("mirrors")]

    simulate(main)
