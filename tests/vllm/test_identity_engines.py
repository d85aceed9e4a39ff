"""Pairs of real engines, one after the other at one daemon: what one stores the other finds, or must never find.

All pairs use the same daemon: each has a tenant of its own, so that it sees nothing of the pairs before it. Every answer is
compared, token by token, with that of the same engine without a connector.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from tests.running import Daemon, Place, daemons
from tests.vllm import models, pairs
from tests.vllm.conftest import totals
from tests.vllm.engines import EngineHost, Generated
from tests.vllm.pairs import DIFFER, LORA, SAME, SAME_APART, SEEN, TEXT, Engine, Kit

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

MANY = 16  # tokens of an answer
NUMBERED = "image"  # in the one line of the log about pictures without a name


@dataclass
class Store:
    """Where the engines of one test store. tenant: of all of them; empty where they are to meet those of other tests."""

    socket: Path
    tenant: str = ""

    def settings(self, engine: Engine) -> dict[str, Any]:
        """Of an engine's connector. Engines of a pair that have tenants keep them apart within the test's."""
        own = engine.extra.get("tenant", "")
        return {**engine.extra, "tenant": f"{self.tenant} {own}".strip()}


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Of all tests of the file. Each token that it was asked for had one outcome."""
    place = Place(tmp_path_factory.mktemp("store"))
    with daemons(place.path) as serve:
        daemon = serve(place, *place.arguments, "--set=dram.capacity_bytes=64MiB")
        yield daemon
        totals(daemon)


