"""Kinds of models, through vLLM's own scheduler: what is stored and loaded of each, and what is declined.

The specs, the managers of blocks and the scheduler are vLLM's; the numbers are checked (see `world.py`).
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1 import kv_cache_interface as specs

from connectors.vllm import scheduler
from connectors.vllm.geometry import Unsupported, plan_for
from tests.vllm import world as world_module
from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import BLOCK_TOKENS, Shape, World, config_of

pytestmark = pytest.mark.vllm


def settle(world: World) -> None:
    """Run, and check what must hold afterwards."""
    world_module.settle(world)
    assert "hook_errors" not in world.sums


MODELS = {
    "latent attention": {"kinds": ("latent",)},
    "latent attention, four ranks, one column": {"kinds": ("latent",), "ranks": 4, "replicas": 4},
    "window alone": {"kinds": ("window",), "window": 40},
    "full and window, of whole blocks": {"kinds": ("full", "window"), "window": 32},
    "full and window, of whole blocks and a token": {"kinds": ("full", "window"), "window": 33},
    "full and state": {"kinds": ("full", "state")},
    "full and state, finer hashes": {"kinds": ("full", "state"), "hash_tokens": 8},
    "full and state, two ranks": {"kinds": ("full", "state"), "ranks": 2},
    "full and state, two stages": {"kinds": ("full", "state"), "ranks": 2, "stages": 2},
    "full and state, a step ahead": {"kinds": ("full", "state"), "ahead": True},
    "full and states of every block": {"kinds": ("full", "states")},
    "state alone": {"kinds": ("state",)},
    "full and states kept inside of chunks": {"kinds": ("full", "checkpoint"), "hash_tokens": 8},
    "full, window and state": {"kinds": ("full", "window", "state"), "window": 40},
    "full and replayed window": {"kinds": ("full", "replay"), "window": 32},
    "full and replayed window, two ranks": {"kinds": ("full", "replay"), "window": 32, "ranks": 2},
}


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_what_one_engine_saves_another_loads(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """A second engine loads a prompt up to its last whole block, and answers the same."""
    first = worlds(**shape)
    first.ask("a", prompt(1, 200))
    settle(first)
    assert first.check_records(store) >= (3 if shape["kinds"] == ("state",) else 12)
    second = worlds(**shape)
    second.ask("a", prompt(1, 200))
    settle(second)
    assert second.sums["hit_tokens"] == 200 // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.outputs == first.outputs


@pytest.mark.parametrize("tokens", [192, 193])
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_a_prompt_of_whole_blocks(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any], tokens: int
) -> None:
    """A prompt that is held whole is answered right: a token that is computed again does not change a state twice."""
    outputs = []
    for _ in range(2):
        world = worlds(**shape)
        world.ask("a", prompt(1, tokens))
        settle(world)
        outputs.append(world.outputs)
    assert outputs[0] == outputs[1] and world.sums["hit_tokens"] >= 128


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_a_conversation_goes_on_elsewhere(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """Blocks that decoding filled are stored too: the next turn, in another engine, finds the answer of the last."""
    first = worlds(**shape)
    first.ask("a", prompt(1, 100), max_tokens=70)
    settle(first)
    first.check_records(store)
    turn = prompt(1, 100) + first.outputs["a"] + prompt(2, 30)
    second = worlds(**shape)
    second.ask("b", turn)
    settle(second)
    assert second.sums["hit_tokens"] >= 160


@pytest.mark.parametrize("bad", [6, 11])
@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_a_failed_load_is_computed(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any], bad: int
) -> None:
    """A block that cannot be read, wherever it is, changes no answer and no record."""
    first = worlds(**shape)
    request = first.ask("a", prompt(1, 200))
    settle(first)
    step = BLOCK_TOKENS // first.shape.hash_tokens
    store.torn.add(bytes(request.block_hashes[bad * step + step - 1]))
    second = worlds(**shape)
    second.ask("a", prompt(1, 200))
    second.ask("b", prompt(1, 160) + prompt(2, 60))
    settle(second)
    assert second.outputs["a"] == first.outputs["a"]
    second.check_records(store)


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_chaos(worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]) -> None:
    """Shared prefixes, few blocks, aborts, blocks that tear: every answer and every record is true."""
    seed = sorted(MODELS).index(next(name for name, known in MODELS.items() if known is shape))
    draw = random.Random(seed)
    first = worlds(**shape)
    for number in range(4):
        first.ask(f"head {number}", prompt(number, 192))
    settle(first)
    world = worlds(seed, **{**shape, "blocks": 45 * len(shape["kinds"]), "sequences": 5})
    world.abort_chance = 0.03
    asked = 0
    for _ in range(3000):
        if asked < 25 and draw.random() < 0.3:
            head = prompt(draw.randrange(4), 8 * draw.randrange(1, 24))
            tail = prompt(100 + asked, draw.randrange(1, 40))
            world.ask(f"r{asked}", head + tail, max_tokens=draw.randrange(1, 40))
            asked += 1
        if draw.random() < 0.02:
            world.scheduler.reset_prefix_cache()
        store.away = draw.random() < 0.1
        store.delay_s = draw.choice([0, 0, 0.002])
        names = [name for _, name in list(store.records)]
        store.unreadable = set(draw.sample(names, min(len(names), draw.choice([0, 0, 2]))))
        store.torn = set(draw.sample(names, min(len(names), draw.choice([0, 0, 2]))))
        if draw.random() < 0.05 and store.records:
            store.records.pop(draw.choice(list(store.records)), None)
        if world.scheduler.has_requests():
            world.step()
        elif asked == 25:
            break
    store.away = False
    settle(world)
    assert world.check_records(store) > 0
    assert world.sums["loads"] > 0


@pytest.mark.parametrize(
    "shape",
    [{"kinds": ("full", "state")}, {"kinds": ("full", "state"), "ranks": 2}, {"kinds": ("full", "state"), "ahead": True}],
    ids=["one rank", "two ranks", "a step ahead"],
)  # fmt: skip
def test_blocks_are_not_cleared_while_they_are_saved(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    """vLLM's worker clears new blocks before it tells connectors of the step: a preempted request's may be among them. Here
    saves read their blocks in just that moment."""
    monkeypatch.setattr(scheduler, "FREES_WAIT_S", 0.0)
    world = worlds(blocks=48, budget=512, **shape)
    halves = [world._ours(worker)._worker for worker in world.workers]
    cleared, prepare = threading.Event(), world._prepare_blocks
    for mover in (mover for half in halves for mover in half._movers.values()):
        monkeypatch.setattr(mover, "save", lambda *args, save=mover.save: cleared.wait() and save(*args))

    def prepare_and_save(output: Any) -> None:
        prepare(output)
        if not any(request.num_preemptions for request in world.requests.values()):
            return
        cleared.set()
        while any(half._saves._saving for half in halves):
            time.sleep(0.001)
        cleared.clear()

    monkeypatch.setattr(world, "_prepare_blocks", prepare_and_save)
    for seed in range(5):
        world.ask(str(seed), prompt(seed, 100), max_tokens=30)
    try:
        settle(world)
    finally:
        cleared.set()
    assert world.check_records(store) > 12


def test_stages_that_are_not_asked_to_save(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it speculates, V1's model runner leaves `wait_for_save` and clearing the orders to the last pipeline stage: the
    others save with their next step, and no request keeps its blocks for ever."""
    world = worlds(ranks=2, stages=2)
    for name in ("wait_for_save", "clear_connector_metadata"):
        hook = getattr(world.workers[0], name)
        monkeypatch.setattr(world.workers[0], name, lambda hook=hook: hook() if world.idle else None)
    for seed in range(3):
        world.ask(str(seed), prompt(seed, 100), max_tokens=30)
    settle(world)
    assert world.check_records(store) >= 3 * 8


