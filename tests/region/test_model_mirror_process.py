"""`kvstore mirror` copies models in processes of its own: survives kill -9, lets no wrong byte through, obeys removals.

ROUNDS=50 kills it more often (`make soak`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replication.erasure.removed_models import Removal, put_removal
from replication.feed.feed import FeedReader
from replication.formats.manifests import CHUNKS, MANIFESTS, PUBLISHING, decode
from replication.models.chunks import lacking, wrong_of_chunk
from tests.objects import S3Server, flip
from tests.region.mirrors import StartMirror, mirrors
from tests.region.regions import S3_KEYS, STORES, arguments, init, regions_file, until
from tests.region.test_mirror_process import bucket, told
from tests.replication.models import MadeModel, make_model, publish
from tests.running import TIMEOUT_S, Daemon, Place, kvstore
from tiers.bucket.objects import Objects

ROUNDS = int(os.environ.get("ROUNDS", "2"))
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]\nwhat = "weights"\nmodels = ["m*"]'
MIB = 1 << 20


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


def publish_in_na(file: Path, *made: MadeModel) -> None:
    asyncio.run(publish(bucket(file, "na"), *made, clock=time.time))


async def _announced(objects: Objects) -> set[str]:
    """The names of announced models; every one is there, with all of its chunks, and each of their bytes is right."""
    reader, names = FeedReader(objects, {}), set[str]()
    while (page := await reader.poll()).segments or page.more:
        names |= {model.name for segment in page.segments for model in segment.models}
    for name in names:
        manifest = decode(bytes(await objects.get(name)), name)
        assert not await lacking(objects, manifest.chunks), f"{name}: announced, and not whole"
        for chunk in manifest.chunks:
            assert not wrong_of_chunk(chunk, bytes(await objects.get(chunk.name))), f"{chunk.name}: is wrong"
    return names


def announced(file: Path, region: str) -> set[str]:
    return asyncio.run(_announced(bucket(file, region)))


async def _names(objects: Objects, folder: str) -> set[str]:
    return {info.name async for page in objects.list(folder) for info in page}


def names(file: Path, region: str, folder: str) -> set[str]:
    return asyncio.run(_names(bucket(file, region), folder))


@pytest.mark.slow
def test_a_mirror_that_is_killed_while_it_copies_models_goes_on(mirror: StartMirror, regions: Path) -> None:
    """After each kill what is announced in the other region is whole and true; a chunk that was put is not put again; in the end
    all is there, no intent is left, and status says what was copied."""
    chance, made = random.Random(0), list[MadeModel]()
    for number in range(ROUNDS):
        made.append(make_model(f"m{number}", chunks=24, size_bytes=MIB))
        publish_in_na(regions, made[-1])
        process = mirror(regions)
        if number % 2:  # in the middle of a model
            there = len(names(regions, "eu", CHUNKS))
            until(lambda: len(names(regions, "eu", CHUNKS)) > there)  # noqa: B023 called in this round
        time.sleep(chance.uniform(0.0, 0.5))  # when it dies; nothing is waited for
        process.kill()
        process.wait(TIMEOUT_S)
        assert announced(regions, "eu") <= {one.name for one in made}
    mirror(regions)
    until(lambda: told(regions)[0] == 0 and len(announced(regions, "eu")) == ROUNDS, 120.0)
    assert announced(regions, "eu") == {one.name for one in made} == names(regions, "eu", MANIFESTS)
    assert names(regions, "eu", CHUNKS) == names(regions, "na", CHUNKS)
    until(lambda: not names(regions, "eu", PUBLISHING))
    until(lambda: not told(regions)[1]["models"])  # a state is written down some seconds later
    _, pair = told(regions)
    assert pair["copied_model_bytes"] <= ROUNDS * 24 * MIB and pair["model_left_bytes"] == 0
    assert (pair["models"], pair["failed"], pair["segments_behind"]) == (0, 0, 0)


def test_a_flipped_chunk_is_said_and_never_announced(mirror: StartMirror, regions: Path) -> None:
    """Status names the model and fails; the other model is there; verify --against says what is lacking."""
    bad, good = make_model("m-bad", chunks=4), make_model("m-good")
    publish_in_na(regions, bad, good)
    name = list(bad.chunks)[1]
    asyncio.run(_put(regions, name, flip(bad.chunks[name], 5)))
    mirror(regions)
    until(lambda: told(regions)[1]["failed"] == 1 and announced(regions, "eu") == {good.name}, 60.0)
    # The good one is told some seconds later; of the other one all is left whenever it is tried again.
    until(lambda: [told(regions)[1][name] for name in ("models", "model_left_bytes")] == [1, 100])
    code, pair = told(regions)
    assert code == 1
    assert pair["failures"][0]["pack"] == "m-bad@r" and name in pair["failures"][0]["reason"]
    done = kvstore("region", "verify", "eu", "--against", "na", "--regions", regions)
    assert done.returncode == 1 and "1 model of na not here" in done.stdout, done.stdout
    done = kvstore("region", "verify", "na", "--deep", "--regions", regions)
    assert done.returncode == 1 and "m-bad@r" in done.stdout and "7 chunks of models" in done.stdout


async def _put(file: Path, name: str, content: bytes) -> None:
    await bucket(file, "na").put(name, content)


def test_what_is_removed_in_one_region_leaves_the_other(
    mirror: StartMirror, regions: Path, tmp_path: Path
) -> None:
    """A mirror that starts again does not bring it back, and another revision stays."""
    one, two = make_model("m", "1"), make_model("m", "2")
    publish_in_na(regions, one, two)
    process = mirror(regions)
    until(lambda: len(announced(regions, "eu")) == 2)

    async def take_away() -> None:
        stone = Removal("m", "1", time.time(), "a test", int(time.time()) + 3600)
        await put_removal(bucket(regions, "na"), stone)

    process.kill()
    process.wait(TIMEOUT_S)
    asyncio.run(take_away())
    mirror(regions)
    until(
        lambda: names(regions, "eu", MANIFESTS) == {two.name}, 120.0
    )  # by the keeper, who follows a dead one


def model_directory(path: Path) -> Path:
    """Small files, and weights of some chunks."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "test"}')
    (path / "model.bin").write_bytes(random.Random(1).randbytes(40 * MIB))
    return path


