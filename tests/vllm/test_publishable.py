"""Blocks whose hash does not say what is in them: nothing beyond what vLLM says may be published, and no answer without KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import World, settle

pytestmark = pytest.mark.vllm

BLOCKS = 200 // 16


def stored(store: FakeStore, hashes: list[bytes]) -> list[int]:
    """Which of these blocks are in the store, by position."""
    held = {name for _, name in store.records}
    return [at for at, digest in enumerate(hashes) if bytes(digest) in held]


@pytest.mark.parametrize("shape", [{}, {"window": 40}], ids=["one group", "two groups"])
@pytest.mark.parametrize("count", [0, 1, 5, BLOCKS, 99])
def test_no_more_is_stored_than_may_be(
    worlds: Callable[..., World], store: FakeStore, shape: dict[str, object], count: int
) -> None:
    """Whatever has been computed. What is looked up does not depend on it: another engine may have published it."""
    world = worlds(**shape)
    request = world.ask("a", prompt(1, 200))
    request.num_publishable_block_hashes = count
    settle(world)
    assert stored(store, request.block_hashes) == list(range(min(count, BLOCKS)))
    fresh = worlds(**shape)
    again = fresh.ask("a", prompt(1, 200))
    again.num_publishable_block_hashes = 0
    settle(fresh)
    assert fresh.sums.get("hit_tokens", 0) == min(count, BLOCKS) * 16


def test_what_may_be_later_is_stored_later(worlds: Callable[..., World], store: FakeStore) -> None:
    """The number grows as a draft model catches up, behind the blocks that are computed."""
    world = worlds(budget=32)
    request = world.ask("a", prompt(1, 200), max_tokens=20)
    request.num_publishable_block_hashes = 0
    while world.scheduler.has_requests():
        world.step()
        request.num_publishable_block_hashes = max(0, request.num_computed_tokens // 16 - 1)
    world.check_answers()
    assert stored(store, request.block_hashes) == list(range((200 + 19) // 16 - 1))
    world.check_records(store)


def test_an_answer_that_is_only_read_has_no_kv(worlds: Callable[..., World], store: FakeStore) -> None:
    """A diffusion model that is asked to emit its canvas without the step that computes KV of it (`diffusion_read_only`)
    leaves the blocks behind the prompt as they were: they are not stored, whatever vLLM counts as computed."""
    world = worlds()
    plain, read = (world.ask(name, prompt(seed, 40), max_tokens=40) for seed, name in enumerate("ab"))
    read.sampling_params.extra_args = {"diffusion_read_only": 1}
    settle(world)
    assert stored(store, plain.block_hashes) == [0, 1, 2, 3]
    assert stored(store, read.block_hashes) == [0, 1]
