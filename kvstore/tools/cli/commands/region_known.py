"""What regions, and the daemon of this node, know of what somebody wants erased."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NamedTuple

from kvstore.tools.cli import CliError
from kvstore.tools.cli.prefixes import ask
from tiers.scratch import scratch_directory

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from replication.catalogue.catalogue import Catalogue
    from replication.formats.tombstones import Tombstone
    from tiers.bucket.objects import Objects


class Known(NamedTuple):
    """is_known: something of it is, or was, here. tenants: whose else. packs, bytes: in the bucket, all of them would go. unread: nodes
    whose tenants nobody can tell, a line each."""

    is_known: bool
    tenants: frozenset[str]
    packs: int = 0
    bytes: int = 0
    unread: tuple[str, ...] = ()


def known_here(args: argparse.Namespace, tombstone: Tombstone) -> Known:
    """By the daemon of this node; nothing where none answers."""
    try:
        spaces = ask(args, args.called, lambda client: client.list_namespaces())
    except CliError:
        return Known(False, frozenset())
    digests = {digest.hex() for digest in tombstone.namespaces}
    named = [
        space
        for space in spaces
        if (not digests or space["digest"] in digests)
        and (not tombstone.tenant or space["fields"].get("tenant", "") == tombstone.tenant)
    ]
    return Known(bool(named), frozenset(space["fields"].get("tenant", "") for space in spaces))


async def known_in(deployment: Deployment, region: str, tombstone: Tombstone) -> Known:
    """By all that a region has announced, and what its nodes say of their traffic. Raises ReplicationError, TierError."""
    from kvstore.tools.cli.commands.region_verify import followed
    from replication.formats.nodes import read_nodes

    with scratch_directory("kvstore-erase-") as directory:
        there = await followed(deployment, region, directory, lambda finding: None)
        try:
            specs = [spec for spec, _ in there.catalogue.namespaces()]
            packs, size = _named(there.catalogue, there.objects, tombstone)
            erased = any(one.id == tombstone.id for one in there.erasure.tombstones)
            nodes = await read_nodes(there.objects)
            asked = {row.tenant for node in nodes.read for row in node.asked}
        finally:
            there.close()
    tenants = frozenset({*(spec.fields.get("tenant", "") for spec in specs), *asked})
    is_known = (
        erased or any(map(tombstone.names, specs)) or (bool(tombstone.tenant) and tombstone.tenant in asked)
    )
    unread = tuple(f"{region}: node {node.writer} cannot be read: {node.reason}" for node in nodes.unread)
    return Known(is_known, tenants, packs, size, unread)


def _named(catalogue: Catalogue, objects: Objects, tombstone: Tombstone) -> tuple[int, int]:
    """How many packs it names, and their bytes, as nodes will find them."""
    from replication.erasure.erased import Erased
    from replication.erasure.erasure import Erasure

    known = Erased(known=[tombstone])  # as if it were in force
    erasure = Erasure(objects, catalogue, known.over_s, known=known)
    found: dict[bytes, int] = {}
    before = -1
    while before < len(found):  # what hangs on a pack may be listed before it
        before = len(found)
        for chunk in catalogue.chunks():
            found |= {one.pack.id: one.pack.size_bytes for one in chunk if erasure.covers(one)}
    return len(found), sum(found.values())
