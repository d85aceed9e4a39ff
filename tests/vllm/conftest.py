"""Fixtures for the vLLM connector: a model made on the spot, daemons, and processes that run engines."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples.demo.model import VOCABULARY, make_model
from kvstore.client import Client
from tests.running import Daemon, Place
from tests.vllm.engines import EngineHost
from tests.vllm.fake_client import FakeStore

if TYPE_CHECKING:  # importing it imports vLLM
    from tests.vllm.world import World

Tokens = list[int]
WITHOUT_VLLM = ("test_device.py",)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing vLLM takes seconds; a run that deselects its tests need not pay for that."""
    without = "not vllm" in (config.getoption("markexpr") or "")
    if without and collection_path.name.startswith("test_") and collection_path.name not in WITHOUT_VLLM:
        return True
    return None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def host(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """A process whose engine the test replaces by its own; importing vLLM is paid for once."""
    pytest.importorskip("vllm")
    process = EngineHost(model, tmp_path_factory.mktemp("host"))
    yield process
    process.kill()


@pytest.fixture
def hosts(model: Path, tmp_path: Path) -> Iterator[Callable[..., EngineHost]]:
    """Further processes, for tests that kill them or need two at a time."""
    pytest.importorskip("vllm")
    running: list[EngineHost] = []

    def start(**extra: str) -> EngineHost:
        running.append(EngineHost(model, tmp_path, **extra))
        return running[-1]

    yield start
    for process in running:
        process.kill()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeStore:
    """A store in this process, in the place of a daemon, for every connector made in the test; what they remember is
    the test's own."""
    from connectors.transfer import link
    from connectors.vllm import spaces

    monkeypatch.setattr(spaces, "default_cache_dir", lambda: tmp_path / "remembered")
    made = FakeStore()
    monkeypatch.setattr(link, "open_client", made.open)
    return made


@pytest.fixture
def worlds(model: Path, store: FakeStore) -> Iterator[Callable[..., World]]:
    """Make simulated engines over that store: of a Shape's fields, and a seed."""
    from tests.vllm.world import Shape, World

    made: list[World] = []

    def make(seed: int = 0, **shape: Any) -> World:
        made.append(World(model, Shape(**shape), seed))
        return made[-1]

    yield make
    store.may_fill.set()
    for world in made:
        world.close()


@pytest.fixture
def serve(serve: Callable[..., Daemon]) -> Iterator[Callable[..., Daemon]]:
    """Daemons whose accounts are looked at when the test is over: each token had one outcome."""
    started: list[Daemon] = []

    def start(place: Place, *arguments: str, **extra: str) -> Daemon:
        started.append(serve(place, *arguments, **extra))
        return started[-1]

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            totals(daemon)


def totals(daemon: Daemon) -> dict[str, int]:
    """A daemon's tokens by outcome, without the zeros; their sum is what it was asked for."""
    with Client(daemon.socket, timeout_s=10.0, label="test", attach=False) as client:
        rows = client.report(0.0)["rows"]
    sums: dict[str, int] = {}
    for row in rows:
        assert sum(row["tokens"].values()) == row["tokens_asked"] and min(row["tokens"].values()) >= 0, row
        for name, tokens in row["tokens"].items():
            sums[name] = sums.get(name, 0) + tokens
    return {name: tokens for name, tokens in sums.items() if tokens}


@pytest.fixture
def daemon(place: Place, serve: Callable[..., Daemon]) -> Daemon:
    return serve(place, *place.arguments, "--set=dram.capacity_bytes=64MiB")


def prompt(seed: int, tokens: int) -> Tokens:
    """Token ids that no other seed starts with."""
    draw = random.Random(seed)
    return [draw.randrange(1, VOCABULARY) for _ in range(tokens)]
