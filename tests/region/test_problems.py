"""What is wrong with a bucket is one problem, told alike wherever somebody looks, in few lines of the log, and gone when it is over."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.tools.web.names import MIRROR
from tests.objects import S3Server
from tests.region.mirrors import mirrors
from tests.region.proxy import Proxy
from tests.region.regions import S3_KEYS, arguments, chain, init, regions_file, space_of, status, store, until
from tests.region.test_mirror_process import make
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


def test_credentials_that_expire_are_one_reason(
    tmp_path: Path, serve: Serve, regions: Path, proxy: Proxy
) -> None:
    """A store that answers 403 ExpiredToken under a little traffic is one problem, with what to do, and the only one of its objects;
    /healthz names it and stays 200; the log has a handful of lines, whatever failed how often; all of it is over when the store
    takes them again. tests/bench/test_drill.py: it is told everywhere."""
    place = Place(tmp_path / "node")
    place.path.mkdir()
    words = ("--set=durable.seen_times=1", "--set=web.listen=127.0.0.1:0")
    daemon = serve(place, *arguments(place, regions, "na", *words), **S3_KEYS)
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
        assert "403 ExpiredToken" in problem["text"]
        assert not of_kind(client.status()["problems"], "object")
        health = get(url_of(daemon), "/healthz")
        assert health.status == 200 and "credentials na: " in health.text
        proxy.mode = "pass"
        until(lambda: not traffic(), 60.0)
        until(lambda: "is right again" in daemon.log())
    assert daemon.stop() == 0
    lines = daemon.log().removeprefix(said).splitlines()
    assert len([line for line in lines if "403" in line]) <= 4, lines
    assert len(lines) <= 20, lines


def why(url: str) -> set[str]:
    """Kinds of the problems of a mirror that give the store's reason."""
    problems = get(url, "/healthz?o=json").json()["problems"]
    return {one["kind"] for one in problems if "403 ExpiredToken" in one["text"]}


def test_a_mirror_tells_of_itself_as_a_daemon_does(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvstore mirror --metrics`: what it copied, how old the oldest is, and every metric of the table; a source whose credentials
    expire is a problem there, in /healthz and in a few lines of the log, and is over when they are taken again."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    file = regions_file(tmp_path, "na", "eu", s3=s3_server, rules='[[rules]]\nfrom = ["na"]\nto = ["eu"]')
    init(file, "na", "eu")
    proxy = Proxy(s3_server.port)
    head, source, rest = file.read_text().partition("[regions.na]")
    file.write_text(head + source + rest.replace(s3_server.endpoint, proxy.endpoint, 1))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with mirrors(tmp_path) as start:
        start(file, f"--metrics=127.0.0.1:{port}")
        make(file, "a")
        until(lambda: 'kvstore_mirror_copied_packs_total{source="na"} 1.0' in get(url, "/metrics").text)
        until(lambda: 'kvstore_mirror_oldest_age_seconds{source="na"}' in get(url, "/metrics").text)
        found = {
            name.removesuffix("_total")
            for name in re.findall(r"^# TYPE (\w+)", get(url, "/metrics").text, re.MULTILINE)
        }
        told = {metric.name.removesuffix("_total") for metric in MIRROR.metrics}
        assert found == told | {"kvstore_problem", "kvstore_problem_seconds"}
        assert get(url, "/healthz").text == "ok\n" and get(url, "/metrics", Host="a.example").status == 403
        proxy.mode = "expired"
        until(lambda: why(url) == {"credentials", "mirror"})
        health = get(url, "/healthz")
        assert health.status == 200 and health.text.startswith("ok: ") and "403 ExpiredToken" in health.text
        row = 'kvstore_problem{kind="credentials",level="problem",subject="na"} 1.0'
        assert row in get(url, "/metrics").text
        proxy.mode = "pass"
        until(lambda: get(url, "/healthz").text == "ok\n", 60.0)
    proxy.close()
    lines = [line for line in (tmp_path / "mirror.log").read_text().splitlines() if "403" in line]
    assert 0 < len(lines) <= 6, lines


def test_a_mirror_serves_this_machine_only(tmp_path: Path) -> None:
    """An address that others reach, or none at all, is one line and exit code 2."""
    file = regions_file(tmp_path, "na", "eu", rules='[[rules]]\nfrom = ["na"]\nto = ["eu"]')
    for text in ("0.0.0.0:9473", "x", "127.0.0.1:99999"):
        done = kvstore("mirror", "--regions", file, "--set=region=eu", "--metrics", text)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and text in done.stderr, done.stderr
