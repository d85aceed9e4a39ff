"""Prefill here, decode there: a request that comes before what it needs is stored waits for it, and never for long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from connectors import constants as limits
from connectors.transfer.prefill import PrefillSpeed
from connectors.vllm.patience import WAITS_MAX, Patience
from connectors.vllm.stats import Tally
from connectors.vllm.tracked import Hit, Tracked
from connectors.vllm.transfer_params import promise
from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeLease, FakeStore, Key
from tests.vllm.world import BLOCK_TOKENS, World, settle

pytestmark = pytest.mark.vllm

TOKENS = 200
WHOLE = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
FOR_LONG = {"still_writing_wait_s": 60}  # nothing here takes so long
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}

SHAPES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"ranks": 2},
    "two groups": {"window": 40},
    "two groups on two ranks": {"window": 40, "ranks": 2},
    "synchronous loads": {"load": "sync"},
    "a step ahead": {"ahead": True},
    "beside another connector": {"sibling": {"load": "async", "only": ["nobody"]}},
    "behind another connector": {"sibling": {"load": "async", "only": ["nobody"]}, "ours": 1},
}


@pytest.fixture
def worlds(worlds: Callable[..., World]) -> Callable[..., World]:
    """Engines that wait for long, unless a test says how long."""

    def make(**shape: Any) -> World:
        extra = {**FOR_LONG, **shape.pop("extra", {})}
        if "load" in shape:
            extra["load"] = shape.pop("load")
        return worlds(**shape, extra=extra)

    return make


def step_until(truth: Callable[[], Any], *worlds: World) -> None:
    deadline_s = time.monotonic() + 60
    while not truth():
        assert time.monotonic() < deadline_s
        for world in worlds:
            world.step()
            time.sleep(0.001)


def unwritten(store: FakeStore, keys: list[Key]) -> FakeLease:
    """These records of one namespace are not stored yet, but being written: `rewrite` ends that."""
    space, hashes = store.spaces[keys[0][0]], [digest for _, digest in keys]
    slots: dict[int, bytearray | bytes] = {n: bytearray(store.records.pop(key)) for n, key in enumerate(keys)}
    return FakeLease(store, space, hashes, slots, partial=False)


def rewrite(store: FakeStore, lease: FakeLease) -> None:
    with store.lock:
        for digest, record in zip(lease.hashes, lease.slots.values(), strict=True):
            store.records[lease._space.digest, digest] = bytes(record)
        lease.release()


def stored_by_another(worlds: Callable[..., World], store: FakeStore, **shape: Any) -> list[Key]:
    """A prompt's records, in prompt order, group after group."""
    first = worlds(**shape)
    first.ask("a", prompt(1, TOKENS), max_tokens=1)
    settle(first)
    names = [bytes(digest) for digest in first.requests["a"].block_hashes]
    return sorted(store.records, key=lambda key: (key[0], names.index(key[1])))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_request_that_comes_too_early_waits(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the prefill's blocks are being stored the decode engine computes nothing; then it loads them all."""
    monkeypatch.setattr(limits, "LOOKUP_FRESH_S", 3600.0)  # who waits asks again sooner
    first, second = worlds(**shape), worlds(**shape)
    store.may_fill.clear()
    first.ask("a", prompt(1, TOKENS), max_tokens=1)
    step_until(lambda: first.outputs["a"], first)
    second.ask("a", prompt(1, TOKENS))
    for _ in range(20):
        second.step()
        assert second.idle
    store.may_fill.set()
    step_until(lambda: second.outputs["a"], first, second)
    settle(first)
    settle(second)
    assert second.sums["hit_tokens"] == WHOLE
    assert (second.sums["lookups"], second.sums["waits"]) == (1, 1)
    assert second.sums["lookup_tokens"] == TOKENS
    assert second.sums["wait_seconds"] > 0
    assert not second.sums.get("failed_blocks")


def test_others_go_on_while_one_waits(worlds: Callable[..., World], store: FakeStore) -> None:
    """A request that waits holds up no other of its engine, also of those that came later."""
    first, second = worlds(), worlds()
    store.may_fill.clear()
    first.ask("a", prompt(1, TOKENS), max_tokens=1)
    step_until(lambda: first.outputs["a"], first)
    second.ask("a", prompt(1, TOKENS))
    second.ask("b", prompt(2, 40), max_tokens=2)
    step_until(lambda: len(second.outputs["b"]) == 2, second)
    assert not second.outputs["a"]
    store.may_fill.set()
    settle(first)
    settle(second)
    assert second.sums["hit_tokens"] == WHOLE


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_wait_ends_at_its_deadline(worlds: Callable[..., World], store: FakeStore, load: str) -> None:
    """Blocks that do not come in time are computed, and the answer is right."""
    keys = stored_by_another(worlds, store)
    unwritten(store, keys[4:])
    second = worlds(load=load, extra={"still_writing_wait_s": 0.05})
    second.ask("a", prompt(1, TOKENS))
    settle(second)
    assert second.sums["hit_tokens"] == 4 * BLOCK_TOKENS
    assert second.sums["waits"] == 1
    assert second.sums["wait_seconds"] >= 0.05


def test_a_wait_can_be_switched_off(worlds: Callable[..., World], store: FakeStore) -> None:
    """With 0 seconds a request starts with what is there, after one lookup."""
    keys = stored_by_another(worlds, store)
    unwritten(store, keys[4:])
    second = worlds(extra={"still_writing_wait_s": 0})
    before = store.count("lookup")
    second.ask("a", prompt(1, TOKENS))
    settle(second)
    assert second.sums["hit_tokens"] == 4 * BLOCK_TOKENS
    assert "waits" not in second.sums
    assert store.count("lookup") == before + 1


def test_a_wait_ends_when_the_writer_is_gone(worlds: Callable[..., World], store: FakeStore) -> None:
    """Nobody waits for a dead writer: what it left is used, and the rest is computed at once."""
    keys = stored_by_another(worlds, store)
    unwritten(store, keys[4:])
    second = worlds()
    second.ask("a", prompt(1, TOKENS))
    for _ in range(5):
        second.step()
    assert second.idle and not second.outputs["a"]
    store.kill_writers()
    settle(second)
    assert second.sums["hit_tokens"] == 4 * BLOCK_TOKENS


def test_a_wait_is_no_longer_than_computing(worlds: Callable[..., World], store: FakeStore) -> None:
    """An engine that computes the missing tokens in a moment does not wait for longer than that."""
    keys = stored_by_another(worlds, store)
    unwritten(store, keys)
    second = worlds()
    second.connector._scheduler._prefill.tokens_per_s = 1e6  # type: ignore[union-attr]
    second.ask("a", prompt(1, TOKENS))
    settle(second)
    assert "hit_tokens" not in second.sums
    assert second.sums["waits"] == 1


def test_what_came_while_waiting_counts_as_gained() -> None:
    """The longest wait is what computing all that it brings would take, not what is still missing of it."""
    now_s, prefill = [100.0], PrefillSpeed()
    prefill.tokens_per_s = 100.0
    patience = Patience(60.0, prefill, Tally(), lambda: now_s[0])
    tracked = Tracked(None, None, [])
    for at_s, held, writing, waits in [(0.0, 20, 100, True), (0.9, 110, 10, True), (1.1, 110, 10, False)]:
        now_s[0] = 100.0 + at_s
        hit = Hit(local_tokens=16, tokens=held, prompt_tokens=200, stale_s=1e9, writing=writing)
        assert patience.holds_back(tracked, hit) == waits, at_s


@pytest.mark.parametrize("every_s", [0.4, 0.9])
def test_blocks_that_keep_coming_are_waited_for(every_s: float) -> None:
    """A prompt longer than one wait is waited for while more of it comes in time, but not for ever."""
    now_s, tracked = [100.0], Tracked(None, None, [])
    patience = Patience(0.5, PrefillSpeed(), Tally(), lambda: now_s[0])
    begun_s, held = now_s[0], 0
    while patience.holds_back(
        tracked, Hit(local_tokens=0, tokens=held, prompt_tokens=100_000, stale_s=1e9, writing=16)
    ):
        now_s[0] += 0.1
        held = int((now_s[0] - begun_s + 1e-6) / every_s) * 16
    waited_s = now_s[0] - begun_s
    assert waited_s == pytest.approx(WAITS_MAX * 0.5 if every_s < 0.5 else 0.5, abs=0.11)


def test_the_last_window_is_waited_for(worlds: Callable[..., World], store: FakeStore) -> None:
    """A hit is not shortened because the blocks of its window come a moment after those of full attention."""
    keys = stored_by_another(worlds, store, window=40)
    first = keys[0][0]
    spaces = {digest: [key for key in keys if key[0] == digest] for digest, _ in keys}
    windowed = next(of for digest, of in spaces.items() if digest != first)
    for of_group in (spaces[first], windowed):  # whichever of them is the window's
        lease = unwritten(store, of_group[-2:])
        second = worlds(window=40)
        second.ask("a", prompt(1, TOKENS))
        for _ in range(5):
            second.step()
        assert second.idle and not second.outputs["a"]
        rewrite(store, lease)
        settle(second)
        assert second.sums["hit_tokens"] == WHOLE


def test_a_daemon_that_goes_away_ends_the_wait(worlds: Callable[..., World], store: FakeStore) -> None:
    """Who cannot ask any more computes."""
    unwritten(store, stored_by_another(worlds, store))
    second = worlds()
    second.ask("a", prompt(1, TOKENS))
    second.step()
    assert second.idle
    store.away = True
    step_until(lambda: second.outputs["a"], second)
    store.away = False
    settle(second)
    assert "hit_tokens" not in second.sums


def test_an_abort_ends_the_wait(worlds: Callable[..., World], store: FakeStore) -> None:
    """Nothing is left of a request that was given up while it waited."""
    unwritten(store, stored_by_another(worlds, store))
    second = worlds()
    second.ask("a", prompt(1, TOKENS))
    second.step()
    second.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    second.ask("b", prompt(2, 40))  # a step tells the connector of the abort
    settle(second)


def test_a_waiting_request_does_not_flood_the_daemon(worlds: Callable[..., World], store: FakeStore) -> None:
    """An idle engine asks vLLM's way in every step; the daemon hears of it every few milliseconds."""
    unwritten(store, stored_by_another(worlds, store))
    second = worlds()
    before, begun_s = store.count("lookup"), time.monotonic()
    second.ask("a", prompt(1, TOKENS))
    for _ in range(200):
        second.step()
    asked, took_s = store.count("lookup") - before, time.monotonic() - begun_s
    assert asked <= 1 + took_s / limits.WRITING_PAUSE_S
    assert len({asking["ticket"] for asking in store.asked[-asked:]}) == 1, "one request, one account"
    store.kill_writers()
    settle(second)


# ---- kv_transfer_params --------------------------------------------------------------------


def returned(world: World) -> list[Any]:
    """What vLLM hands to the proxy for each request that finishes from now on."""
    told: list[Any] = []
    finished = world.scheduler._connector_finished

    def connector_finished(*arguments: Any) -> Any:
        answer = finished(*arguments)
        told.append(answer[1])
        return answer

    world.scheduler._connector_finished = connector_finished
    return told


def prefilled(world: World, params: Any = REMOTE_DECODE) -> Any:
    """What a prefill of the prompt returns."""
    told = returned(world)
    world.ask("a", prompt(1, TOKENS), max_tokens=1).kv_transfer_params = params
    settle(world)
    (answer,) = told
    return answer


def test_a_prefill_says_what_it_stores(worlds: Callable[..., World]) -> None:
    """The answer to a prefill names the daemon and every whole block, and nothing that another connector would read."""
    assert prefilled(worlds()) == {"kvstore": {"daemon": "fake", "tokens": WHOLE}}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, "yes", [1]], ids=repr)