def test_a_replayed_window_is_not_stored(worlds: Callable[..., World], store: FakeStore) -> None:
    """vLLM computes the last window of a loaded prefix again; only the other group has a namespace."""
    replays = []
    for _ in range(2):
        world = worlds(kinds=("full", "replay"), window=32)
        request = world.ask("a", prompt(1, 200))
        settle(world)
        replays.append(request.replay_start)
    assert replays == [0, 192 - 32]
    assert len(store.spaces) == 1


def test_a_state_costs_one_block_of_a_load(worlds: Callable[..., World], store: FakeStore) -> None:
    """Of a recurrent state only the last block is loaded, of full attention all of them."""
    for _ in range(2):
        world = worlds(kinds=("full", "state"))
        world.ask("a", prompt(1, 200))
        settle(world)
    assert world.sums["loaded_blocks"] == 12 + 1


def test_replicas_share(worlds: Callable[..., World], store: FakeStore) -> None:
    """Data parallel engines have schedulers of their own and one namespace: what one saved another loads."""
    for rank in range(2):
        world = worlds(replica=(rank, 2))
        assert world.config.parallel_config.data_parallel_rank == rank
        world.ask("a", prompt(1, 200))
        settle(world)
    assert world.sums["loaded_blocks"] == 12 and len(store.spaces) == 1


