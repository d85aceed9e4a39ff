"""What deciding costs: operations a second and memory a tracked block, without moving bytes.

    python -m benchmarks.policy_cost [--blocks N] [--policy NAME] [-o json]

An operation is one block of a request that goes through the engine: looked up, pinned and
released when it is held, else reserved, committed, and something evicted for it. Blocks have
hashes of 32 bytes, as vLLM's. `policy_ops_per_s` counts them while the cache is full;
`index_bytes_per_block` is the growth of the process by a full cache, divided by its blocks,
everything included: index, policy, ghosts, slot numbers. The counted arena's table exists
before. `gc_pause_ms` is a full collection by Python's collector: nobody is answered meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import time
from pathlib import Path

from kvstore.policies.names import OURS, POLICIES
from kvstore.replay.cell import Node

HASH_BYTES = 32
PROMPT_BLOCKS = 64
REUSED_SHARE = 0.5
OPERATIONS = 300_000
STEP_S = 0.05


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(number: int) -> bytes:
    """The hashes of one prompt."""
    return b"".join(hashlib.sha256(f"{number}/{depth}".encode()).digest() for depth in range(PROMPT_BLOCKS))


def measure(blocks: int, policy: str) -> dict[str, object]:
    """Fill, then ask for old and new prompts in turn, and weigh. The clock moves on by 50 ms a prompt."""
    node = Node(blocks, POLICIES[policy](), HASH_BYTES)
    prompts = blocks // PROMPT_BLOCKS
    rng = random.Random(1)
    asked = [
        prompt(rng.randrange(prompts) if rng.random() < REUSED_SHARE else prompts + step)
        for step in range(OPERATIONS // PROMPT_BLOCKS)
    ]
    gc.collect()
    before = resident_bytes()
    for number in range(prompts):
        node.ask(number * STEP_S, prompt(number))
    started_s = time.perf_counter()
    for number, hashes in enumerate(asked, prompts):
        node.ask(number * STEP_S, hashes)
    asked_s = time.perf_counter()
    gc.collect()
    collected_s = time.perf_counter()
    grown = resident_bytes() - before
    return {
        "policy": policy,
        "blocks": blocks,
        "policy_ops_per_s": round(len(asked) * PROMPT_BLOCKS / (asked_s - started_s)),
        "index_bytes_per_block": round(grown / (prompts * PROMPT_BLOCKS), 1),
        "gc_pause_ms": round((collected_s - asked_s) * 1e3, 1),
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
