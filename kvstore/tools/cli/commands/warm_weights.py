"""What `kvstore warm REGION --weights NAME` will take: which revisions are there, and what mirrors copy first."""

from __future__ import annotations

from kvstore.daemon.config.config import Durable
from kvstore.daemon.config.regions_file import Deployment
from kvstore.tools.cli.buckets import opened
from kvstore.tools.cli.commands.warm_plan import NothingNamed, Plan, alive_in
from replication.errors import Damaged, ReplicationError
from replication.formats.manifests import Manifest, read_manifest
from replication.formats.nodes import read_nodes
from replication.formats.orders import Order
from replication.formats.rules import sources_for
from replication.mirror.ordered_models import newest_revision, ordered_weights_rule
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing, TierError

_GB = 1e9


async def plan_weights(deployment: Deployment, region: str, order: Order, prices: Durable) -> Plan:
    """Changes nothing anywhere. order: as of `Planner`. Raises NothingNamed, other ReplicationError, TierError."""
    plan, home = Plan(), await opened(deployment, region)
    plan.daemons = alive_in(await read_nodes(home), order.made_s)
    for name in order.weights:
        here = await _found(home, name)
        manifest = await _brought(deployment, region, order, name, here, plan) or here
        if manifest is None:
            raise NothingNamed(f"region {region}: no model {name} is there, and none is to be copied there")
        plan.preload_bytes += manifest.size_bytes
        plan.preload_packs += 1
    plan.durable_bytes = plan.preload_bytes
    plan.copy_s = None if plan.copy_bytes else 0.0
    plan.copy_price = plan.copy_bytes / _GB * prices.copy_gb_price
    plan.storage_month_price = plan.copy_bytes / _GB * prices.storage_gb_month_price
    return plan


async def _brought(
    deployment: Deployment, region: str, order: Order, name: str, here: Manifest | None, plan: Plan
) -> Manifest | None:
    """What a mirror copies for it; None where nothing is to be copied."""
    rules = deployment.copy_rules()
    for source in sources_for(rules, region, deployment.regions):
        if ordered_weights_rule(rules, source, region, name.partition("@")[0], order) is None:
            continue
        try:
            there = await _found(deployment.regions[source].open(), name)
        except (ReplicationError, TierError) as error:
            plan.notes.append(f"{source}: what is copied from there is not in this plan: {error}")
            continue
        if there is not None and (here is None or here.name != there.name):
            plan.copy_packs += 1
            plan.copy_bytes += sum(chunk.size_bytes for chunk in there.chunks)
            return there
    return None


async def _found(objects: Objects, name: str) -> Manifest | None:
    model, _, revision = name.partition("@")
    revision = revision or await newest_revision(objects, model)
    if not revision:
        return None
    try:
        return await read_manifest(objects, model, revision)
    except (ObjectMissing, Damaged):
        return None
