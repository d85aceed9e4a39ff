"""Asking the buckets of regions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.tools.cli import FAILED, OK, UNREACHABLE

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from tiers.bucket.objects import Objects

T = TypeVar("T")


def asked(work: Callable[[], Awaitable[T]]) -> T:
    """Run something that talks to buckets."""

    async def answer() -> T:
        return await work()

    return asyncio.run(answer())


def code_of(error: Exception) -> int:
    """The exit code for what a bucket or its content does wrong."""
    from tiers.errors import ObjectUnavailable

    return UNREACHABLE if isinstance(error, ObjectUnavailable) else FAILED


def code_said(document: Mapping[str, Any], is_well: bool) -> int:
    """The exit code that fits a document about regions, of here or of another node. Its `away`: those of which a bucket does not answer."""
    if document.get("away"):
        return UNREACHABLE
    return OK if is_well else FAILED


async def opened(deployment: Deployment, region: str) -> Objects:
    """The bucket of a region, which is that region's. Raises RegionError, ObjectError."""
    from replication.formats.region import open_region

    objects = deployment.regions[region].open()
    await open_region(objects, deployment.deployment, region)
    return objects


def in_each(
    deployment: Deployment, regions: Iterable[str], work: Callable[[Objects], Awaitable[str]]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The bucket of each region opened, and something done with it: what to say of each, and the exit code that this asks for."""
    from replication.errors import ReplicationError
    from tiers.errors import TierError
    from tiers.together import together

    async def one(name: str) -> tuple[str, str, int]:
        try:
            return name, await work(await opened(deployment, name)), OK
        except (ReplicationError, TierError) as error:
            return name, str(error), code_of(error)

    states = asked(lambda: together(map(one, regions)))
    rows = [{"region": name, "state": state} for name, state, _ in states]
    return rows, {name: code for name, _, code in states}


def away_of(codes: Mapping[str, int]) -> list[str]:
    """Regions whose bucket does not answer."""
    return sorted(name for name, code in codes.items() if code == UNREACHABLE)
