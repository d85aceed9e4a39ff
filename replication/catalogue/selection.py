"""Selection: the most valuable packs of a catalogue that fit a number of bytes, whole prefixes only.

    catalogue ─▶ wanted ─▶ those worth keeping for longest, older ones first ─▶ each behind all that it hangs on ─▶ chosen
                              (as many as fit are remembered)                       a prefix that does not fit is left out

How long a pack is worth keeping is what demand says of it (`Announced.kept_until_s`), so it orders packs by value, too. A
pack is chosen with every pack before it in its prefix, or not at all: without them nobody could use it.

Invariants: chosen packs are closed under prefixes, each behind its parent, and have no more bytes than allowed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from replication.catalogue.catalogue import Catalogue
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced

_TURN_PACKS = 64  # placed in one turn of the loop: about 3 ms


class Chosen(NamedTuple):
    """size_bytes: of its records, as tiers hold them."""

    pack_id: bytes
    size_bytes: int


class _Ranked(NamedTuple):
    """worth_s: kept until then. older: the higher the older, so that the least of these is the first to be left out."""

    worth_s: float
    older: int
    chosen: Chosen


def records_bytes(announced: Announced) -> int:
    return announced.blocks * announced.pack.header.spec.record_bytes


async def choose(
    catalogue: Catalogue, wants: Callable[[Announced], bool], budget_bytes: int = 0
) -> list[Chosen]:
    """The packs to have first, parents before children. budget_bytes: 0 for no limit.

    Lets others run every few milliseconds. Raises CatalogueDamaged, also where it is made anew meanwhile.
    """
    renewals = catalogue.renewals
    ranked = await _ranked(catalogue, wants, budget_bytes, renewals)
    placed: dict[bytes, Chosen] = {}
    used_bytes = looks = 0
    for _, _, chosen in ranked:
        looks += 1
        if looks >= _TURN_PACKS:
            looks = 0
            await asyncio.sleep(0)
            _require(catalogue, renewals)
        if chosen.pack_id in placed:
            continue
        line = await _line(catalogue, wants, chosen.pack_id, placed)
        _require(catalogue, renewals)
        looks += len(line)
        size_bytes = sum(one.size_bytes for one in line)
        if line and (not budget_bytes or used_bytes + size_bytes <= budget_bytes):
            used_bytes += size_bytes
            placed.update((one.pack_id, one) for one in line)
    return list(placed.values())


async def _ranked(
    catalogue: Catalogue, wants: Callable[[Announced], bool], budget_bytes: int, renewals: int
) -> list[_Ranked]:
    """The best first, no more of them than may fit."""
    best: list[_Ranked] = []
    total_bytes = count = 0
    for chunk in catalogue.chunks():
        for announced in filter(wants, chunk):
            count += 1
            chosen = Chosen(announced.pack.id, records_bytes(announced))
            heappush(best, _Ranked(announced.kept_until_s or math.inf, -count, chosen))
            total_bytes += chosen.size_bytes
            while budget_bytes and total_bytes - best[0].chosen.size_bytes >= budget_bytes:
                total_bytes -= heappop(best).chosen.size_bytes
        await asyncio.sleep(0)
        _require(catalogue, renewals)
    best.sort(reverse=True)
    return best


async def _line(
    catalogue: Catalogue, wants: Callable[[Announced], bool], pack_id: bytes, placed: dict[bytes, Chosen]
) -> list[Chosen]:
    """A pack behind those before it in its prefix that are not placed yet; nothing where one of them is not to be had."""
    line: dict[bytes, Chosen] = {}
    [announced] = catalogue.packs([pack_id])
    while announced is not None and announced.pack.id not in placed:
        header, pack_id = announced.pack.header, announced.pack.id
        if pack_id in line or not wants(announced):
            return []
        line[pack_id] = Chosen(pack_id, records_bytes(announced))
        if not header.parent:
            return list(reversed(line.values()))
        [spot] = catalogue.find([header.spec.digest + header.parent])
        announced = spot.announced if spot is not None else None
        if len(line) % _TURN_PACKS == 0:
            await asyncio.sleep(0)
    return [] if announced is None else list(reversed(line.values()))


def _require(catalogue: Catalogue, renewals: int) -> None:
    if catalogue.renewals != renewals:
        raise CatalogueDamaged("the catalogue was made anew meanwhile")
