"""The prefill speed that an engine tells: only steps that prefill count, and outliers do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from connectors.transfer.prefill import (
    PREFILL_SAMPLES_MIN,
    PREFILL_STEP_TOKENS_MIN,
    STEPS_AHEAD_MAX,
    PrefillSpeed,
)
from tests.vllm.conftest import prompt
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import Shape, World


class Engine:
    """Steps that take as long as the test says."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.speed = PrefillSpeed(lambda: self.now_s)

    def step(self, tokens: int, requests: int, seconds: float) -> None:
        self.speed.ordered(tokens, requests)
        self.now_s += seconds
        self.speed.ended()


def test_it_is_unknown_until_enough_steps_prefilled() -> None:
    """The first steps of an engine, and those that decode, leave it at 0."""
    engine = Engine()
    for _ in range(100):
        engine.step(200, 200, 0.01)  # decoding
        engine.step(PREFILL_STEP_TOKENS_MIN - 1, 1, 0.01)
    assert engine.speed.tokens_per_s == 0.0
    for _ in range(PREFILL_SAMPLES_MIN):
        assert engine.speed.tokens_per_s == 0.0
        engine.step(1000, 2, 0.1)
    assert engine.speed.tokens_per_s == pytest.approx(10_000)


def test_hiccups_and_bunched_outputs_do_not_count() -> None:
    """A step held up for seconds, and one whose output came with the last one's, change little."""
    engine = Engine()
    for _ in range(8):
        for _ in range(5):
            engine.step(1000, 1, 0.1)
        engine.step(1000, 1, 5.0)
        engine.step(1000, 1, 0.0001)
    assert engine.speed.tokens_per_s == pytest.approx(10_000, rel=0.1)


def test_steps_planned_ahead_begin_when_the_last_one_ended() -> None:
    """With one step in flight when the next is ordered, no time is counted twice."""
    engine = Engine()
    engine.speed.ordered(1000, 1)
    for _ in range(20):
        engine.speed.ordered(1000, 1)
        engine.now_s += 0.1
        engine.speed.ended()
    assert engine.speed.tokens_per_s == pytest.approx(10_000)


def test_steps_without_an_output_are_forgotten() -> None:
    """Orders whose end is never told do not pile up."""
    engine = Engine()
    for _ in range(10 * STEPS_AHEAD_MAX):
        engine.speed.ordered(1000, 1)
    assert len(engine.speed._steps) <= STEPS_AHEAD_MAX


@pytest.mark.vllm
@pytest.mark.parametrize("ahead", [False, True])
def test_lookups_tell_it(model: Path, store: FakeStore, ahead: bool) -> None:
    """Real schedulers learn it from their own steps, and lookups carry it."""
    world = World(model, Shape(budget=256, ahead=ahead))
    for number in range(6):
        world.ask(f"r{number}", prompt(number, 200))
        world.run()
    told = [asking["prefill_tokens_per_s"] for asking in store.asked]
    assert told[0] == 0.0 < told[-1]
    world.close()


def test_the_unit_is_tokens_per_second() -> None:
    """A step twice as long is half as fast."""
    rates: list[float] = []
    make: Callable[[], Engine] = Engine
    for seconds in (0.1, 0.2):
        engine = make()
        for _ in range(5):
            engine.step(500, 1, seconds)
        rates.append(engine.speed.tokens_per_s)
    assert rates == [pytest.approx(5000), pytest.approx(2500)]
