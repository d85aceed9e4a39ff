"""`kvstore mirror` in processes of its own: copies what a daemon made, survives kill -9, and lets no wrong byte through.

ROUNDS=50 kills it more often.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.daemon.config.regions_file import load_regions
from replication.feed.feed import FeedWriter
from replication.formats.announced import Announced
from tests.objects import S3Server
from tests.region.mirrors import StartMirror, mirrors
from tests.region.regions import (
    S3_KEYS,
    STORES,
    arguments,
    chain,
    init,
    read,
    regions_file,
    space_of,
    status,
    store,
    until,
)
from tests.running import TIMEOUT_S, Daemon, Place, kvstore
from tiers.bucket.objects import Objects
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.packs import PACKS, PackHeader

ROUNDS = int(os.environ.get("ROUNDS", "2"))
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]'
SPEC = NamespaceSpec(b"tests of mirrors", 4096, 16, 16, {"model": "a model", "tenant": ""})


@pytest.fixture(params=STORES)
def regions(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the regions na and eu, whose buckets are ready; credentials are in the environment."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    s3: S3Server | None = request.getfixturevalue("s3_server") if request.param == "s3" else None
    file = regions_file(tmp_path, "na", "eu", s3=s3, rules=RULES)
    init(file, "na", "eu")
    return file


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[StartMirror]:
    with mirrors(tmp_path) as start:
        yield start


def bucket(file: Path, region: str) -> Objects:
    return load_regions(file).regions[region].open()


async def _make(file: Path, names: Sequence[str]) -> list[str]:
    """A pack for each name, put into na and announced there; the names of their objects."""
    objects = bucket(file, "na")
    writer = FeedWriter(objects, digest(names[0].encode()).hex()[:16], time.time, random.Random())
    packs = []
    for name in names:
        records = [digest(f"{name} {index}".encode()) * (SPEC.record_bytes // 16) for index in range(3)]
        hashes = [digest(record[:16]) for record in records]
        header = PackHeader(SPEC, b"", b"".join(hashes), b"".join(map(digest, records)))
        packs.append(await put_pack(objects, header, records))
        await writer.announce([Announced(packs[-1], int(time.time()))])
    return [pack.name for pack in packs]


def make(file: Path, *names: str) -> list[str]:
    return asyncio.run(_make(file, names))


def contents(file: Path, region: str) -> dict[str, bytes]:
    """All packs of a region."""

    async def all_of_it() -> dict[str, bytes]:
        objects = bucket(file, region)
        names = [info.name async for page in objects.list(PACKS) for info in page]
        return {name: bytes(await objects.get(name)) for name in names}

    return asyncio.run(all_of_it())


def told(file: Path, *now: str) -> tuple[int, dict[str, Any]]:
    """What `kvstore region` says of the mirror from na to eu, and its exit code."""
    done = kvstore("region", "status", "eu", *now, "--regions", file, "-o", "json")
    assert done.stdout, done.stderr
    [pair] = json.loads(done.stdout)["mirrors"]
    assert (pair["source"], pair["region"]) == ("na", "eu")
    return done.returncode, pair


@pytest.mark.slow
def test_a_prompt_of_one_region_is_read_in_the_other_one(
    tmp_path: Path, serve: Callable[..., Daemon], mirror: StartMirror, regions: Path
) -> None:
    """What a daemon in na made durable a fresh daemon in eu gives back, byte by byte, when na is gone; SIGTERM stops the
    mirror in seconds."""
    hashes = chain("prompt", 24)
    for name in ("na", "eu"):
        (tmp_path / f"node-{name}").mkdir()
    place = Place(tmp_path / "node-na")
    daemon = serve(place, *arguments(place, regions, "na"))
    process = mirror(regions)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        for ticket in (1, 2):
            assert client.lookup([space], hashes, ticket=ticket, tokens=24 * 64) == 24
        until(lambda: status(client)["blocks"] == 24)
    assert daemon.stop() == 0
    shutil.rmtree(place.path)
    until(lambda: contents(regions, "eu") == contents(regions, "na") != {})
    until(lambda: told(regions)[0] == 0 and told(regions, "--now")[1]["segments_behind"] == 0, 60.0)
    code, pair = told(regions, "--now")
    assert (code, pair["pending"], pair["failed"], pair["state"]) == (0, 0, 0, "ok")
    assert pair["copied_packs"] == len(contents(regions, "na")) and pair["in_time_share"] == 1.0
    begun_s = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0 and time.monotonic() - begun_s < 20.0
    place = Place(tmp_path / "node-eu")
    daemon = serve(place, *arguments(place, regions, "eu"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        until(lambda: client.lookup([space], hashes, ticket=3, tokens=24 * 64) == 24)
        assert read(client, space, hashes) == 24
    assert daemon.stop() == 0


@pytest.mark.slow
def test_a_mirror_that_is_killed_goes_on(mirror: StartMirror, regions: Path) -> None:
    """However often a mirror is killed while packs are made, in the end all of them are in the other region, and are true."""
    chance = random.Random(0)
    for number in range(ROUNDS):
        make(regions, *(f"{number} {index}" for index in range(10)))
        process = mirror(regions)
        time.sleep(chance.uniform(0.0, 1.5))
        process.kill()
        process.wait(TIMEOUT_S)
    mirror(regions)
    until(lambda: told(regions)[0] == 0, 120.0)
    there = contents(regions, "na")
    assert len(there) == 10 * ROUNDS and contents(regions, "eu") == there


def test_a_flipped_byte_stays_where_it_is(mirror: StartMirror, regions: Path) -> None:
    """A pack that rotted in its bucket is not copied: status names it and fails; the others are there."""
    names = make(regions, "a", "b", "c")
    damaged = bytearray(contents(regions, "na")[names[1]])
    damaged[-1] ^= 1

    async def rot() -> None:
        await bucket(regions, "na").put(names[1], bytes(damaged))

    asyncio.run(rot())
    mirror(regions)
    until(lambda: told(regions)[1]["failed"] == 1, 60.0)
    code, pair = told(regions)
    assert code == 1 and pair["segments_behind"] == 3 and pair["pending"] == 1
    assert pair["failures"][0]["pack"] in names[1] and "checksum" in pair["failures"][0]["reason"]
    until(lambda: set(contents(regions, "eu")) == {names[0], names[2]})
    shown = kvstore("region", "status", "--regions", regions)
    assert shown.returncode == 1 and "checksum" in shown.stdout


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    """An unknown region, no rule for it, a bucket that is no region or another one, a directory in use: one line, and
    nothing is written."""
    file = regions_file(tmp_path, "na", "eu", "apac", rules=RULES)
    init(file, "na")
    for region, code, says in (
        ("", 2, "known are na, eu, apac"),
        ("asia", 2, "known are na, eu, apac"),
        ("apac", 1, "no rule"),
        ("eu", 1, "kvstore region init"),
    ):
        done = kvstore(
            "mirror", f"--regions={file}", f"--set=region={region}", f"--data-dir={tmp_path / 'mirror'}"
        )
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert not list((tmp_path / "eu").iterdir())
    done = kvstore("region", "status", "asia", "--regions", file)
    assert (done.returncode, done.stdout) == (2, "") and "known are na, eu, apac" in done.stderr
    done = kvstore("region", "status", "--regions", file, "-o", "json")
    assert done.returncode == 1 and "region init" in json.loads(done.stdout)["mirrors"][0]["state"]


def test_what_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that does not answer is exit code 4; a mirror that never ran is exit code 1, and named."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    file = regions_file(tmp_path, "na", "eu", rules=RULES)
    init(file, "na", "eu")
    code, pair = told(file)
    assert (code, pair["state"], pair["heartbeat_age_s"]) == (1, "never ran", None)
    assert pair["segments_behind"] is None and "pending" not in pair  # nobody knows
    assert "0 B" not in kvstore("region", "status", "--regions", file).stdout
    place = f'url = "file://{tmp_path / "eu"}"'
    file.write_text(
        file.read_text().replace(
            place, 'url = "s3://nobody/kv"\nendpoint = "http://127.0.0.1:9"\nstall_s = 1.0'
        )
    )
    code, pair = told(file)
    assert code == 4 and "nobody" in pair["state"]
