"""`kvstore warm`: a new cluster holds what it will be asked for before it is asked, and the bucket alone is enough to order it."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.daemon.config.regions_file import load_regions
from replication.formats.nodes import NODE_FORMAT, Asked, Node
from tests.objects import S3Server
from tests.region.mirrors import StartMirror, mirrors
from tests.region.regions import (
    BLOCK_TOKENS,
    RECORD_BYTES,
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
from tests.running import Daemon, Place, kvstore

Serve = Callable[..., Daemon]
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]\ntenants = ["umbrella"]'
BLOCKS = 24
PACK_BLOCKS = 4  # of a pack of 256 KiB
TICKETS = itertools.count(1)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[StartMirror]:
    with mirrors(tmp_path) as start:
        yield start


def node(tmp_path: Path, name: str) -> Place:
    (tmp_path / name).mkdir()
    return Place(tmp_path / name)


def warm(file: Path, region: str, *words: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and answer of a command that must not fail for other reasons."""
    done = kvstore("warm", region, "--regions", file, "-o", "json", *words)
    assert done.stdout and "Traceback" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, answer


async def tell(file: Path, asked: Sequence[Asked]) -> None:
    """What a daemon of NA tells of itself, ten minutes after it began."""
    node = Node(
        writer="a" * 16, at_s=time.time(), dram_bytes=1 << 30, nvme_bytes=0, load_bytes_per_s=1e6, asked=asked
    )
    await NODE_FORMAT.put(load_regions(file).regions["na"].open(), node)


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def persist(client: Client, tenant: str = "", *names: object) -> list[list[bytes]]:
    """Prompts that are asked for twice, and durable then."""
    before, space = status(client)["blocks"], space_of(client, tenant)
    prompts = [chain(name, BLOCKS) for name in names or ["prompt"]]
    for hashes in prompts:
        store(client, space, hashes)
        for _ in range(2):
            client.lookup([space], hashes, ticket=next(TICKETS), tokens=BLOCKS * BLOCK_TOKENS)
    until(lambda: status(client)["blocks"] == before + BLOCKS * len(prompts))
    return prompts


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORES)
def test_a_new_cluster_is_warm_before_it_is_asked(
    kind: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    serve: Serve,
    mirror: StartMirror,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NA has made a prompt that no rule copies; an order for EU has it copied by the mirror and loaded by a node that starts
    with nothing. With EU's bucket out of reach it hits DRAM, byte by byte. Ordering again finds that all is done."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    s3: S3Server | None = request.getfixturevalue("s3_server") if kind == "s3" else None
    file = regions_file(tmp_path, "na", "eu", s3=s3, rules=RULES)
    init(file, "na", "eu")
    place = node(tmp_path, "node-na")
    daemon = serve(place, *arguments(place, file, "na"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        [hashes] = persist(client)
    assert daemon.stop() == 0
    mirror(file)
    until(lambda: warm(file, "eu", "--dry-run")[1]["plan"]["copy_packs"] > 0)
    code, answer = warm(file, "eu", "--wait", "0")
    assert (code, answer["state"]) == (0, "ordered")
    assert answer["plan"]["preload_bytes"] == BLOCKS * RECORD_BYTES
    assert answer["plan"]["preload_blocks"] == BLOCKS and answer["plan"]["copy_bytes"] > BLOCKS * RECORD_BYTES
    place = node(tmp_path, "node-eu")
    daemon = serve(place, *arguments(place, file, "eu"))
    code, answer = warm(file, "eu")
    assert (code, answer["state"]) == (0, "done"), answer
    [told] = answer["daemons"]
    assert (told["state"], told["done_bytes"], told["moved_bytes"]) == ("done", *2 * [BLOCKS * RECORD_BYTES])
    [copied] = answer["mirrors"]
    assert copied["who"] == "mirror-na" and copied["state"] == "done" and copied["done_packs"] > 0
    if s3 is not None:
        s3.stop()
    else:
        (tmp_path / "eu").rename(tmp_path / "away")
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        assert (
            client.lookup([space_of(client)], hashes, ticket=next(TICKETS), tokens=BLOCKS * BLOCK_TOKENS)
            == BLOCKS
        )
        assert read(client, space_of(client), hashes) == BLOCKS
        assert sum(row["tokens"]["dram"] for row in client.report(0.0)["rows"]) == BLOCKS * BLOCK_TOKENS
    daemon.stop()


@pytest.mark.slow
def test_an_order_outlives_kill_9_and_is_carried_out_once(tmp_path: Path, serve: Serve) -> None:
    """A node that is killed before it has all (a pack is cut off) goes on where it was when it is back: what is held is not
    fetched again. A second order with the same words is the same order."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = node(tmp_path, "one")
    daemon = serve(place, *arguments(place, file, "na", "--set=durable.pack_bytes=256KiB"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        prompts = persist(client, "", *range(6))
    assert daemon.stop() == 0
    shutil.rmtree(tmp_path / "na" / "nodes")  # it is away for long
    pack = next(path for path in (tmp_path / "na" / "packs").rglob("*") if path.is_file())
    content = pack.read_bytes()
    pack.chmod(0o600)
    pack.write_bytes(content[:1000])
    assert warm(file, "na", "--wait", "0")[1]["state"] == "ordered"
    place = node(tmp_path, "two")
    daemon = serve(place, *arguments(place, file, "na"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        until(lambda: status(client).get("fetched_records", 0) == 6 * BLOCKS - PACK_BLOCKS)
    daemon.stop(signal.SIGKILL)
    pack.write_bytes(content)
    daemon = serve(place, *daemon.arguments)
    code, answer = warm(file, "na")
    assert (code, answer["state"]) == (0, "done"), answer
    [told] = answer["daemons"]
    assert told["done_bytes"] == told["total_bytes"] == 6 * BLOCKS * RECORD_BYTES
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        assert told["moved_bytes"] == PACK_BLOCKS * RECORD_BYTES
        until(lambda: status(client)["fetched_records"] == PACK_BLOCKS)  # it is told once a second
        for hashes in prompts:
            assert read(client, space_of(client), hashes) == BLOCKS
        assert status(client)["fetched_records"] == PACK_BLOCKS
    assert warm(file, "na")[1]["daemons"] == [told]
    assert len(files(tmp_path / "na" / "orders")) == 1
    code, answer = warm(file, "na", "--cancel")
    assert (code, answer["state"]) == (0, "cancelled")
    assert not files(tmp_path / "na" / "orders") and not files(tmp_path / "na" / "warming")
    assert daemon.stop() == 0


@pytest.mark.slow
def test_nothing_that_is_held_leaves_for_an_order(tmp_path: Path, serve: Serve) -> None:
    """A node whose DRAM is full of its own says that it has no room, and still has all it had; onto NVMe there is room,
    and DRAM is as it was but for the little that is on its way."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = node(tmp_path, "one")
    daemon = serve(place, *arguments(place, file, "na"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        persist(client, "acme", *range(4))
    assert daemon.stop() == 0
    shutil.rmtree(tmp_path / "na" / "nodes")  # it is away for long
    place, nvme = node(tmp_path, "two"), tmp_path / "nvme"
    nvme.mkdir()
    daemon = serve(
        place, *arguments(place, file, "na", f"--set=nvme.directories={nvme}", "--set=durable.rule=off")
    )
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        own = chain("own", 240)  # 15 of 16 MiB: 16 slots are free
        store(client, space, own)
        until(lambda: client.status()["demoting_blocks"] == 0)
        code, answer = warm(file, "na", "--tenant", "ac*")
        assert (code, answer["state"]) == (0, "done"), answer
        [told] = answer["daemons"]
        assert told["state"] == "full" and 0 < told["moved_bytes"] <= 16 * RECORD_BYTES
        assert client.status()["counters"]["evicted_dram"] == 0
        code, answer = warm(file, "na", "--tenant", "ac*", "--to", "nvme")
        assert (code, answer["state"]) == (0, "done"), answer
        [told] = answer["daemons"]
        assert told["state"] == "done" and told["done_bytes"] == 4 * BLOCKS * RECORD_BYTES
        (tmp_path / "na").rename(tmp_path / "away")
        for number in range(4):
            assert read(client, space_of(client, "acme"), chain(number, BLOCKS)) == BLOCKS
    assert daemon.stop() == 0


def test_a_dry_run_writes_nothing(tmp_path: Path, serve: Serve) -> None:
    """It says what it would take, and what the region's own traffic lets expect, unknown before any was told; the bucket is
    as it was."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = node(tmp_path, "one")
    daemon = serve(place, *arguments(place, file, "na", "--set=durable.pack_bytes=256KiB"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        persist(client)
    assert daemon.stop() == 0
    plan = warm(file, "na", "--dry-run")[1]["plan"]
    assert (plan["hit_rate"], plan["preload_s"], plan["traffic_of"]) == (None, None, [])
    shutil.rmtree(tmp_path / "na" / "nodes")  # of the daemon that has begun just now
    asyncio.run(tell(file, [Asked("a model", "", 60e3, 30e3), Asked("elsewhere", "", 40e3, 40e3)]))
    before = files(tmp_path / "na")
    plan = warm(file, "na", "--dry-run")[1]["plan"]
    assert (plan["hit_rate"], plan["preloaded_hit_rate"]) == (
        pytest.approx(0.3, rel=1e-3),
        pytest.approx(0.3, rel=1e-3),
    )
    assert plan["traffic_of"] == ["na"] and plan["preload_s"] == BLOCKS * RECORD_BYTES / 1e6
    code, answer = warm(file, "na", "--dry-run", "--budget", "1MiB", "--model", "a *")
    assert (code, answer["state"]) == (0, "planned")
    plan = answer["plan"]
    assert plan["preload_bytes"] == 1 << 20 and plan["durable_bytes"] == BLOCKS * RECORD_BYTES
    assert (plan["hit_rate"], plan["preloaded_hit_rate"]) == (
        pytest.approx(0.5, rel=1e-3),
        pytest.approx(0.5 * 16 / BLOCKS, rel=1e-3),
    )
    assert (plan["copy_bytes"], plan["copy_s"], plan["copy_price"]) == (0, 0.0, 0.0)
    shown = kvstore("warm", "na", "--regions", file, "--dry-run")
    assert shown.returncode == 0 and "expected hit rate" in shown.stdout and "preloaded" in shown.stdout
    assert files(tmp_path / "na") == before


def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, serve: Serve) -> None:
    """Unknown regions and names, sizes and times that are none, a bucket that is no region, an order that nobody takes."""
    file = regions_file(tmp_path, "na", "eu")
    init(file, "na")
    place = node(tmp_path, "one")
    daemon = serve(place, *arguments(place, file, "na"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        persist(client, "acme")
    assert daemon.stop() == 0
    before = files(tmp_path / "na")
    for words, code, says in (
        (("asia",), 2, "known are na, eu"),
        (("eu",), 1, "kvstore region init"),
        (("na", "--model", "other"), 3, "models are a model, tenants acme"),
        (("na", "--tenant", ""), 2, "allowed are 1 to"),
        (("na", "--budget", "10GB"), 2, "ambiguous"),
        (("na", "--budget", "0"), 2, "allowed are 1 to"),
        (("na", "--for", "1s"), 2, "allowed are"),
        (("na", "--to", "disk"), 2, "dram"),
        (("na", "--to", "nvme"), 1, "no daemon of region na has the tier nvme"),
        (("na", "--cancel"), 3, "none is in force"),
    ):
        done = kvstore("warm", *words, "--regions", file)
        assert (done.returncode, done.stdout) == (code, ""), (words, done.stderr)
        assert says in done.stderr and len(done.stderr.splitlines()) == 1, (words, done.stderr)
    assert files(tmp_path / "na") == before
    code, answer = warm(file, "na", "--wait", "1s")
    assert (code, answer["state"], answer["daemons"]) == (1, "not taken", [])
    assert len(files(tmp_path / "na" / "orders")) == 1
