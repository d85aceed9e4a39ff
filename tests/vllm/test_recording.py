"""What `kvstore record` gets of engines: each request once, with its exact length."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from kvstore.client import Client
from kvstore.tools.replay.trace import read
from tests.running import TIMEOUT_S, Daemon, environment
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost
from tests.vllm.fake_client import FakeStore
from tests.vllm.world import BLOCK_TOKENS as WORLD_BLOCK_TOKENS
from tests.vllm.world import World

pytestmark = pytest.mark.vllm

OUTPUT_TOKENS = 3 * BLOCK_TOKENS


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_preempted_request_is_told_as_such(
    worlds: Callable[..., World], store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is asked for by one ticket as a new one, and by others, after it was preempted, as a known one."""
    monkeypatch.setattr("connectors.vllm.scheduler.FREES_WAIT_S", 0.0)
    world = worlds(blocks=2 * (200 // WORLD_BLOCK_TOKENS) + 3, budget=512, prefix_caching=False)
    store.delay_s = 0.3
    world.ask("long", prompt(1, 200), max_tokens=40)
    world.ask("short", prompt(3, 200), max_tokens=2)
    world.run()
    store.delay_s = 0.0
    assert sum(request.num_preemptions for request in world.requests.values()) > 0
    new = {asking["ticket"] for asking in store.asked if not asking["again"]}
    known = {asking["ticket"] for asking in store.asked if asking["again"]}
    assert len(new) == 2 and known and not new & known
    world.check_answers()


def test_lengths_of_a_real_engine_are_exact(host: EngineHost, daemon: Daemon, tmp_path: Path) -> None:
    """20 prompts, some of them the same: their lengths and what they share are in the file; of the output all but
    less than a block."""
    lengths = [BLOCK_TOKENS, BLOCK_TOKENS + 1, *(100 + 13 * n for n in range(15))]
    prompts = [prompt(n, length) for n, length in enumerate(lengths)]
    prompts += [prompts[5], prompts[6][:64], [*prompts[7], 5]]
    path = tmp_path / "t.jsonl"
    host.start(daemon.socket)
    record = subprocess.Popen(
        [sys.executable, "-m", "kvstore", "record", path, "--socket", daemon.socket, "-o", "json"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait(path.exists)
    answers = [
        *host.generate(prompts[:17], OUTPUT_TOKENS).tokens,
        *host.generate(prompts[17:], OUTPUT_TOKENS).tokens,
    ]
    sequences = [[*tokens, *answer[:-1]] for tokens, answer in zip(prompts, answers, strict=True)]
    whole = {tuple(s[:end]) for s in sequences for end in range(BLOCK_TOKENS, len(s) + 1, BLOCK_TOKENS)}
    with Client(daemon.socket, timeout_s=20, attach=False) as client:

        def is_stored() -> bool:
            host.generate(
                [[7, 8, 9]], max_tokens=2
            )  # too short to be asked for; saves are sent with the next step
            return bool(client.status()["counters"]["committed"] == len(whole))

        wait(is_stored)
    record.terminate()
    summary = json.loads(record.communicate(timeout=TIMEOUT_S)[0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["input_length"] for line in lines] == [len(tokens) for tokens in prompts]
    assert [len(line["hash_ids"]) for line in lines] == [len(tokens) // BLOCK_TOKENS for tokens in prompts]
    assert {line["block_tokens"] for line in lines} == {BLOCK_TOKENS}
    assert lines[17]["hash_ids"] == lines[5]["hash_ids"]
    assert lines[18]["hash_ids"] == lines[6]["hash_ids"][:2]
    assert lines[19]["hash_ids"][: len(lines[7]["hash_ids"])] == lines[7]["hash_ids"]
    for line, tokens in zip(lines, sequences, strict=True):
        assert line["output_length"] == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS - line["input_length"]
    assert summary["input_tokens"] == sum(map(len, prompts))
    assert len(read([path]).prompts) == 20
