"""Weights replaced inside a running engine: hits where the weights are the same, none where they are not."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.request import RequestStatus

from connectors import constants as limits
from connectors.vllm import worker as worker_module
from tests.vllm import world as world_module
from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.tiny_weights import TinyModel, give_model
from tests.vllm.world import BLOCK_TOKENS, VOCABULARY, World

pytestmark = pytest.mark.vllm

TEXT = prompt(1, 200)
BLOCKS = 200 // BLOCK_TOKENS

SHAPES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"ranks": 2},
    "two groups, four ranks in two stages": {"window": 40, "ranks": 4, "stages": 2},
    "ranks that hold the same": {"ranks": 2, "replicas": 2},
    "a step ahead": {"ahead": True},
    "synchronous loads": {"extra": {"load": "sync"}},
    "no prefix caching": {"prefix_caching": False},
    "beside another connector": {"sibling": {"load": "async", "only": ["nobody"]}, "introduced": False},
}

FEW = dict(list(SHAPES.items())[:6])


@pytest.fixture
def worlds(worlds: Callable[..., World]) -> Callable[..., World]:
    return lambda **shape: worlds(**{"weights": 1, **shape})


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the connector has said of its weights since the last call."""
    caplog.set_level(logging.INFO, logger="vllm.kvstore")

    def take() -> list[str]:
        said = [line for line in caplog.messages if "weights" in line]
        caplog.clear()
        return said

    return take


def reset(world: World, **how: Any) -> bool:
    return bool(world.scheduler.reset_prefix_cache(reset_connector=True, **how))


def hits(world: World, store: FakeStore, text: list[int] = TEXT) -> int:
    """Ask; check the answer, and every record in use; return how many blocks came from the store."""
    before = world.sums.get("loaded_blocks", 0)
    world.ask(f"r{len(world.requests)}", text)
    world.run()
    world.check_answers()
    world.check_empty()
    world.check_records(store)
    assert "hook_errors" not in world.sums
    return int(world.sums.get("loaded_blocks", 0) - before)


def names(world: World) -> set[bytes]:
    """Digests of the namespaces in use."""
    return {group.space.digest for group in world.connector._scheduler._spaces.columns.values()}


# ---- the same weights, and others ----------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "late"),
    [(shape, bool(number % 2)) for number, shape in enumerate([*SHAPES.values(), {}])],
    ids=[*SHAPES.keys(), "one rank, reset last"],
)
def test_weights_that_go_and_come_back(
    worlds: Callable[..., World],
    store: FakeStore,
    lines: Callable[[], list[str]],
    shape: dict[str, Any],
    late: bool,
) -> None:
    """A, B, A, A: B finds nothing of A, A finds its own again, and each epoch is one line in the log; whether the
    reset comes before the new weights or after them (late)."""

    def update(value: int) -> None:
        assert late or reset(world)
        world.replace_weights(value)
        assert not late or reset(world)

    filler = worlds(**shape)
    assert hits(filler, store) == 0
    world = worlds(**shape)
    warm = hits(world, store)
    assert warm > 0
    first = names(world)
    assert not lines()
    update(2)
    assert hits(world, store) == 0 and not names(world) & first
    (line,) = lines()
    assert "live " in line and "(before: those of the start): they were replaced" in line
    second = names(world)
    assert reset(world)
    assert hits(world, store) == warm and names(world) == second
    (line,) = lines()
    assert "they are the same" in line
    update(1)
    assert hits(world, store) == warm and names(world) == first
    (line,) = lines()
    assert "those of the start (before: live " in line and "start again" in line
    assert reset(world)
    assert hits(world, store) == warm and names(world) == first
    (line,) = lines()
    assert "they are the same" in line
    assert first | second <= set(store.spaces)  # what others may use is never ended


@pytest.mark.parametrize("busy", ["a load", "a save"])
def test_a_reset_that_vllm_refuses(worlds: Callable[..., World], store: FakeStore, busy: str) -> None:
    """While a load is under way, or a finished request's blocks are being saved, vLLM raises and tells no connector.
    Nothing was reset; a few steps later it can be, and nothing of the weights before is found."""
    if busy == "a load":
        assert hits(worlds(weights=1), store) == 0
    world = worlds(weights=1)
    if busy == "a save":
        store.may_fill.clear()
    request = world.ask("a", TEXT, max_tokens=1)
    while not (request.is_finished() or request.status == RequestStatus.WAITING_FOR_REMOTE_KVS):
        world.step()
    version = world.connector._scheduler._spaces.version  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        reset(world, reset_running_requests=True)
    assert world.connector._scheduler._spaces.version == version  # type: ignore[union-attr]
    store.may_fill.set()
    world.run()
    world.replace_weights(2)
    assert reset(world, reset_running_requests=True)
    assert hits(world, store) == 0


