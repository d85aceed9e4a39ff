"""What a warm-up of a region will take and bring, from what lies in its bucket, and in those it copies from.

    catalogue of the region ◀── what its mirrors will copy ── catalogues of the sources    read into a temporary directory
              │ selection, as daemons and mirrors make it, too
              ▼
    packs, bytes │ time, at rates that were measured or set │ money, by the prices of [durable] │ hit rate, by traffic that was told

What nobody has measured is not guessed: None.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvstore.daemon.config.config import Durable
from kvstore.daemon.config.regions_file import Deployment
from kvstore.tools.cli.buckets import opened
from kvstore.tools.cli.commands.region_verify import followed
from replication.audit.orphans import Finding
from replication.catalogue.catalogue import Catalogue
from replication.catalogue.selection import Chosen, choose
from replication.constants import CATALOGUE_CHUNK_PACKS, CLOCK_SKEW_S, HEARTBEAT_LATE_S, NODE_INTERVAL_S
from replication.errors import ReplicationError
from replication.formats.announced import Announced
from replication.formats.mirror_state import read_mirrors
from replication.formats.nodes import Node, Nodes, Unread, durable_share, read_nodes
from replication.formats.orders import Order, read_all_progress, read_orders
from replication.formats.rules import Rule, sources_for
from replication.mirror.ordered_copies import ordered_rule
from replication.mirror.verify import Outside
from tiers.bucket.objects import Objects
from tiers.errors import TierError
from tiers.scratch import scratch_directory

_GB = 1e9
_ALIVE_S = 2.5 * NODE_INTERVAL_S
KINDS_TOLD = 8


@dataclass
class Plan:
    """copy_…: by mirrors, once. preload_…: what each daemon is to hold, what it holds already included. daemons: ids of those that told
    of themselves lately. …_s, …_price, hit_rate: None where nobody knows. hit_rate: of tokens asked for, from any tier;
    preloaded_hit_rate: without going to the bucket, at least. traffic_of: the regions whose traffic says so. notes: for people."""

    copy_packs: int = 0
    copy_bytes: int = 0
    preload_packs: int = 0
    preload_blocks: int = 0
    preload_bytes: int = 0
    durable_bytes: int = 0
    daemons: list[str] = field(default_factory=list)
    copy_s: float | None = None
    preload_s: float | None = None
    copy_price: float = 0.0
    put_price: float = 0.0
    storage_month_price: float = 0.0
    hit_rate: float | None = None
    preloaded_hit_rate: float | None = None
    traffic_of: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class NothingNamed(ReplicationError):
    """Nothing that is durable has such a name."""


class NoTier(ReplicationError):
    """No daemon of the region has the tier."""


class Planner:
    """Of one region and one order."""

    def __init__(self, deployment: Deployment, region: str, order: Order, prices: Durable) -> None:
        """order: made now, by the clock of the region's store."""
        self._deployment = deployment
        self._region = region
        self._order = order
        self._prices = prices
        self._now_s = order.made_s
        self._plan = Plan()
        self._share: float | None = None  # of what is durable, in tokens, that is preloaded

    async def plan(self) -> Plan:
        """Changes nothing anywhere. Raises NothingNamed, NoTier, other ReplicationError, TierError."""
        objects = await opened(self._deployment, self._region)
        nodes = await read_nodes(objects)
        alive = [node for node in nodes.read if node.at_s > self._now_s - _ALIVE_S]
        self._plan.daemons = alive_in(nodes, self._now_s)
        self._plan.notes += [
            f"{self._region}: node {node.writer} cannot be read: {node.reason}" for node in nodes.unread
        ]
        holds_bytes = [node.holds_bytes(self._order.to) for node in alive]
        if holds_bytes and not any(holds_bytes):
            raise NoTier(f"{objects.where}: no daemon of region {self._region} has the tier {self._order.to}")
        with scratch_directory("kvstore-warm-") as directory:
            home = await self._followed(self._region, directory)
            try:
                sources = await self._copies(objects, home.catalogue, directory)
                least_bytes = min(filter(None, holds_bytes), default=0)
                await self._preload(home.catalogue, least_bytes)
                await self._expect(home.catalogue, nodes.read, sources)
            finally:
                home.close()
        rates = [node.load_bytes_per_s for node in alive if node.load_bytes_per_s]
        if rates:
            self._plan.preload_s = self._plan.preload_bytes / statistics.median(rates)
        return self._plan

    async def _followed(self, region: str, directory: Path) -> Outside:
        """All that a region has announced, to be closed. Raises RegionError, ObjectError."""

        def note(gap: Finding) -> None:
            self._plan.notes.append(f"{region}: a part of its feed cannot be read ({gap.reason})")

        return await followed(self._deployment, region, directory, note)

    # -- copies --

    async def _copies(self, objects: Objects, home: Catalogue, directory: Path) -> list[str]:
        """Learn at home what mirrors will bring. Returns the sources that could be read."""
        deployment, read = self._deployment, []
        rules = deployment.copy_rules()
        sources = sources_for(rules, self._region, deployment.regions)
        states = {state.source: state for state in await read_mirrors(objects, sources)}
        by_rate: dict[Rule, int] = {}
        for source in sources:
            if self._now_s - states[source].at_s > HEARTBEAT_LATE_S + CLOCK_SKEW_S:
                self._plan.notes.append(f"{source}: its mirror does not run: nothing is copied from there")
                continue
            try:
                there = await self._followed(source, directory)
                try:
                    await self._add_copies(home, there.catalogue, source, rules, by_rate)
                finally:
                    there.close()
                read.append(source)
            except (ReplicationError, TierError) as error:
                self._plan.notes.append(f"{source}: what is copied from there is not in this plan: {error}")
        await self._price(objects, by_rate)
        return read

    async def _add_copies(
        self, home: Catalogue, there: Catalogue, source: str, rules: Sequence[Rule], by_rate: dict[Rule, int]
    ) -> None:
        def rule_of(announced: Announced) -> Rule | None:
            return ordered_rule(self._order, rules, source, self._region, announced.pack.header.spec)

        chosen = await choose(
            there, lambda one: self._is_alive(one) and rule_of(one) is not None, self._order.budget_bytes
        )
        for start in range(0, len(chosen), CATALOGUE_CHUNK_PACKS):
            ids = [one.pack_id for one in chosen[start : start + CATALOGUE_CHUNK_PACKS]]
            pairs = zip(there.packs(ids), home.packs(ids), strict=True)
            lacking = [one for one, known in pairs if one is not None and known is None and not one.origin]
            for announced in lacking:
                size_bytes = announced.pack.size_bytes
                if (rule := rule_of(announced)) is not None:
                    by_rate[rule] = by_rate.get(rule, 0) + size_bytes
                self._plan.copy_packs += 1
                self._plan.copy_bytes += size_bytes
            home.add_packs([msgspec.structs.replace(announced, origin=source) for announced in lacking])
            await asyncio.sleep(0)

    async def _price(self, objects: Objects, by_rate: dict[Rule, int]) -> None:
        plan, prices = self._plan, self._prices
        plan.copy_price = plan.copy_bytes / _GB * prices.copy_gb_price
        plan.put_price = plan.copy_packs / 1e6 * prices.put_million_price
        plan.storage_month_price = plan.copy_bytes / _GB * prices.storage_gb_month_price
        if not by_rate:
            plan.copy_s = 0.0
        elif all(rule.bytes_per_s for rule in by_rate):
            plan.copy_s = max(size_bytes / rule.bytes_per_s for rule, size_bytes in by_rate.items())
        else:
            orders = (await read_orders(objects, {})).by_key.values()
            told = [one for order in orders for one in await read_all_progress(objects, order)]
            rates = [one.bytes_per_s for one in told if one.is_mirror and one.bytes_per_s]
            plan.copy_s = plan.copy_bytes / max(rates) if rates else None

    # -- preloading --

    def _is_alive(self, announced: Announced) -> bool:
        return not 0 < announced.kept_until_s <= self._now_s

    async def _preload(self, home: Catalogue, least_bytes: int) -> None:
        """least_bytes: of the smallest tier, 0 where that is not known."""
        order, plan = self._order, self._plan

        def wants(announced: Announced) -> bool:
            return self._is_alive(announced) and order.names(announced.pack.header.spec)

        budgets = [budget for budget in (order.budget_bytes, least_bytes) if budget]
        everything = await choose(home, wants)
        if not everything:
            raise NothingNamed(self._nothing(home))
        chosen = await choose(home, wants, min(budgets)) if budgets else everything
        plan.preload_packs = len(chosen)
        plan.preload_bytes = sum(one.size_bytes for one in chosen)
        plan.durable_bytes = sum(one.size_bytes for one in everything)
        plan.preload_blocks, tokens = await _size(home, chosen)
        _, all_tokens = await _size(home, everything)
        self._share = tokens / all_tokens if all_tokens else None

    def _nothing(self, home: Catalogue) -> str:
        fields = [spec.fields for spec, _ in home.namespaces()]
        models = sorted({named.get("model", "") or "(none)" for named in fields})
        tenants = sorted({named.get("tenant", "") or "(none)" for named in fields})
        if not fields:
            return f"region {self._region}: nothing is durable there, and nothing is to be copied"
        return (
            f"region {self._region}: nothing that is durable is of this model and tenant: "
            f"models are {_few(models)}, tenants {_few(tenants)}"
        )

    async def _expect(self, home: Catalogue, nodes: Sequence[Node], sources: Sequence[str]) -> None:
        """The hit rate, by the traffic of the region; where it had none, by that of its sources."""
        here = {
            (spec.fields.get("model", ""), spec.fields.get("tenant", "")) for spec, _ in home.namespaces()
        }
        plan, names = self._plan, self._order.names_of

        def share(told: Sequence[Node]) -> float | None:
            return durable_share(told, names, lambda *kind: kind in here, self._now_s)

        plan.hit_rate, plan.traffic_of = share(nodes), [self._region]
        if plan.hit_rate is None:
            told = [await read_nodes(self._deployment.regions[source].open()) for source in sources]
            plan.hit_rate, plan.traffic_of = share([node for one in told for node in one.read]), list(sources)
        if plan.hit_rate is None:
            plan.traffic_of = []
        elif self._share is not None:
            plan.preloaded_hit_rate = plan.hit_rate * self._share


def alive_in(nodes: Nodes, now_s: float) -> list[str]:
    """The daemons that told of themselves lately, whether or not that can be read."""
    told: list[Node | Unread] = [*nodes.read, *nodes.unread]
    return [node.writer for node in told if node.at_s > now_s - _ALIVE_S]


async def _size(catalogue: Catalogue, chosen: Sequence[Chosen]) -> tuple[int, int]:
    """Blocks and tokens."""
    blocks = tokens = 0
    for start in range(0, len(chosen), CATALOGUE_CHUNK_PACKS):
        ids = [one.pack_id for one in chosen[start : start + CATALOGUE_CHUNK_PACKS]]
        for announced in catalogue.packs(ids):
            if announced is not None:
                blocks += announced.blocks
                tokens += announced.blocks * announced.pack.header.spec.block_tokens
        await asyncio.sleep(0)
    return blocks, tokens


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - KINDS_TOLD} more" if len(names) > KINDS_TOLD else ""
    return ", ".join(names[:KINDS_TOLD]) + more
