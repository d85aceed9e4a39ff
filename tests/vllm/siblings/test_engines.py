"""Real engines under MultiConnector: whatever stands beside us, outputs and the store stay true.

For each sibling, before and behind us: 300 prompts of chats that share their beginnings, on an engine whose
own cache is too small for them, over a daemon that is empty at first. The sibling knows two of three
chats already. What it answers must be what an engine without any connector answers; and
so must a fresh engine with ours alone afterwards, which computes nothing that was saved.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.running import Daemon
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost, Generated, ours

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HEADS, CHATS, TURNS = 6, 100, 3  # 300 prompts
MAX_TOKENS = 5
SETTLE_TIMEOUT_S = 60
FEW_BLOCKS = {"max_model_len": 320, "kv_cache_memory_bytes": 12 << 20, "max_num_seqs": 8}  # 96 of them
CHUNKED_TOKENS, WHOLE_TOKENS = (
    256,
    4096,
)  # a step computes; ExampleConnector saves what a prompt's first step did


def turns() -> list[list[int]]:
    """The prompts, turn after turn: each goes on where the same chat's last one ended."""
    asked = []
    for turn in range(TURNS):
        for chat in range(CHATS):
            tokens = prompt(1000 + chat % HEADS, 50 + 7 * (chat % HEADS))
            for past in range(turn + 1):
                tokens = tokens + prompt(10 * chat + past, 30 + (chat + 11 * past) % 41)
            if len(tokens) % BLOCK_TOKENS == 1:
                tokens = tokens[:-1]  # ExampleConnector looks under one name and saves under another then
            asked.append(tokens)
    return asked


def blocks(tokens: list[int]) -> set[tuple[int, ...]]:
    """What the whole blocks stand for: all tokens up to each one's end."""
    return {tuple(tokens[:end]) for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)}


@dataclass
class Asked:
    """expected: what the model answers without any connector. files: what ExampleConnector has saved."""

    prompts: list[list[int]]
    expected: list[list[int]]
    files: Path


def under_multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def keeper(name: str = "KeeperConnector", role: str = "kv_consumer", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_connector_module_path": "tests.vllm.siblings.keeper",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def example(files: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(files)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


SIBLINGS = {
    "sync, fails": keeper(load="sync", fail_chance=0.3, seed=1),
    "async, fails": keeper(load="async", fail_chance=0.3, seed=2),
    "ExampleConnector": {},  # with files of its own
    "foreign handshake": keeper("ForeignConnector", load="async"),
}


@pytest.fixture(scope="module")
def asked(host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """What is right, and siblings that know two of three chats."""
    prompts, files = turns(), tmp_path_factory.mktemp("example")
    host.start(None, max_num_batched_tokens=CHUNKED_TOKENS, **FEW_BLOCKS)
    expected = host.generate(prompts, MAX_TOKENS).tokens
    both = under_multi(keeper(role="kv_producer"), example(files))
    host.start(None, kv_transfer_config=both, max_num_batched_tokens=WHOLE_TOKENS, **FEW_BLOCKS)
    known = [at for at in range(len(prompts)) if at % CHATS % 3]
    kept = host.generate([prompts[at] for at in known], MAX_TOKENS).tokens
    settle(host)
    assert kept == [expected[at] for at in known]
    return Asked(prompts, expected, files)


def settle(host: EngineHost) -> None:
    """Until all that was to be saved is saved; vLLM hears of it with a next step."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while True:
        host.generate([[7, 8, 9]], max_tokens=2)
        if not host.pending():
            return
        assert time.monotonic() < deadline, "saves under way"
        time.sleep(0.05)


def ask(host: EngineHost, asked: Asked) -> tuple[Generated, dict[str, float]]:
    """All prompts, answered as they must be, and what the connector counted."""
    answer = host.generate(asked.prompts, MAX_TOKENS)
    settle(host)
    metrics = host.metrics()
    wrong = [at for at, tokens in enumerate(answer.tokens) if tokens != asked.expected[at]]
    assert not wrong, f"{len(wrong)} of {len(asked.prompts)} answers are wrong: {wrong[:20]} {metrics}"
    assert set(answer.ends) == {"length"}
    assert not metrics.get("hook_errors"), metrics
    return answer, metrics


def check_sibling(name: str, counts: dict[str, int]) -> None:
    """It did what it stands for."""
    if "fails" in name:
        assert counts["brought"] > 50 and counts["failed"] > 10, counts
    elif "foreign" in name:
        assert counts["brought"] > 50 and counts["handshakes"] == 1, counts


@pytest.mark.parametrize("ours_at", [0, 1], ids=["ours first", "ours second"])
@pytest.mark.parametrize("name", SIBLINGS)
def test_beside_a_sibling(
    host: EngineHost, daemon: Daemon, asked: Asked, tmp_path: Path, name: str, ours_at: int
) -> None:
    """Answers beside a sibling are those of an engine without connectors, and so are those of a fresh engine with
    ours alone, which finds at least four fifths of what was saved."""
    sibling, budget_tokens = SIBLINGS[name], CHUNKED_TOKENS
    if name == "ExampleConnector":
        sibling = example(Path(shutil.copytree(asked.files, tmp_path / "files")))
        budget_tokens = WHOLE_TOKENS
    children = [sibling]
    children.insert(ours_at, ours(daemon.socket, extra={"load": "async" if ours_at else "sync"}))
    quiet = len(host.log())
    host.start(
        None, kv_transfer_config=under_multi(*children), max_num_batched_tokens=budget_tokens, **FEW_BLOCKS
    )
    _, beside = ask(host, asked)
    check_sibling(name, host.sibling_counts())
    assert beside["external_prefix_cache_hits"] > beside["hit_tokens"] > 0, beside  # both have loaded
    host.start(daemon.socket, role="kv_consumer", enable_prefix_caching=False, max_model_len=320)
    alone, metrics = ask(host, asked)
    pairs = zip(asked.prompts, alone.cached, strict=True)
    found = set().union(*(blocks(tokens[:cached]) for tokens, cached in pairs))
    every = set().union(*(blocks(tokens) for tokens in asked.prompts))
    assert len(found) > 0.8 * beside["saved_blocks"] > 0.4 * len(every), (len(found), len(every), beside)
    assert not metrics["failed_blocks"], metrics
    said = host.log()[quiet:]
    assert "ERROR" not in said and "Traceback" not in said and "kvstore:" not in said, said
