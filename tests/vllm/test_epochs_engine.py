"""Weights replaced inside a real engine: hits where they are the same, none where not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.running import Daemon
from tests.vllm import engines
from tests.vllm.conftest import prompt
from tests.vllm.engines import EngineHost

pytestmark = pytest.mark.vllm

LONG = prompt(70, 330)
LONG_TOKENS = 330 // engines.BLOCK_TOKENS * engines.BLOCK_TOKENS


@pytest.fixture(scope="module")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other keys; its directory has another name."""
    numpy = pytest.importorskip("safetensors.numpy")
    copy = Path(shutil.copytree(model, tmp_path_factory.mktemp("models") / "trained"))
    (path,) = copy.glob("*.safetensors")
    tensors = numpy.load_file(path)
    numpy.save_file({name: t * 1.25 if "k_proj" in name else t for name, t in tensors.items()}, path)
    return copy


class Trained:
    """An engine whose weights are replaced by vLLM's own means."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host

    def pause(self) -> None:
        self.host.core("pause_scheduler")
        self.host.core("resume_scheduler")

    def sleep(self, level: int) -> None:
        self.host.core("sleep", level=level)
        self.host.core("wake_up")

    def update(self, weights: Path) -> None:
        self.host.core("pause_scheduler")
        self.host.core("collective_rpc", method="reload_weights", kwargs={"weights_path": str(weights)})
        self.host.core("resume_scheduler")

    def ask(self) -> tuple[list[int], int]:
        """Tokens, and how many of the prompt's came from the store."""
        made = self.host.generate([LONG])
        return made.tokens[0], made.cached[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_engine_that_is_trained(
    hosts: Callable[..., EngineHost], daemon: Daemon, model: Path, other_model: Path
) -> None:
    """Pause and resume, sleep and wake, other weights twice and the first again: hits where the weights are the same,
    none where they are not, and the tokens are those of fresh engines. A second engine finds what the first stored."""
    host = hosts()
    host.fill_gap("keep_weights_in_sight")
    host.start(None, model=str(other_model))
    other = host.generate([LONG]).tokens[0]
    host.start(None)
    first = host.generate([LONG]).tokens[0]
    assert first != other
    host.start(daemon.socket)
    engine = Trained(host)
    assert engine.ask() == (first, 0)
    for rest in (engine.pause, lambda: engine.sleep(1), lambda: engine.sleep(2)):
        rest()
        assert engine.ask() == (first, LONG_TOKENS)
    engine.update(other_model)
    assert engine.ask() == (other, 0)
    engine.pause()
    assert engine.ask() == (other, LONG_TOKENS)
    engine.update(model)
    assert engine.ask() == (first, LONG_TOKENS)
    host.start(daemon.socket)
    engine.update(other_model)
    assert engine.ask() == (other, LONG_TOKENS)
    metrics = host.metrics()
    assert metrics["loaded_blocks"] > 0 and not metrics.get("hook_errors")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_real_engine_whose_weights_are_packed(
    host: EngineHost, daemon: Daemon, model: Path, other_model: Path
) -> None:
    """vLLM's CPU build keeps weights where nobody sees them: each reset is an epoch of its own, and nothing is wrong."""
    host.start(daemon.socket)
    engine = Trained(host)
    first, cached = engine.ask()
    assert not cached
    engine.update(other_model)
    other, cached = engine.ask()
    assert other != first and not cached
    engine.update(model)
    assert engine.ask() == (first, 0)
    assert not host.metrics().get("hook_errors")
