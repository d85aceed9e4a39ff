"""What deciding costs: operations a second, and memory for each tracked block. No bytes are moved.

An operation is one block of a request that goes through the daemon's own engine, with counted
slots: looked up, pinned and released when it is held, else reserved and committed while
another one is evicted for it. Half of the prompts are old ones; each begins with one of a few
system prompts, as those of a node's applications do. Hashes have 32 bytes, as vLLM's. Times are
of the processor, of which it uses one; what a hypervisor takes away counts as well.

Two speeds come of it, in turn: of the whole way through the engine, and of the policy by itself, by the
time that its own calls take (`benchmarks.bench.timed`).

The memory is what the process grew by: index, policy, what it remembers of blocks that left,
slot numbers; the table of the counted slots, which no daemon has, exists before. What the C library
keeps unused is given back first, as a daemon does every minute. Each size is measured in a process of its own.

How long the event loop is held (`benchmarks.bench.holds`) is measured of the same node, when it is full, and of one
with everything (`benchmarks.bench.crowded`).

The limit is what the interpreter can do: an `OrderedDict` as LRU, without parents, leases,
slots or tiers, is asked for the same prompts, in turn. It comes after the memory was measured.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from collections import OrderedDict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench.crowded import crowded_turns
from benchmarks.bench.holds import slowest_turns
from benchmarks.bench.plan import POLICY_BYTES_PER_BLOCK_EST, Plan
from benchmarks.bench.timed import Timed
from kvstore.daemon import heap
from kvstore.index.forest import split_hashes
from kvstore.protocol.frames import HASHES_MAX
from kvstore.tools.bench.dram import HASH_BYTES
from kvstore.tools.bench.figures import Value
from kvstore.tools.replay.workers import workers
from tiers.dram.memory_limits import memory_left

if TYPE_CHECKING:
    from kvstore.tools.replay.cell import Node

PROMPT_BLOCKS = 64
SYSTEM_BLOCKS = 4  # of them, which are those of its application
APPLICATIONS = 12
REUSED_SHARE = 0.5
BROUGHT_SHARE = 1.5  # prompts before it is measured, of those that fit: blocks have come and gone by then
AGED_EVERY = 1000  # prompts, about half a second
STEP_S = 0.05  # of the engine's clock, between two prompts


def measure(plan: Plan, _home: Path, arena_directory: Path) -> dict[str, Value]:
    """Both sizes. One for which there is no memory is left out, and said so. Raises WorkerError."""
    values: dict[str, Value] = {
        "policy_blocks": plan.policy_blocks,
        "policy_10m_blocks": plan.policy_10m_blocks,
    }
    for blocks, size, hold in ((plan.policy_blocks, "", "1m"), (plan.policy_10m_blocks, "_10m", "10m")):
        needed = blocks * POLICY_BYTES_PER_BLOCK_EST
        if not blocks:
            values[f"policy{size}_skipped"] = "quick"
        elif not memory_left(needed):
            values[f"policy{size}_skipped"] = f"{blocks} blocks need {needed} bytes of memory"
        else:
            with workers(1) as pool:
                values |= pool.submit(
                    cost, blocks, plan.policy_operations, size, hold, arena_directory / "crowded"
                ).result()
    return values


def cost(blocks: int, operations: int, size: str, hold: str, arena_path: Path) -> dict[str, Value]:
    """Of a node with this many slots and our policy. size, hold: what the names of the figures have of it. arena_path:
    for the arena of a node with everything."""
    from kvstore.policies.names import OURS
    from kvstore.tools.replay.cell import Node
    from kvstore.tools.replay.policies import POLICIES

    policies = Timed(POLICIES[OURS]())
    node = Node(blocks, policies, HASH_BYTES)
    held = max(1, (blocks - APPLICATIONS * SYSTEM_BLOCKS) // (PROMPT_BLOCKS - SYSTEM_BLOCKS))
    brought = round(held * BROUGHT_SHARE)
    rounds = max(1, operations // PROMPT_BLOCKS)
    draw = random.Random(1)
    asked = [
        _prompt(brought + (step if draw.random() >= REUSED_SHARE else -1 - draw.randrange(held)))
        for step in range(3 * rounds)
    ]
    gc.collect()
    heap.freeze()  # as a daemon does when it has started
    before = _resident_bytes()
    unmeasured = chain(map(_prompt, range(brought)), asked[:rounds])
    slowest_s = max(_ask(node, step, hashes) for step, hashes in enumerate(unmeasured))
    heap.give_back()
    grown = _resident_bytes() - before

    lru: OrderedDict[bytes, int] = OrderedDict()
    for number in range(brought - held, brought):
        _ask_dict(lru, blocks, _prompt(number))
    heap.freeze()  # no daemon has such a dictionary, for its collector to walk
    engine_s = dict_s = 0.0
    for step, hashes in enumerate(asked[rounds:]):
        policies.run_clock(step % 2 == 1)  # the policy by itself, in every second round
        took_s = _ask(node, brought + rounds + step, hashes)
        slowest_s = max(slowest_s, took_s)
        if step % 2 == 0:
            engine_s += took_s
            dict_s += _ask_dict(lru, blocks, hashes)
    holds_ms = {"prompt": round(slowest_s * 1e3, 2)} | slowest_turns(node, _hashes("unknown", HASHES_MAX))
    node.close()
    lru.clear()
    heap.give_back()
    holds_ms |= crowded_turns(blocks, arena_path)
    operations = rounds * PROMPT_BLOCKS
    return {
        f"policy{size}_ops_per_s": round(operations / policies.spent_s),
        f"engine{size}_ops_per_s": round(operations / engine_s),
        f"dict{size}_ops_per_s": round(operations / dict_s),
        f"engine{size}_ratio": round(dict_s / engine_s, 4),
        f"index{size}_bytes_per_block": round(grown / blocks, 1),
        f"loop_hold_{hold}_ms_max": max(holds_ms.values()),
        **{f"loop_hold_{hold}_{work}_ms": ms for work, ms in holds_ms.items()},
    }


def _ask(node: Node, step: int, hashes: bytes) -> float:
    """Ask for one prompt. Answers how long it took, in s."""
    before_s = time.process_time()
    node.ask(step * STEP_S, hashes)
    if step % AGED_EVERY == 0:  # as a daemon does every second
        heap.age()
    return time.process_time() - before_s


def _ask_dict(kept: OrderedDict[bytes, int], blocks: int, hashes: bytes) -> float:
    """The same of a dictionary of so many blocks."""
    before_s = time.process_time()
    for block_hash in split_hashes(hashes, HASH_BYTES):
        if block_hash in kept:
            kept.move_to_end(block_hash)
        else:
            if len(kept) >= blocks:
                kept.popitem(last=False)
            kept[block_hash] = 0
    return time.process_time() - before_s


def _prompt(number: int) -> bytes:
    """The hashes of one prompt."""
    system = _hashes(f"system {number % APPLICATIONS}", SYSTEM_BLOCKS)
    return system + _hashes(f"prompt {number}", PROMPT_BLOCKS - SYSTEM_BLOCKS)


def _hashes(name: str, blocks: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(blocks * HASH_BYTES)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
