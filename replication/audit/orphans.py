"""Orphans: packs that are in a bucket, and that nobody has announced. What becomes of them.

    a writer died between put and announce │ its segment was lost │ its life was over and nobody deleted it
      ─▶ header, read by range ─▶ erased by a tombstone ────────▶ deleted
                               ─▶ removed when it was over ─────▶ deleted
                               ─▶ damaged in the store ─────────▶ deleted
                               ─▶ of a later version ───────────▶ left alone
                               ─▶ begins a prompt, or follows a block that is durable ─▶ announced, for RESTORED_KEPT_S
                               ─▶ else it waits for its parent; of no use to anybody after PARENTLESS_S ─▶ deleted

A pack says everything of itself but how long it is worth keeping. It is given a week, as long as its parent's life if that
is shorter, because nothing outlives what it hangs on: who asks for it meanwhile prolongs that.

What must always hold:

* Nothing that is erased is announced: tombstones are looked for before each page of a listing is judged.
* A parent is announced before what hangs on it.
* Nothing is deleted that a writer may be about to announce, or has announced and this catalogue has not read: only what
  had been there for long when all of the feed was read.

Memory: ORPHANS_WAITING_MAX names, and what one segment announces.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from replication.catalogue.catalogue import Catalogue
from replication.constants import AUDIT_REQUESTS_MAX, SEGMENT_BLOCKS_MAX, SEGMENT_ENTRIES_MAX
from replication.deleting import unchanged
from replication.erasure.erasure import Erasure
from replication.formats.announced import Announced
from replication.formats.removed import Said
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused, PackDamaged, PackUnknown
from tiers.packs.codecs import CODECS
from tiers.packs.pack_io import read_pack
from tiers.packs.packs import PACK_HEADER_BYTES_MAX, PRELUDE_BYTES, Pack, PackHeader, pack_identity, parse
from tiers.together import together

ORPHANS_WAITING_MAX: Final = 1 << 16  # for their parents; 300 bytes each
PARENTLESS_S: Final = 24 * 3600.0  # an orphan waits for its parents, before it is deleted
RESTORED_KEPT_S: Final = 7 * 24 * 3600.0  # life of a pack whose announcement was lost

log = logging.getLogger("replication.orphans")


class Kind(StrEnum):
    """What can be found."""

    MISSING = "missing"  # announced, and not there
    SIZE = "size"  # announced with another number of bytes
    ORPHAN = "orphan"  # there, sound, and not announced
    PARENTLESS = "parentless"  # … and follows a block that is not durable
    ERASED = "erased"  # … and named by a tombstone
    OVER = "over"  # … and removed because its life was, and not deleted
    DAMAGED = "damaged"  # its bytes are not what its header, or its announcement, says
    STRANGE = "strange"  # an object below packs/ that is no pack by its name, or of a later version
    GAP = "gap"  # in a feed: a segment that is gone or damaged
    LACKING = "lacking"  # another region has it, and by the rules it should be here


class Finding(NamedTuple):
    """pack: the name of the object. repaired: what was done about it; "" if nothing was."""

    kind: Kind
    pack: str
    reason: str
    repaired: str = ""


class Hands(Protocol):
    """What changes a region. Each raises ObjectError."""

    async def announce(self, some: Sequence[Said]) -> None:
        """Say in this order that these packs and models are durable, or removed; the catalogue knows it, too, when it returns."""

    async def delete(self, names: Sequence[str]) -> int:
        """Returns how many could be deleted; what could not is told, and takes no other one with it."""


class Terms(NamedTuple):
    """settled_s: unix seconds; what was put before that and is not known to the catalogue is announced nowhere.
    restores_all: orphans that are younger, too: what a lost segment said. origin: of a pack, by its id: "" where it was made
    here, None where a mirror brings it."""

    settled_s: float
    restores_all: bool = False
    origin: Callable[[bytes], str | None] = lambda pack_id: ""


def keys_of(header: PackHeader) -> Iterable[bytes]:
    return (header.spec.digest + block for block in header.each_hash())


def _folder(info: ObjectInfo) -> str:
    return info.name.rpartition("/")[0]


class Orphans:
    """Those of one audit. left: how many were not judged: too young, or somebody else's business. is_whole: none had to be
    left because too many waited."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        erasure: Erasure,
        hands: Hands,
        terms: Terms,
        clock: Callable[[], float],
        told: Callable[[Finding], None],
    ) -> None:
        """clock: unix seconds. told: called with each that is found."""
        self.restored = self.deleted = self.left = 0
        self.is_whole = True
        self._objects = objects
        self._catalogue = catalogue
        self._erasure = erasure
        self._hands = hands
        self._terms = terms
        self._clock = clock
        self._told = told
        self._ready: list[Announced] = []  # to be announced together
        self._ready_until_s: dict[bytes, int] = {}  # by key of their blocks
        self._waiting: dict[bytes, list[ObjectInfo]] = {}  # by key of the parent
        self._count_waiting = 0
        self._unread: set[str] = (
            set()
        )  # folders in which one could not be read, that may be somebody's parent

    async def take(self, infos: Sequence[ObjectInfo]) -> None:
        """A page of them. Raises ObjectError, CatalogueDamaged."""
        terms = self._terms
        old = [info for info in infos if terms.restores_all or info.modified_s < terms.settled_s]
        self.left += len(infos) - len(old)
        if old:
            await self._erasure.look()
            await self._judge_all(deque(old))

    async def end(self) -> None:
        """There are no more: what waits for a parent that has come meanwhile is restored; the rest is of no use to anybody."""
        waiting, self._waiting, self._count_waiting = self._waiting, {}, 0
        if not waiting:
            return
        await self._erasure.look()
        await self._judge_all(deque(info for infos in waiting.values() for info in infos))
        before_s = self._terms.settled_s - PARENTLESS_S
        if not self.is_whole:
            return
        for infos in self._waiting.values():
            for info in infos:
                if info.modified_s < before_s and _folder(info) not in self._unread:
                    await self._delete(Kind.PARENTLESS, info, "it follows a block that is not durable")
                else:
                    self.left += 1

    async def _judge_all(self, infos: deque[ObjectInfo]) -> None:
        """These, and what waits for them."""
        while infos:
            some = [infos.popleft() for _ in range(min(len(infos), AUDIT_REQUESTS_MAX))]
            packs = await together(self._read(info) for info in some)
            for info, pack in zip(some, packs, strict=True):
                if isinstance(pack, Pack):
                    infos.extend(await self._judge(info, pack))
                elif pack:
                    await self._delete_if_settled(Kind.DAMAGED, info, pack)
                else:
                    self._unread.add(_folder(info))
            if (
                len(self._ready) >= SEGMENT_ENTRIES_MAX // 2
                or len(self._ready_until_s) >= SEGMENT_BLOCKS_MAX // 2
            ):
                await self._announce()
        await self._announce()

    async def _read(self, info: ObjectInfo) -> Pack | str:
        """The pack, or why it is none; "" if it is gone, of a later version, or the way to it is to blame."""
        identity = pack_identity(info.name)
        assert identity is not None
        reason = ""
        for _ in range(2):
            try:
                return await read_pack(self._objects, *identity)
            except (ObjectMissing, ObjectDamaged, ObjectRefused):
                return ""
            except PackUnknown as error:
                self.left += 1
                self._told(Finding(Kind.STRANGE, info.name, str(error)))
                return ""
            except PackDamaged as error:
                reason = str(error)
        return reason if await self._is_damaged(info) else ""

    async def _is_damaged(self, info: ObjectInfo) -> bool:
        """What comes back damaged the same way twice is damaged in the store."""
        end = min(info.size_bytes, PRELUDE_BYTES + PACK_HEADER_BYTES_MAX)
        try:
            (first,) = await self._objects.get_ranges(info.name, [(0, end)])
            (again,) = await self._objects.get_ranges(info.name, [(0, end)])
            size_bytes = (await self._objects.head(info.name)).size_bytes
        except (ObjectMissing, ObjectDamaged, ObjectRefused):
            return False
        if first != again or size_bytes != info.size_bytes:
            return False
        try:
            pack = parse(first, info.name, self._objects.seals)
        except PackDamaged:
            return True
        except ObjectRefused:  # of a key that is not in our file
            return False
        return (pack.name, pack.size_bytes) != (info.name, size_bytes)

    async def _judge(self, info: ObjectInfo, pack: Pack) -> Iterable[ObjectInfo]:
        """Returns what waited for it."""
        if self._is_known(info):
            return ()
        origin = self._terms.origin(pack.id)
        if origin is None:
            self.left += 1
            return ()
        if self._erasure.covers(Announced(pack)):
            await self._delete(Kind.ERASED, info, "a tombstone names it")
            return self._freed(pack.header)  # and is erased, too
        if info.modified_s < self._terms.settled_s and self._catalogue.is_over(pack.id, info.modified_s):
            await self._delete(Kind.OVER, info, "its life is over")
            return ()
        if pack.header.codec not in CODECS:
            self.left += 1
            self._told(
                Finding(
                    Kind.STRANGE,
                    info.name,
                    f"of a later version: codec {pack.header.codec!r}, known here are {CODECS}",
                )
            )
            return ()
        until_s = self._life(pack.header)
        if until_s is None:
            self._wait(info, pack.header)
            return ()
        self._ready.append(Announced(pack, origin=origin, kept_until_s=until_s))
        self._told(Finding(Kind.ORPHAN, info.name, "nobody has announced it", "announced"))
        self._ready_until_s.update((key, until_s) for key in keys_of(pack.header))
        return self._freed(pack.header)

    def _freed(self, header: PackHeader) -> list[ObjectInfo]:
        freed = [info for key in keys_of(header) for info in self._waiting.pop(key, ())]
        self._count_waiting -= len(freed)
        return freed

    def _life(self, header: PackHeader) -> int | None:
        """Until when it is worth keeping; None as long as nothing durable is before it."""
        now_s = int(self._clock())
        until_s = now_s + int(RESTORED_KEPT_S)
        if not header.parent:
            return until_s
        key = header.spec.digest + header.parent
        parent_s = self._ready_until_s.get(key)
        if parent_s is None:
            [spot] = self._catalogue.find([key])
            if spot is None:
                return None
            parent_s = spot.announced.kept_until_s
        if not parent_s:
            return until_s
        return min(until_s, parent_s) if parent_s > now_s else None

    def _wait(self, info: ObjectInfo, header: PackHeader) -> None:
        if self._count_waiting == ORPHANS_WAITING_MAX:
            self.is_whole = False
            self.left += 1
            return
        self._waiting.setdefault(header.spec.digest + header.parent, []).append(info)
        self._count_waiting += 1

    async def _announce(self) -> None:
        ready, self._ready = self._ready, []
        if ready:
            await self._hands.announce(ready)
            self.restored += len(ready)
        self._ready_until_s.clear()

    async def _delete_if_settled(self, kind: Kind, info: ObjectInfo, reason: str) -> None:
        if info.modified_s < self._terms.settled_s:
            await self._delete(kind, info, reason)
        else:
            self.left += 1

    def _is_known(self, info: ObjectInfo) -> bool:
        """Whether it was announced meanwhile."""
        identity = pack_identity(info.name)
        assert identity is not None
        [known] = self._catalogue.packs([identity[1]])
        return known is not None and known.pack.name == info.name

    async def _delete(self, kind: Kind, info: ObjectInfo, reason: str) -> None:
        if self._is_known(info):
            return
        if await self._hands.delete(await unchanged(self._objects, [info])):
            self.deleted += 1
            self._told(Finding(kind, info.name, reason, "deleted"))
        else:
            self.left += 1
