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
from replication.formats.ranges import Id
from replication.formats.sealed import fetch, seal
from tiers.bucket.objects import ObjectInfo, Objects

DOUBTED_TOLD_MAX: Final = 256  # by one node at a time
DOUBTED_BYTES_MAX: Final = 16 * KIB

DOUBTS = "doubts/"
DOUBTS_NAME = re.compile(r"[A-Za-z0-9._=+-]{1,64}")
_MAGIC = b"KVDOUB1\n"


class Doubted(msgspec.Struct, frozen=True, array_like=True):
    """packs: their ids."""

    packs: Annotated[Sequence[Id], Meta(max_length=DOUBTED_TOLD_MAX)]


async def put_doubts(objects: Objects, node: str, packs: Sequence[bytes]) -> None:
    """Raises ObjectError."""
    await objects.put(DOUBTS + node, seal(_MAGIC, Doubted(packs)))
    await ring(objects)


async def read_doubts(objects: Objects, info: ObjectInfo) -> Doubted:
    """Raises Damaged, ObjectError."""
    return await fetch(objects, _MAGIC, Doubted, info.name, DOUBTED_BYTES_MAX)
