"""The marker of a region: what makes a bucket, a prefix of one or a directory a region of this deployment.

    <root>/region.json     {"format": 1, "deployment": "acme", "region": "eu", "made_s": …}

It is made once, by `kvstore region init`, and never changed. Who opens a region reads it first: a wrong bucket,
a bucket of another deployment, two regions under one name or a newer format end in one line, and nothing is written. A marker
that cannot be read says none of that: whoever has other things to do goes on, and looks again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from replication.constants import MARKER_BYTES_MAX, MARKER_NAME
from replication.errors import MarkerDamaged, RegionError
from replication.formats.ranges import RegionName, UnixS
from tiers.bucket.objects import Objects
from tiers.bucket.sealed_objects import SEALED_MAGIC
from tiers.errors import ObjectDamaged, ObjectError, ObjectKeyUnknown, ObjectMissing
from tiers.parsing import ParserErrors

REGION_FORMAT: Final = 1  # of everything below the root of a region

MARKER = MARKER_NAME
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_HINT = "lower-case letters, digits and '-', beginning with a letter or a digit, at most 63 characters"


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker says. made_s: unix seconds, by the clock of whoever made it."""

    format: Annotated[int, Meta(ge=1, le=REGION_FORMAT)]
    deployment: RegionName
    region: RegionName
    made_s: UnixS

    @property
    def identity(self) -> str:
        """Differs between any two regions that were ever made: a region made anew is another one."""
        return f"{self.deployment}/{self.region}/{self.made_s:.6f}"


async def init_region(objects: Objects, deployment: str, region: str, clock: Callable[[], float]) -> Region:
    """Make this place a region, or find that it is this one already. clock: unix seconds.

    Raises RegionError where it is another one, MarkerDamaged, ObjectError where the store fails.
    """
    _check_names(objects.where, deployment, region)
    try:
        return await open_region(objects, deployment, region)
    except _MarkerMissing:
        made = Region(format=REGION_FORMAT, deployment=deployment, region=region, made_s=clock())
        content = msgspec.json.encode(made)
    failure: ObjectError | None = None
    try:
        await objects.put(MARKER, content, only_new=True)
    except ObjectError as error:
        failure = error
    # Whoever else was here first has won, and an answer that was lost may have been a yes.
    try:
        return await open_region(objects, deployment, region)
    except _MarkerMissing as error:
        raise failure or error from error


async def open_region(objects: Objects, deployment: str, region: str) -> Region:
    """What the marker says, if this place is the region asked for. Changes nothing.

    Raises RegionError where it is not, MarkerDamaged where nobody can say, ObjectError where the store fails.
    """
    _check_names(objects.where, deployment, region)
    asked = f"region {region!r} of deployment {deployment!r}"
    try:
        content = bytes(await objects.get_within(MARKER, MARKER_BYTES_MAX))
    except (ObjectDamaged, ObjectKeyUnknown) as error:
        raise MarkerDamaged(f"{error}: no marker of a region, asked for was {asked}") from error
    except ObjectMissing as error:
        raise _MarkerMissing(
            f"{objects.where}: no region is there, asked for was {asked}: is it mounted, is its url right? "
            f"Only where it is new, `kvstore region init {region}` makes it one"
        ) from error
    found = _parse(content, objects.where, asked)
    if (found.deployment, found.region) != (deployment, region):
        raise RegionError(
            f"{objects.where}: is region {found.region!r} of deployment {found.deployment!r}, asked for was {asked}"
        )
    return found


async def require_place(objects: Objects) -> None:
    """That something is there: a mount that is away lists as empty. Raises ObjectError."""
    await objects.head(MARKER)


async def require_same(objects: Objects, region: Region) -> None:
    """That this place is this region still: what is away has no marker. Raises RegionError, MarkerDamaged, ObjectError."""
    found = await open_region(objects, region.deployment, region.region)
    if found.identity != region.identity:
        raise RegionError(f"{objects.where}: is another region of this name by now")


class _MarkerMissing(RegionError):
    """There is no marker."""


def _parse(content: bytes, where: str, asked: str) -> Region:
    if content.startswith(SEALED_MAGIC):
        raise MarkerDamaged(
            f"{where}: its {MARKER} is sealed: the file of regions has no key_file; asked for was {asked}"
        )
    try:
        said = json.loads(content)
    except ParserErrors:
        said = None
    number = said.get("format") if isinstance(said, dict) else None
    if isinstance(number, int) and number > REGION_FORMAT:
        raise RegionError(
            f"{where}: a region of format {number}, known here are formats up to {REGION_FORMAT}; asked for was {asked}"
        )
    try:
        found = msgspec.convert(said, Region)
    except ParserErrors as error:
        raise MarkerDamaged(
            f"{where}: its {MARKER} is no marker of a region, asked for was {asked}"
        ) from error
    return found


def _check_names(where: str, deployment: str, region: str) -> None:
    for word, name in (("deployment", deployment), ("region", region)):
        if not _NAME.fullmatch(name):
            raise RegionError(f"{where}: {word} {name!r}: allowed are {_HINT}")
