"""The region of a daemon: buckets as levels, its own first, and what is persisted there, as the configuration says.

Imported only where there is one: it brings all of regions with it, a quarter of what a daemon imports.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.commands.erased_file import ErasedFile
from kvstore.daemon.config.config import Config
from kvstore.daemon.config.regions_file import Deployment, Place, load_regions
from kvstore.daemon.config.reloading import rule_of
from kvstore.daemon.data_dir import DataDir
from kvstore.durable.demand import Demand
from kvstore.durable.level import ObjectLevel
from kvstore.durable.persister import Persisting
from kvstore.durable.region_level import RegionLevel
from kvstore.durable.warmer import Warmer
from kvstore.durable.warming import OrderModel, Warming
from kvstore.engine.engine import Engine
from kvstore.movement.shared import SharedLimits
from replication.erasure.erased import Erased
from replication.formats.nodes import Condition, NodeErased
from replication.formats.rules import sources_for
from replication.formats.tombstones import Tombstone
from replication.problems import Problem
from replication.region.read_through import ReadThrough
from replication.region.region_node import RegionNode
from replication.store_clock import StoreClock
from replication.watched import Watched

OBJECT_JOBS_MAX, OBJECT_BATCH_RECORDS = 64, 64  # loads from the bucket under way, and records of each

Reply = Callable[[Callable[[], None]], object]


class Levels(NamedTuple):
    """deployment: the file of regions. home: our own region's bucket. far: those of other regions by name, in the order in which they are asked."""

    deployment: Deployment
    home: ObjectLevel
    far: Mapping[str, RegionLevel[ReadThrough]]

    def status(self) -> dict[str, Any]:
        """The fields are documented in docs/cli.md."""
        far = [{"name": name, **level.status()} for name, level in self.far.items()]
        return {**self.home.status(), "read_through": far}

    def small_status(self, name: str) -> dict[str, Any]:
        """What a Live answer has of `status`: plain figures, of our own region (with this name) and of those that are read through."""
        status = self.status()
        far: Any = status["read_through"]
        return {"name": name, **_plain(status), "read_through": [_plain(one) for one in far]}

    def wrong(self) -> list[Problem]:
        """What is wrong with any of them now."""
        return [
            problem
            for problems in (self.home.wrong(), *(level.wrong() for level in self.far.values()))
            for problem in problems
        ]

    def persisting(self, config: Config) -> Persisting | None:
        """What is persisted in our own region, None for nothing."""
        durable = config.durable
        if durable.rule == "off":
            return None
        return Persisting(
            self.home,
            Demand(),
            rule_of(durable, config.report.gpu_hour_price),
            durable.bytes_per_s,
            durable.pack_bytes,
            self.home.now_s,
        )

    def join(
        self,
        config: Config,
        data_dir: DataDir,
        engine: Engine,
        reply: Reply,
        is_new: bool,
        order: OrderModel,
        condition: Callable[[], Condition],
        file: ErasedFile,
    ) -> Warmer:
        """Have these levels of an engine join their regions. Returns what brings in what is ordered for our own. is_new: DRAM holds
        nothing of an earlier daemon. order: has a model preloaded, called where models.orders is on. condition: how this daemon is.
        file: where it is put down what is erased."""
        deployment, tombstones = self.deployment, Erased(known=file.known.values())
        source = next(source for source in engine.loader.shared if source.level is self.home)
        traffic = engine.persister.asks.traffic if engine.persister is not None else None
        warmer = Warmer(engine.blocks, engine.loader, engine.register, source, traffic)

        def erased(tombstones: Sequence[Tombstone]) -> None:
            clock = self.home.clock
            file.add(tombstones, clock() if isinstance(clock, StoreClock) and clock.is_known else 0.0)
            for tombstone in tombstones:
                reply(partial(engine.erasing.erase, tombstone))

        def how_far(tombstones: Sequence[Tombstone]) -> list[NodeErased]:
            if file.problem:
                return []  # a start might not know of them: who waits for us waits on
            found = zip(tombstones, map(engine.erasing.left, tombstones), strict=True)
            return [NodeErased(one.id, one.serial, *left) for one, left in found if left is not None]

        async def join_home() -> RegionNode:
            node = await RegionNode.join(
                Watched(deployment.regions[config.region].open(), config.region, self.home.problems),
                deployment.deployment,
                config.region,
                data_dir.catalogue_path,
                data_dir.instance,
                random.Random(),
                time.time,
                deployment.clock_skew_s,
                erased,
                tombstones,
            )
            node.sources = sources_for(deployment.copy_rules(), config.region, deployment.regions)
            node.codec = "" if config.durable.compression == "off" else config.durable.compression
            return node

        async def follow(name: str) -> ReadThrough:
            return await ReadThrough.follow(
                Watched(deployment.regions[name].open(), name, self.far[name].problems),
                deployment.deployment,
                name,
                data_dir.path / "read_through" / name / "catalogue",
                tombstones,
                random.Random(),
                time.time,
                deployment.clock_skew_s,
            )

        ordered = order if config.models.orders == "on" else None
        self.home.start(
            join_home,
            lambda node: Warming(node, warmer, reply, node.clock, is_new, ordered, condition, how_far).run(),
        )
        for name, level in self.far.items():
            level.start(partial(follow, name))
        return warmer

    def close(self) -> bool:
        """Let go of all buckets; False if something hangs."""
        return all([self.home.close(), *(level.close() for level in self.far.values())])


def _plain(status: Mapping[str, object]) -> dict[str, object]:
    return {
        field: value
        for field, value in status.items()
        if value is None or isinstance(value, str | int | float)
    }


def require_regions(config: Config) -> None:
    """What can never work with this file of regions, before anything else is opened. Raises RegionsFileError."""
    path = Path(config.regions_file)
    deployment = load_regions(path)
    place = deployment.place(config.region, "region")
    deployment.require_openable(path, (config.region, *place.read_through))


def region_levels(config: Config, reply: Reply) -> Levels:
    """The levels of buckets, to be started with `Levels.join`. reply: runs a call on the engine's thread. Raises RegionsFileError."""
    deployment = load_regions(Path(config.regions_file))
    place = deployment.place(config.region, "region")
    far: dict[str, RegionLevel[ReadThrough]] = {
        name: RegionLevel(f"read-through {name}", reply, _limits(deployment.regions[name]), name, is_far=True)
        for name in place.read_through
    }
    return Levels(deployment, ObjectLevel(reply, _limits(place), config.region), far)


def _limits(place: Place) -> SharedLimits:
    return SharedLimits(OBJECT_JOBS_MAX, OBJECT_BATCH_RECORDS, place.stall_s)
