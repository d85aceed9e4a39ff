"""The workload: prompts of conversations in order of time, as block hashes; recorded ones, or made up from a seed.

    trace (Mooncake's format) ─┐                            ┌─ first half   served in NA
    seed ─▶ conversations ─────┴▶ prompts: when, which blocks ┴─ second half  served by a new cluster

The made-up hour has what recorded chat has: somebody comes back in a minute or not at all, a third of all blocks were asked
for before, three quarters of them are asked for once. `Figures` says how near it comes; nothing is tuned to a result.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.traffic import BLOCK_TOKENS, Session, World
from kvstore.constants import REPLAY_HASH_BYTES
from kvstore.tools.replay.trace import read

HASH_BYTES = 32
RECORD_BYTES = 4096  # stands for a block, which has a hundred MiB or so
__all__ = ["BLOCK_TOKENS", "HASH_BYTES", "RECORD_BYTES", "Figures", "Prompt", "conversations", "recorded"]

# As seen in recorded chat of an hour: how long first turns are, how much a turn adds, how long people pause, how many stay.
SYSTEM_PROMPTS, SYSTEM_TOKENS = 12, 600.0
FIRST_TURN_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 5600.0, 900.0, 350.0  # medians
PAUSE_S, PAUSE_SPREAD = 115.0, 1.05  # median, and spread of its logarithm, until the next turn
STAY_FIRST, STAY_LATER = 0.36, 0.75  # chance of another turn, after the first one and after many
TIRING_TOKENS = 60_000  # a prompt of that length halves it


class Prompt(NamedTuple):
    """A request. at_s: seconds after the first one. hashes: of its blocks, the last of which may be partly filled."""

    at_s: float
    hashes: tuple[bytes, ...]


class Figures(NamedTuple):
    """What can be got at all. seen_share: of the blocks asked for, how many were asked for before. once_share: of
    different blocks, how many are asked for once."""

    requests: int
    blocks: int
    different_blocks: int
    duration_s: float
    seen_share: float
    once_share: float


def recorded(path: Path) -> list[Prompt]:
    """The requests of a trace. Raises kvstore.errors.ReplayError."""
    trace = read([path])
    known: dict[bytes, bytes] = {}
    prompts = []
    for at_s, joined in zip(trace.times_s, trace.prompts, strict=True):
        names = [joined[at : at + REPLAY_HASH_BYTES] for at in range(0, len(joined), REPLAY_HASH_BYTES)]
        prompts.append(
            Prompt(at_s - trace.times_s[0], tuple(known.setdefault(name, _hash_of(name)) for name in names))
        )
    return prompts


def conversations(seed: int, duration_s: float, arrivals_per_s: float) -> list[Prompt]:
    """A chat service's traffic. arrivals_per_s: of new conversations."""
    world = World(seed)
    systems = world.prefixes(SYSTEM_PROMPTS, SYSTEM_TOKENS, 0.8)
    rng = world.random

    def conversation() -> Session:
        chain = world.zipf(systems, 1.0)
        world.extend(chain, world.lognormal(FIRST_TURN_TOKENS, 1.0))
        for turn in itertools.count():
            world.ask(chain)
            stays = STAY_LATER - (STAY_LATER - STAY_FIRST) * 0.7**turn
            if rng.random() > stays / (1 + chain.tokens / TIRING_TOKENS):
                return
            yield 5 + world.lognormal(PAUSE_S, PAUSE_SPREAD)
            world.extend(chain, world.lognormal(TURN_TOKENS, 0.7) + world.lognormal(ANSWER_TOKENS, 1.0))

    world.spawn(world.arrivals(arrivals_per_s, conversation))
    requests = itertools.takewhile(
        lambda request: request.timestamp_ms < 1000 * duration_s, world.run(blocks_max=1 << 62)
    )
    return [
        Prompt(request.timestamp_ms / 1000, tuple(_hash_of(b"%d" % number) for number in request.hashes))
        for request in requests
    ]


def figures(prompts: Sequence[Prompt]) -> Figures:
    asks = Counter(block_hash for prompt in prompts for block_hash in prompt.hashes)
    blocks = sum(asks.values())
    return Figures(
        requests=len(prompts),
        blocks=blocks,
        different_blocks=len(asks),
        duration_s=round(prompts[-1].at_s, 1),
        seen_share=round(1 - len(asks) / blocks, 4),
        once_share=round(sum(count == 1 for count in asks.values()) / len(asks), 4),
    )


def halves(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """The first and the second half of the requests; each begins at 0 s."""
    middle = len(prompts) // 2
    half_s = prompts[middle].at_s
    return list(prompts[:middle]), [
        Prompt(prompt.at_s - half_s, prompt.hashes) for prompt in prompts[middle:]
    ]


def contents(hashes: Iterable[bytes]) -> Iterator[bytes]:
    """The record of each block: bytes that no other block has, and that anybody can check."""
    return (hashlib.shake_128(block_hash).digest(RECORD_BYTES) for block_hash in hashes)


def _hash_of(name: bytes) -> bytes:
    return hashlib.blake2b(name, digest_size=HASH_BYTES).digest()
