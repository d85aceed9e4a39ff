"""A mirror: from one place of the bucket into another, against what obstore alone puts and gets there.

    N objects put │ N objects got │ N packs of one region mirrored into another one     round by round

What is timed is a mirror as `kvstore mirror` runs it: from joining, with nothing known of either side, until all is copied,
verified and announced.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path

from kvstore.bench.packs import clear
from kvstore.bench.plan import Plan
from kvstore.bench.rounds import Rounds
from replication.announced import Announced
from replication.catalogue import Catalogue
from replication.feed import FeedWriter
from replication.mirror import Joined, Mirror
from replication.region import init_region
from replication.region_node import RegionNode
from replication.rules import Rule
from tiers.objects import Objects
from tiers.packs import Pack

DEPLOYMENT = "benchmark"
POLL_S = 0.01

Open = Callable[[str], Objects]
PutPacks = Callable[[Objects], Awaitable[Sequence[Pack]]]
Bare = Callable[[], Awaitable[tuple[float, float]]]


async def measure_mirror(
    plan: Plan, open_at: Open, put_packs: PutPacks, bare: Bare, home: Path
) -> dict[str, float]:
    """open_at: a place of the bucket. put_packs: as many as a round has. bare: seconds that obstore alone takes to put, and
    to get, as much."""
    rounds = Rounds(plan.mirror_packs * plan.region_pack_bytes)
    for number in range(plan.mirror_rounds):
        source, target = open_at(f"mirror-{number}/na"), open_at(f"mirror-{number}/eu")
        await _announce(source, await put_packs(source))
        rounds.add("slower", max(await bare()))
        rounds.add("mirror", await _mirror(plan, source, target, home / f"mirror-{number}"))
        await clear(source)
        await clear(target)
    return {"mirror_gbps": rounds.gbps("mirror"), "mirror_ratio": rounds.ratio("mirror", "slower")}


async def _announce(source: Objects, packs: Sequence[Pack]) -> None:
    await init_region(source, DEPLOYMENT, "na", time.time)
    writer = FeedWriter(source, "00000000000000aa", time.time, random.Random(1))
    await writer.open()
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
        working = asyncio.gather(node.run(), mirror.run())
        try:
            while mirror.state().copied_packs < plan.mirror_packs:
                await asyncio.sleep(POLL_S)
            return time.perf_counter() - started
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
