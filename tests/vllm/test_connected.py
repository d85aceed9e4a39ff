"""What an engine's log says of its daemon when all is well."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import World

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("shape", [{}, {"window": 40, "ranks": 2}], ids=["one group", "two groups and ranks"])
def test_one_line_says_that_the_engine_is_connected(
    worlds: Callable[..., World], caplog: pytest.LogCaptureFixture, shape: dict[str, int]
) -> None:
    """However many requests, groups, ranks and resets: socket, instance, model and sizes are said once."""
    caplog.set_level(logging.INFO, logger="vllm.kvstore")
    world = worlds(**shape)
    for number in range(3):
        world.ask(f"r{number}", prompt(number, 200))
        world.run()
        world.scheduler.reset_prefix_cache(reset_connector=True)
    (line,) = [line for line in caplog.messages if line.startswith("kvstore: connected")]
    assert (
        "instance fake" in line
        and "model tiny-llama" in line
        and line.endswith(f"ranks {shape.get('ranks', 1)}")
    )
    assert line.count("tokens") == 1 + ("window" in shape)


@pytest.mark.parametrize(("kinds", "lasts"), [(("full", "states"), True), (("full", "state"), False)])
def test_one_line_says_that_no_bucket_keeps_a_model(
    worlds: Callable[..., World],
    store: FakeStore,
    caplog: pytest.LogCaptureFixture,
    kinds: tuple[str, ...],
    lasts: bool,
) -> None:
    """Where only some blocks have a state no lookup of any group counts for a bucket; where all have one they do."""
    caplog.set_level(logging.INFO, logger="vllm.kvstore")
    world = worlds(kinds=kinds)
    for number in range(2):
        world.ask(f"r{number}", prompt(number, 200))
        world.run()
    assert [line.startswith("kvstore: no bucket keeps") for line in caplog.messages].count(True) == 1 - lasts
    assert {asking["lasting"] for asking in store.asked} == {lasts}