@pytest.mark.parametrize("shape", FEW.values(), ids=FEW.keys())
def test_engines_of_one_update_share(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """What an engine stores after an update is a hit for one that began with other weights and got the same."""
    other = {**shape, "weights": 7, "extra": {**shape.get("extra", {}), "model_digest": "other"}}
    engines = [worlds(**shape), worlds(**other)]
    for engine in engines:
        hits(engine, store)
        engine.replace_weights(2)
        assert reset(engine)
    assert hits(engines[0], store) == 0
    assert hits(engines[1], store) > 0


@pytest.mark.parametrize("ranks", [{"ranks": 2}, {"ranks": 2, "stages": 2}])
def test_one_rank_that_differs(worlds: Callable[..., World], store: FakeStore, ranks: dict[str, int]) -> None:
    """New weights on the last of two ranks are other weights; exchanged with those of the first they are others again."""
    world = worlds(**ranks)
    hits(world, store)
    seen = [names(world)]
    for weights in ((1, 2), (2, 1), (2, 2)):
        world.replace_weights(*weights)
        assert reset(world)
        assert hits(world, store) == 0
        assert names(world) not in seen
        seen.append(names(world))
    world.replace_weights(1, 2)
    assert reset(world)
    assert hits(world, store) > 0 and names(world) == seen[1]


def test_the_name_of_the_start_stays(worlds: Callable[..., World], store: FakeStore) -> None:
    """vLLM notes where weights were reloaded from in the configuration that an engine in one process shares: the
    namespaces go by the first name all the same."""
    world = worlds()
    hits(world, store)
    world.config.model_config.model, world.config.model_config.revision = "checkpoints/17", "main"
    assert reset(world)
    assert hits(world, store) == BLOCKS


# ---- while things are under way -------------------------------------------------------------


@pytest.mark.parametrize("shape", FEW.values(), ids=FEW.keys())
def test_running_requests_start_again_with_the_new_weights(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """Requests are preempted by the reset, under new weights and under the same: what is stored is true."""
    world = worlds(**shape)
    hits(world, store)
    for round_, value in enumerate((2, 1, 1)):
        request = world.ask(f"running {round_}", prompt(10 + round_, 200), max_tokens=40)
        while not request.num_output_tokens:
            world.step()
        world.catch_up()
        while any(store.held for store in world.connector._scheduler._storing.stores.values()):
            world.step()
            world.catch_up()
        assert not request.is_finished()
        world.replace_weights(value)
        assert reset(world, reset_running_requests=True)
        world.run()
        world.check_empty()
        assert world.check_records(store) >= BLOCKS
        world.requests.pop(f"running {round_}")  # it was answered by two sets of weights
    assert hits(world, store) > 0 and "hook_errors" not in world.sums


def test_weights_replaced_after_an_idle_step(worlds: Callable[..., World], store: FakeStore) -> None:
    """Steps that only wait for saves say nothing of the weights: these may be replaced until a request starts."""
    world = worlds(prefix_caching=False)
    hits(world, store)
    first = names(world)
    store.may_fill.clear()
    world.ask("a", prompt(2, 200), max_tokens=1)
    while not world.outputs["a"]:
        world.step()
    reset(world)
    for _ in range(3):
        world.step()
    assert world.scheduler.has_requests() and not names(world)
    store.may_fill.set()
    world.run()
    world.replace_weights(2)
    assert hits(world, store) == 0 and names(world) != first
    assert hits(world, store, prompt(2, 200)) == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_what_ranks_said_before_a_reset_does_not_count_after_it(
    worlds: Callable[..., World], store: FakeStore, ahead: bool
) -> None:
    """A second reset, with new weights, overtakes the report on the weights after the first one."""
    world = worlds(ahead=ahead, prefix_caching=False)
    hits(world, store)
    first = names(world)
    assert reset(world)
    half = world.connector._scheduler
    reports: list[Any] = []
    half_reported, half.reported = half.reported, reports.append
    world.ask("a", TEXT)
    world.step()
    world.catch_up()
    assert reports and not names(world)
    half.reported = half_reported
    world.replace_weights(2)
    assert reset(world)
    for report in reports:
        half.reported(report)
    assert not half._spaces.ready()
    world._asked_of["a"] = world._seat(0)
    world.run()
    world.check_answers()
    assert names(world) != first and not world.sums.get("loaded_blocks")
    assert hits(world, store) > 0


def test_a_rank_that_does_not_answer(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait for the ranks a bounded time, and are computed then; nothing is looked up or saved meanwhile."""
    world = worlds(ranks=2, prefix_caching=False)
    hits(world, store)
    records = len(store.records)
    assert reset(world)
    with monkeypatch.context() as silent:
        silent.setattr(limits, "RANKS_WAIT_S", 0.2)
        silent.setattr(world.workers[1], "build_connector_worker_meta", lambda: None)
        world.ask("a", prompt(3, 200))
        world.run()
    world.check_answers()
    assert len(store.records) == records and not names(world)
    world.ask("b", prompt(4, 200))
    world.run()
    assert hits(world, store, prompt(4, 200)) > 0


def test_saves_go_through_before_an_engine_sleeps(worlds: Callable[..., World], store: FakeStore) -> None:
    """While copies are under way vLLM is told to step on, which is what its pause waits for."""
    world = worlds()
    store.may_fill.clear()
    world.ask("a", TEXT)
    while not world.connector._scheduler._storing.stores:
        world.step()
    assert world.connector.has_pending_push_work()
    store.may_fill.set()
    world.run()
    assert not world.connector.has_pending_push_work() and world.sums["saved_blocks"] == BLOCKS


def test_no_copy_touches_memory_that_is_given_away(worlds: Callable[..., World], store: FakeStore) -> None:
    """From `unregister_kv_caches` to `restore_kv_caches` blocks are neither read nor written: loads fail, saves are
    not made; afterwards both are."""
    filler = worlds()
    hits(filler, store)
    world = worlds()
    (worker,) = world.workers
    worker.unregister_kv_caches()
    touched = [tensor.clone() for tensor in world.tensors[0].values()]
    store.delay_s = 0.01
    half = worker._worker
    half._loads.run = lambda line, task, run=half._loads.run: (
        run(line, task),
        touched.append(
            all(torch.equal(*pair) for pair in zip(world.tensors[0].values(), touched, strict=False))
        ),
    )
    world.ask("a", TEXT)
    world.run()
    world.check_answers()
    assert touched[-1] is True and world.sums["load_failures"] == 1 and not world.sums.get("loaded_blocks")
    records = len(store.records)
    world.ask("b", prompt(5, 200))
    world.run()
    assert len(store.records) == records
    worker.restore_kv_caches()
    assert hits(world, store, prompt(6, 200)) == 0
    assert reset(world)
    assert hits(world, store, prompt(6, 200)) == BLOCKS


@pytest.mark.parametrize("way", ["save", "load"])
def test_giving_memory_away_waits_for_copies(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A copy that is just running is over when `unregister_kv_caches` returns."""
    monkeypatch.setattr(
        "connectors.vllm.worker.IDLE_LOAD_BYTES_MAX", 0
    )  # or the engine's own thread makes the load
    if way == "load":
        hits(worlds(), store)
    world = worlds()
    (worker,) = world.workers
    (mover,) = worker._worker._movers.values()
    running, over, copy = threading.Event(), threading.Event(), getattr(mover, way)

    def slow(*arguments: Any) -> Any:
        running.set()
        time.sleep(0.2)
        over.set()
        return copy(*arguments)

    setattr(mover, way, slow)
    world.ask("a", TEXT, max_tokens=1)
    while not running.is_set():
        world.step()
    worker.unregister_kv_caches()
    assert over.is_set()
    worker.restore_kv_caches()
    world.run()
    world.check_answers()


@pytest.mark.parametrize("shape", FEW.values(), ids=FEW.keys())
def test_chaos(worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]) -> None:
    """Two engines whose weights come and go while requests run, a daemon that does too: no record is of other weights
    than its namespace, and the engine that preempts its requests never samples from KV of other weights."""
    draw = random.Random(11)
    engines = [worlds(**{**shape, "blocks": 60}) for _ in range(2)]
    for number in range(300):
        world = draw.choice(engines)
        store.away, store.delay_s = draw.random() < 0.05, draw.choice([0, 0, 0.002])
        if draw.random() < 0.2:
            head = prompt(draw.randrange(4), BLOCK_TOKENS * draw.randrange(1, 12))
            world.ask(f"r{number}", head + prompt(100 + number, 5), max_tokens=draw.randrange(1, 20))
        if draw.random() < 0.08:
            preempt = world is engines[0] or draw.random() < 0.5
            replace_while_running(world, store, draw, preempt)
        elif world.scheduler.has_requests():
            world.step()
    store.away = False
    for world in engines:
        world.run()
        world.check_empty()
        assert world.check_records(store) > 0
        assert world.sums["loaded_blocks"] > 0
    assert not any(VOCABULARY in tokens for tokens in engines[0].outputs.values()), "sampled from garbage"


def replace_while_running(world: World, store: FakeStore, draw: random.Random, preempt: bool) -> None:
    """Weights of one kind or another, before or after a reset, unless vLLM cannot preempt all requests just now."""
    world.catch_up()
    world.check_records(store)
    try:
        reset(world, reset_running_requests=preempt)
    except RuntimeError:
        return
    world.replace_weights(draw.choice([1, 1, 2, 3]))
    if draw.random() < 0.5:
        reset(world)


# ---- weights that are not seen ---------------------------------------------------------------


def packed(config: Any, value: int, layers: list[str]) -> TinyModel:
    """A backend has packed the weights into an object of its own, and left an empty tensor behind."""
    model = give_model(config, value, layers)
    weight, model.projection.weight = model.projection.weight, torch.nn.Parameter(torch.empty(0))
    model.fill = weight.data.fill_
    return model


def offloaded(config: Any, value: int, layers: list[str]) -> TinyModel:
    config.offload_config.prefetch.offload_group_size = 2
    return give_model(config, value, layers)


def unrecorded(config: Any, value: int, layers: list[str]) -> TinyModel:
    model = give_model(config, value, layers)
    config.compilation_config.static_forward_context[layers[0]] = torch.nn.Module()
    return model


UNSEEN = {
    "no model": (None, "its models are not found"),
    "a layer of no model": (unrecorded, "its models are not found"),
    "packed": (packed, "projection does not keep them in its tensors"),
    "offloaded": (offloaded, "layer by layer"),
}


@pytest.mark.parametrize(("give", "why"), UNSEEN.values(), ids=UNSEEN.keys())
def test_weights_that_cannot_be_seen(
    worlds: Callable[..., World],
    store: FakeStore,
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    give: Callable[[Any, int, list[str]], TinyModel] | None,
    why: str,
) -> None:
    """A layer that keeps its weights elsewhere: each reset is an epoch of its own, with a line that says why, and ends
    with the next one."""
    monkeypatch.setattr(world_module, "give_model", give)
    world = worlds(prefix_caching=False, weights=None if give is None else 1)
    hits(world, store)
    assert not lines()
    seen = [names(world)]
    for _ in range(3):
        assert reset(world)
        assert hits(world, store) == 0
        (line,) = lines()
        assert why in line and "own epoch" in line
        assert hits(world, store) == BLOCKS
        assert not any(names(world) & before for before in seen)
        seen.append(names(world))
    assert set(store.spaces) == seen[0] | seen[-1]


def test_weights_that_are_not_seen_once(
    worlds: Callable[..., World],
    store: FakeStore,
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device that fails once costs one epoch; after the next reset the engine is back in its warm store."""
    world = worlds(ranks=2)
    hits(world, store)
    first = names(world)

    def fail(*_: Any) -> str:
        raise torch.OutOfMemoryError("no room for sums")

    assert reset(world)
    with monkeypatch.context() as failing:
        failing.setattr(worker_module, "live_digest", fail)
        world.ask("a", TEXT)
        world.run()
    world.check_answers()
    assert not names(world) & first and not world.sums.get("loaded_blocks")
    assert any("no room for sums" in line for line in lines())
    own = names(world)
    assert reset(world)
    world.ask("b", TEXT)
    world.run()
    assert world.sums["loaded_blocks"] == BLOCKS and names(world) == first
    assert not own & set(store.spaces)


@pytest.mark.parametrize("weights", [1, None], ids=["seen", "not seen"])
def test_weights_that_are_not_those_of_files(
    worlds: Callable[..., World],
    store: FakeStore,
    lines: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    weights: int | None,
) -> None:
    """With load_format = dummy the files of the model are not what is computed with: what the ranks see names the weights,
    and where they see nothing, nothing is stored. An engine whose files are what it computes with shares with those that
    compute with the same."""
    named = {"extra": {"model_digest": ""}}
    true_config = world_module.config_of

    def without_files(*arguments: Any) -> Any:
        made = true_config(*arguments)
        made.load_config.load_format = "dummy"
        return made

    with monkeypatch.context() as dummy:
        dummy.setattr(world_module, "config_of", without_files)
        engines = [worlds(weights=weights, **named) for _ in range(2)]
        hits(engines[0], store)
        assert hits(engines[1], store) == (0 if weights is None else BLOCKS)
        if weights is None:
            assert not store.records and any("load_format is dummy" in line for line in lines())
            return
        other = worlds(weights=2, **named)
        assert hits(other, store) == 0
    real = worlds(weights=1, **named)
    assert hits(real, store) == BLOCKS and names(real) == names(engines[0])