def test_who_does_not_ask_is_told_nothing(worlds: Callable[..., World], params: Any) -> None:
    """Requests that nobody goes on with get no transfer parameters."""
    assert prefilled(worlds(), params) is None


def test_who_stores_nothing_promises_nothing(worlds: Callable[..., World], store: FakeStore) -> None:
    """A worker that only loads returns nothing."""
    assert prefilled(worlds(role="kv_consumer")) is None


def test_a_promise_stands_beside_that_of_another_connector(worlds: Callable[..., World]) -> None:
    """MultiConnector puts NIXL's parameters and ours together; a key of both would end the engine."""
    world = worlds(sibling={"load": "async", "only": ["nobody"]})
    theirs = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1]], "remote_engine_id": "e",
        "remote_request_id": "r", "remote_host": "h", "remote_port": 1, "tp_size": 1,
    }  # fmt: skip
    multi: Any = world.scheduler.connector
    sibling = next(each for each in multi.sub_connectors if each is not world.connector)
    sibling.request_finished_all_groups = lambda *_: (False, dict(theirs))
    told = prefilled(world)
    told.pop("remote_prefill_cached_tokens", None)  # vLLM's own
    assert told == {**theirs, **promise("fake", WHOLE)}


def test_a_promise_is_waited_for(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode request that comes before its prefill worker has even begun to store waits for that."""
    monkeypatch.setattr(limits, "PROMISED_WAIT_S", 60)
    first, second = worlds(), worlds()
    second.ask("a", prompt(1, TOKENS)).kv_transfer_params = promise("fake", WHOLE)
    for _ in range(5):
        second.step()
    assert second.idle and not store.writing()
    first.ask("a", prompt(1, TOKENS), max_tokens=1)
    settle(first)
    settle(second)
    assert second.sums["hit_tokens"] == WHOLE
    assert second.sums["waits"] == 1


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_promise_that_is_kept_already_costs_nothing(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    """Where all is stored that can be loaded, also of a prompt without a token behind its last block, nobody waits."""
    monkeypatch.setattr(limits, "PROMISED_WAIT_S", 60)
    first, second = worlds(), worlds(load=load)
    first.ask("a", prompt(1, WHOLE), max_tokens=1)
    settle(first)
    second.ask("a", prompt(1, WHOLE)).kv_transfer_params = promise("fake", 2 * WHOLE)
    settle(second)
    assert second.sums["hit_tokens"] == WHOLE - (BLOCK_TOKENS if load == "sync" else 0)
    assert "waits" not in second.sums


def test_each_start_of_a_request_may_wait(worlds: Callable[..., World], store: FakeStore) -> None:
    """A request that is preempted and starts again waits again for what is being stored then."""
    keys = stored_by_another(worlds, store)
    second = worlds()
    request = second.ask("a", prompt(1, TOKENS), max_tokens=8)
    for waits in (1, 2):
        lease = unwritten(store, keys[6:])
        second.step()
        assert second.idle and second.sums["waits"] == waits
        rewrite(store, lease)
        step_until(lambda: len(second.outputs["a"]) == waits, second)  # noqa: B023 called in this round
        if waits == 1:
            assert second.scheduler.reset_prefix_cache(reset_running_requests=True)
    settle(second)
    assert request.num_preemptions == 1
    assert second.sums["hit_tokens"] == 2 * WHOLE


def test_a_promise_that_is_not_kept_costs_a_moment(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody begins to store what was promised, the wait is the short one."""
    monkeypatch.setattr(limits, "PROMISED_WAIT_S", 0.02)
    second = worlds()
    second.ask("a", prompt(1, TOKENS)).kv_transfer_params = promise("fake", 1 << 70)
    settle(second)
    assert second.sums["waits"] == 1
    assert second.sums["wait_seconds"] < FOR_LONG["still_writing_wait_s"] / 2


FOREIGN = [
    {"kvstore": {"daemon": "another", "tokens": WHOLE}},
    {"kvstore": {"daemon": "fake", "tokens": -1}},
    {"kvstore": {"daemon": "fake", "tokens": True}},
    {"kvstore": {"daemon": "fake", "tokens": "many"}},
    {"kvstore": {"daemon": "fake"}},
    {"kvstore": {"daemon": ["fake"], "tokens": WHOLE}},
    {"kvstore": "fake"},
    {"kvstore": None},
    {"remote_engine_id": "e", "remote_block_ids": [[1, 2]]},
    ["kvstore"],
    "kvstore",
    7,
]


@pytest.mark.parametrize("params", FOREIGN, ids=repr)
def test_what_is_not_ours_is_ignored(
    worlds: Callable[..., World], monkeypatch: pytest.MonkeyPatch, params: Any
) -> None:
    """Parameters of others, and malformed ones of ours, are neither waited for nor an error."""
    monkeypatch.setattr(limits, "PROMISED_WAIT_S", 60)
    world = worlds()
    world.ask("a", prompt(1, TOKENS)).kv_transfer_params = params
    settle(world)
    assert not {"waits", "hook_errors"} & world.sums.keys()
    assert world.sums["lookups"] == 1


def test_who_gets_its_prompt_from_elsewhere_does_not_wait(
    worlds: Callable[..., World], store: FakeStore
) -> None:
    """A decode request whose prompt NIXL fetches starts at once, though we could have it a little later."""
    unwritten(store, stored_by_another(worlds, store))
    second = worlds()
    second.ask("a", prompt(1, TOKENS)).kv_transfer_params = {
        "do_remote_prefill": True,
        **promise("fake", WHOLE),
    }
    settle(second)
    assert "waits" not in second.sums
