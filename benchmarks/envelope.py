"""How far our policy is from the best reference, on made-up traffic of several shapes and seeds.

    shapes × seeds ──▶ a trace each ──▶ every reference and ours, at each capacity ──▶ ours − best reference

The envelope is a hard bar: it is the best of all references in each cell, known only afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.traffic import SHAPES, as_line
from kvstore.policies.names import OURS
from kvstore.tools.replay import table
from kvstore.tools.replay.policies import REFERENCES
from kvstore.tools.replay.trace import Trace, read
from kvstore.tools.replay.workers import workers

CAPACITIES = (0.01, 0.05, 0.1, 0.25)
LIKE_LIFE = ("agents", "chat", "scan", "shift", "study", "tasks")
AIM_POINTS = 0.3  # below the envelope at most


@dataclass(frozen=True, slots=True)
class Cell:
    """One trace at one capacity. points: of hit ratio, above the best reference (below 0: under it)."""

    shape: str
    seed: int
    capacity_fraction: float
    hit_ratio: float
    best_reference: str
    points: float


def generated(directory: Path, shape: str, seed: int, blocks: int) -> Trace:
    """Made-up requests, as `kvstore replay` reads them."""
    path = directory / f"{shape}-{seed}.jsonl"
    path.write_text("\n".join(map(as_line, SHAPES[shape](seed, blocks))))
    return read([path])


def compare(shape: str, seed: int, blocks: int, capacities: Sequence[float] = CAPACITIES) -> list[Cell]:
    """One trace at these capacities."""
    with tempfile.TemporaryDirectory() as directory:
        trace = generated(Path(directory), shape, seed, blocks)
    cells = []
    for fraction in capacities:
        ratios = {
            cell.policy: table.run_cell(trace, cell).hit_ratio
            for cell in table.plan(trace, [OURS, *REFERENCES], [fraction])
        }
        ours = ratios.pop(OURS)
        best = max(ratios, key=ratios.__getitem__)
        cells.append(Cell(shape, seed, fraction, ours, best, 100 * (ours - ratios[best])))
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if a cell is further below the envelope than the aim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=LIKE_LIFE, metavar="SHAPE", help="default: %(default)s")
    parser.add_argument("--seed", type=int, action="append", help="several are allowed (default: 1 and 2)")
    parser.add_argument("--blocks", type=int, default=100_000, help="block references of a trace")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    args = parser.parse_args(arguments)
    if unknown := set(args.shapes) - set(SHAPES):
        parser.error(f"no such shape: {', '.join(sorted(unknown))}; known are {', '.join(sorted(SHAPES))}")
    if args.blocks < 1:
        parser.error(f"--blocks {args.blocks}: at least 1")
    traces = [(shape, seed, args.blocks) for shape in args.shapes for seed in args.seed or (1, 2)]
    with workers(len(os.sched_getaffinity(0))) as pool:
        cells = [cell for cells in pool.map(compare, *zip(*traces, strict=True)) for cell in cells]
    below = [cell for cell in cells if cell.points < -AIM_POINTS]
    if args.output == "json":
        print(
            json.dumps({"aim_points": AIM_POINTS, "below": len(below), "cells": [asdict(c) for c in cells]})
        )
    else:
        _print_table(cells)
        print(
            f"{len(below)} of {len(cells)} cells are more than {AIM_POINTS} points below the best reference; "
            f"on average ours is {statistics.fmean(cell.points for cell in cells):+.2f} points from it"
        )
    return 1 if below else 0


def _print_table(cells: Sequence[Cell]) -> None:
    print(f"{'shape':8} {'seed':>4}" + "".join(f"{fraction:>8.0%}" for fraction in CAPACITIES))
    for at in range(0, len(cells), len(CAPACITIES)):
        row = cells[at : at + len(CAPACITIES)]
        print(f"{row[0].shape:8} {row[0].seed:>4}" + "".join(f"{cell.points:>+8.2f}" for cell in row))


if __name__ == "__main__":
    sys.exit(main())
