"""vLLM's own helpers for connectors, from its source distribution, with ours in the place of theirs."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

from connectors.vllm.messages import GroupFacts, Orders, Rank, Report
from tests.running import ROOT
from tests.vllm.fake_client import FakeStore

pytestmark = pytest.mark.vllm

HELPERS = ROOT / ".cache/vllm-0.32.0/tests/v1/kv_connector/unit/utils.py"
BLOCK_TOKENS = 16
PROMPT_BLOCKS = 3
RECORD_BYTES = 64


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    if not HELPERS.is_file():
        pytest.skip("vLLM's source distribution is not here: make vllm-source")
    spec = importlib.util.spec_from_file_location("vllm_connector_helpers", HELPERS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def schedulers(
    theirs: ModuleType, store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make a scheduler with our connector, as vLLM's tests make theirs."""
    where = tmp_path / "facebook/opt-125m"
    where.mkdir(parents=True)
    (where / "config.json").write_text(json.dumps({
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "vocab_size": 50272, "hidden_size": 768,
        "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "max_position_embeddings": 10000,
        "word_embed_proj_dim": 768, "do_layer_norm_before": True, "torch_dtype": "float16", "bos_token_id": 2,
        "eos_token_id": 2, "pad_token_id": 1,
    }))  # fmt: skip
    monkeypatch.chdir(tmp_path)
    made = []

    def make(**extra: Any) -> Any:
        config = theirs.create_vllm_config(
            kv_connector="KVStoreConnector",
            kv_connector_module_path="connectors.vllm",
            kv_role="kv_both",
            block_size=BLOCK_TOKENS,
            kv_connector_extra_config={"model_digest": "opt", **extra},
        )
        scheduler = theirs.create_scheduler(config, num_blocks=100)
        rank = Rank(0, {0: GroupFacts(RECORD_BYTES, {"rank": "0"})})
        scheduler.connector._scheduler._spaces.know_ranks([rank])
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.shutdown()


def hold(scheduler: Any, store: FakeStore, request: Any, blocks: int) -> None:
    """Put the first blocks of a request's prompt into the store."""
    half = scheduler.connector._scheduler
    assert half._spaces.ready()
    for name in request.block_hashes[:blocks]:
        store.records[half._spaces.columns[0].space.digest, bytes(name)] = bytes(RECORD_BYTES)


def let_reserve(scheduler: Any) -> None:
    """Until slots were leased for all that is to be saved: the next step orders it."""
    storing, give_up_s = scheduler.connector._scheduler._storing, time.monotonic() + 10
    while not all(store.ended or store in storing._made for store in storing.stores.values()):
        assert time.monotonic() < give_up_s
        time.sleep(0.001)


def told(orders: Orders, **more: Any) -> Report:
    """What workers report that did as they were told."""
    saves = {save.number: (1, len(save.block_ids), True) for save in orders.saves}
    return Report(saves, {load.number: (1, len(load.block_ids)) for load in orders.loads}, **more)


def play(theirs: ModuleType, scheduler: Any, requests: list[Any], **result: Any) -> Orders:
    """One step whose workers do as they are told, and say `result`."""
    let_reserve(scheduler)
    output = scheduler.schedule()
    orders: Orders = output.kv_connector_metadata
    report = told(orders, failed=result.pop("failed", set()))
    sent = set(orders.draining) or None
    running = [request for request in requests if request.request_id in output.num_scheduled_tokens]
    answer = theirs.create_model_runner_output(
        running, finished_sending=sent, kv_connector_worker_meta=report, **result
    )
    scheduler.update_from_output(output, answer)
    return orders


def request_of(theirs: ModuleType, number: int) -> Any:
    return theirs.create_request(
        number, num_tokens=PROMPT_BLOCKS * BLOCK_TOKENS + 8, max_tokens=4, block_size=BLOCK_TOKENS
    )


def finish(theirs: ModuleType, scheduler: Any, request: Any) -> None:
    for _ in range(20):
        if not scheduler.has_requests():
            break
        play(theirs, scheduler, [request], use_eos=True)
    theirs.assert_scheduler_empty(scheduler)


def test_a_request_without_hits_leaves_nothing(theirs: ModuleType, schedulers: Any) -> None:
    """Nothing is held: the request is computed, saved, and the scheduler is empty afterwards."""
    scheduler = schedulers()
    request = request_of(theirs, 1)
    scheduler.add_request(request)
    orders = play(theirs, scheduler, [request])
    assert not orders.loads and [len(save.block_ids) for save in orders.saves] == [PROMPT_BLOCKS]
    finish(theirs, scheduler, request)


