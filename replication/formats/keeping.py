"""Who keeps a region, and what it tells everybody else.

    keeper/<number, 16 hex>    Term: who took the lease, once for each time it was taken; the highest one counts
    news                       News: that its holder is alive, and what is new; replaced every few seconds
    bell                       changes when somebody has put what the keeper should look at
    stuck/<life>               a process cannot go on in a feed, and no snapshot helps it: the keeper writes one

All but the bell, in which nothing stands, are sealed. A term has its number inside: what lies under another name is damaged, and is no term.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from replication.constants import KIB, MIB, NUMBERS_MAX
from replication.formats.members import read_members
from replication.formats.ranges import Count, Id, Positions, Word, WriterName
from replication.formats.sealed import Sealed
from replication.formats.segment import WRITER_NAME
from replication.problems import Problems
from replication.store_clock import StoreClock
from replication.waits import passed_s
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectRefused

TERMS: Final = "keeper/"
NEWS: Final = "news"
BELL: Final = "bell"
CLOCK: Final = "clock"  # in its place, to learn the store's clock, where the bell is sick
BELL_BYTES_MAX: Final = 64
STUCK: Final = "stuck/"
TERM_NAME: Final = re.compile(r"[0-7][0-9a-f]{15}")

log = logging.getLogger("replication.keeping")

_TermNumber = Annotated[int, Meta(gt=0, le=NUMBERS_MAX)]
_Host = Annotated[str, Meta(max_length=255)]


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """life: of one process, drawn when it begins. host: for people. is_mirror: it copies from other regions, and knows of them."""

    life: WriterName
    host: _Host
    is_mirror: bool


class Term(msgspec.Struct, frozen=True, array_like=True):
    """beat: counts on where the news cannot be written."""

    number: _TermNumber
    holder: Holder
    beat: Count = 0

    @property
    def name(self) -> str:
        return term_name(self.number)


class News(msgspec.Struct, frozen=True, array_like=True):
    """Of the holder of a term. beat: counts on. kept_s: for how long it has held the lease. heads: of writers that wrote lately, up to
    which number; None: not known. folders: a digest of the list of each. listens: heads are looked at every few seconds; else writers ring.
    is_over: its holder ends, and has given the lease back."""

    term: _TermNumber
    holder: Holder
    beat: Count
    kept_s: Count
    heads: Positions | None = None
    folders: Annotated[dict[Word, Id], Meta(max_length=64)] = {}
    listens: bool = False
    is_over: bool = False


def term_name(number: int) -> str:
    return f"{TERMS}{number:016x}"


TERM_FORMAT: Final = Sealed(b"KVTERM1\n", Term, 4 * KIB, lambda term: term.name)
NEWS_FORMAT: Final = Sealed(b"KVNEWS1\n", News, 8 * MIB)  # of 100,000 writers
STUCK_FORMAT: Final = Sealed(b"KVSTUK1\n", Holder, 4 * KIB)


async def ring(objects: Objects) -> None:
    """Have the keeper look. Where it cannot be done, it looks a little later."""
    try:
        await objects.put(BELL, secrets.token_bytes(16))
    except ObjectError as error:
        log.debug("the keeper looks later: %s", error)


async def measure(objects: Objects, clock: StoreClock) -> None:
    """Learn the store's clock, by ringing. Raises ObjectError."""
    begun_s = passed_s()
    clock.learn(await store_now_s(objects), begun_s)


async def clock_of(objects: Objects, clock: StoreClock | None = None) -> StoreClock:
    """The same, as far as it can be had: who may put nothing there, and only looks, goes by its own."""
    clock = clock or StoreClock()
    with suppress(ObjectError):
        await measure(objects, clock)
    return clock


async def store_now_s(objects: Objects, name: str = BELL) -> float:
    """Unix seconds by the store's clock, by ringing. Raises ObjectError."""
    try:
        await objects.put(name, secrets.token_bytes(16))
        return (await objects.head(name)).modified_s
    except (ObjectDamaged, ObjectRefused):  # something else lies there, a folder say
        if name == CLOCK:
            raise
    return await store_now_s(objects, CLOCK)


async def put_stuck(objects: Objects, holder: Holder) -> None:
    """Raises ObjectError."""
    await objects.put(STUCK + holder.life, STUCK_FORMAT.seal(holder))
    await ring(objects)


async def stuck(objects: Objects, problems: Problems) -> list[str]:
    """The names of what those who are stuck have put. Raises ObjectError."""

    async def read(info: ObjectInfo) -> Holder:
        return await STUCK_FORMAT.fetch(objects, info.name)

    members = await read_members(objects, STUCK, WRITER_NAME, read, problems)
    return [info.name for info, _ in members.found]
