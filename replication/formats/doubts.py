"""Doubts: packs that a reader did not find, or found to be wrong, told to the keeper of the region.

doubts/<node>      Doubted: put when there are new ones, deleted by the keeper when it has looked at all of them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from replication.constants import KIB
from replication.formats.keeping import ring
from replication.formats.members import Members, read_members
from replication.formats.ranges import Id
from replication.formats.sealed import Sealed
from replication.problems import Problems
from tiers.bucket.objects import Objects

DOUBTED_TOLD_MAX: Final = 256  # by one node at a time

DOUBTS = "doubts/"
DOUBTS_NAME = re.compile(r"[A-Za-z0-9._=+-]{1,64}")


class Doubted(msgspec.Struct, frozen=True, array_like=True):
    """packs: their ids."""

    packs: Annotated[Sequence[Id], Meta(max_length=DOUBTED_TOLD_MAX)]


DOUBTED_FORMAT: Final = Sealed(b"KVDOUB1\n", Doubted, 16 * KIB)


async def put_doubts(objects: Objects, node: str, packs: Sequence[bytes]) -> None:
    """Raises ObjectError."""
    await objects.put(DOUBTS + node, DOUBTED_FORMAT.seal(Doubted(packs)))
    await ring(objects)


async def read_doubts(objects: Objects, problems: Problems) -> Members[Doubted]:
    """Of all nodes; what cannot be read is a problem, and left out. Raises ObjectError where there is no list."""
    return await read_members(
        objects, DOUBTS, DOUBTS_NAME, lambda info: DOUBTED_FORMAT.fetch(objects, info.name), problems
    )
