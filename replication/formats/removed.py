"""Removed: packs and models that are in a region no more, as feeds, snapshots and catalogues say it.

    announced at 5 ─┐
    announced at 9 ─┼─▶ removed up to 9: all of these are void        announced at 12: it is there again
                    │   in whatever order they are read

Only who keeps the region's house says so; a catalogue forgets nothing by itself. A removal is about what was announced up to a
moment and about nothing later, so it takes nothing that was put again, and nobody's clocks are compared but those of who announces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from replication.formats.announced import Announced
from replication.formats.announced_models import AnnouncedModel
from replication.formats.ranges import Id, UnixS, Word
from replication.formats.sealed import Heard, heard


class Reason(StrEnum):
    """Why something was removed."""

    OVER = "over"  # its life
    ERASED = "erased"
    GONE = "gone"  # announced, and not there
    DAMAGED = "damaged"
    REFUSED = "refused"  # the store hands it out to nobody
    HANGING = "hanging"  # it follows a block that is not durable


LOST = frozenset({Reason.GONE, Reason.DAMAGED, Reason.REFUSED, Reason.HANGING})  # nobody wanted that


class Removed(msgspec.Struct, frozen=True, array_like=True):
    """id: of a pack, or `AnnouncedModel.name_id`. said_s: what was announced of it until then is void; unix seconds. reason: a `Reason`,
    or what a later version calls one."""

    id: Id
    said_s: UnixS
    reason: Word = ""


def removed(announced: Announced | AnnouncedModel, reason: Reason) -> Removed:
    """Of all that is known to have been announced of this."""
    name = announced.pack.id if isinstance(announced, Announced) else announced.name_id
    return Removed(name, announced.said_s, reason)


Said = Announced | AnnouncedModel | Removed


def heard_removed(raws: Sequence[msgspec.Raw], where: str) -> Heard[Removed]:
    return heard(raws, _REMOVED.decode, where)


def latest(some: Iterable[Removed]) -> dict[bytes, Removed]:
    """By id the one that voids most."""
    found: dict[bytes, Removed] = {}
    for one in some:
        if one.id not in found or found[one.id].said_s < one.said_s:
            found[one.id] = one
    return found


_REMOVED = msgspec.msgpack.Decoder(Removed)