@pytest.fixture
def store(shared_daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A tenant of the test's own. What it stored is dropped at its end, so that the next test has room."""
    yield Store(shared_daemon.socket, request.node.name)
    with Client(shared_daemon.socket, timeout_s=30.0, label="test", attach=False) as client:
        client.clear(everything=True)


@pytest.fixture(scope="module")
def kit(host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    host.fill_gap("compute_in_fp8")
    return Kit(host.model, tmp_path_factory.mktemp("pairs"), host.hub)


def ask(host: EngineHost, engine: Engine) -> Generated:
    return host.generate(engine.prompts, MANY, salt=engine.salt, adapter=engine.adapter, images=engine.images)


def alone(host: EngineHost, engine: Engine) -> list[list[int]]:
    """What the engine says without a connector."""
    engine.prepare()
    host.start(None, **engine.options)
    return ask(host, engine).tokens


def served(host: EngineHost, store: Store, engine: Engine) -> tuple[list[list[int]], list[int]]:
    """What a fresh engine says with the store, and how many tokens of each prompt it did not compute."""
    engine.prepare()
    host.start(store.socket, extra=store.settings(engine), **engine.options)
    got = ask(host, engine)
    host.finish_saves()
    return got.tokens, got.cached


@pytest.mark.parametrize("name", DIFFER)
def test_engines_that_must_not_share(host: EngineHost, store: Store, kit: Kit, name: str) -> None:
    """Both store what they compute, and find it again; neither finds what the other did, though tokens and blocks are
    the same."""
    if lacks(name):
        pytest.skip(f"vLLM has it for CPUs with {pairs.NEEDS[name]}")
    first, second = DIFFER[name](kit)
    said = alone(host, first)
    nothing = [0] * len(first.prompts)
    assert served(host, store, first) == (said, nothing)
    assert host.metrics().get("saved_blocks", 0) >= sum(first.blocks) // pairs.BLOCK or name in pairs.UNKNOWN
    says = alone(host, second)
    assert says != said or name in pairs.WALLS, "the pair proves nothing"
    assert served(host, store, second) == (says, nothing)
    assert found(host, store, second, says, name) == second.blocks


def lacks(name: str) -> bool:
    """Whether this CPU does."""
    return pairs.NEEDS.get(name, "") not in Path("/proc/cpuinfo").read_text()


def found(host: EngineHost, store: Store, engine: Engine, said: list[list[int]], name: str) -> list[int]:
    """How many tokens an engine finds of what an equal one stored."""
    tokens, cached = served(host, store, engine)
    assert tokens == said or name in pairs.ROUNDED
    return cached if name not in pairs.UNKNOWN else engine.blocks


@pytest.mark.parametrize("name", SAME)
def test_engines_that_must_share(host: EngineHost, store: Store, kit: Kit, name: str) -> None:
    """All that one stored the other finds."""
    share(host, store, *SAME[name](kit))


def share(host: EngineHost, store: Store, first: Engine, second: Engine) -> None:
    said = alone(host, first)
    assert served(host, store, first) == (said, [0] * len(first.prompts))
    assert alone(host, second) == said
    assert served(host, store, second) == (said, second.blocks)


@pytest.mark.skipif("PAIRS" not in os.environ, reason="of make soak: PAIRS=rounds")
@pytest.mark.parametrize("name", SAME_APART)
def test_each_that_decides_nothing(host: EngineHost, store: Store, kit: Kit, name: str) -> None:
    """What the pairs above have at once is shared one by one as well."""
    share(host, store, *SAME_APART[name](kit))


@pytest.mark.skipif("PAIRS" not in os.environ, reason="of make soak: PAIRS=rounds")
def test_all_engines_at_one_daemon(host: EngineHost, daemon: Daemon, kit: Kit) -> None:
    """The engines of all pairs, in any order: whatever they find of each other's, each says what it says alone."""
    store = Store(daemon.socket)
    for seed in range(int(os.environ["PAIRS"])):
        makers = [*DIFFER.items(), *SAME.items(), *SAME_APART.items()]
        random.Random(seed).shuffle(makers)
        for name, make in makers:
            for engine in make(kit) if not lacks(name) else ():
                said = alone(host, engine)
                for _ in range(2):
                    tokens, _cached = served(host, store, engine)
                    assert tokens == said or name in pairs.ROUNDED, (seed, name)


# ---- what has no name that says what it is ---------------------------------------------------------


def test_pictures_that_are_only_numbered(host: EngineHost, store: Store, kit: Kit) -> None:
    """Without both caches vLLM names a picture by a counter: the first one of two engines is not the same. Prompts
    with pictures are neither looked up nor saved, one line says so, and other prompts are as always."""
    options = {
        "model": str(kit.made(models.vision_model)),
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
    }
    engines = [Engine(options, prompts=SEEN, images=[picture]) for picture in (1, 2)]
    lines = host.log().count(NUMBERED)
    said = [alone(host, engine) for engine in engines]
    assert said[0] != said[1]
    for engine, tokens in zip(engines, said, strict=True):
        assert served(host, store, engine) == (tokens, [0])
        got = ask(host, engine)  # the engine's second one
        assert (got.tokens, got.cached) == (tokens, [0])
        assert host.metrics().get("saved_blocks", 0) == 0
    assert host.log().count(NUMBERED) == lines + len(engines)
    words = Engine(options)
    said_of_words = alone(host, words)
    assert served(host, store, words) == (said_of_words, [0, 0])
    assert served(host, store, words) == (said_of_words, words.blocks)


def test_an_adapter_that_is_replaced_under_a_running_engine(host: EngineHost, store: Store, kit: Kit) -> None:
    """The engine goes on with what it has loaded: what it stores from then on is not what the files say."""
    path = models.lora_adapter(kit.base, kit.place(), "adapter", 1)
    adapter = ("adapter", 1, str(path))
    earlier, later = (
        Engine(LORA, prompts=TEXT[:1], adapter=adapter),
        Engine(LORA, prompts=TEXT[1:], adapter=adapter),
    )
    said = alone(host, earlier)
    assert served(host, store, earlier) == (said, [0])
    pairs.other_adapter(path)
    ask(host, later)
    host.finish_saves()
    for engine in (earlier, later):
        says = alone(host, engine)
        assert served(host, store, engine) == (says, [0])
        assert served(host, store, engine) == (says, engine.blocks)


def test_weights_that_are_replaced_under_a_running_engine(host: EngineHost, store: Store, kit: Kit) -> None:
    """What it goes on to store is of the weights that it has loaded."""
    model = kit.copy()
    before, after = Engine({"model": str(model)}), Engine({"model": str(model)})
    said = alone(host, before)
    host.start(store.socket, extra=store.settings(before), **before.options)
    pairs.replace_unseen(model / "model.safetensors")
    got = ask(host, before)
    assert (got.tokens, got.cached) == (said, [0, 0])
    host.finish_saves()
    says = alone(host, after)
    assert says != said
    assert served(host, store, after) == (says, [0, 0])
    assert served(host, store, Engine({"model": str(kit.base)})) == (said, before.blocks)


def test_started_from_weights_or_updated_to_them(
    hosts: Callable[..., EngineHost], store: Store, kit: Kit
) -> None:
    """One engine got weights while it ran, another one was started from their files: each finds what the other stored."""
    other = kit.copy()
    pairs.other_keys(kit.base / "model.safetensors", other / "model.safetensors")
    host = hosts()
    host.fill_gap("keep_weights_in_sight")
    started, updated = Engine({"model": str(other)}), Engine(prompts=[TEXT[0]])
    said = alone(host, started)
    assert served(host, store, updated)[1] == [0]
    host.core("pause_scheduler")
    host.core("collective_rpc", method="reload_weights", kwargs={"weights_path": str(other)})
    host.core("resume_scheduler")
    got = ask(host, updated)
    assert (got.tokens, got.cached) == (said[:1], [0])
    host.finish_saves()
    assert served(host, store, started) == (said, [started.blocks[0], 0])
