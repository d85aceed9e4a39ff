"""A bucket that hangs, answers 503, cuts off or flips bits: engines are served, no wrong byte comes, and it works again after."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.region.regions import (
    S3_KEYS,
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
from tests.running import Daemon, Place

Serve = Callable[..., Daemon]
STALL_S = 1.0


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    made = Proxy(s3_server.port)
    yield made
    made.close()


@pytest.fixture
def regions(tmp_path: Path, s3_server: S3Server, proxy: Proxy) -> Path:
    """A region whose nodes go through the proxy."""
    file = regions_file(tmp_path, "na", s3=s3_server)
    init(file, "na")
    text = file.read_text().replace(s3_server.endpoint, proxy.endpoint)
    file.write_text(text.replace(f'"{proxy.endpoint}"', f'"{proxy.endpoint}"\nstall_s = {STALL_S}'))
    return file


def node(tmp_path: Path, name: str, serve: Serve, regions: Path) -> Daemon:
    (tmp_path / name).mkdir()
    place = Place(tmp_path / name)
    return serve(place, *arguments(place, regions, "na", "--set=durable.seen_times=1"), **S3_KEYS)


def breaker(client: Client) -> dict[str, object]:
    (found,) = [each for each in client.status()["breakers"] if each["name"] == "object loads"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hang", "503", "cut"])
def test_a_bucket_that_fails_is_left_alone_and_used_again(
    tmp_path: Path, serve: Serve, regions: Path, proxy: Proxy, mode: str
) -> None:
    """What only the bucket has is a miss while it fails, after one wait at most; what DRAM has is hit in between; when the
    bucket works again, so do its hits, and what was to be persisted meanwhile is."""
    writer = node(tmp_path, "writer", serve, regions)
    hashes, more = chain("prompt", 8), chain("more", 8)
    with Client(str(writer.socket), timeout_s=5.0) as client:
        space = space_of(client)
        store(client, space, hashes)
        client.lookup([space], hashes, ticket=1, tokens=8 * 64)
        until(lambda: status(client)["blocks"] == 8)
    reader = node(tmp_path, "reader", serve, regions)
    with Client(str(reader.socket), timeout_s=5.0) as client:
        space = space_of(client)
        until(lambda: client.lookup([space], hashes) == 8)
        proxy.mode = mode
        begun_s = time.monotonic()
        assert read(client, space, hashes) == 0
        until(lambda: breaker(client)["state"] != "closed" or read(client, space, hashes))
        until(lambda: client.lookup([space], hashes) == 0)
        assert time.monotonic() - begun_s < 30
        store(client, space, more)
        for _ in range(100):
            asked_s = time.monotonic()
            assert client.lookup([space], more, ticket=2, tokens=8 * 64) == 8
            assert read(client, space, more) == 8
            assert time.monotonic() - asked_s < STALL_S, "a dead bucket held up a hit in DRAM"
        proxy.mode = "pass"
        until(lambda: client.lookup([space], hashes) == 8, 60.0)
        until(lambda: read(client, space, hashes) == 8)
        until(lambda: status(client)["blocks"] == 16, 60.0)


@pytest.mark.slow
def test_flipped_bits_never_come_through(tmp_path: Path, serve: Serve, regions: Path, proxy: Proxy) -> None:
    """Answers of the bucket are damaged on their way: every byte that an engine gets is right, and what is damaged is a miss."""
    writer = node(tmp_path, "writer", serve, regions)
    prompts = [chain(f"prompt {number}", 8) for number in range(12)]
    with Client(str(writer.socket), timeout_s=5.0) as client:
        space = space_of(client)
        for number, hashes in enumerate(prompts, 1):
            store(client, space, hashes)
            client.lookup([space], hashes, ticket=number, tokens=8 * 64)
        until(lambda: status(client)["blocks"] == 96)
    reader = node(tmp_path, "reader", serve, regions)
    with Client(str(reader.socket), timeout_s=5.0) as client:
        space = space_of(client)
        until(lambda: status(client).get("blocks") == 96)
        proxy.mode = "flip"
        came = sum(read(client, space, hashes) for hashes in prompts)
        assert proxy.flipped and came < 96
        until(lambda: status(client)["corrupt_records"] + status(client)["failed_records"] > 0)
