"""What is wrong with a bucket is one problem, told alike wherever somebody looks, in few lines of the log, and gone when it is over."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from tests.objects import S3Server
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, arguments, chain, init, regions_file, space_of, status, store, until
from tests.running import Daemon, Place, kvstore
from tests.web.asked import get, url_of

Serve = Callable[..., Daemon]


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
    file.write_text(file.read_text().replace(s3_server.endpoint, proxy.endpoint))
    return file


def of_kind(problems: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [problem for problem in problems if problem["kind"] == kind]


def everywhere(daemon: Daemon, place: Place) -> dict[str, str]:
    """By where somebody looks, all that is told there."""
    url, socket = url_of(daemon), ("--socket", place.socket)
    top = json.loads(kvstore("top", "--interval", "0.2s", "-o", "json", *socket).stdout)
    return {
        "status": kvstore("status", *socket).stdout.partition("arena")[0],
        "top": "\n".join(top["attention"]),
        "page": json.dumps(get(url, "/live.json").json()["live"]["problems"]),
        "healthz": get(url, "/healthz?o=json").text,
        "metrics": get(url, "/metrics").text,
        "doctor": kvstore("doctor", *socket, "--data-dir", place.data_dir).stdout,
    }


def test_credentials_that_expire_are_one_reason_everywhere(
    tmp_path: Path, serve: Serve, regions: Path, proxy: Proxy
) -> None:
    """A store that answers 403 ExpiredToken under a little traffic: status, top, page, /healthz, metrics and doctor name it, with
    what to do; the log has a handful of lines, whatever failed how often; all of it is over when the store takes them again."""
    place = Place(tmp_path / "node")
    place.path.mkdir()
    more = ("--set=durable.seen_times=1", "--set=web.listen=127.0.0.1:0")
    daemon = serve(place, *arguments(place, regions, "na", *more), **S3_KEYS)
    with Client(str(daemon.socket), timeout_s=5.0) as client:
        space, prompts = space_of(client), iter(range(1, 10_000))

        def traffic() -> list[dict[str, Any]]:
            hashes = chain(number := next(prompts), 4)
            store(client, space, hashes)
            client.lookup([space], hashes, ticket=number, tokens=4 * 64)
            return client.status()["problems"]

        until(lambda: not traffic() and status(client)["open"] and status(client)["blocks"])
        said = daemon.log()
        proxy.mode = "expired"
        until(lambda: of_kind(traffic(), "credentials"))
        until(lambda: of_kind(traffic(), "credentials")[0]["count"] > 5)
        [problem] = of_kind(client.status()["problems"], "credentials")
        assert (problem["subject"], problem["level"]) == ("na", "problem") and problem["fix"]
        for where, text in everywhere(daemon, place).items():
            assert re.search(r"credentials\W.*\bna\b", text), (where, text)
            assert where == "metrics" or "403 ExpiredToken" in text, (where, text)
        proxy.mode = "pass"
        until(lambda: not traffic(), 60.0)
        until(lambda: "is right again" in daemon.log())
    assert daemon.stop() == 0
    lines = daemon.log().removeprefix(said).splitlines()
    assert len([line for line in lines if "403" in line]) <= 4, lines
    assert len(lines) <= 20, lines
