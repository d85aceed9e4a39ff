"""What waits: requests in vLLM's queue, whose blocks come up meanwhile, and requests that need blocks which saves give back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeClient, FakeStore
from tests.vllm.world import BLOCK_TOKENS, World

pytestmark = pytest.mark.vllm

TOKENS = 200
WHOLE = TOKENS // BLOCK_TOKENS


@pytest.fixture
def promoted(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """What the daemon was asked to promote, call by call."""
    asked: list[list[bytes]] = []
    prefetch = FakeClient.prefetch

    def note(self: FakeClient, namespace: Any, hashes: Any, parent: bytes = b"") -> int:
        asked.append([bytes(digest) for digest in hashes])
        return prefetch(self, namespace, hashes, parent)

    monkeypatch.setattr(FakeClient, "prefetch", note)
    return asked


def until(world: World, happened: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if happened():
            return
        world.step()
    raise AssertionError("it did not happen")


def test_blocks_of_queued_requests_are_promoted(
    worlds: Callable[..., World], store: FakeStore, promoted: list[list[bytes]]
) -> None:
    """A request that waits for another one has its blocks asked up from slower tiers, once; one that starts at once has not."""
    world = worlds(sequences=1)
    world.ask("first", prompt(1, TOKENS), max_tokens=60)
    world.ask("second", prompt(2, TOKENS))
    names = [bytes(digest) for digest in world.requests["second"].block_hashes[:WHOLE]]
    until(world, lambda: bool(promoted))
    assert world.requests["first"].num_output_tokens < 60
    world.run()
    assert promoted == [names]
    world.check_answers()
    world.check_empty()


def test_no_more_are_promoted_than_start_soon(
    worlds: Callable[..., World],
    store: FakeStore,
    promoted: list[list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a long queue only the first are promoted, the next when these have started; who is aborted makes room as well."""
    monkeypatch.setattr("connectors.vllm.queue.QUEUED_PROMOTIONS_MAX", 2)
    world = worlds(sequences=1)
    for number in range(5):
        world.ask(f"r{number}", prompt(number, TOKENS), max_tokens=30)
    until(world, lambda: len(promoted) == 2)
    for _ in range(10):
        world.step()
    assert len(promoted) == 2
    world.scheduler.finish_requests("r1", _aborted())
    until(world, lambda: len(promoted) == 3)
    world.run()
    heads = [names[0] for names in promoted]
    assert heads == [bytes(world.requests[f"r{number}"].block_hashes[0]) for number in (1, 2, 3, 4)]
    world.check_empty()


def test_blocks_that_saves_give_back_are_waited_for(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs a block waits for the saves of one that has finished; where these take too long, another one is
    preempted, as without us."""
    preempted = {}
    for patient in (True, False):
        monkeypatch.setattr("connectors.vllm.scheduler.FREES_WAIT_S", 60.0 if patient else 0.0)
        world = worlds(blocks=2 * WHOLE + 3, budget=512, prefix_caching=False)
        store.delay_s = 0.3
        world.ask("long", prompt(1 + patient, TOKENS), max_tokens=40)
        world.ask("short", prompt(3 + patient, TOKENS), max_tokens=2)
        world.run()
        store.delay_s = 0.0
        world.check_answers()
        world.check_empty()
        preempted[patient] = sum(request.num_preemptions for request in world.requests.values())
    assert preempted[True] == 0 < preempted[False]


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED
