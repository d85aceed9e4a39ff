"""`kvstore explain` beside a real engine: what it says would hit is what the engine stored."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.running import Daemon, kvstore
from tests.vllm.conftest import prompt
from tests.vllm.engines import BLOCK_TOKENS, EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def explained(daemon: Daemon, tokens: list[int], *words: str) -> dict[str, Any]:
    done = kvstore("explain", "-", "-o", "json", "--socket", daemon.socket, *words, stdin=json.dumps(tokens))
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("salt", ["", "acme"])
def test_what_an_engine_stored_would_hit(host: EngineHost, daemon: Daemon, salt: str) -> None:
    """The engine's hashes and ours are the same: every whole block hits in DRAM, another salt and prompt miss."""
    asked = prompt(11, 300)
    whole = len(asked) // BLOCK_TOKENS * BLOCK_TOKENS
    host.start(daemon.socket)
    host.generate([asked], salt=salt)
    deadline = time.monotonic() + 20
    while True:
        document = explained(daemon, asked, "--salt", salt)
        if document["hit_tokens"] == whole or time.monotonic() > deadline:
            break
        host.generate([[7, 8, 9]], max_tokens=2)  # background saves are reported with the next step
    assert {block["outcome"] for block in document["blocks"]} == {"dram"}
    assert (document["hit_tokens"], document["tokens"]) == (whole, len(asked))
    assert explained(daemon, asked, "--salt", "other")["hit_tokens"] == 0
    assert explained(daemon, [5, *asked], "--salt", salt)["hit_tokens"] == 0
