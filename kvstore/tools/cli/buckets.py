"""Asking the buckets of regions: opening one, and the exit code for what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvstore.tools.cli import FAILED, UNREACHABLE, CliError

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from tiers.bucket.objects import Objects

T = TypeVar("T")


def asked(work: Callable[[], Awaitable[T]]) -> T:
    """Run something that talks to buckets. Raises CliError for what a bucket or its content does wrong."""
    from replication.errors import ReplicationError
    from tiers.errors import TierError

    async def answer() -> T:
        return await work()

    try:
        return asyncio.run(answer())
    except (ReplicationError, TierError) as error:
        raise CliError(str(error), exit_code=code_of(error)) from error


def code_of(error: Exception) -> int:
    """The exit code for what a bucket or its content does wrong."""
    from tiers.errors import ObjectUnavailable

    return UNREACHABLE if isinstance(error, ObjectUnavailable) else FAILED


async def opened(deployment: Deployment, region: str) -> Objects:
    """The bucket of a region, which is that region's. Raises RegionError, ObjectError."""
    from replication.formats.region import open_region

    objects = deployment.regions[region].open()
    await open_region(objects, deployment.deployment, region)
    return objects
