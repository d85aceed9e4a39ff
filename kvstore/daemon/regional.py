"""The region of a daemon: its bucket as a level, and what is persisted there, as the configuration says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from kvstore.constants import OBJECT_BATCH_RECORDS, OBJECT_JOBS_MAX
from kvstore.daemon.config import Config, Durable
from kvstore.daemon.data_dir import DataDir
from kvstore.daemon.regions_file import load_regions
from kvstore.durable.demand import Demand
from kvstore.durable.level import ObjectLevel
from kvstore.durable.persister import Persisting
from kvstore.durable.worth import Cost, Prices, Seen, Worth
from kvstore.movement.shared import SharedLimits
from replication.region_node import RegionNode
from replication.tombstones import Tombstone


def object_level(
    config: Config, data_dir: DataDir, reply: Callable[[Callable[[], None]], object]
) -> ObjectLevel | None:
    """The level of the region's bucket; None without one. reply: runs a call on the engine's thread.

    Raises RegionsFileError.
    """
    if not config.regions_file:
        return None
    deployment = load_regions(Path(config.regions_file))
    place = deployment.place(config.region, "region")

    async def join(erased: Callable[[Tombstone], None]) -> RegionNode:
        node = await RegionNode.join(
            place.open(),
            deployment.deployment,
            config.region,
            data_dir.catalogue_path,
            data_dir.instance,
            random.Random(),
            time.time,
            deployment.clock_skew_s,
            erased,
        )
        node.codec = "" if config.durable.compression == "off" else config.durable.compression
        return node

    limits = SharedLimits(OBJECT_JOBS_MAX, OBJECT_BATCH_RECORDS, place.stall_s)
    return ObjectLevel(join, reply, limits)


def persisting(config: Config, level: ObjectLevel | None) -> Persisting | None:
    """What is persisted, None for nothing."""
    durable = config.durable
    if level is None or durable.rule == "off":
        return None
    return Persisting(
        level, Demand(), _rule(durable, config.report.gpu_hour_price), durable.bytes_per_s, durable.pack_bytes
    )


def _rule(durable: Durable, gpu_hour_price: float) -> Worth:
    if durable.rule == "seen":
        return Seen(durable.seen_times, durable.seen_within_s, durable.keep_s)
    prices = Prices(
        gpu_hour_price,
        durable.storage_gb_month_price,
        durable.put_million_price,
        durable.copy_gb_price,
        durable.found_nowhere_share,
    )
    return Cost(prices, durable.half_life_s, durable.pack_bytes)
