"""What deciding costs: operations a second, and memory for each tracked block. No bytes are moved.

An operation is one block of a request that goes through the daemon's own engine, with counted
slots: looked up, pinned and released when it is held, else reserved and committed while
another one is evicted for it. Half of the prompts are old ones. Hashes have 32 bytes, as
vLLM's. Times are of the processor, of which it uses one: others on the machine do not count.

The memory is what the process grew by: index, policy, what it remembers of blocks that left,
slot numbers; the table of the counted slots, which no daemon has, exists before. Each size is
measured in a process of its own, once, with the machine's memory in mind.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import random
import time
from pathlib import Path

from kvstore.bench.dram import HASH_BYTES
from kvstore.bench.figures import Value
from kvstore.bench.plan import POLICY_BYTES_PER_BLOCK_EST, Plan

PROMPT_BLOCKS = 64
REUSED_SHARE = 0.5
STEP_S = 0.05  # of the engine's clock, between two prompts


def measure(plan: Plan, _home: Path, _arena_directory: Path) -> dict[str, Value]:
    """Both sizes. One for which there is no memory is left out, and said so."""
    values: dict[str, Value] = {
        "policy_blocks": plan.policy_blocks,
        "policy_10m_blocks": plan.policy_10m_blocks,
    }
    for blocks, policy, index in (
        (plan.policy_blocks, "policy", "index"),
        (plan.policy_10m_blocks, "policy_10m", "index_10m"),
    ):
        needed = blocks * POLICY_BYTES_PER_BLOCK_EST
        if not blocks or needed > available_bytes():
            values[f"{policy}_skipped"] = (
                f"{blocks} blocks need {needed} bytes of memory" if blocks else "quick"
            )
            continue
        with multiprocessing.get_context("spawn").Pool(1) as process:
            operations, size_bytes, pause_ms = process.apply(cost, (blocks, plan.policy_operations))
        values[f"{policy}_ops_per_s"] = operations
        values[f"{index}_bytes_per_block"] = size_bytes
        values[f"{index}_gc_pause_ms"] = pause_ms
    return values


def cost(blocks: int, operations: int) -> tuple[int, float, float]:
    """Of a node with this many slots and our policy: operations a second, bytes a block, and the ms that
    a full garbage collection holds everybody up."""
    from kvstore.policies.names import OURS, POLICIES
    from kvstore.replay.cell import Node

    node = Node(blocks, POLICIES[OURS](), HASH_BYTES)
    prompts = blocks // PROMPT_BLOCKS
    draw = random.Random(1)
    asked = [
        _prompt(draw.randrange(prompts) if draw.random() < REUSED_SHARE else prompts + step)
        for step in range(max(1, operations // PROMPT_BLOCKS))
    ]
    gc.collect()
    before = _resident_bytes()
    for number in range(prompts):
        node.ask(number * STEP_S, _prompt(number))
    started_s = time.process_time()
    for number, hashes in enumerate(asked, prompts):
        node.ask(number * STEP_S, hashes)
    asked_s = time.process_time()
    gc.collect()
    collected_s = time.process_time()
    grown = _resident_bytes() - before
    return (
        round(len(asked) * PROMPT_BLOCKS / (asked_s - started_s)),
        round(grown / (prompts * PROMPT_BLOCKS), 1),
        round((collected_s - asked_s) * 1e3, 1),
    )


def available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _prompt(number: int) -> bytes:
    """The hashes of one prompt."""
    return hashlib.shake_128(number.to_bytes(8, "big")).digest(PROMPT_BLOCKS * HASH_BYTES)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
