"""vLLM's scheduler with our connector under everything that can go wrong: nothing bad is ever served or stored."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from connectors import constants as limits
from connectors.transfer import link
from connectors.transfer.fetching import LOAD_RETRY_S
from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import BLOCK_TOKENS, World, settle

pytestmark = pytest.mark.vllm


def wait_for(truth: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not truth():
        assert time.monotonic() < deadline
        time.sleep(0.005)


SHAPES = {
    "one rank": {},
    "two ranks": {"ranks": 2},
    "two groups": {"window": 40},
    "two groups on two ranks": {"window": 40, "ranks": 2},
    "four ranks in two stages, two groups": {"window": 40, "ranks": 4, "stages": 2},
    "four ranks that hold the same by pairs": {"ranks": 4, "replicas": 2},
    "synchronous loads": {"extra": {"load": "sync"}},
    "synchronous loads on two ranks": {"ranks": 2, "extra": {"load": "sync"}},
    "no prefix caching": {"prefix_caching": False},
    "a step ahead": {"ahead": True},
    "a step ahead, two groups": {"ahead": True, "window": 40},
    "a step ahead, synchronous loads asked for": {"ahead": True, "extra": {"load": "sync"}},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_one_engine_saves_another_loads(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """A second engine loads all whole blocks of a prompt, bit by bit, and answers the same."""
    first = worlds(**shape)
    first.ask("a", prompt(1, 200))
    settle(first)
    assert first.check_records(store) >= 12
    second = worlds(**shape)
    second.ask("a", prompt(1, 200))
    settle(second)
    assert second.sums["loaded_blocks"] >= 12
    assert second.outputs == first.outputs
    assert "hook_errors" not in second.sums


def test_eight_ranks_fill_one_record(worlds: Callable[..., World], store: FakeStore) -> None:
    """Eight ranks make one lookup, one reserve, one commit and one acquire, as one rank does."""
    counts = []
    for ranks in (1, 8):
        for name in ("filler", "reader"):
            store.calls.clear()
            world = worlds(ranks=ranks)
            world.ask(name, prompt(1, 200))
            settle(world)
            assert world.sums["saved_blocks" if name == "filler" else "loaded_blocks"] >= 12
        counts.append({call: store.count(call) for call in ("lookup", "acquire", "reserve", "commit")})
    assert counts[0] == counts[1] and counts[1]["acquire"] == 1
    assert len(store.spaces) == 2


@pytest.mark.parametrize("kind", ["load", "save"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_one_rank_cannot_copy(
    worlds: Callable[..., World],
    store: FakeStore,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    kind: str,
) -> None:
    """A device that fails on one rank: what it should have saved is of no use to anybody, and what it should
    have loaded is computed on all ranks."""
    first = worlds(**shape)
    if kind == "load":
        first.ask("a", prompt(1, 200))
        settle(first)
    broken = first if kind == "save" else worlds(**shape)
    for mover in broken._ours(broken.workers[0])._worker._movers.values():  # type: ignore[union-attr]
        monkeypatch.setattr(mover, kind, lambda *_: 1 / 0)
    broken.ask("b", prompt(1, 200))
    settle(broken)
    group = broken.connector._scheduler._spaces.columns[0]
    if kind == "save":
        assert not [1 for digest, _ in store.records if digest == group.space.digest]
        assert broken.sums["skipped_unavailable"] >= 12
    else:
        assert not broken.sums.get("loaded_blocks") or "window" in shape
        assert broken.sums["load_failures"] == 1
    assert not store.open_leases


@pytest.mark.parametrize("shape", [{}, {"extra": {"load": "sync"}}, {"window": 40}], ids=str)
@pytest.mark.parametrize("ended", ["finished", "aborted"])
def test_an_id_that_is_given_again_at_once(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any], ended: str
) -> None:
    """A request with the id of one that has just ended gets the blocks of its own prompt, and no others."""
    first = worlds(**shape)
    first.ask("a", prompt(1, 200))
    settle(first)
    world = worlds(**shape)
    request = world.ask("a", prompt(1, 200), max_tokens=2 if ended == "finished" else 50)
    while "a" in world.scheduler.requests:
        world.step()
        if ended == "aborted" and request.num_output_tokens:
            world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    world.ask("a", prompt(2, 200))
    settle(world)
    assert world.check_records(store) >= 12


def test_ranks_on_several_nodes_are_declined(
    worlds: Callable[..., World], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One daemon cannot serve an engine that is spread over machines: one line says so, and nothing is stored."""
    world = worlds(ranks=2, introduced=False)
    world._ours(world.workers[1])._worker._rank.node = "another machine"  # type: ignore[union-attr]
    world.ask("a", prompt(1, 200))
    settle(world)
    assert not store.records and world.sums["declined"] == 1
    assert sum("several nodes" in line for line in caplog.messages) == 1


