"""Asking the buckets of regions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
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
