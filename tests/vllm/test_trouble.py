"""The daemon is absent, dies, or hangs, and engines die: answers stay right, and nobody waits long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import Daemon, Place, kvstore
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [prompt(seed, 330) for seed in range(40, 44)]
BLOCKS = 330 // BLOCK_TOKENS
DELAY_S_MAX = 10.0  # a busy machine needs seconds for the answers alone; one wait a request would be more
AS_SHIPPED = {"lookup_timeout_s": 0.1, "load_timeout_s": 3, "save_timeout_s": 1}


@pytest.fixture(scope="module")
def expected(host: EngineHost) -> list[list[int]]:
    """What the model says without any connector."""
    host.start(None)
    return host.generate(PROMPTS).tokens


def test_no_daemon_at_all(host: EngineHost, tmp_path: Path, expected: list[list[int]]) -> None:
    """An engine starts and answers without a daemon, and as fast as without a connector."""
    host.start(tmp_path / "nobody-here", extra=AS_SHIPPED)
    result = host.generate(PROMPTS)
    assert result.tokens == expected and result.seconds < DELAY_S_MAX
    metrics = host.metrics()
    assert metrics["unavailable"] > 0 and metrics.get("hook_errors", 0) == 0


@pytest.mark.parametrize("load", ["async", "sync"])
def test_the_daemon_hangs_and_goes_on(
    host: EngineHost, daemon: Daemon, expected: list[list[int]], load: str
) -> None:
    """A stopped daemon costs one short timeout; when it goes on, it is used again."""
    host.start(daemon.socket, extra={**AS_SHIPPED, "load": load}, enable_prefix_caching=False)
    assert host.generate(PROMPTS[:1]).tokens == expected[:1]
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        hung = host.generate(PROMPTS, timeout_s=30)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
    assert hung.tokens == expected and hung.ends == ["length"] * 4
    assert hung.seconds < DELAY_S_MAX
    deadline = time.monotonic() + 20
    while sum(host.generate(PROMPTS).cached) < 4 * BLOCKS * BLOCK_TOKENS:
        assert time.monotonic() < deadline, host.metrics()
        time.sleep(0.2)
    assert host.metrics().get("hook_errors", 0) == 0


def test_the_daemon_is_killed_and_comes_back(
    host: EngineHost, place: Place, serve: Callable[..., Daemon], expected: list[list[int]]
) -> None:
    """Killed under a running engine, the daemon is missed by nobody; a new one serves what was in memory."""
    daemon = serve(place)
    host.start(daemon.socket, extra=AS_SHIPPED, enable_prefix_caching=False)
    assert host.generate(PROMPTS).tokens == expected
    deadline = time.monotonic() + 20
    while sum(host.generate(PROMPTS).cached) < 4 * BLOCKS * BLOCK_TOKENS:
        assert time.monotonic() < deadline
    daemon.stop(signal.SIGKILL)
    dead = host.generate(PROMPTS)
    assert dead.tokens == expected and sum(dead.cached) == 0 and dead.seconds < DELAY_S_MAX
    serve(place)
    while sum((back := host.generate(PROMPTS)).cached) < 4 * BLOCKS * BLOCK_TOKENS:
        assert time.monotonic() < deadline + 20
        time.sleep(0.2)
    assert back.tokens == expected
    assert host.metrics().get("hook_errors", 0) == 0


def test_an_engine_killed_while_saving_leaves_nothing_wrong(
    hosts: Callable[..., EngineHost], host: EngineHost, daemon: Daemon, expected: list[list[int]]
) -> None:
    """Engines killed at any time of their work leave a daemon that is sound and blocks that are true."""
    for wait_s in (0.02, 0.15):
        victim = hosts()
        victim.start(daemon.socket, max_num_batched_tokens=64, max_num_seqs=4)
        victim.send({"do": "generate", "prompts": PROMPTS, "max_tokens": 16})
        time.sleep(wait_s)
        os.killpg(victim.process.pid, signal.SIGKILL)
        victim.process.wait(30)
    checked = kvstore("fsck", f"--socket={daemon.socket}")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    host.start(daemon.socket)
    assert host.generate(PROMPTS).tokens == expected
