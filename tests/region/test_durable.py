"""What was asked for often is found by a node that never computed it; a bucket that is wrong or away harms nobody."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvstore.client import Client, Namespace
from tests.objects import S3Server
from tests.region.regions import (
    RECORD_BYTES,
    S3_KEYS,
    arguments,
    chain,
    content,
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


def test_compressed_packs_are_smaller_and_give_the_same_bytes(tmp_path: Path, serve: Serve) -> None:
    """With durable.compression a node puts shorter packs, and one without it reads them."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    hashes = chain("prompt", 16)
    for name, setting in (("writer", "split-zstd"), ("reader", "off")):
        place = node(tmp_path, name)
        daemon = serve(place, *arguments(place, file, "na", f"--set=durable.compression={setting}"))
        with Client(str(daemon.socket), timeout_s=5.0) as client:
            space = space_of(client)
            if name == "writer":
                store(client, space, hashes)
                for ticket in (1, 2):
                    client.lookup([space], hashes, ticket=ticket, tokens=16 * 64)
            until(lambda: status(client).get("blocks") == 16)
            assert status(client)["bytes"] < 16 * RECORD_BYTES / 2
            assert read(client, space, hashes) == 16
        daemon.stop(signal.SIGKILL)


@pytest.fixture(params=["file", "s3"])
def regions(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with one region, whose bucket is ready."""
    s3: S3Server | None = request.getfixturevalue("s3_server") if request.param == "s3" else None
    file = regions_file(tmp_path, "na", s3=s3)
    init(file, "na")
    return file


def node(tmp_path: Path, name: str) -> Place:
    (tmp_path / name).mkdir()
    return Place(tmp_path / name)


def test_a_fresh_node_has_what_was_asked_for_twice(tmp_path: Path, serve: Serve, regions: Path) -> None:
    """One node computes; another one, with nothing of its own, gives the same bytes back, and counts them as hits."""
    first = serve(node(tmp_path, "first"), *arguments(Place(tmp_path / "first"), regions, "na"), **S3_KEYS)
    hashes = chain("prompt", 40)
    with Client(str(first.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        for ticket in (1, 2):
            assert client.lookup([space], hashes, ticket=ticket, tokens=40 * 64) == 40
        until(lambda: status(client)["blocks"] == 40)
    first.stop(signal.SIGKILL)
    shutil.rmtree(tmp_path / "first")
    second = serve(node(tmp_path, "second"), *arguments(Place(tmp_path / "second"), regions, "na"), **S3_KEYS)
    with Client(str(second.socket), timeout_s=5.0) as client:
        space = space_of(client)
        until(lambda: client.lookup([space], hashes, ticket=3, tokens=40 * 64) == 40)
        rest = [bytearray(RECORD_BYTES) for _ in range(10)]  # an engine has the 30 before itself
        assert client.get(space, hashes[30:], rest, 10.0, hashes[29]) == 10
        assert list(map(bytes, rest)) == list(map(content, hashes[30:]))
        assert read(client, space, hashes) == 40
        until(lambda: status(client)["fetched_records"] == 40)
        assert client.lookup([space], hashes, ticket=4, tokens=40 * 64) == 40
        tokens = client.report(0.0)["rows"][0]["tokens"]
        assert tokens["shared"] == tokens["dram"] == 40 * 64, tokens
    assert second.stop() == 0


def asked(client: Client, space: Namespace, hashes: Sequence[bytes], ticket: int) -> bool:
    return client.lookup([space], hashes, ticket=ticket, tokens=len(hashes) * 64) == len(hashes)


def test_a_restart_goes_on_where_it_was(tmp_path: Path, serve: Serve, regions: Path) -> None:
    """Demand survives a clean stop: a prompt asked for once before and once after it is persisted."""
    place = node(tmp_path, "node")
    hashes = chain("prompt", 8)
    for ticket in (1, 2):
        daemon = serve(place, *arguments(place, regions, "na"), **S3_KEYS)
        with Client(str(daemon.socket), timeout_s=5.0) as client:
            space = space_of(client)
            if ticket == 1:
                store(client, space, hashes)
            until(partial(asked, client, space, hashes, ticket))
            if ticket == 2:
                until(lambda: status(client)["blocks"] == 8)
        assert daemon.stop() == 0


def test_a_pack_that_is_gone_or_damaged_is_a_miss(tmp_path: Path, serve: Serve) -> None:
    """Whatever happens to objects, no wrong byte comes back, and what is gone is not promised for ever."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    place = node(tmp_path, "writer")
    daemon = serve(place, *arguments(place, file, "na", "--set=durable.pack_bytes=256KiB"))
    hashes = chain("prompt", 12)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        for ticket in (1, 2):
            client.lookup([space], hashes, ticket=ticket, tokens=12 * 64)
        until(lambda: status(client)["blocks"] == 12)
    daemon.stop()
    packs = sorted((tmp_path / "na" / "packs").rglob("*"), key=lambda path: path.stat().st_mtime_ns)
    packs = [path for path in packs if path.is_file()]
    assert len(packs) == 3
    content = bytearray(packs[1].read_bytes())
    content[-1] ^= 1
    packs[1].chmod(0o600)
    packs[1].write_bytes(content)
    packs[2].unlink()
    reader = node(tmp_path, "reader")
    daemon = serve(reader, *arguments(reader, file, "na"))
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        until(lambda: client.lookup([space], hashes, ticket=3, tokens=12 * 64) == 12)
        assert read(client, space, hashes) == 7  # the last record of the second pack is the damaged one
        read(client, space, hashes)
        assert client.lookup([space], hashes, ticket=4, tokens=12 * 64) < 12


def test_a_dead_bucket_costs_nothing(tmp_path: Path, serve: Serve) -> None:
    """A daemon whose bucket does not answer starts, serves, and says so."""
    (tmp_path / "regions.toml").write_text(
        'deployment = "acme"\n[regions.na]\nurl = "s3://nobody/kv"\nendpoint = "http://127.0.0.1:9"\n'
    )
    place = node(tmp_path, "node")
    daemon = serve(place, *arguments(place, tmp_path / "regions.toml", "na"), **S3_KEYS)
    hashes = chain("prompt", 8)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        for ticket in (1, 2, 3):
            assert client.lookup([space], hashes, ticket=ticket, tokens=8 * 64) == 8
        until(lambda: "nobody" in status(client)["problem"])
        assert status(client)["open"] is False
        assert read(client, space, hashes) == 8
    assert daemon.stop() == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[: len(good) // 2],
        lambda good: b"",
        lambda good: good.replace(b"{", b"[", 1),
        lambda good: good.replace(b"region", b"regi\xefn", 1),
        lambda good: b"[" * 50_000,
        lambda good: good + bytes(1 << 20),
    ],
    ids=["cut", "empty", "flipped", "no text", "nested", "too large"],
)
def test_a_marker_that_cannot_be_read_stops_no_daemon(
    tmp_path: Path, serve: Serve, damage: Callable[[bytes], bytes]
) -> None:
    """DRAM serves, the region is a problem that is told, and it is joined when its marker is whole again."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    marker = tmp_path / "na" / "region.json"
    good = marker.read_bytes()
    marker.chmod(0o600)
    marker.write_bytes(damage(good))
    place = node(tmp_path, "node")
    daemon = serve(place, *arguments(place, file, "na"))
    hashes = chain("prompt", 4)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        assert read(client, space, hashes) == 4
        until(lambda: "no marker of a region" in status(client)["problem"])
        assert status(client)["open"] is False
        marker.write_bytes(good)
        until(lambda: status(client)["open"])
        assert not status(client)["problem"]
    assert daemon.stop() == 0


def test_a_bucket_that_is_not_ours_stops_the_start(tmp_path: Path, serve: Serve) -> None:
    """Another deployment, another region, no region at all, a newer format: one line, exit code 1, nothing written."""
    file = regions_file(tmp_path, "na", "eu")
    init(file, "na")
    place = node(tmp_path, "node")
    (tmp_path / "other.toml").write_text(file.read_text().replace('"acme"', '"other"'))
    (tmp_path / "swapped.toml").write_text(file.read_text().replace("/na", "/xx").replace("/eu", "/na"))
    for regions, region, said in (
        (file, "eu", "kvstore region init"),
        (tmp_path / "other.toml", "na", "deployment 'acme'"),
        (tmp_path / "swapped.toml", "eu", "region 'na'"),
    ):
        run = kvstore("serve", *arguments(place, regions, region))
        assert run.returncode == 1, run.stderr
        assert said in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
    run = kvstore("serve", *arguments(place, file, "apac"))
    assert run.returncode == 2 and "known are na, eu" in run.stderr
    marker = tmp_path / "na" / "region.json"
    marker.write_text(marker.read_text().replace('"format":1', '"format":9'))
    run = kvstore("serve", *arguments(place, file, "na"))
    assert run.returncode == 1 and "format 9" in run.stderr
    assert [path.name for path in (tmp_path / "na").iterdir()] == ["region.json"]
    assert not list((tmp_path / "eu").iterdir())