def test_more_sizes_of_columns_than_a_row_has_room_for(
    worlds: Callable[..., World], store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine pipeline stages of different sizes: declined, in one line."""
    world = worlds(ranks=9, stages=9)
    world.ask("a", prompt(1, 200))
    settle(world)
    assert not store.records
    assert sum("at most 8 are allowed" in line for line in caplog.messages) == 1


def test_a_window_group_is_loaded_by_its_window_only(worlds: Callable[..., World], store: FakeStore) -> None:
    """Of a sliding-window group only the blocks of the last window travel."""
    first = worlds(window=40)
    first.ask("a", prompt(1, 200))
    settle(first)
    second = worlds(window=40)
    second.ask("a", prompt(1, 200))
    settle(second)
    full, window = 200 // BLOCK_TOKENS, 3  # positions 153..191 lie in blocks 9, 10, 11
    assert second.sums["loaded_blocks"] == full + window


def test_a_hit_is_never_shorter_than_the_window(worlds: Callable[..., World], store: FakeStore) -> None:
    """With a block of the last window gone, the hit moves back to where a whole window is held."""
    first = worlds(window=40)
    request = first.ask("a", prompt(1, 200))
    settle(first)
    space = first.connector._scheduler._spaces.columns[1].space
    del store.records[space.digest, bytes(request.block_hashes[10])]
    second = worlds(window=40)
    second.ask("a", prompt(1, 200))
    settle(second)
    assert second.sums["loaded_blocks"] == 10 + 3  # full blocks 0..9, window blocks 7, 8, 9
    assert second.connector._scheduler._world == 1


@pytest.mark.parametrize("shape", [{"window": 40}, {"ahead": True}], ids=["two groups", "a step ahead"])
def test_synchronous_loads_only_where_vllm_can_take_them_back(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """With several groups, or with steps planned ahead, loads are asynchronous whatever was asked for."""
    filler = worlds(**shape)
    filler.ask("a", prompt(1, 200))
    settle(filler)
    world = worlds(**shape, extra={"load": "sync"})
    world.ask("a", prompt(1, 200))
    orders = world.scheduler.schedule().kv_connector_metadata
    assert {load.sync for load in orders.loads} == {False} and [end.sync for end in orders.load_ends] == [
        False
    ]


@pytest.mark.parametrize("bad", [0, 6, 11], ids=["first", "middle", "last"])
@pytest.mark.parametrize("how", ["unreadable", "torn"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_failed_load_is_computed(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any], how: str, bad: int
) -> None:
    """A block that cannot be read, wherever it is, costs its computation and changes no answer and no record."""
    first = worlds(**shape)
    request = first.ask("a", prompt(1, 200))
    settle(first)
    getattr(store, how).add(bytes(request.block_hashes[bad]))
    second = worlds(**shape)
    second.ask("a", prompt(1, 200))
    second.ask("b", prompt(1, 160) + prompt(2, 60))
    settle(second)
    assert second.outputs["a"] == first.outputs["a"]
    assert second.sums["failed_blocks"] >= 1
    second.check_records(store)
    tickets = {asked["ticket"] for asked in store.asked}
    assert any(
        ticket in tickets and missing == request.block_hashes[bad] for ticket, _, missing in store.settled
    )


def test_the_failure_policy_is_to_recompute(worlds: Callable[..., World], store: FakeStore) -> None:
    """vLLM's default fails a request whose block went between lookup and load; with us it is computed."""
    first = worlds()
    request = first.ask("a", prompt(1, 200))
    settle(first)
    store.unreadable.add(bytes(request.block_hashes[6]))
    second = worlds(policy="fail")
    second.ask("a", prompt(1, 200))
    settle(second)
    assert second.outputs["a"] == first.outputs["a"] and second.sums["failed_blocks"] >= 1
    assert second.scheduler.recompute_kv_load_failures and not second.scheduler.requires_kv_delivery


def test_a_request_is_not_loaded_again_after_a_failure(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """A load that always fails is tried once for a request, not for ever."""
    first = worlds(window=40)
    request = first.ask("a", prompt(1, 200))
    settle(first)
    store.unreadable.add(bytes(request.block_hashes[11]))
    second = worlds(window=40)
    second.ask("a", prompt(1, 200))
    settle(second)
    assert second.sums["loads"] == 1


def test_preemption_keeps_what_is_stored_true(worlds: Callable[..., World], store: FakeStore) -> None:
    """With too few blocks for all requests, preempted ones lose their blocks while saves run: no record is wrong."""
    store.delay_s = 0.01  # saves are still under way when blocks are wanted back
    world = worlds(blocks=22, sequences=6)
    for number in range(6):
        world.ask(f"r{number}", prompt(number, 90), max_tokens=40)
    settle(world)
    assert sum(request.num_preemptions for request in world.requests.values()) > 0
    assert world.check_records(store) > 0


def test_a_long_prompt_in_chunks_is_saved_whole(worlds: Callable[..., World], store: FakeStore) -> None:
    """A prompt of many scheduler steps leaves every one of its blocks in the store, each with its parent."""
    world = worlds(budget=48)
    request = world.ask("a", prompt(1, 320))
    settle(world)
    digest = world.connector._scheduler._spaces.columns[0].space.digest
    hashes = [bytes(name) for name in request.block_hashes[:20]]
    assert all((digest, name) in store.records for name in hashes)
    assert [store.parents[digest, name] for name in hashes] == [b"", *hashes[:-1]]


def test_salted_prompts_share_nothing(worlds: Callable[..., World], store: FakeStore) -> None:
    """The same prompt under another cache_salt finds no block."""
    world = worlds(prefix_caching=False)
    world.ask("a", prompt(1, 200), salt="alice")
    settle(world)
    world.ask("b", prompt(1, 200), salt="bob")
    settle(world)
    assert world.sums.get("loaded_blocks", 0) == 0
    world.ask("c", prompt(1, 200), salt="alice")
    settle(world)
    assert world.sums["loaded_blocks"] == 12


@pytest.mark.parametrize(
    ("role", "saves", "loads"), [("kv_producer", 12, 0), ("kv_consumer", 0, 12), ("kv_both", 12, 12)]
)
def test_roles_decide(
    worlds: Callable[..., World], store: FakeStore, role: str, saves: int, loads: int
) -> None:
    """A producer only saves, a consumer only loads."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    before = len(store.records)
    world = worlds(role=role)
    world.ask("a", prompt(1, 200))
    world.ask("b", prompt(2, 200))
    settle(world)
    assert world.sums.get("loaded_blocks", 0) == loads
    assert len(store.records) - before == saves


def test_a_store_that_is_away_is_not_noticed(worlds: Callable[..., World], store: FakeStore) -> None:
    """With the daemon away, requests are answered, blocks freed, and what was not saved is counted."""
    store.away = True
    world = worlds()
    for number in range(4):
        world.ask(f"r{number}", prompt(number, 120))
    settle(world)
    assert world.sums["skipped_unavailable"] > 0 and not store.records
    assert "hook_errors" not in world.sums
    store.away = False
    world.ask("later", prompt(9, 120))
    settle(world)
    assert world.check_records(store) > 0


def test_a_full_store_is_no_reason_to_fail(worlds: Callable[..., World], store: FakeStore) -> None:
    """Where there is no room the leading blocks are kept and the engine goes on."""
    store.room = 5
    world = worlds()
    world.ask("a", prompt(1, 200))
    settle(world)
    assert world.check_records(store) == 5


def test_saves_are_bounded(worlds: Callable[..., World], store: FakeStore) -> None:
    """When more bytes wait for their copy than allowed, blocks are skipped and counted."""
    store.delay_s = 0.3
    world = worlds(extra={"save_queue_bytes": 1 << 20}, budget=512, blocks=256)
    world.connector._scheduler._storing._queue_bytes_max = BLOCK_TOKENS * 8 * 2
    for number in range(4):
        world.ask(f"r{number}", prompt(number, 120))
    settle(world)
    assert world.sums["skipped_queue_full"] > 0
    world.check_records(store)


def test_a_slow_save_keeps_a_finished_requests_blocks(worlds: Callable[..., World], store: FakeStore) -> None:
    """A finished request's blocks are given back only when its saves are through."""
    store.delay_s = 0.2
    world = worlds()
    world.ask("a", prompt(1, 64), max_tokens=1)
    while not world.outputs["a"]:
        world.step()
    assert "a" in world.scheduler.requests and len(store.records) == 0
    settle(world)
    assert world.check_records(store) == 4


def test_an_aborted_load_is_given_back(worlds: Callable[..., World], store: FakeStore) -> None:
    """A request aborted while it is loading leaves no blocks behind."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    store.delay_s = 0.2
    world = worlds()
    world.ask("a", prompt(1, 200))
    world.step()
    assert world.requests["a"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
    world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    settle(world)


def test_a_hook_that_breaks_harms_nobody(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug in the connector, while a load was promised already, costs the load and not the request."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    for shape in ({}, {"extra": {"load": "sync"}}, {"window": 40}):
        world = worlds(**shape)
        half = world.connector._scheduler
        monkeypatch.setattr(type(half), "_load_part", lambda *_: 1 / 0)
        world.ask("a", prompt(1, 200))
        settle(world)
        monkeypatch.undo()
        monkeypatch.setattr(link, "open_client", store.open)


def test_what_is_refused_costs_itself_alone(worlds: Callable[..., World], store: FakeStore) -> None:
    """A lookup in a namespace that the daemon refuses stops no other one; it is asked again with the next request."""
    first = worlds()
    asked = first.ask("a", prompt(1, 200))
    first.ask("b", prompt(2, 200))
    settle(first)
    store.forbidden.add(bytes(asked.block_hashes[0]))
    second = worlds()
    for name, seed, hit_tokens in (("a", 1, 0), ("b", 2, 192)):
        second.ask(name, prompt(seed, 200))
        settle(second)
        assert second.sums.get("hit_tokens", 0) == hit_tokens
    assert second.sums["refused"] and "hook_errors" not in second.sums
    store.forbidden.clear()
    second.scheduler.reset_prefix_cache()
    second.ask("again", prompt(1, 200))
    settle(second)
    assert second.sums["hit_tokens"] == 2 * 192


def test_a_lookup_that_was_not_answered_is_settled_later(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """The daemon may have counted hits that nobody heard of: the next request takes them back first."""
    world = worlds()
    store.away = True
    lost = world.ask("a", prompt(1, 200))
    settle(world)
    assert store.settled == []
    store.away = False
    world.ask("b", prompt(2, 200))
    settle(world)
    assert [(tokens, missing) for _, tokens, missing in store.settled] == [(0, lost.block_hashes[0])]
    assert store.settled[0][0] not in [asking["ticket"] for asking in store.asked]


def test_sources_of_hits_are_told(worlds: Callable[..., World], store: FakeStore) -> None:
    """vLLM learns how many tokens came from memory, how many from disk, and of how many nobody can say; what is not in memory is
    fetched early."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    filler = worlds()
    request = filler.ask("a", prompt(1, 192))
    settle(filler)
    store.slow.update(bytes(name) for name in request.block_hashes[8:12])
    store.far.add(bytes(request.block_hashes[11]))
    world = worlds()
    world.ask("a", prompt(1, 200))
    world.step()
    half = world.connector._scheduler
    expected = {CacheHitSource.HOST: 128, CacheHitSource.DISK: 48, CacheHitSource.EXTERNAL_UNSPECIFIED: 16}
    assert half.hit_sources(world.requests["a"], 192) == expected
    settle(world)
    assert store.count("prefetch") == 1 and world.sums["loaded_blocks"] == 12


def test_a_hint_that_fails_fails_no_load(worlds: Callable[..., World], store: FakeStore) -> None:
    """Asking for blocks on disk ahead of time is a help: where that call fails, the load itself goes on."""
    filler = worlds()
    request = filler.ask("a", prompt(1, 192))
    settle(filler)
    store.slow.update(bytes(name) for name in request.block_hashes[8:12])
    store.no_prefetch = True
    world = worlds()
    world.ask("a", prompt(1, 200))
    settle(world)
    assert store.count("prefetch") == 1 and world.sums["loaded_blocks"] == 12


def test_a_request_that_waits_is_looked_up_once(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks in every step for the request that does not fit yet: the daemon is asked once, and again when
    the answer has become old, when a load failed, or when more of the prompt is in vLLM's own cache."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    monkeypatch.setattr(limits, "LOOKUP_FRESH_S", 1000.0)
    world = worlds(blocks=30)
    half, counted = world.connector._scheduler, []
    monkeypatch.setattr(half._tally, "add", lambda name, amount=1: counted.append(name))
    world.ask("long", prompt(2, 300), max_tokens=60)
    world.ask("waits", prompt(1, 200))
    asked = store.count("lookup")
    for _ in range(20):
        world.step()
    assert world.requests["waits"].num_computed_tokens == 0 and store.count("lookup") == asked + 2
    half._load_failed("long")
    world.step()
    assert store.count("lookup") == asked + 3
    half._requests["waits"].hit.stale_s = 0.0
    world.step()
    assert store.count("lookup") == asked + 4
    assert half.matched_tokens(world.requests["waits"], 16) == (176, True)
    assert store.count("lookup") == asked + 5
    settle(world)
    assert counted.count("lookups") == 2


def test_blocks_beyond_a_leases_budget_are_asked_for_again(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """A daemon that hands out five blocks at a time gives all of them, one lease after the other."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    store.budget = 5
    world = worlds()
    request = world.ask("a", prompt(1, 200))
    settle(world)
    assert world.sums["loaded_blocks"] == 12 and store.count("acquire") == 3 and not store.open_leases
    names = [b"", *map(bytes, request.block_hashes)]
    assert all(parent == names[names.index(hashes[0]) - 1] for parent, hashes in store.acquired)


def test_what_follows_the_engines_own_blocks_is_asked_for_by_its_parent(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """Only so a region's bucket finds it."""
    filler = worlds()
    request = filler.ask("a", prompt(1, 200))
    settle(filler)
    world = worlds()
    world.ask("a", prompt(1, 200)[:80])
    settle(world)
    store.acquired.clear()
    world.ask("b", prompt(1, 200))
    settle(world)
    names = list(map(bytes, request.block_hashes))
    assert store.acquired[0][0] == names[names.index(store.acquired[0][1][0]) - 1]
    assert names.index(store.acquired[0][1][0]) > 0


def test_blocks_beyond_a_leases_budget_are_saved_too(worlds: Callable[..., World], store: FakeStore) -> None:
    """A daemon that takes five blocks at a time gets all of them, none left out in between."""
    store.budget = 5
    world = worlds()
    request = world.ask("a", prompt(1, 200))
    settle(world)
    held = {digest for _, digest in store.records}
    assert {bytes(name) for name in request.block_hashes[:12]} <= held
    assert world.sums["saved_blocks"] == len(store.records)


@pytest.mark.parametrize("bad", [0, 7])
def test_a_missing_block_is_told_from_one_beyond_the_budget(
    worlds: Callable[..., World], store: FakeStore, bad: int
) -> None:
    """Blocks beyond the budget are no reason to wait for one that is missing."""
    filler = worlds()
    request = filler.ask("a", prompt(1, 200))
    settle(filler)
    store.budget = 3
    store.unreadable.add(bytes(request.block_hashes[bad]))
    world = worlds()
    world.ask("a", prompt(1, 200))
    settle(world)
    assert world.sums.get("loaded_blocks", 0) == bad and store.count("acquire") <= 5


def test_asking_for_pending_blocks_neither_spins_nor_lasts(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """A daemon that has nothing yet, and answers at once, is asked now and then until time is up."""
    filler = worlds()
    filler.ask("a", prompt(1, 200))
    settle(filler)
    store.budget = 0
    world = worlds(extra={"load_timeout_s": 1})
    world.ask("a", prompt(1, 200))
    settle(world)
    assert world.sums["failed_blocks"] == 12 and 0.9 <= world.sums["load_seconds"] < 3
    assert store.count("acquire") <= 1 / LOAD_RETRY_S + 2


def stored_now(world: World, store: FakeStore) -> set[bytes]:
    """Block hashes in the namespaces that the engine uses now."""
    digests = {group.space.digest for group in world.connector._scheduler._spaces.columns.values()}
    return {name for digest, name in store.records if digest in digests}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_old_weights_stay_out_of_the_new_namespace(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """What requests computed before a reset, and what they compute on top of it, is not in the new namespace."""
    store.delay_s = 0.01  # saves are under way when the reset comes
    world = worlds(**shape)
    world.ask("ended", prompt(2, 40), max_tokens=1)
    world.ask("a", prompt(1, 200))
    while not world.outputs["ended"]:
        world.step()  # its last save is ordered with the next step
    world.scheduler.reset_prefix_cache(reset_connector=True)
    settle(world)
    assert world.requests["a"].num_output_tokens == 4 and not stored_now(world, store)
    assert "hook_errors" not in world.sums
    world.check_records(store)


def test_old_weights_in_vllms_own_cache_are_not_stored(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """vLLM cannot empty its own cache while requests run: what later requests find there is not stored."""
    world = worlds()
    world.ask("a", prompt(1, 200))
    world.step()
    assert world.scheduler.reset_prefix_cache(reset_connector=True) is False
    settle(world)
    world.ask("b", prompt(1, 200) + prompt(2, 100))
    settle(world)
    assert not stored_now(world, store)
    request = world.ask("c", prompt(3, 200))
    settle(world)
    assert stored_now(world, store) == {bytes(name) for name in request.block_hashes[:12]}
    assert world.scheduler.reset_prefix_cache(reset_connector=True) is True
    world.ask("d", prompt(1, 200))
    settle(world)
    world.ask("e", prompt(1, 200) + prompt(4, 100))
    settle(world)
    assert len(stored_now(world, store)) == 300 // BLOCK_TOKENS


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_request_that_starts_again_after_a_reset_is_saved(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any]
) -> None:
    """When the reset preempts running requests, all they compute then is of the new weights, and stored as such."""
    world = worlds(**shape)
    half = world.connector._scheduler
    request = world.ask("a", prompt(1, 200), max_tokens=60)
    world.step()
    while any(stored.held for stored in half._storing.stores.values()):  # vLLM raises where blocks are in use
        world.step()
        time.sleep(0.01)
        world.catch_up()
    world.catch_up()
    assert not request.is_finished()
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    settle(world)
    assert stored_now(world, store) >= {bytes(name) for name in request.block_hashes[:12]}
    assert world.check_records(store) >= 12


@pytest.mark.parametrize("told", [False, True], ids=["ordered", "under way"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_reset_fails_loads(
    worlds: Callable[..., World],
    store: FakeStore,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    told: bool,
) -> None:
    """Blocks of the old weights that are ordered or on their way when the reset comes are computed instead."""
    monkeypatch.setattr(
        "connectors.vllm.worker.IDLE_LOAD_BYTES_MAX", 0
    )  # or loads of an idle engine would be over at once
    filler = worlds(**shape)
    filler.ask("a", prompt(1, 200))
    settle(filler)
    world = worlds(**shape)
    half = world.connector._scheduler
    failed: list[str] = []
    note_failed, make_orders = half._load_failed, half.orders
    half._load_failed = lambda name: failed.append(name) or note_failed(name)
    store.delay_s = 0.1
    world.ask("a", prompt(1, 200))
    if told:
        world.step()
    else:
        half.orders = lambda output: half.new_epoch() or make_orders(output)
    inside = told and half._sync  # a synchronous load is over when its step is
    if told:
        world.connector.reset_cache()
    world.step()
    half.orders = make_orders
    settle(world)
    assert set(failed) == (set() if inside else {"a"})
    assert told or not world.sums.get("loaded_blocks")
    assert "hook_errors" not in world.sums


def test_reset_cache_forgets_what_older_weights_computed(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """After reset_cache (weights may have changed) nothing stored before is loaded, and new blocks are."""
    world = worlds(prefix_caching=False)
    world.ask("a", prompt(1, 200))
    settle(world)
    assert world.connector.reset_cache() is True
    world.ask("b", prompt(1, 200))
    settle(world)
    assert world.sums.get("loaded_blocks", 0) == 0
    world.ask("c", prompt(1, 200))
    settle(world)
    assert world.sums["loaded_blocks"] == 12


def test_resets_leave_nothing_behind(worlds: Callable[..., World], store: FakeStore) -> None:
    """Weights are replaced 2,000 times: each reset ends the namespaces of the one before, their blocks included,
    also where the daemon was away; only the first namespace is not ours alone and stays."""
    world = worlds(prefix_caching=False)
    half = world.connector._scheduler
    for number in range(20):
        world.ask(f"r{number}", prompt(number, 40), max_tokens=1)
        settle(world)
        store.away = number % 5 == 3
        assert world.connector.reset_cache() is True
        store.away = False
    for _ in range(2000):
        assert half._spaces.ready()
        world.connector.reset_cache()
    assert not half._spaces._old
    assert half._spaces.ready() and len(store.spaces) == 2  # the first, and the one of now
    assert {digest for digest, _ in store.records} <= set(store.spaces)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("seed", range(2))
def test_chaos(worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any], seed: int) -> None:
    """Shared prefixes, few blocks, aborts, a daemon that comes and goes, blocks that tear: every answer and record is true."""
    draw = random.Random(seed)
    world = worlds(seed, **{**shape, "blocks": 40 if "window" not in shape else 60, "sequences": 5})
    world.abort_chance = 0.03
    asked = 0
    for _ in range(3000):
        if asked < 50 and draw.random() < 0.3:
            head = prompt(draw.randrange(6), 16 * draw.randrange(1, 12))
            world.ask(
                f"r{asked}",
                head + prompt(100 + asked, draw.randrange(1, 40)),
                max_tokens=draw.randrange(1, 24),
            )
            asked += 1
        store.away = draw.random() < 0.1
        store.delay_s = draw.choice([0, 0, 0.002])
        names = [name for _, name in list(store.records)]
        store.unreadable = set(draw.sample(names, min(len(names), draw.choice([0, 0, 2]))))
        store.torn = set(draw.sample(names, min(len(names), draw.choice([0, 0, 2]))))
        if draw.random() < 0.05 and store.records:
            store.records.pop(draw.choice(list(store.records)), None)
        if world.scheduler.has_requests():
            world.step()
        elif asked == 50:
            break
    store.away = False
    settle(world)
    assert world.check_records(store) > 0
    assert world.sums["loaded_blocks"] > 0
