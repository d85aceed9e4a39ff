"""The table: every policy at every capacity, each cell in a process of its own.

cells, each with the trace ──▶ worker processes ──▶ results, in the table's order
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.constants import REPLAY_HASH_BYTES
from kvstore.index.forest import split_hashes
from kvstore.tools.replay import cell
from kvstore.tools.replay.policies import BOUND, EVERYTHING, POLICIES, REFERENCES
from kvstore.tools.replay.policies.belady import Oracle
from kvstore.tools.replay.trace import Trace
from kvstore.tools.replay.workers import workers

REPLAY_PROCESSES_MAX = 16  # each has the trace in memory

Progress = Callable[[int, int], None]  # cells done, cells in all


@dataclass(frozen=True, slots=True)
class Cell:
    policy: str
    fraction: float  # of the trace's unique blocks
    blocks: int


@dataclass(frozen=True, slots=True)
class Result:
    cell: Cell
    hit_ratio: float


def plan(trace: Trace, policies: Sequence[str], fractions: Sequence[float]) -> list[Cell]:
    """The cells in the order of the table."""
    cells = [
        Cell(name, fraction, max(1, int(trace.unique_blocks * fraction)))
        for name in policies
        if name != EVERYTHING
        for fraction in fractions
    ]
    return cells + [Cell(EVERYTHING, 1.0, trace.unique_blocks)] * (EVERYTHING in policies)


def envelope(results: Sequence[Result]) -> dict[float, float]:
    """For each capacity the best hit ratio of the reference policies; empty without them."""
    best: dict[float, float] = {}
    for result in results:
        if result.cell.policy in REFERENCES:
            fraction = result.cell.fraction
            best[fraction] = max(best.get(fraction, 0.0), result.hit_ratio)
    return best


def compute(trace: Trace, cells: Sequence[Cell], progress: Progress) -> list[Result]:
    """Run the cells; the results are in their order. Raises WorkerError."""
    processes = min(len(os.sched_getaffinity(0)), len(cells), REPLAY_PROCESSES_MAX)
    if processes < 2:
        return list(_counted((run_cell(trace, c) for c in cells), len(cells), progress))
    with workers(processes) as pool:
        return list(_counted(pool.map(partial(run_cell, trace), cells), len(cells), progress))


def run_cell(trace: Trace, wanted: Cell) -> Result:
    """One cell, in this process."""
    if wanted.policy == BOUND:
        return Result(wanted, _bound(trace, wanted.blocks))
    policies = POLICIES["lru" if wanted.policy == EVERYTHING else wanted.policy]()
    return Result(wanted, cell.run(trace, wanted.blocks, policies))


def _bound(trace: Trace, blocks: int) -> float:
    requests = [split_hashes(hashes, REPLAY_HASH_BYTES) for hashes in trace.prompts]
    uses: dict[bytes, list[int]] = {}
    for number, hashes in enumerate(requests):
        for block_hash in hashes:
            uses.setdefault(block_hash, []).append(number)
    oracle = Oracle(uses)
    return cell.run(trace, blocks, oracle, lambda number: oracle.request(requests[number]))


def _counted(results: Iterator[Result], total: int, progress: Progress) -> Iterator[Result]:
    for done, result in enumerate(results, 1):
        progress(done, total)
        yield result