ATTENTION: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": torch.float32,
}
STATE: dict[str, Any] = {"block_size": BLOCK_TOKENS, "shapes": ((1,),), "dtypes": (torch.float32,)}
DECLINED = {
    "chunked local attention": (
        specs.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
        "KV group 0 (ChunkedLocalAttentionSpec) is neither attention to all, nor to a window, nor a state",
    ),
    "attention sinks": (
        specs.SinkFullAttentionSpec(**ATTENTION, sink_len=4),
        "(SinkFullAttentionSpec) is neither",
    ),
    "R-SWA": (specs.RSWASpec(**ATTENTION, rswa_window=32), "(RSWASpec) is neither"),
    "states without prefix caching": (specs.MambaSpec(**STATE), "keeps no states of block boundaries"),
    "states of drafted tokens": (
        specs.MambaSpec(**STATE, mamba_cache_mode="align", num_speculative_blocks=2),
        "keeps states of drafted tokens (speculative decoding)",
    ),
    "nothing that is kept": (
        specs.SlidingWindowMLASpec(**ATTENTION, sliding_window=32, bounded_replay=True),
        "a model without KV cache",
    ),
}


@pytest.mark.parametrize(("spec", "said"), DECLINED.values(), ids=DECLINED.keys())
def test_what_is_declined(model: Path, spec: Any, said: str) -> None:
    """A model with a group that no hash names is declined as a whole, in words."""
    groups = [specs.KVCacheGroupSpec(["layer"], spec)]
    kv = specs.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(Unsupported) as refusal:
        plan_for(kv, config_of(model, Shape()))
    assert said in str(refusal.value)


def test_a_host_resident_group_is_declined(model: Path) -> None:
    """Blocks that live in a pool of the host are not the ones that a worker could copy."""
    group = specs.KVCacheGroupSpec(["layer"], specs.FullAttentionSpec(**ATTENTION), host_resident=True)
    kv = specs.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    with pytest.raises(Unsupported, match="is not kept on the device for good"):
        plan_for(kv, config_of(model, Shape()))


@pytest.mark.parametrize("switches", ["both", "caching", "caching, batch invariant", "caching, pooling"])
def test_prompts_that_must_not_start_in_the_middle(
    model: Path, monkeypatch: pytest.MonkeyPatch, switches: str
) -> None:
    """Where vLLM forbids the reuse of prefixes we decline; where only the user turned its cache off we do not."""
    config = config_of(model, Shape(prefix_caching=False))
    if switches == "both":
        config.scheduler_config.enable_chunked_prefill = False
    if "invariant" in switches:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    if "pooling" in switches:
        monkeypatch.setattr(type(config.model_config), "is_prefix_caching_supported", False)
    group = specs.KVCacheGroupSpec(["layer"], specs.FullAttentionSpec(**ATTENTION))
    kv = specs.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    if switches == "caching":
        assert len(plan_for(kv, config).groups) == 1
        return
    with pytest.raises(Unsupported, match=r"one piece|batch invariance|does not support"):
        plan_for(kv, config)


def test_the_table_names_tests_that_exist() -> None:
    """Each row of the table in docs/vllm.md that says what works or is declined names a test, by a case that it has."""
    here = Path(__file__).parent
    text = (here.parent.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
    table = text.split("| model | engine | | shown by |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]
    assert len(rows) > 20
    for row in rows:
        known = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)(?:\[(.+)\])?`", row[-1])
        if known is None:
            assert "not tried" in " ".join(row), row
            continue
        name, function, case = known.groups()
        source = (here / name).read_text(encoding="utf-8")
        assert f"def {function}(" in source, row
        assert case is None or f'"{case}"' in source, row