def test_an_asynchronous_load(theirs: ModuleType, schedulers: Any, store: FakeStore) -> None:
    """The request waits for its blocks, then computes only what was not held."""
    scheduler = schedulers()
    request = request_of(theirs, 2)
    hold(scheduler, store, request, 2)
    scheduler.add_request(request)
    orders = play(theirs, scheduler, [request])
    (load,), (end,) = orders.loads, orders.load_ends
    assert not load.sync and len(load.block_ids) == 2 and not scheduler.running
    assert (end.request_id, end.missing) == (request.request_id, []) and not store.open_leases
    play(theirs, scheduler, [request], finished_recving={request.request_id})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {request.request_id: BLOCK_TOKENS + 8}
    (save,) = output.kv_connector_metadata.saves
    answer = theirs.create_model_runner_output(
        [request], kv_connector_worker_meta=told(output.kv_connector_metadata)
    )
    scheduler.update_from_output(output, answer)
    space, hashes = (
        scheduler.connector._scheduler._spaces.columns[0].space,
        [bytes(h) for h in request.block_hashes],
    )
    assert len(save.block_ids) == 1 and store.parents[space.digest, hashes[2]] == hashes[1]
    finish(theirs, scheduler, request)


def test_a_synchronous_load(theirs: ModuleType, schedulers: Any, store: FakeStore) -> None:
    """The load is part of the step that computes the rest; nothing is saved before it is known to be good."""
    scheduler = schedulers(load="sync")
    request = request_of(theirs, 3)
    hold(scheduler, store, request, 2)
    scheduler.add_request(request)
    output = scheduler.schedule()
    orders = output.kv_connector_metadata
    assert output.has_sync_kv_loads and orders.loads[0].sync and not orders.saves
    report = told(orders, sync_step=orders.sync_step)
    answer = theirs.create_model_runner_output([request], kv_connector_worker_meta=report)
    scheduler.update_from_output(output, answer)
    assert not play(theirs, scheduler, [request]).saves
    (save,) = play(theirs, scheduler, [request]).saves
    assert len(save.block_ids) == 1
    finish(theirs, scheduler, request)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_asynchronous_load_that_fails(
    theirs: ModuleType, schedulers: Any, store: FakeStore, bad: int
) -> None:
    """Blocks reported as failed are computed, and the request is not looked up again."""
    scheduler = schedulers()
    request = request_of(theirs, 4 + bad)
    hold(scheduler, store, request, 2)
    scheduler.add_request(request)
    block_ids = play(theirs, scheduler, [request]).loads[0].block_ids
    play(
        theirs, scheduler, [request],
        finished_recving={request.request_id}, invalid_block_ids=set(block_ids[bad:]), failed={request.request_id},
    )  # fmt: skip
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {request.request_id: (PROMPT_BLOCKS - bad) * BLOCK_TOKENS + 8}
    assert not output.kv_connector_metadata.loads
    answer = theirs.create_model_runner_output(
        [request], kv_connector_worker_meta=told(output.kv_connector_metadata)
    )
    scheduler.update_from_output(output, answer)
    finish(theirs, scheduler, request)


def test_a_synchronous_load_that_fails(theirs: ModuleType, schedulers: Any, store: FakeStore) -> None:
    """The step's tokens are thrown away, the blocks computed, and the request's blocks never saved."""
    scheduler = schedulers(load="sync")
    request = request_of(theirs, 6)
    hold(scheduler, store, request, 2)
    scheduler.add_request(request)
    output = scheduler.schedule()
    block_ids = output.kv_connector_metadata.loads[0].block_ids
    name = request.request_id
    report = told(output.kv_connector_metadata, sync_step=1, failed={name})
    answer = theirs.create_model_runner_output(
        [request], invalid_block_ids={block_ids[1]}, kv_connector_worker_meta=report
    )
    scheduler.update_from_output(output, answer)
    assert request.num_computed_tokens == BLOCK_TOKENS and not request.output_token_ids
    saves = []
    while scheduler.has_requests():
        saves += play(theirs, scheduler, [request], use_eos=True).saves
    assert not saves
    theirs.assert_scheduler_empty(scheduler)


def test_the_failure_policy_is_to_recompute(theirs: ModuleType, schedulers: Any) -> None:
    """vLLM's default would fail a request whose block was evicted meanwhile; with us a miss is a miss."""
    scheduler = schedulers()  # their helper leaves the policy at its default, "fail"
    assert scheduler.recompute_kv_load_failures and not scheduler.requires_kv_delivery


def test_finished_requests_wait_for_their_saves(theirs: ModuleType, schedulers: Any) -> None:
    """A request that ends while a save is under way keeps its blocks until the ranks report it sent."""
    scheduler = schedulers()
    request = request_of(theirs, 7)
    scheduler.add_request(request)
    first = scheduler.schedule()
    assert first.kv_connector_metadata.saves
    scheduler.update_from_output(first, theirs.create_model_runner_output([request], use_eos=True))
    assert not play(theirs, scheduler, []).draining
    assert request.is_finished() and request.request_id in scheduler.requests
    report = told(first.kv_connector_metadata)
    later = theirs.create_model_runner_output([], kv_connector_worker_meta=report)
    scheduler.update_from_output(scheduler.schedule(), later)
    assert play(theirs, scheduler, []).draining == [request.request_id]
    assert request.request_id not in scheduler.requests
