"""What deciding costs: operations a second and memory a tracked block, without moving bytes.

    python -m benchmarks.policy_cost [--blocks N] [--policy NAME] [-o json]

An operation is one block of a request that goes through the engine: looked up, pinned and
released when it is held, else reserved, committed, and something evicted for it. Blocks have
hashes of 32 bytes, as vLLM's. `policy_ops_per_s` counts them while the cache is full;
`index_bytes_per_block` is the growth of the process by a full cache, divided by its blocks,
everything included: index, policy, ghosts, and the counted arena, whose share
(`places_bytes_per_block`) a real daemon does not have.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path

from kvstore.engine import Engine
from kvstore.leases import Acquired
from kvstore.namespaces import NamespaceRegistry, NamespaceSpec
from kvstore.policies.names import OURS, POLICIES
from kvstore.replay.cell import NoIo
from kvstore.replay.places import CountedPlaces

HASH_BYTES = 32
PROMPT_BLOCKS = 64
REUSED_SHARE = 0.5
OPERATIONS = 300_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(number: int) -> bytes:
    """The hashes of one prompt."""
    return b"".join(hashlib.sha256(f"{number}/{depth}".encode()).digest() for depth in range(PROMPT_BLOCKS))


class Load:
    """An engine that is asked for prompts at random."""

    def __init__(self, blocks: int, policy: str) -> None:
        self.now_s = 0.0
        self.places = CountedPlaces(blocks)
        before = resident_bytes()
        self.engine = Engine(
            self.places, None, NamespaceRegistry(), NoIo(), POLICIES[policy](), clock=lambda: self.now_s
        )
        self.engine.adopt()
        self.session = self.engine.open_session(0, "bench")
        self.space = self.engine.register(NamespaceSpec(bytes(16), 1, HASH_BYTES))
        self.before = before

    def ask(self, hashes: bytes) -> None:
        """As a connector would: look up, acquire what is held, store the rest, release."""
        self.now_s += 0.05
        hits = self.engine.lookup([self.space], hashes) * HASH_BYTES
        answers: list[Acquired] = []
        if hits:
            self.engine.acquire(self.session, self.space, hashes[:hits], answers.append)
        if hits < len(hashes):
            before = hashes[max(hits - HASH_BYTES, 0) : hits]
            answer = self.engine.reserve(self.session, self.space, hashes[hits:], before)
            positions = [slot.position for slot in answer.slots]
            if positions:
                self.engine.commit(self.session, answer.lease, positions, bytes(16) * len(positions))
        if answers:
            self.engine.release(self.session, answers[0].lease)


def measure(blocks: int, policy: str) -> dict[str, object]:
    """Fill, weigh, then ask for old and new prompts in turn."""
    gc.collect()
    load = Load(blocks, policy)
    prompts = blocks // PROMPT_BLOCKS
    for number in range(prompts):
        load.ask(prompt(number))
    gc.collect()
    grown = resident_bytes() - load.before
    records = sum(
        sys.getsizeof(record) + sum(map(sys.getsizeof, record[:1]))
        for record in load.places._records
        if record is not None
    )
    rng = random.Random(1)
    asked = [
        prompt(rng.randrange(prompts) if rng.random() < REUSED_SHARE else prompts + step)
        for step in range(OPERATIONS // PROMPT_BLOCKS)
    ]
    started_s = time.perf_counter()
    for hashes in asked:
        load.ask(hashes)
    took_s = time.perf_counter() - started_s
    return {
        "policy": policy,
        "blocks": blocks,
        "policy_ops_per_s": round(len(asked) * PROMPT_BLOCKS / took_s),
        "index_bytes_per_block": round((grown - records) / (prompts * PROMPT_BLOCKS), 1),
        "places_bytes_per_block": round(records / (prompts * PROMPT_BLOCKS), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--policy", choices=sorted(POLICIES), default=OURS)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    figures = measure(args.blocks, args.policy)
    if args.output == "json":
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