@pytest.mark.slow
def test_a_model_published_in_one_region_serves_the_other_one_without_it(
    serve: Callable[..., Daemon], mirror: StartMirror, regions: Path, tmp_path: Path
) -> None:
    """Published by the command, ordered by the command: mirrored, and preloaded by a daemon that takes orders. With the first region gone
    all of it is in the second one and true, and another node preloads it. Removed there, its name is free for other revisions only."""
    directory = model_directory(tmp_path / "files")
    here = ("--regions", regions)
    done = kvstore(
        "model", "publish", directory, "--name", "big", "--revision", "v1", "--region", "na", *here
    )
    assert done.returncode == 0, done.stderr
    done = kvstore("region", "verify", "na", *here)
    assert done.returncode == 0 and "1 model there, 1 announced and whole" in done.stdout, done.stdout
    done = kvstore("warm", "eu", "--weights", "small", *here)
    assert done.returncode == 3 and "no model small" in done.stderr
    process = mirror(regions)
    until(lambda: told(regions)[0] == 0, 60.0)
    assert not names(regions, "eu", MANIFESTS)  # no rule names it
    place = Place(tmp_path / "node")
    place.path.mkdir()
    daemon = serve(place, *arguments(place, regions, "eu", "--set=models.orders=on"))
    done = kvstore("warm", "eu", "--weights", "big", "--wait", "0", "-o", "json", *here)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert plan["copy_packs"] == 1 and plan["copy_bytes"] >= 40 * MIB
    files = place.data_dir / "models/models--big/snapshots/v1"
    until((files / "model.bin").exists, 120.0)
    assert (files / "model.bin").read_bytes() == (directory / "model.bin").read_bytes()
    done = kvstore("warm", "eu", "--weights", "big", "-o", "json", *here)
    told_of = json.loads(done.stdout)
    assert (done.returncode, told_of["state"]) == (0, "done"), done.stdout
    assert [one["done_packs"] for one in (*told_of["mirrors"], *told_of["daemons"])] == [1, 1]
    assert daemon.stop() == 0
    assert announced(regions, "eu") == {"models/manifests/big/v1"}
    until(lambda: told(regions)[1]["copied_models"] == 1, 30.0)
    process.kill()
    process.wait(TIMEOUT_S)
    text = regions.read_text().replace("/na", "/gone").replace("s3://na-", "s3://gone-")
    regions.write_text(text)
    elsewhere = tmp_path / "elsewhere"
    done = kvstore("model", "preload", "big", "--region", "eu", f"--set=models.dir={elsewhere}", *here)
    assert done.returncode == 0, done.stderr
    files = elsewhere / "models--big/snapshots/v1"
    assert (files / "model.bin").read_bytes() == (directory / "model.bin").read_bytes()
    done = kvstore("model", "verify", "big@v1", "--deep", "--region", "eu", *here)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert announced(regions, "eu") == names(regions, "eu", MANIFESTS) == {"models/manifests/big/v1"}
    done = kvstore("model", "rm", "big@v1", "--region", "eu", *here)
    assert done.returncode == 0 and not names(regions, "eu", MANIFESTS)
    done = kvstore(
        "model", "publish", directory, "--name", "big", "--revision", "v1", "--region", "eu", *here
    )
    assert done.returncode == 1 and "was removed by" in done.stderr and "--revision" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not names(regions, "eu", MANIFESTS)
    done = kvstore(
        "model", "publish", directory, "--name", "big", "--revision", "v2", "--region", "eu", *here
    )
    assert done.returncode == 0 and "put 0 chunks" in done.stdout, done.stdout
