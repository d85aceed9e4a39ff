"""Asking the buckets of regions: where one is, opening it, and the exit code for what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvstore.tools.cli import FAILED, UNREACHABLE, USAGE, CliError

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment, Place
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


def place_of(deployment: Deployment, region: str, asked_by: str) -> Place:
    """Where a region of a deployment is. Raises CliError."""
    from kvstore.daemon.config.regions_file import RegionsFileError

    try:
        return deployment.place(region, asked_by)
    except RegionsFileError as error:
        raise CliError(*error.problems, exit_code=USAGE) from error


async def opened(deployment: Deployment, region: str) -> Objects:
    """The bucket of a region, which is that region's. Raises RegionError, ObjectError."""
    from replication.formats.region import open_region

    objects = deployment.regions[region].open()
    await open_region(objects, deployment.deployment, region)
    return objects
