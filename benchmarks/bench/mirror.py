"""A mirror: from one bucket into another, against what obstore alone gets from the one and puts into the other.

    N objects got from the source │ N objects put to the target │ N packs mirrored     round by round

What is timed is a mirror as `kvstore mirror` runs it: from joining, with nothing known of either side, until all is copied,
verified and announced.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from benchmarks.bench.plan import Plan
from kvstore.tools.bench.packs import Packs, clear
from kvstore.tools.bench.rounds import Rounds
from replication.catalogue.catalogue import Catalogue
from replication.feed.feed import FeedWriter
from replication.formats.announced import Announced
from replication.formats.region import init_region
from replication.formats.rules import Rule
from replication.mirror.mirror import Joined, Mirror
from replication.region.region_node import RegionNode
from tiers.bucket.objects import Objects
from tiers.packs.packs import Pack
from tiers.together import meanwhile

DEPLOYMENT = "benchmark"
POLL_S = 0.01

Open = Callable[[str], Objects]


async def measure_mirror(
    plan: Plan, near: Packs, far: Packs, open_near: Open, open_far: Open, home: Path
) -> dict[str, float]:
    """From near to far, which may be the same bucket. open_near, open_far: a place in each."""
    rounds = Rounds(plan.mirror_packs * plan.region_pack_bytes)
    for number in range(plan.mirror_rounds):
        source, target = open_near(f"mirror-{number}/na"), open_far(f"mirror-{number}/eu")
        await _announce(source, await near.put(source, plan.mirror_packs))
        _, get_s = await near.bare(plan.mirror_packs)
        put_s, _ = await far.bare(plan.mirror_packs)
        rounds.add("slower", max(put_s, get_s))
        rounds.add("mirror", await _mirror(plan, source, target, home / f"mirror-{number}"))
        await clear(source)
        await clear(target)
    return {"mirror_gbps": rounds.gbps("mirror"), "mirror_ratio": rounds.ratio("mirror", "slower")}


async def _announce(source: Objects, packs: Sequence[Pack]) -> None:
    await init_region(source, DEPLOYMENT, "na", time.time)
    writer = FeedWriter(source, "00000000000000aa", time.time, random.Random(1))
    await writer.announce([Announced(pack) for pack in packs])


async def _mirror(plan: Plan, source: Objects, target: Objects, home: Path) -> float:
    """Seconds until all packs are copied. home: what the names of its catalogues begin with."""
    marker = await init_region(target, DEPLOYMENT, "eu", time.time)
    started = time.perf_counter()
    chance = random.Random(2)
    node = await RegionNode.join(
        target, DEPLOYMENT, "eu", home.with_name(f"{home.name}-eu"), "a mirror", chance, time.time
    )

    async def join() -> Joined:
        return Joined(
            marker.identity, source, Catalogue.open(home.with_name(f"{home.name}-na"), marker.identity)
        )

    with closing(node):
        mirror = Mirror(node, target, "na", join, [Rule()], {}, time.time, chance)
        async with meanwhile(node.run()), meanwhile(mirror.run()):
            while mirror.state().copied_packs < plan.mirror_packs:
                await asyncio.sleep(POLL_S)
            return time.perf_counter() - started
