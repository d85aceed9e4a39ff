"""A node that was told of an erasure, was killed before it could carry it out, and starts while the bucket is away."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, arguments, chain, init, read, regions_file, space_of, store, until
from tests.running import Daemon, Place, kvstore


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    made = Proxy(s3_server.port)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("names", "prefix"), [(True, True), (False, False)], ids=["names, prefix", "no names, tenant"]
)
def test_it_serves_nothing_of_it(
    tmp_path: Path, serve: Callable[..., Daemon], s3_server: S3Server, proxy: Proxy, prefix: bool, names: bool
) -> None:
    """All of a tenant, or a prefix of it, was in use, so nothing could be dropped; the start does not hand it out, whether an engine has
    named its namespace again or not, and other prompts are hit as before. When the bucket is back it goes on."""
    file = regions_file(tmp_path, "na", s3=s3_server)
    file.write_text(file.read_text().replace(s3_server.endpoint, proxy.endpoint))
    init(file, "na")
    (tmp_path / "node").mkdir()
    place = Place(tmp_path / "node")
    words = arguments(place, file, "na")
    daemon = serve(place, *words)
    erased, other = chain("erased", 8), chain("other", 8)
    client = Client(str(daemon.socket), timeout_s=5.0)
    space, theirs = space_of(client, "acme"), space_of(client, "umbrella")
    store(client, space, erased)
    store(client, theirs, other)
    if prefix:
        store(client, space, other)
    lease = client.acquire(space, erased, 5.0)
    what = (
        ["--namespace", space.digest.hex(), "--prefix", erased[2].hex()] if prefix else ["--tenant", "acme"]
    )
    said = kvstore("region", "erase", "--yes", "--force", *what, "--regions", file)
    assert said.returncode == 0, said.stderr
    until(lambda: client.lookup([space], erased) == (2 if prefix else 0))
    daemon.stop(signal.SIGKILL)
    del lease  # held until then
    proxy.mode = "away"
    if not names:
        (place.data_dir / "namespaces.json").unlink()
    daemon = serve(place, *words)
    client = Client(str(daemon.socket), timeout_s=5.0)
    until(lambda: not client.status()["adopting"])
    for number in range(20):
        assert client.lookup([space_of(client, "acme")], erased) == (2 if prefix else 0), (
            number,
            client.status(),
        )
        time.sleep(0.05)
    assert read(client, space_of(client, "umbrella"), other) == 8
    assert not prefix or read(client, space_of(client, "acme"), other) == 8
    proxy.mode = "pass"
    until(lambda: client.status()["region"]["open"])
    assert read(client, space_of(client, "umbrella"), other) == 8
    assert client.lookup([space_of(client, "acme")], erased) == (2 if prefix else 0)
