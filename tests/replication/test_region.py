"""The marker of a region: made once, and checked by whoever comes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable

import pytest

from replication.errors import MarkerDamaged, RegionError
from replication.formats.region import MARKER, Region, init_region, open_region
from tests.objects import Faults, FaultyObjects, MemoryObjects
from tests.replication.virtual_loop import run
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectRefused, ObjectUnavailable

NAME = "bucket"


def made(
    where: str = NAME, deployment: str = "acme", region: str = "eu", time_s: float = 5.0
) -> MemoryObjects:
    objects = MemoryObjects(where)
    run(init_region(objects, deployment, region, lambda: time_s))
    return objects


def test_a_region_is_made_once() -> None:
    """Making a region again changes nothing, and opening it says what was made."""
    objects = made()
    before = dict(objects.stored)
    again = run(init_region(objects, "acme", "eu", lambda: 99.0))
    assert again == run(open_region(objects, "acme", "eu"))
    assert again == Region(format=1, deployment="acme", region="eu", made_s=5.0)
    assert objects.stored == before and list(before) == [MARKER]


def test_regions_that_were_made_apart_are_told_apart() -> None:
    """Another deployment, name or time of making is another identity."""
    found = {
        run(open_region(made(NAME, deployment, region, time_s), deployment, region)).identity
        for deployment, region, time_s in (
            ("acme", "eu", 5.0),
            ("acme", "us", 5.0),
            ("b", "eu", 5.0),
            ("acme", "eu", 6.0),
        )
    }
    assert len(found) == 4


def written(content: bytes) -> Callable[[], MemoryObjects]:
    def objects() -> MemoryObjects:
        found = MemoryObjects(NAME)
        run(found.put(MARKER, content))
        return found

    return objects


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (lambda: MemoryObjects(NAME), "bucket: no region is there, .*'eu' .*'acme'.*kvstore region init"),
        (lambda: made(deployment="other"), "bucket: is region 'eu' of deployment 'other', .*'eu' .*'acme'"),
        (lambda: made(region="us"), "bucket: is region 'us' of deployment 'acme', .*'eu' .*'acme'"),
        (written(b'{"format": 2, "zones": []}'), "bucket: a region of format 2, .*up to 1; .*'eu' .*'acme'"),
        (written(b'{"name": "a web page"}'), r"bucket: its region.json is no marker.*'eu' .*'acme'"),
        (written(b"<html>"), r"bucket: its region.json is no marker"),
        (written(b"\xff\xfe"), r"bucket: its region.json is no marker"),
        (written(b"[1]"), r"bucket: its region.json is no marker"),
        (written(b""), r"bucket: its region.json is no marker"),
        (written(b"[" * 60_000), r"bucket: its region.json is no marker"),
        (written(bytes(1 << 20)), r"bucket: region.json: 1048576 bytes: .*no marker"),
        (
            written(b'{"format": 1, "deployment": "acme", "region": "eu", "made_s": NaN}'),
            r"bucket: its region.json is no marker",
        ),
        (
            written(json.dumps({"format": 1, "deployment": 3, "region": "eu", "made_s": 1}).encode()),
            "no marker",
        ),
    ],
)
def test_a_wrong_place_is_told_in_one_line(place: Callable[[], MemoryObjects], said: str) -> None:
    """What is no region, or another one, ends in one line that names the place, what is there and what was asked for;
    nothing is written, neither by opening nor, unless it is empty, by making."""
    objects = place()
    before = dict(objects.stored)
    with pytest.raises((RegionError, MarkerDamaged), match=said) as error:
        run(open_region(objects, "acme", "eu"))
    assert isinstance(error.value, MarkerDamaged) == ("no marker" in said)
    assert "\n" not in str(error.value) and objects.stored == before
    if before:
        with pytest.raises((RegionError, MarkerDamaged), match=said):
            run(init_region(objects, "acme", "eu", lambda: 1.0))
        assert objects.stored == before


@pytest.mark.parametrize("name", ["", "EU", "eu_1", "-eu", "e/u", "é", "a" * 64])
def test_names_that_are_not_allowed(name: str) -> None:
    """A name of a region or a deployment that is not allowed is told with what is; nothing is written."""
    objects = MemoryObjects(NAME)
    for deployment, region in (("acme", name), (name, "eu")):
        with pytest.raises(RegionError, match="allowed are lower-case"):
            run(init_region(objects, deployment, region, lambda: 1.0))
        with pytest.raises(RegionError, match="allowed are lower-case"):
            run(open_region(objects, deployment, region))
    assert not objects.stored
    assert run(init_region(objects, "a" * 63, "0-9", lambda: 1.0)).region == "0-9"


def test_of_several_that_make_a_region_one_wins() -> None:
    """Regions of different names made in one place at the same time: one is made, all others are told."""

    async def main(seed: int) -> None:
        objects = FaultyObjects(MemoryObjects(), random.Random(seed), Faults(delay_s=1.0, lost=0.3))
        results = await asyncio.gather(
            *(init_region(objects, "acme", f"r{n}", lambda n=n: float(n)) for n in range(5)),  # type: ignore[misc]  # mypy cannot type the default
            return_exceptions=True,
        )
        winners = [result for result in results if isinstance(result, Region)]
        assert len(winners) == 1
        assert sum(isinstance(result, RegionError) for result in results) == 4
        assert await open_region(objects, "acme", winners[0].region) == winners[0]

    for seed in range(50):
        run(main(seed))


@pytest.mark.parametrize("error", [ObjectRefused("bucket: no permission"), ObjectUnavailable("bucket: 503")])
def test_what_the_store_says_is_passed_on(error: ObjectError) -> None:
    """A store that refuses or fails is no missing region."""
    objects: Objects = FaultyObjects(MemoryObjects(), random.Random(0), Faults(refuse=error))
    for work in (open_region(objects, "acme", "eu"), init_region(objects, "acme", "eu", lambda: 1.0)):
        with pytest.raises(type(error), match=str(error)):
            run(work)


def test_a_marker_that_cannot_be_written_is_the_stores_error() -> None:
    """Where reading is allowed and writing is not, making a region says what the store said."""

    class ReadOnly(MemoryObjects):
        async def put(self, name: str, content: object, only_new: bool = False) -> bool:
            raise ObjectRefused("bucket: read only")

    with pytest.raises(ObjectRefused, match="read only"):
        run(init_region(ReadOnly(), "acme", "eu", lambda: 1.0))
