"""The life of `kvstore mirror`: one process that copies into its region from all regions that a rule names.

    data dir (lock, instance) ─▶ join the bucket at home ─▶ "ready …" ─▶ a mirror for each source, until SIGTERM

    <data dir>/catalogue                    what is durable at home
    <data dir>/mirror/<source>/catalogue    what is durable in a source

Wrong settings and a bucket at home that is not ours end it with one line. A bucket at home that does not answer is tried
again; a source that does not answer, or refuses, is told in its state and stops no other one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable
from functools import partial

from kvstore.constants import JOIN_PAUSE_S
from kvstore.daemon.config.regions_file import Deployment, Place
from kvstore.daemon.data_dir import DataDir
from kvstore.daemon.process import Signals
from kvstore.daemon.systemd import Notifier
from kvstore.errors import StartError
from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueBusy, RegionError, ReplicationError
from replication.formats.region import open_region
from replication.formats.rules import Rule, sources_for
from replication.mirror.mirror import Joined, Mirror, elsewhere
from replication.region.region_node import RegionNode
from tiers.bucket.objects import Objects
from tiers.constants import OBJECT_TIMEOUT_S
from tiers.errors import ObjectRefused, TierError

log = logging.getLogger("kvstore.mirror")

_WATCHDOG_SHARE = 3  # pings in the time after which systemd takes us for hung


class Mirroring:
    """Of one region, whose data dir is held."""

    def __init__(
        self,
        deployment: Deployment,
        region: str,
        data_dir: DataDir,
        ready: Callable[[str], None],
        notifier: Notifier | None = None,
        signals: Signals | None = None,
    ) -> None:
        """ready: called with a line when the region is joined. Raises StartError where there is nothing to copy from."""
        self._deployment = deployment
        self._region = region
        self._data_dir = data_dir
        self._ready = ready
        self._notifier = notifier or Notifier()
        self._signals = signals or Signals()
        self._rules = deployment.copy_rules()
        self._sources = sources_for(self._rules, region, deployment.regions)
        if not self._sources:
            raise StartError(f"region {region}: no rule of the file of regions copies anything to it")

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartError where the bucket at home refuses."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._live())
        self._signals.attach(dict.fromkeys((signal.SIGTERM, signal.SIGINT), work.cancel))
        try:
            await work
        except asyncio.CancelledError:
            log.info("stopped")

    async def _live(self) -> None:
        objects, node = await self._joined()
        try:
            sources = ",".join(self._sources)
            self._ready(f"ready region={self._region} sources={sources} bucket={node.where}")
            self._notifier.send("READY=1")
            paces: dict[Rule, float] = {}
            mirrors = [
                Mirror(
                    node,
                    objects,
                    name,
                    partial(self._join_source, name),
                    self._rules,
                    paces,
                    time.time,
                    random.Random(),
                )
                for name in self._sources
            ]
            if node.auditing is not None:
                node.auditing.elsewhere = elsewhere(mirrors)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(node.run())
                tasks.create_task(self._ping())
                for mirror in mirrors:
                    tasks.create_task(mirror.run())
        finally:
            self._notifier.send("STOPPING=1")
            await node.stop()
            node.close()

    async def _joined(self) -> tuple[Objects, RegionNode]:
        """The bucket at home, and our part in it."""
        deployment = self._deployment
        place = deployment.place(self._region, "region")
        said = ""
        while True:
            try:
                objects = _opened(place)
                node = await RegionNode.join(
                    objects,
                    deployment.deployment,
                    self._region,
                    self._data_dir.catalogue_path,
                    self._data_dir.instance,
                    random.Random(),
                    time.time,
                    deployment.clock_skew_s,
                    is_mirror=True,
                )
                return objects, node
            except (RegionError, ObjectRefused, CatalogueBusy) as error:
                raise StartError(str(error)) from error
            except (TierError, ReplicationError) as error:
                if str(error) != said:
                    log.warning("not joined yet: %s", error)
                said = str(error)
            await asyncio.sleep(JOIN_PAUSE_S)

    async def _join_source(self, name: str) -> Joined:
        """Raises ReplicationError, TierError."""
        objects = _opened(self._deployment.regions[name])
        marker = await open_region(objects, self._deployment.deployment, name)
        path = self._data_dir.path / "mirror" / name / "catalogue"
        return Joined(marker.identity, objects, Catalogue.open(path, marker.identity))

    async def _ping(self) -> None:
        """Tell systemd that this loop turns."""
        watchdog_s = self._notifier.watchdog_s
        while watchdog_s:
            self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(watchdog_s / _WATCHDOG_SHARE)


def _opened(place: Place) -> Objects:
    """A bucket, for whole packs over long ways: nobody waits for one. Raises ObjectRefused."""
    return place.open(OBJECT_TIMEOUT_S)
