"""Under MultiConnector, beside a connector whose loads fail: what we store is true all the same."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.request import RequestStatus

from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.siblings.truth import TruthConnector
from tests.vllm.world import VOCABULARY, World, settle

pytestmark = pytest.mark.vllm

BLOCKS = 200 // 16
PLACES = pytest.mark.parametrize("ours", [0, 1], ids=["ours first", "ours second"])


@pytest.fixture
def worlds(worlds: Callable[..., World]) -> Callable[..., World]:
    return lambda **shape: worlds(**{"introduced": False, **shape})


@PLACES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("bad", [0, 5, 11])
def test_what_a_sibling_could_not_load_is_not_stored(
    worlds: Callable[..., World], store: FakeStore, ours: int, ranks: int, load: str, bad: int
) -> None:
    """A sibling's load fails: its step's blocks stay out of the store, and a fresh engine with ours alone is right."""
    world = worlds(ranks=ranks, ours=ours, sibling={"load": load, "fail": [bad]})
    for number in range(3):
        world.ask(f"r{number}", prompt(number, 200))
        world.ask(f"s{number}", prompt(number, 160) + prompt(10 + number, 60))
    settle(world)
    world.check_records(store)
    fresh = worlds(ranks=ranks)
    for number in range(3):
        fresh.ask(f"r{number}", prompt(number, 200))
    settle(fresh)


@PLACES
@pytest.mark.parametrize("load", ["sync", "async"])
def test_what_a_sibling_loaded_is_stored(
    worlds: Callable[..., World], store: FakeStore, ours: int, load: str
) -> None:
    """Blocks that a sibling brought are saved as if they had been computed; the sibling's handshake is its own."""
    world = worlds(ours=ours, sibling={"load": load})
    request = world.ask("a", prompt(1, 200))
    settle(world)
    held = {name for _, name in store.records}
    assert {bytes(name) for name in request.block_hashes[:BLOCKS]} <= held
    assert world.check_records(store) >= BLOCKS
    assert "hook_errors" not in world.sums


@PLACES
def test_an_aborted_request_leaves_nothing_bad_to_later_ones(
    worlds: Callable[..., World], store: FakeStore, ours: int
) -> None:
    """A request is aborted before vLLM has computed again what a load did not bring: nobody finds it in
    vLLM's prefix cache, and nothing built on it is stored."""
    world = worlds(ours=ours, budget=256, sibling={"load": "sync", "fail": [3], "only": ["a"]})
    world.ask("a", prompt(1, 200))
    while not world.scheduler.running:
        world.step()
    world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    world.ask("b", prompt(1, 200) + prompt(2, 60))
    settle(world)
    world.check_records(store)


def test_a_request_that_is_aborted_while_a_sibling_loads_it(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that was preempted, what a window has left is still being saved when it ends: vLLM gives its blocks back when
    the sibling is through, and is not asked to do so once more. That would end the engine."""
    window = {"kinds": ("window",), "window": 40, "prefix_caching": False}
    world = worlds(ours=1, sibling={"load": "async", "only": ["a"]}, **window)
    sibling = world.scheduler.connector.sub_connectors[0]  # type: ignore[union-attr]
    sibling._served.add("a")
    may_save, may_come = threading.Event(), threading.Event()
    (mover,) = world._ours(world.workers[0])._worker._movers.values()
    monkeypatch.setattr(mover, "save", lambda *args, save=mover.save: may_save.wait() and save(*args))
    come = TruthConnector.get_finished
    monkeypatch.setattr(
        TruthConnector, "get_finished", lambda *args: come(*args) if may_come.is_set() else (None, None)
    )
    try:
        request = world.ask("a", prompt(1, 100), max_tokens=50)
        while not request.num_output_tokens:
            world.step()
        world.scheduler.running.remove(request)
        world.scheduler._preempt_request(request, 0.0)
        sibling._served.clear()
        while request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            world.step()
        world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
        may_come.set()
        world.step()
    finally:
        may_save.set()
    world.run()
    world.ask("b", prompt(2, 40))
    settle(world)


def test_hits_that_a_sibling_serves_are_not_ours(worlds: Callable[..., World], store: FakeStore) -> None:
    """The daemon found the blocks, a sibling loaded them: the daemon's accounts hear that they were not used."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    world = worlds(ours=1, sibling={"load": "sync"})
    world.ask("a", prompt(1, 200))
    settle(world)
    ticket = store.asked[-1]["ticket"]
    world.ask("b", prompt(2, 200))
    settle(world)
    assert (ticket, 0, b"") in store.settled and not world.sums.get("loaded_blocks")


def test_a_policy_that_fails_requests_is_declined(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector's policy is out of our reach: where it is not to recompute, nothing is loaded or stored, and
    one line says what to set."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    calls = len(store.calls)
    world = worlds(policy="fail", sibling={"load": "sync", "only": ["nobody"]})
    said: list[str] = []
    monkeypatch.setattr(world.connector.guard, "say_once", said.append)
    for number in range(3):
        world.ask(f"r{number}", prompt(number, 200))
    settle(world)
    assert len(store.calls) == calls
    assert len(said) == 1 and '"kv_load_failure_policy": "recompute"' in said[0]


def test_no_entry_point_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is named by its module's path alone: MultiConnector, which asks by name, finds its statistics."""
    monkeypatch.delitem(KVConnectorFactory._registry, "KVStoreConnector", raising=False)
    spec = importlib.util.find_spec("connectors.vllm")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))  # as in a process that has not imported it
    stats = MultiConnector.build_kv_connector_stats({"KVStoreConnector": {"lookups": 3}})
    assert stats is not None and stats.data["KVStoreConnector"].data == {"lookups": 3}


