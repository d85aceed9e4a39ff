"""Carried out: how far an erasing is in a region's bucket, as its keeper tells it.

    erased/<id of the tombstone>    CarriedOut: put when the whole bucket was looked through, and again when what is left changes

Whoever erases, and waits, reads it. Nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from replication.constants import KIB, PROBLEMS_TOLD
from replication.errors import Damaged
from replication.formats.ranges import Count, HexId, Text, UnixS
from replication.formats.sealed import fetch, seal
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing, ObjectRefused

CARRIED_OUT_BYTES_MAX: Final = 64 * KIB

CARRIED_OUT = "erased/"
_MAGIC = b"KVERSD1\n"


class CarriedOut(msgspec.Struct, frozen=True, array_like=True):
    """serial: of the tombstone. at_s: unix seconds. left: objects that are there still and that it names, or may name; why: of some of them, a line
    each."""

    tombstone: HexId
    serial: Count
    at_s: UnixS
    left: Count = 0
    why: Annotated[Sequence[Text], Meta(max_length=PROBLEMS_TOLD)] = ()


async def put_carried_out(objects: Objects, said: CarriedOut) -> None:
    """Raises ObjectError."""
    await objects.put(CARRIED_OUT + said.tombstone, seal(_MAGIC, said))


async def read_carried_out(objects: Objects, tombstone_id: str) -> CarriedOut | None:
    """None where nobody has told yet. Raises ObjectError."""
    try:
        return await fetch(objects, _MAGIC, CarriedOut, CARRIED_OUT + tombstone_id, CARRIED_OUT_BYTES_MAX)
    except (ObjectMissing, ObjectRefused, Damaged):
        return None
