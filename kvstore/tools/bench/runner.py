"""One run: the parts in order, each in a directory of its own that goes when it ends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from kvstore.tools.bench import disk, dram, lookup, machine, packs, promote
from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.plan import Plan
from tiers.dram.pages import choose_arena_path
from tiers.scratch import scratch_directory

P = TypeVar("P", bound=Plan)
Part = tuple[str, Callable[[P, Path, Path], dict[str, Value]]]  # what it measures, in words; and how

PARTS: dict[str, Part[Plan]] = {
    "dram": ("put and get through a daemon, and memcpy", dram.measure),
    "lookup": ("lookups of 2048 blocks", lookup.measure),
    "disk": ("the NVMe tier, and O_DIRECT", disk.measure),
    "promote": ("NVMe to DRAM through a daemon, and O_DIRECT", promote.measure),
    "region": ("packs in a bucket, and obstore alone", packs.measure),
}


def run(
    plan: P, directory: Path, parts: Mapping[str, Part[P]], say: Callable[[str], None]
) -> dict[str, Value]:
    """Measure these parts with files under `directory`. Raises DaemonError, KvstoreError, TierError, OSError."""
    # Where a daemon would put its arena, with room for a second one of our own.
    arena_directory = choose_arena_path(None, "auto", 3 * plan.arena_bytes, "bench").parent
    started_s = time.monotonic()
    values: dict[str, Value] = {}
    # A short name: the directory holds a socket.
    with scratch_directory("kvb-", directory) as scratch:
        facts = machine.facts(scratch, arena_directory)
        others = machine.Others()
        for name, (summary, measure) in parts.items():
            say(f"{name}: {summary} …")
            home = scratch / name
            home.mkdir()
            part_s = time.monotonic()
            values |= measure(plan, home, arena_directory)
            shutil.rmtree(home)
            say(f"{name}: {time.monotonic() - part_s:.1f} s")
        values["other_cpu_percent"] = others.percent()
    facts["directory"] = str(directory)
    values["run_s"] = round(time.monotonic() - started_s, 1)
    return values | facts
