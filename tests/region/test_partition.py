"""Partitions: a process is cut off from one bucket, for a while, in both directions or in one. What it has goes on, what is told is
true, and after healing everything is everywhere.

    writer in na ──────────▶ bucket of na ◀── proxy ◀── mirror ──▶ proxy ──▶ bucket of eu
    daemon in na ──▶ proxy ─────▶╯                                              ▲ `kvstore region status`, from outside

PARTITION_S=60 makes them longer, and has all of them (`make soak`). "deaf": what is asked arrives and is done, and the answers do not come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.client import Client
from tests.objects import S3Server
from tests.region.mirrors import StartMirror, mirrors
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
from tests.region.test_mirror_process import RULES, contents, make, told
from tests.running import Daemon, Place

PARTITION_S = float(os.environ.get("PARTITION_S", "3"))
IS_LONG = PARTITION_S >= 30
HEALED_S = 120.0  # within which everything is everywhere
Serve = Callable[..., Daemon]


@pytest.fixture
def regions(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the regions na and eu, as nobody is cut off from them."""
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    file = regions_file(tmp_path, "na", "eu", s3=s3_server, rules=RULES)
    init(file, "na", "eu")
    return file


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[Proxy]:
    made = Proxy(s3_server.port)
    yield made
    made.close()


def through(proxy: Proxy, file: Path, region: str, s3: S3Server) -> Path:
    """The same regions as seen by a process whose way to one of them is the proxy."""
    head, mark, tail = file.read_text().partition(f"[regions.{region}]")
    other = file.with_name(f"{region}-through-proxy.toml")
    other.write_text(head + mark + tail.replace(s3.endpoint, proxy.endpoint, 1))
    return other


@dataclass
class Truth:
    """What a mirror says of its age, against what is known here: which packs are not in eu, and when each was announced."""

    file: Path
    made: dict[str, float] = field(default_factory=dict)  # when it was announced at the latest, unix seconds
    told_s: list[float] = field(default_factory=list)

    def make(self, *names: str) -> None:
        for name in make(self.file, *names):
            self.made[name] = time.time()

    def ask(self) -> None:
        """The age is no lower than that of the oldest pack that is not there."""
        asked_s, there = time.time(), contents(self.file, "eu")
        _, pair = told(self.file)
        assert pair["oldest_age_s"] is not None
        self.told_s.append(pair["oldest_age_s"])
        now_there = contents(self.file, "eu")
        missing = [
            made_s for name, made_s in self.made.items() if name not in there and name not in now_there
        ]
        assert pair["oldest_age_s"] >= asked_s - min(missing, default=asked_s), (pair, missing)


def converged(file: Path) -> bool:
    code, pair = told(file, "--now")
    return (code, pair["segments_behind"], pair["pending"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("region", "mode"),
    [("na", "hang"), ("eu", "deaf"), *([("na", "deaf"), ("eu", "hang")] if IS_LONG else [])],
)
def test_a_mirror_is_cut_off(
    tmp_path: Path, regions: Path, s3_server: S3Server, proxy: Proxy, region: str, mode: str
) -> None:
    """From its source, or from its own bucket: no age is told that is lower than the truth, and after healing every pack is in
    eu, byte by byte, once announced, and the age is that of a mirror that is well."""
    truth = Truth(regions)
    truth.make("first", "second")
    with mirrors(tmp_path) as start:
        start_through(start, proxy, regions, region, s3_server)
        until(lambda: converged(regions), HEALED_S)
        truth.ask()
        proxy.mode = mode
        ends_s = time.monotonic() + PARTITION_S
        while time.monotonic() < ends_s:
            truth.make(f"more {len(truth.made)}")
            truth.ask()
        proxy.mode = "pass"
        healed_s = time.monotonic()
        until(lambda: converged(regions), HEALED_S)
        took_s = time.monotonic() - healed_s
        there = contents(regions, "eu")
        assert there == contents(regions, "na") and there.keys() == truth.made.keys()

        def is_well() -> bool:
            truth.ask()
            return truth.told_s[-1] < HEALED_S / 4

        until(is_well, HEALED_S)
        _, pair = told(regions)
        assert (pair["failed"], pair["lost"], pair["copied_packs"]) == (0, 0, len(truth.made))
    ages = [round(age_s, 1) for age_s in truth.told_s]
    print(
        f"{region} {mode}: {PARTITION_S:g} s away, {len(truth.made)} packs, whole again after {took_s:.1f} s, ages told {ages}"
    )


def start_through(start: StartMirror, proxy: Proxy, file: Path, region: str, s3: S3Server) -> None:
    start(through(proxy, file, region, s3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["deaf", *(["hang"] if IS_LONG else [])])
def test_a_daemon_is_cut_off(
    tmp_path: Path, serve: Serve, regions: Path, s3_server: S3Server, proxy: Proxy, mode: str
) -> None:
    """From its bucket: what DRAM has is hit, byte by byte, all the time, and new prompts are stored and hit; after healing they
    are durable, and another node has them."""
    nodes = []
    for name, file in (("cut", through(proxy, regions, "na", s3_server)), ("other", regions)):
        (tmp_path / name).mkdir()
        place = Place(tmp_path / name)
        nodes.append(serve(place, *arguments(place, file, "na", "--set=durable.seen_times=1"), **S3_KEYS))
    with Client(str(nodes[0].socket), timeout_s=5.0) as client, Client(str(nodes[1].socket)) as other:
        space, prompts = space_of(client), [chain("before", 8)]
        store(client, space, prompts[0])
        client.lookup([space], prompts[0], ticket=1, tokens=8 * 64)
        until(lambda: status(other).get("blocks") == 8)
        proxy.mode = mode
        ends_s = time.monotonic() + PARTITION_S
        hits = 0
        while time.monotonic() < ends_s:
            if len(prompts) < 8:
                prompts.append(chain(f"while away {len(prompts)}", 8))
                store(client, space, prompts[-1])
            for number, hashes in enumerate(prompts, 1):
                assert client.lookup([space], hashes, ticket=number, tokens=8 * 64) == 8
                assert read(client, space, hashes) == 8
                hits += 1
            time.sleep(0.1)
        proxy.mode = "pass"
        healed_s = time.monotonic()
        asked = iter(range(1000, 1_000_000))

        def all_durable() -> bool:
            for hashes in prompts:
                client.lookup([space], hashes, ticket=next(asked), tokens=8 * 64)
            time.sleep(0.2)
            return bool(status(other).get("blocks") == 8 * len(prompts))

        until(all_durable, HEALED_S)
        took_s = time.monotonic() - healed_s
        for hashes in prompts:
            until(lambda: read(other, space_of(other), hashes) == 8)  # noqa: B023 called in this round
        assert client.status()["health"]["ok"]
    print(f"daemon {mode}: {PARTITION_S:g} s away, {hits} prompts hit, whole again after {took_s:.1f} s")
