"""Serving prompts as an engine would: look up, load what is there, compute and store the rest.

    paced        first half │ at its own times, `speed` times faster │ lookup ─▶ put of what is missing
    at once    second half │ one prompt after another              │ lookup ─▶ get, bytes checked ─▶ put of what is missing

Computing takes no time here. A hit counts when its bytes came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.regions.prices import PREFILL_TOKENS_PER_S
from benchmarks.regions.workload import BLOCK_TOKENS, HASH_BYTES, RECORD_BYTES, Prompt, contents
from kvstore.client import Client, Namespace

CALL_TIMEOUT_S = 10.0
LOAD_S_MAX = 30.0  # of one prompt
DIGEST = b"demo of regions!"


class Served(NamedTuple):
    """One prompt. promised: blocks that the lookup found; hits: of those, how many came; wrong: of those, how many had other
    bytes than were stored."""

    at_s: float
    blocks: int
    promised: int
    hits: int
    wrong: int


class TooLate(Exception):
    """This machine does not keep up with the prompts. late_s: by how much."""

    def __init__(self, late_s: float) -> None:
        super().__init__(late_s)
        self.late_s = late_s


def serve_paced(
    socket_path: Path,
    prompts: Sequence[Prompt],
    begin_s: float,
    speed: float,
    stop: threading.Event,
    late_s_max: float,
) -> float:
    """Serve at their times, from begin_s (monotonic) on; how late the latest one was, in seconds. Raises ClientError, TooLate."""
    late_s = 0.0
    with _client(socket_path) as client:
        space = _space(client)
        for ticket, prompt in enumerate(prompts, 1):
            due_s = begin_s + prompt.at_s / speed
            if stop.wait(max(0.0, due_s - time.monotonic())):
                break
            late_s = max(late_s, time.monotonic() - due_s)
            if late_s > late_s_max:
                raise TooLate(late_s)
            held = _lookup(client, space, prompt, ticket, PREFILL_TOKENS_PER_S)
            _store(client, space, prompt.hashes, held)
    return late_s


def serve_at_once(
    socket_path: Path, prompts: Sequence[Prompt], progress: Callable[[int], None]
) -> list[Served]:
    """Serve one after another, with every byte checked. progress: told how many were served. Raises ClientError."""
    into = [bytearray(RECORD_BYTES) for _ in range(max(len(prompt.hashes) for prompt in prompts))]
    served = []
    with _client(socket_path) as client:
        space = _space(client)
        for ticket, prompt in enumerate(prompts, 1):
            # Without a prefill rate nothing is refused for being slower than computing.
            promised = _lookup(client, space, prompt, ticket, prefill_tokens_per_s=0.0)
            hits = client.get(space, prompt.hashes[:promised], into[:promised], LOAD_S_MAX) if promised else 0
            right = contents(prompt.hashes[:hits])
            wrong = sum(held != true for held, true in zip(into[:hits], right, strict=True))
            _store(client, space, prompt.hashes, hits)
            served.append(Served(prompt.at_s, len(prompt.hashes), promised, hits, wrong))
            progress(ticket)
    return served


def hit_share(served: Sequence[Served], within_s: float) -> float:
    """Of the blocks that were asked for in the first seconds, how many were hits."""
    early = [one for one in served if one.at_s < within_s]
    return sum(one.hits for one in early) / max(1, sum(one.blocks for one in early))


def _client(socket_path: Path) -> Client:
    return Client(socket_path, timeout_s=CALL_TIMEOUT_S, label="demo of regions")


def _space(client: Client) -> Namespace:
    return client.namespace(DIGEST, RECORD_BYTES, HASH_BYTES, BLOCK_TOKENS, {"model": "demo"})


def _lookup(
    client: Client, space: Namespace, prompt: Prompt, ticket: int, prefill_tokens_per_s: float
) -> int:
    tokens = len(prompt.hashes) * BLOCK_TOKENS
    return client.lookup(
        [space], prompt.hashes, ticket=ticket, tokens=tokens, prefill_tokens_per_s=prefill_tokens_per_s
    )


def _store(client: Client, space: Namespace, hashes: Sequence[bytes], held: int) -> None:
    missing = hashes[held:]
    parent = hashes[held - 1] if held else b""
    client.put(space, missing, parent, list(contents(missing)))
