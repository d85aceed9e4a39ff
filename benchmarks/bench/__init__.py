"""What developers watch of the node and of regions, besides the parts of `kvstore bench`: `python -m benchmarks`.

policy ─┬─ timed     the policy's calls by themselves      ranks     eight ranks through the engine
        ├─ holds     the slowest turn of the event loop    restart   starts over a million rows
        └─ crowded   the same of a node with everything    region ── mirror, a feed read, a catalogue asked
"""

from __future__ import annotations

from benchmarks.bench import policy, ranks, region, restart
from benchmarks.bench.plan import Plan
from kvstore.tools.bench import runner

PARTS: dict[str, runner.Part[Plan]] = {
    **runner.PARTS,
    "policy": ("what deciding costs, at a million blocks and at ten", policy.measure),
    "ranks": ("eight ranks through the engine", ranks.measure),
    "restart": ("starts over a million rows", restart.measure),
    "region": ("packs in a bucket and mirrored, and obstore alone; catching up", region.measure),
}
