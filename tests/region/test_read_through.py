"""Reading through: what a mirror has not brought is read where it was made; that region is never written to, and harms nobody."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.daemon.config.regions_file import load_regions
from tests.objects import S3Server
from tests.region.mirrors import StartMirror, mirrors
from tests.region.proxy import Proxy
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
from tests.running import Daemon, Place, kvstore

Serve = Callable[..., Daemon]
RULES = '[[rules]]\nfrom = ["na"]\nto = ["eu"]'
STALL_S = 1.0
BLOCKS = 16
OFF, EAGER = "--set=durable.rule=off", "--set=durable.seen_times=1"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)


def deployment(path: Path, s3: S3Server | None = None) -> Path:
    """A file with na and eu, whose buckets are ready; eu reads na through."""
    file = regions_file(path, "na", "eu", s3=s3, rules=RULES)
    init(file, "na", "eu")
    file.write_text(file.read_text().replace("[regions.eu]", '[regions.eu]\nread_through = ["na"]'))
    return file


@pytest.fixture(params=STORES)
def regions(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return deployment(tmp_path, request.getfixturevalue("s3_server") if request.param == "s3" else None)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[StartMirror]:
    with mirrors(tmp_path) as start:
        yield start


def node(path: Path, name: str, serve: Serve, file: Path, region: str, *more: str) -> Daemon:
    (path / name).mkdir()
    place = Place(path / name)
    return serve(place, *arguments(place, file, region, *more))


def asked(client: Client, space: Any, hashes: list[bytes], ticket: int = 0) -> int:
    return client.lookup([space], hashes, ticket=ticket, tokens=len(hashes) * 64)


def produced(
    path: Path, serve: Serve, file: Path, tenants: tuple[str, ...] = ("",), region: str = "na"
) -> None:
    """A daemon of the region makes the prompt of each tenant durable, and is gone."""
    daemon = node(path, f"producer-{region}", serve, file, region, EAGER)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        for ticket, tenant in enumerate(tenants, 1):
            space, hashes = space_of(client, tenant), chain(tenant, BLOCKS)
            store(client, space, hashes)
            asked(client, space, hashes, ticket)
        until(lambda: status(client).get("blocks") == BLOCKS * len(tenants))
    assert daemon.stop() == 0


def listing(file: Path, region: str, below: str = "") -> dict[str, tuple[object, ...]]:
    """All that a bucket has, and when it was put."""

    async def listed() -> dict[str, tuple[object, ...]]:
        objects = load_regions(file).regions[region].open()
        pages = [page async for page in objects.list(below)]
        return {info.name: (info.size_bytes, info.modified_s, info.e_tag) for page in pages for info in page}

    return asyncio.run(listed())


def far(client: Client) -> dict[str, Any]:
    (found,) = status(client)["read_through"]
    assert isinstance(found, dict)
    return found


def tokens(client: Client) -> Counter[str]:
    """By outcome, of all lookups so far."""
    found: Counter[str] = Counter()
    for row in client.report(0.0)["rows"]:
        found.update(row["tokens"])
    return found


def test_what_was_not_copied_is_read_where_it_was_made(tmp_path: Path, serve: Serve, regions: Path) -> None:
    """No mirror runs: a node of eu hits what na made, with the right bytes, counts it as read through, and has it in DRAM from then
    on. Nothing of na's bucket is changed, by a restart neither, and nothing is put into eu's that nobody there asked for often."""
    produced(tmp_path, serve, regions)
    before = listing(regions, "na")
    daemon = node(tmp_path, "eu-node", serve, regions, "eu", OFF)
    hashes = chain("", BLOCKS)
    for ticket in (1, 3):
        with Client(str(daemon.socket), timeout_s=5.0) as client:
            space, before_tokens = space_of(client), tokens(client)
            until(lambda: asked(client, space, hashes, ticket) == BLOCKS)  # noqa: B023 called in this round
            assert read(client, space, hashes) == BLOCKS
            until(lambda: far(client)["fetched_records"] == BLOCKS)
            assert asked(client, space, hashes, ticket + 1) == BLOCKS
            counted = {name: count for name, count in (tokens(client) - before_tokens).items() if count}
            assert counted == {"read_through": BLOCKS * 64, "dram": BLOCKS * 64}
            assert far(client)["blocks"] == BLOCKS and status(client)["blocks"] == 0
            names = {speed["name"] for speed in client.status()["speeds"]}
            assert {"object", "read-through na"} <= names
        daemon.stop(signal.SIGKILL)
        for arena in (tmp_path / "eu-node" / "shm").iterdir():
            arena.unlink()
        if ticket == 1:
            daemon = serve(Place(tmp_path / "eu-node"), *daemon.arguments)
    assert listing(regions, "na") == before
    assert not listing(regions, "eu", "packs/")


@pytest.mark.slow
def test_a_mirror_that_comes_later_copies_nothing_twice(
    tmp_path: Path, serve: Serve, regions: Path, mirror: StartMirror
) -> None:
    """What was read through is persisted at home when it is asked for often there, as the same pack: a mirror that starts then
    has nothing to copy of it. What it does copy is found at home by the next node, and not read through any more."""
    produced(tmp_path, serve, regions, ("one", "two"))
    daemon = node(tmp_path, "eu-node", serve, regions, "eu", EAGER)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space, hashes = space_of(client, "one"), chain("one", BLOCKS)
        until(lambda: asked(client, space, hashes) == BLOCKS)
        assert read(client, space, hashes) == BLOCKS
        asked(client, space, hashes, 1)
        until(lambda: status(client)["blocks"] == BLOCKS)
    daemon.stop()
    mirror(regions)
    fresh = node(tmp_path, "fresh", serve, regions, "eu", OFF)
    with Client(str(fresh.socket), timeout_s=5.0) as client:
        until(lambda: status(client).get("blocks") == 2 * BLOCKS)
        packs = listing(regions, "na", "packs/")
        assert len(packs) == 2 and packs.keys() == listing(regions, "eu", "packs/").keys()
        for tenant in ("one", "two"):
            space, hashes = space_of(client, tenant), chain(tenant, BLOCKS)
            assert asked(client, space, hashes, 2) == BLOCKS and read(client, space, hashes) == BLOCKS
        until(lambda: status(client)["fetched_records"] == 2 * BLOCKS)
        assert far(client)["fetched_records"] == 0
        assert tokens(client)["read_through"] == 0


def test_what_is_erased_is_not_read_through(tmp_path: Path, serve: Serve) -> None:
    """One tenant is erased at home only, one where it was made, a prompt of a third one from its middle on: none of it is
    read through, by a node that starts afterwards neither; all the rest is. Whom no region knows is refused, though one only is asked for."""
    file = deployment(tmp_path)
    tenants = ("home", "there", "middle", "kept")
    produced(tmp_path, serve, file, tenants)
    middle = chain("middle", BLOCKS)[6]
    said = kvstore("region", "erase", "--yes", "--tenant", "nobody", "--region", "eu", "--regions", file)
    assert said.returncode == 3 and "tenants are home, kept, middle, there" in said.stderr
    for words in (
        ("--tenant", "home", "--region", "eu"),
        ("--tenant", "there", "--region", "na"),
        (
            "--tenant",
            "middle",
            "--namespace",
            b"middle".ljust(16, b".").hex(),
            "--prefix",
            middle.hex(),
            "--region",
            "eu",
        ),
    ):
        said = kvstore("region", "erase", "--yes", *words, "--regions", file)
        assert said.returncode == 0, said.stdout + said.stderr
    rest = [0, 0, 6, BLOCKS]

    def none_too_many(how: Callable[..., int], client: Client) -> bool:
        """Whether all the rest is there. It may be less, while the feed is read, and while a daemon that starts carries out an
        erasure: what of a tenant was on its way then is not let in."""
        found = [how(client, space_of(client, tenant), chain(tenant, BLOCKS)) for tenant in tenants]
        assert all(got <= most for got, most in zip(found, rest, strict=True)), found
        return found == rest

    for name in ("one", "two"):
        daemon = node(tmp_path, name, serve, file, "eu", OFF)
        with Client(str(daemon.socket), timeout_s=5.0) as client:
            until(lambda: none_too_many(asked, client))
            until(lambda: none_too_many(read, client))
            assert none_too_many(asked, client), name
        assert daemon.stop() == 0


@pytest.mark.slow
def test_a_tombstone_at_home_ends_what_was_read_through(tmp_path: Path, serve: Serve) -> None:
    """What a node has read through leaves its DRAM when home erases it, and does not come back from where it was made."""
    file = deployment(tmp_path)
    produced(tmp_path, serve, file, ("acme",))
    daemon = node(tmp_path, "eu-node", serve, file, "eu", OFF)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space, hashes = space_of(client, "acme"), chain("acme", BLOCKS)
        until(lambda: asked(client, space, hashes) == BLOCKS)
        assert read(client, space, hashes) == BLOCKS
        assert (
            kvstore(
                "region", "erase", "--yes", "--tenant", "acme", "--region", "eu", "--regions", file
            ).returncode
            == 0
        )
        until(lambda: asked(client, space, hashes) == 0)
        assert read(client, space, hashes) == 0
        until(lambda: status(client)["tombstones"] == 1)
        assert far(client)["blocks"] == BLOCKS


def test_a_region_that_is_none_stops_nothing(tmp_path: Path, serve: Serve) -> None:
    """The other region's bucket was never made ready: the daemon starts, serves, and says why nothing is read from there; it
    is read when it is ready."""
    file = deployment(tmp_path)
    (tmp_path / "na" / "region.json").unlink()
    daemon = node(tmp_path, "eu-node", serve, file, "eu", EAGER)
    hashes = chain("home", BLOCKS)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        assert asked(client, space, hashes, 1) == BLOCKS
        until(lambda: status(client)["blocks"] == BLOCKS)
        until(lambda: "kvstore region init" in far(client)["problem"])
        told = kvstore("status", "--socket", daemon.socket)
        assert told.returncode == 0 and "far region  na: not joined: file://" in told.stdout
        assert far(client)["open"] is False and not list((tmp_path / "na").rglob("*.json"))
        init(file, "na")
        until(lambda: far(client)["open"])
        assert far(client)["problem"] == "" and far(client)["name"] == "na"
        told = kvstore("status", "--socket", daemon.socket)
        assert "far region  na in file://" in told.stdout and "0 records fetched" in told.stdout


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ('["apac"]', "regions.eu.read_through: apac: known regions are na, eu"),
        ('["eu"]', "regions.eu.read_through: eu: is the region itself; allowed are others"),
        ('["na", "na"]', "regions.eu.read_through: na: is named 2 times; once is allowed"),
        ('["NA"]', "regions.eu.read_through[1]: 'NA': string should match pattern"),
        ('"na"', "regions.eu.read_through: 'na': input should be a valid tuple"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, names: str, said: str) -> None:
    """File, key, what is there and what is allowed; nothing is started."""
    file = regions_file(tmp_path, "na", "eu")
    file.write_text(file.read_text().replace("[regions.eu]", f"[regions.eu]\nread_through = {names}"))
    run = kvstore("region", "ls", "--regions", file)
    assert run.returncode == 2 and f"{file}: {said}" in run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    run = kvstore("serve", *arguments(Place(tmp_path), file, "eu"))
    assert run.returncode == 2 and f"{file}: {said}" in run.stderr.splitlines()[-1]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    made = Proxy(s3_server.port)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hang", "503", "cut"])
def test_a_region_that_fails_takes_nothing_from_hits_at_home(
    tmp_path: Path, serve: Serve, s3_server: S3Server, proxy: Proxy, mode: str
) -> None:
    """While na's bucket fails, a prompt of which eu's bucket has the first half is hit up to there, from the bucket and from DRAM,
    and the breaker of home stays closed; after that the other half is read through again."""
    file = deployment(tmp_path, s3_server)
    text = file.read_text().replace("[regions.eu]", "[regions.eu]\nstall_s = 60.0")  # the machine may be busy
    file.write_text(
        text.replace(
            f'"{s3_server.endpoint}"', f'"{proxy.endpoint}"\nstall_s = {STALL_S}', 1
        )  # na is the first one
    )
    produced(tmp_path, serve, file)
    hashes, half = chain("", BLOCKS), BLOCKS // 2
    daemon = node(tmp_path, "first", serve, file, "eu", EAGER)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes[:half])
        asked(client, space, hashes[:half], 1)
        until(lambda: status(client)["blocks"] == half)
    daemon.stop()
    daemon = node(tmp_path, "second", serve, file, "eu", OFF)
    with Client(str(daemon.socket), timeout_s=30.0) as client:
        space = space_of(client)
        until(lambda: status(client).get("blocks") == half and asked(client, space, hashes) == BLOCKS)
        proxy.mode = mode
        until(lambda: read(client, space, hashes) == half and asked(client, space, hashes) == half)
        for _ in range(20):
            assert asked(client, space, hashes) == half and read(client, space, hashes) == half
        breakers = {each["name"]: each["trips"] for each in client.status()["breakers"]}
        assert breakers["object loads"] == 0 and breakers["read-through na loads"] > 0
        proxy.mode = "pass"
        until(lambda: asked(client, space, hashes) == BLOCKS and read(client, space, hashes) == BLOCKS, 90.0)
