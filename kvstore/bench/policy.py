"""What deciding costs: operations a second, and memory for each tracked block. No bytes are moved.

An operation is one block of a request that goes through the daemon's own engine, with counted
slots: looked up, pinned and released when it is held, else reserved and committed while
another one is evicted for it. Half of the prompts are old ones; each begins with one of a few
system prompts, as those of a node's applications do. Hashes have 32 bytes, as vLLM's. Times are
of the processor, of which it uses one; what a hypervisor takes away counts as well.

Two speeds come of it: of the whole way through the engine, and of the policy by itself, by the
time that its own calls take (`kvstore.bench.timed`).

The memory is what the process grew by: index, policy, what it remembers of blocks that left,
slot numbers; the table of the counted slots, which no daemon has, exists before. What the C library
keeps unused is given back first, as a daemon does every minute. Each size is measured in a process of its own.

How long the event loop is held (`kvstore.bench.holds`) is measured of the same node, when it is full.

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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.bench.dram import HASH_BYTES
from kvstore.bench.figures import Value
from kvstore.bench.holds import slowest_turns
from kvstore.bench.plan import POLICY_BYTES_PER_BLOCK_EST, Plan
from kvstore.bench.timed import Timed
from kvstore.daemon import heap
from kvstore.index.forest import split_hashes
from kvstore.processes import workers
from kvstore.protocol.frames import HASHES_MAX

if TYPE_CHECKING:
    from kvstore.replay.cell import Node

PROMPT_BLOCKS = 64
SYSTEM_BLOCKS = 4  # of them, which are those of its application
APPLICATIONS = 12  # some more than have an experience of their own
REUSED_SHARE = 0.5
BROUGHT_SHARE = 1.5  # prompts before it is measured, of those that fit: blocks have come and gone by then
STEP_S = 0.05  # of the engine's clock, between two prompts


def measure(plan: Plan, _home: Path, _arena_directory: Path) -> dict[str, Value]:
    """Both sizes. One for which there is no memory is left out, and said so. Raises WorkerError."""
    values: dict[str, Value] = {
        "policy_blocks": plan.policy_blocks,
        "policy_10m_blocks": plan.policy_10m_blocks,
    }
    for blocks, size, hold in ((plan.policy_blocks, "", "1m"), (plan.policy_10m_blocks, "_10m", "10m")):
        policy, engine, ordered_dict, index = (f"{of}{size}" for of in ("policy", "engine", "dict", "index"))
        needed = blocks * POLICY_BYTES_PER_BLOCK_EST
        if not blocks or needed > available_bytes():
            values[f"{policy}_skipped"] = (
                f"{blocks} blocks need {needed} bytes of memory" if blocks else "quick"
            )
            continue
        with workers(1) as pool:
            found = pool.submit(cost, blocks, plan.policy_operations).result()
        values[f"{policy}_ops_per_s"] = found.policy_operations_per_s
        values[f"{engine}_ops_per_s"] = found.engine_operations_per_s
        values[f"{ordered_dict}_ops_per_s"] = found.dict_operations_per_s
        values[f"{engine}_ratio"] = round(found.engine_operations_per_s / found.dict_operations_per_s, 4)
        values[f"{index}_bytes_per_block"] = found.bytes_per_block
        values[f"loop_hold_{hold}_ms_max"] = max(found.holds_ms.values())
        values |= {f"loop_hold_{hold}_{work}_ms": ms for work, ms in found.holds_ms.items()}
    return values


@dataclass(frozen=True, slots=True)
class Cost:
    """holds_ms: the slowest turn of each kind of work; of prompts, those that filled the node included."""

    policy_operations_per_s: int
    engine_operations_per_s: int
    dict_operations_per_s: int
    bytes_per_block: float
    holds_ms: dict[str, float]


def cost(blocks: int, operations: int) -> Cost:
    """Of a node with this many slots and our policy."""
    from kvstore.policies.names import OURS
    from kvstore.replay.cell import Node
    from kvstore.replay.policies import POLICIES

    policies = Timed(POLICIES[OURS]())
    node = Node(blocks, policies, HASH_BYTES)
    held = max(1, (blocks - APPLICATIONS * SYSTEM_BLOCKS) // (PROMPT_BLOCKS - SYSTEM_BLOCKS))
    brought = round(held * BROUGHT_SHARE)
    rounds = max(1, operations // PROMPT_BLOCKS)
    draw = random.Random(1)
    asked = [
        _prompt(brought + (step if draw.random() >= REUSED_SHARE else -1 - draw.randrange(held)))
        for step in range(2 * rounds)
    ]
    gc.collect()
    heap.freeze()  # as a daemon does when it has started
    before = _resident_bytes()
    unmeasured = chain(map(_prompt, range(brought)), asked[:rounds])
    slowest_s = max(_ask(node, step, hashes) for step, hashes in enumerate(unmeasured))
    heap.give_back()
    grown = _resident_bytes() - before

    lru = DictLru(blocks)
    for number in range(brought - held, brought):
        lru.ask(_prompt(number))
    engine_s = dict_s = policies.spent_s = 0.0
    for step, hashes in enumerate(asked[rounds:], brought + rounds):
        took_s = _ask(node, step, hashes)
        slowest_s = max(slowest_s, took_s)
        engine_s += took_s
        dict_s += lru.ask(hashes)
    holds_ms = {"prompt": round(slowest_s * 1e3, 2)} | slowest_turns(node, _hashes("unknown", HASHES_MAX))
    node.close()
    policy_speed, engine_speed, dict_speed = (
        round(rounds * PROMPT_BLOCKS / spent_s) for spent_s in (policies.spent_s, engine_s, dict_s)
    )
    return Cost(
        policy_speed,
        engine_speed,
        dict_speed,
        round(grown / blocks, 1),
        holds_ms,
    )


def _ask(node: Node, step: int, hashes: bytes) -> float:
    """Ask for one prompt. Answers how long it took, in s."""
    before_s = time.process_time()
    node.ask(step * STEP_S, hashes)
    return time.process_time() - before_s


class DictLru:
    """An `OrderedDict` of so many blocks."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: OrderedDict[bytes, int] = OrderedDict()

    def ask(self, hashes: bytes) -> float:
        """The same as `_ask`."""
        kept = self._kept
        before_s = time.process_time()
        for block_hash in split_hashes(hashes, HASH_BYTES):
            if block_hash in kept:
                kept.move_to_end(block_hash)
            else:
                if len(kept) >= self._blocks:
                    kept.popitem(last=False)
                kept[block_hash] = 0
        return time.process_time() - before_s


def available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _prompt(number: int) -> bytes:
    """The hashes of one prompt."""
    system = _hashes(f"system {number % APPLICATIONS}", SYSTEM_BLOCKS)
    return system + _hashes(f"prompt {number}", PROMPT_BLOCKS - SYSTEM_BLOCKS)


def _hashes(name: str, blocks: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(blocks * HASH_BYTES)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
