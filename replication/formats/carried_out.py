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
from replication.formats.ranges import Count, HexId, Text, UnixS
from replication.formats.sealed import Sealed

CARRIED_OUT: Final = "erased/"


class CarriedOut(msgspec.Struct, frozen=True, array_like=True):
    """serial: of the tombstone. at_s: unix seconds. left: objects that are there still and that it names, or may name; why: of some of them, a line
    each."""

    tombstone: HexId
    serial: Count
    at_s: UnixS
    left: Count = 0
    why: Annotated[Sequence[Text], Meta(max_length=PROBLEMS_TOLD)] = ()


CARRIED_OUT_FORMAT: Final = Sealed(
    b"KVERSD1\n", CarriedOut, 64 * KIB, lambda said: CARRIED_OUT + said.tombstone
)