@PLACES
@pytest.mark.parametrize("ahead", [False, True], ids=["a step at a time", "a step ahead"])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_chaos_beside_a_sibling(
    worlds: Callable[..., World], store: FakeStore, ours: int, load: str, ahead: bool
) -> None:
    """Shared prefixes, few blocks, aborts, loads of ours and of a sibling that fail: every record is true.

    With steps planned ahead vLLM itself delivers what a failed synchronous load spoiled, so answers
    are not looked at there."""
    draw = random.Random(ours)
    world = worlds(
        ours=ours,
        ahead=ahead,
        blocks=40,
        sequences=5,
        sibling={"load": load, "fail_chance": 0.1, "seed": ours},
    )
    world.abort_chance = 0.03
    asked = 0
    for _ in range(3000):
        if asked < 40 and draw.random() < 0.3:
            head = prompt(draw.randrange(5), 16 * draw.randrange(1, 12))
            tail = prompt(100 + asked, draw.randrange(1, 40))
            world.ask(f"r{asked}", head + tail, max_tokens=draw.randrange(1, 24))
            asked += 1
        names = [name for _, name in list(store.records)]
        store.unreadable = set(draw.sample(names, min(len(names), draw.choice([0, 0, 2]))))
        if world.scheduler.has_requests():
            world.step()
        elif asked == 40:
            break
    world.run()
    if not (ahead and load == "sync"):
        world.check_answers()
    world.check_empty()
    assert world.check_records(store) > 0


@PLACES
@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_window_that_a_sibling_left_holes_in(
    worlds: Callable[..., World], store: FakeStore, ours: int, load: str
) -> None:
    """Blocks of a window fail: vLLM goes on from there without what came before, and answers wrongly. Nothing of it is
    stored, nor of what others find of it, and later engines are right."""
    wrong = 0
    for bad in (3, 8, 11):
        shape: dict[str, Any] = {"kinds": ("window",), "window": 70, "budget": 256}
        world = worlds(**shape, ours=ours, sibling={"load": load, "fail": [bad], "only": ["a"]})
        text = prompt(bad, 200)
        world.ask("a", text, max_tokens=40)
        while world.scheduler.has_requests():
            world.step()
            if "b" not in world.requests and world.outputs["a"]:
                world.ask("b", text + prompt(50, 60))
        world.ask("c", text + prompt(51, 60))
        world.run()
        wrong += world.outputs["a"][0] == VOCABULARY
        world.check_records(store)
        fresh = worlds(**shape)
        for name, tail in (("a", []), ("b", prompt(50, 60)), ("c", prompt(51, 60))):
            fresh.ask(name, text + tail)
        settle(fresh)
    assert wrong, "vLLM copes with it: nothing is proven"
