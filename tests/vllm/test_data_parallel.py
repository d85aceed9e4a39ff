"""Data parallel replicas behind one of vLLM's servers, as people start them: one daemon for all of them.

    ask ─▶ server (--data-parallel-size 2) ─┬─ replica 0 ─┬─ daemon
                                            ╰─ replica 1 ─╯

Replicas of a dense model know nothing of each other. Those of a model with experts share these, and step together: the one
that has nothing to do computes dummy batches, which no connector is told of.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvstore.client import Client
from tests.running import Daemon
from tests.vllm import models
from tests.vllm.conftest import prompt, totals
from tests.vllm.engines import BLOCK_TOKENS, EngineHost, ours
from tests.vllm.servers import ANSWER_S_MAX, HOST, Server, api_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

REPLICAS = 2
ANSWER_TOKENS = 8
LONG_TOKENS = 256
PROMPTS = [prompt(3000 + number, 200 + 37 * number) for number in range(6)]
LONG = prompt(2999, 100)
SAVED_S_MAX = 30


def whole(tokens: list[int]) -> int:
    """Tokens of its whole blocks."""
    return len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def told(tokens: list[int], answer: list[int]) -> list[int]:
    """Those whose KV there is after an answer: not of its last token."""
    return tokens + answer[:-1]


@pytest.fixture
def started(tmp_path: Path, daemon: Daemon) -> Iterator[Callable[..., Server]]:
    """Servers of two replicas, each with our connector."""
    running: list[Server] = []

    def start(model: Path, *words: str) -> Server:
        transfer = ours(daemon.socket, extra={"cache_dir": str(tmp_path / "cache")})
        words = ("--max-model-len", "2048", "--data-parallel-size", str(REPLICAS), *words)
        running.append(api_server(f"server-{len(running)}", tmp_path, model, transfer, words=words))
        return running[-1]

    yield start
    for server in running:
        server.stop()


def counted(server: Server, name: str) -> list[float]:
    """One of our metrics, of each replica."""
    found = {}
    for line in server.get("/metrics").splitlines():
        for replica in range(REPLICAS):
            if line.startswith(f"vllm:kvstore_{name}{{") and f'engine="{replica}"' in line:
                found[replica] = float(line.rpartition(" ")[2])
    return [found[replica] for replica in range(REPLICAS)]


def wait_stored(daemon: Daemon, sequences: list[list[int]]) -> None:
    """Until the whole blocks of all these, and nothing else, are there, in one namespace for all."""
    blocks = sum(map(whole, sequences)) // BLOCK_TOKENS
    deadline_s = time.monotonic() + SAVED_S_MAX
    with Client(daemon.socket, timeout_s=10, attach=False) as tool:
        while True:
            (space,) = tool.list_namespaces()
            if space["blocks"] == blocks:
                return
            assert time.monotonic() < deadline_s, (space, blocks)
            time.sleep(0.05)


def check_shared(server: Server, daemon: Daemon, alone: list[list[int]]) -> None:
    """Half of the prompts are computed by each replica, and then all of them loaded by the other."""
    owners = [number % REPLICAS for number in range(len(PROMPTS))]
    first = [server.ask(tokens, ANSWER_TOKENS, owner) for owner, tokens in zip(owners, PROMPTS, strict=True)]
    assert [answer.tokens for answer in first] == alone
    assert [answer.cached for answer in first] == [0] * len(PROMPTS)
    assert counted(server, "connected") == counted(server, "ready") == [1] * REPLICAS
    wait_stored(daemon, [*map(told, PROMPTS, alone)])
    second = [
        server.ask(tokens, ANSWER_TOKENS, 1 - owner) for owner, tokens in zip(owners, PROMPTS, strict=True)
    ]
    assert [answer.tokens for answer in second] == alone
    assert [answer.cached for answer in second] == list(map(whole, PROMPTS))


def forget_locally(server: Server) -> None:
    """Both replicas: what vLLM's own prefix caches hold."""
    address = f"http://{HOST}:{server.port}/reset_prefix_cache"
    with urllib.request.urlopen(
        urllib.request.Request(address, method="POST"), timeout=ANSWER_S_MAX
    ) as answer:
        assert json.load(answer) == {"success": True}


def check_warm(server: Server, alone: list[list[int]]) -> None:
    """All prompts are loaded, at once, whichever replica vLLM chooses for each."""
    before = counted(server, "hit_tokens_total")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda tokens: server.ask(tokens, ANSWER_TOKENS), PROMPTS))
    assert [answer.tokens for answer in answers] == alone
    assert [answer.cached for answer in answers] == list(map(whole, PROMPTS))
    hits = [after - was for after, was in zip(counted(server, "hit_tokens_total"), before, strict=True)]
    assert sum(hits) == sum(map(whole, PROMPTS)) and all(hits), "vLLM has both work"


def check_quiet(server: Server) -> None:
    for trouble in ("hook_errors_total", "load_failures_total", "declined_total", "unavailable_total"):
        assert counted(server, trouble) == [0] * REPLICAS, trouble


@pytest.mark.skipif("PAIRS" not in os.environ, reason="of make soak: PAIRS=rounds")
def test_replicas_of_a_dense_model(
    host: EngineHost,
    daemon: Daemon,
    model: Path,
    started: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one replica computes the other loads, and either loads what it has forgotten; the answers are those of one
    engine without a connector."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for `forget_locally`
    server = started(model)
    host.start(None)
    alone = host.generate(PROMPTS, ANSWER_TOKENS).tokens
    host.stop()
    server.wait()
    check_shared(server, daemon, alone)
    forget_locally(server)
    check_warm(server, alone)
    check_quiet(server)
    assert totals(daemon)["dram"] == 2 * sum(map(whole, PROMPTS))


def test_replicas_that_share_experts(
    host: EngineHost, daemon: Daemon, model: Path, tmp_path: Path, started: Callable[..., Server]
) -> None:
    """The same of replicas that step together: one computes and saves while the other decodes, either loads while the
    other has nothing to do, and dummy batches between cost neither a save nor a token."""
    experts = models.expert_model(model, tmp_path)
    worker = ("--worker-extension-cls", "tests.vllm.expert_parallel.ExpertWorker")
    server = started(experts, "--enable-expert-parallel", *worker)
    host.start(None, model=str(experts))
    alone = host.generate(PROMPTS, ANSWER_TOKENS).tokens
    (long,) = host.generate([LONG], LONG_TOKENS).tokens
    host.stop()
    server.wait()
    check_shared(server, daemon, alone)
    fresh = [prompt(4000 + number, 150) for number in range(4)]
    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(server.ask, LONG, LONG_TOKENS, 0)
        first = [server.ask(tokens, 1, 1) for tokens in fresh]
        assert going_on.result().tokens == long
    wait_stored(daemon, [*map(told, PROMPTS, alone), *fresh, told(LONG, long)])
    second = [server.ask(tokens, 1, 0) for tokens in fresh]
    assert [answer.tokens for answer in second] == [answer.tokens for answer in first]
    assert [answer.cached for answer in second] == list(map(whole, fresh))
    check_quiet(server)
