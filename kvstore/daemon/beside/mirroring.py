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
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, NamedTuple

from kvstore.constants import JOIN_PAUSE_S
from kvstore.daemon.config.regions_file import Deployment, Place
from kvstore.daemon.data_dir import DataDir
from kvstore.daemon.process import Signals
from kvstore.daemon.systemd import Notifier
from kvstore.daemon.telling import facts_of
from kvstore.durable.region_level import NOT_JOINED, NOT_JOINED_FIX
from kvstore.errors import StartError
from kvstore.protocol import answers
from kvstore.units import format_duration, plural
from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueBusy, RegionError, ReplicationError
from replication.formats.mirror_state import IN_TIME_S, NOT_REACHED, MirrorState, judged
from replication.formats.region import open_region
from replication.formats.rules import Rule, sources_for
from replication.mirror.mirror import Joined, Mirror, elsewhere
from replication.problems import Problem, Problems
from replication.region.region_node import RegionNode
from replication.watched import Watched
from tiers.bucket.objects import Objects
from tiers.constants import OBJECT_TIMEOUT_S
from tiers.errors import ObjectRefused, TierError
from tiers.together import together

log = logging.getLogger("kvstore.mirror")

MIRROR_LOOK_S = 5.0  # between two looks at what is wrong
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
        beside: Callable[[Mirroring], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """ready: called with a line when the region is joined. beside: what goes on as long as this does, joined or not. Raises
        StartError where there is nothing to copy from."""
        self._deployment = deployment
        self._region = region
        self._data_dir = data_dir
        self._ready = ready
        self._notifier = notifier or Notifier()
        self._signals = signals or Signals()
        self._beside = beside
        self.problems = Problems()  # with buckets
        self.mirrors: list[Mirror] = []
        self._seen = Problems()  # with mirrors, as they are when somebody looks
        self._node: RegionNode | None = None
        self._begun_s = time.monotonic()
        self._rules = deployment.copy_rules()
        self._sources = sources_for(self._rules, region, deployment.regions)
        if not self._sources:
            raise StartError(f"region {region}: no rule of the file of regions copies anything to it")

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. Raises StartError where the bucket at home refuses."""
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._live())
        self._signals.attach(dict.fromkeys((signal.SIGTERM, signal.SIGINT), work.cancel))
        beside = loop.create_task(self._beside(self)) if self._beside is not None else None
        try:
            await work
        except asyncio.CancelledError:
            log.info("stopped")
        finally:
            if beside is not None:
                beside.cancel()
                await asyncio.wait([beside])

    async def _live(self) -> None:
        objects, self._node = await self._joined()
        node = self._node
        try:
            sources = ",".join(self._sources)
            self._ready(f"ready region={self._region} sources={sources} bucket={node.where}")
            self._notifier.send("READY=1")
            paces: dict[Rule, float] = {}
            self.mirrors = mirrors = [
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
            await together([node.run(), self._ping(), self._look(), *(mirror.run() for mirror in mirrors)])
        finally:
            self._notifier.send("STOPPING=1")
            await node.stop()
            node.close()

    async def _joined(self) -> tuple[Objects, RegionNode]:
        """The bucket at home, and our part in it."""
        deployment = self._deployment
        place = deployment.place(self._region, "region")
        while True:
            try:
                objects = self._opened(place, self._region)
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
                self.problems.over(self._region, NOT_JOINED)
                return objects, node
            except (RegionError, ObjectRefused, CatalogueBusy) as error:
                raise StartError(str(error)) from error
            except (TierError, ReplicationError) as error:
                self.problems.note(self._region, str(error), NOT_JOINED, NOT_JOINED_FIX)
            await asyncio.sleep(JOIN_PAUSE_S)

    async def _join_source(self, name: str) -> Joined:
        """Raises ReplicationError, TierError."""
        objects = self._opened(self._deployment.regions[name], name)
        marker = await open_region(objects, self._deployment.deployment, name)
        path = self._data_dir.path / "mirror" / name / "catalogue"
        return Joined(marker.identity, objects, Catalogue.open(path, marker.identity))

    def _opened(self, place: Place, name: str) -> Objects:
        """A bucket, for whole packs over long ways: nobody waits for one. What is in another region's is not copied. Raises ObjectRefused."""
        return Watched(place.open(OBJECT_TIMEOUT_S), name, self.problems, proves_reads=True)

    # -- for people --

    def told(self) -> list[answers.Problem]:
        """What is wrong now, as a daemon tells it."""
        found = [
            *self._seen.all(),
            *self.problems.all(),
            *(self._node.wrong() if self._node is not None else ()),
        ]
        found += [problem for mirror in self.mirrors for problem in mirror.wrong()]
        return facts_of(found, time.time())

    @property
    def _now_s(self) -> float:
        """Unix seconds by the clock of the store at home, of which states are; by our own before it is joined."""
        return time.time() if self._node is None else self._node.clock()

    def figures(self) -> Figures:
        """For metrics."""
        states = [mirror.state() for mirror in self.mirrors]
        left_bytes = [mirror.left_bytes for mirror in self.mirrors]
        uptime_s = time.monotonic() - self._begun_s
        return Figures(self._region, uptime_s, self._now_s, states, left_bytes, self.told())

    async def _look(self) -> None:
        """At the mirrors, and have it logged."""
        while True:
            self._seen.only(
                one for mirror in self.mirrors for one in _wrong_with(mirror.state(), self._now_s)
            )
            self.told()
            await asyncio.sleep(MIRROR_LOOK_S)

    async def _ping(self) -> None:
        """Tell systemd that this loop turns."""
        watchdog_s = self._notifier.watchdog_s
        while watchdog_s:
            self._notifier.send("WATCHDOG=1")
            await asyncio.sleep(watchdog_s / _WATCHDOG_SHARE)


class Figures(NamedTuple):
    """Of one process. states, left_bytes: of each source, in the same order. now_s: unix seconds."""

    region: str
    uptime_s: float
    now_s: float
    states: list[MirrorState]
    left_bytes: list[int]
    problems: list[answers.Problem]


def _wrong_with(state: MirrorState, now_s: float) -> Iterator[Problem]:
    """With one mirror."""
    word, source = judged(state, now_s), state.source
    if word == "problem" and state.problem != NOT_REACHED:
        fix = "its bucket, the credentials and the network on the way to it; it is tried again"
        yield Problem("mirror", source, f"is not followed: {state.problem}", fix)
    if state.failed:
        why = state.failures[0].reason if state.failures else "the log has more"
        text = (
            f"{plural(state.failed, 'pack')} or models could not be copied, and wait to be tried again: {why}"
        )
        yield Problem(
            "mirror",
            f"{source}, copies",
            text,
            "kvstore region status says which",
            "warning",
            count=state.failed,
        )
    age_s = state.oldest_age_now_s(now_s)
    if age_s is not None and age_s > IN_TIME_S:
        text = f"what was announced {format_duration(age_s)} ago is not here yet"
        yield Problem(
            "mirror", f"{source}, late", text, "its network, or bytes_per_s of the rules", "warning"
        )
