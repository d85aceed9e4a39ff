"""Snapshots: the whole catalogue at some positions, so that catching up takes seconds.

    snapshots/parts/<number>-<chance>/<part>     packs, in sealed objects of about a megabyte, put first; then models, and removals
    snapshots/manifests/<number>-<chance>        positions, and every part with its checksum, put last

    write   positions ─▶ all packs ─▶ parts ─▶ manifest          read   newest manifest ─▶ parts ─▶ positions

What must always hold:

* A manifest has every pack that was announced up to its positions and was there still: positions are taken first. That it has more
  does no harm. It has removals, too, for as long as they are remembered: what they void may be read later.
* Positions are taken over after the last part is. A snapshot that is damaged or half gone is left for the one before.
* Numbers ascend, chance keeps two that are written at the same time apart: nobody waits for anybody.
* Nothing is removed that kept snapshots do not cover: a segment only when SNAPSHOTS_KEPT whole ones do and it is older
  than RETENTION_S by the store's own clock. A writer that is silent for so long, and covered, is retired: all of it goes, the
  head first. Of any other one the last segment stays, and what is behind its head.
* Whoever follows holds himself against each new snapshot, and reads it where it covers more (tail.py). A manifest names a retired
  writer until as many have as are kept: so who has missed more of them than that reads the newest one.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from replication.catalogue.catalogue import Catalogue
from replication.constants import KIB, MIB, NUMBERS_MAX, RETENTION_S, SEGMENT_MODELS_MAX
from replication.deleting import delete_each
from replication.errors import CatalogueDamaged, Damaged, FormatUnknown
from replication.formats.announced import Announced, tabled, untabled, weight_bytes
from replication.formats.announced_models import AnnouncedModel, heard_models
from replication.formats.ranges import Count, Id, Number, Positions, UnixS
from replication.formats.removed import Removed, heard_removed
from replication.formats.sealed import Sealed
from replication.formats.segment import FEED, HEAD_FORMAT, SEGMENT_FORMAT, head_name, segment_number
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectUnavailable
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACK_HEADER_BYTES_MAX
from tiers.together import together

SNAPSHOT_PART_BYTES: Final = 1 * MIB  # a part that has so much takes no further pack; read in 2 ms
SNAPSHOT_PART_BYTES_MAX: Final = 4 * MIB
SNAPSHOT_PART_ENTRIES_MAX: Final = 1 << 14  # each counts for 96 bytes at least
ENTRY_BYTES: Final = 1 * KIB  # for which a pack counts at least: it takes as long to encode
REMOVED_BYTES: Final = 128  # of a removal, at most
SNAPSHOT_PARTS_MAX: Final = 1 << 16
SNAPSHOT_REQUESTS_MAX: Final = 4  # parts in memory at a time
SNAPSHOT_STORE_ATTEMPTS_MAX: Final = 3  # of a part that does not read back as it was put
SNAPSHOTS_KEPT: Final = 3
DELETE_NAMES_MAX: Final = 1000  # in one call
assert SNAPSHOT_PART_BYTES + PACK_HEADER_BYTES_MAX < SNAPSHOT_PART_BYTES_MAX
assert SNAPSHOT_PART_ENTRIES_MAX > SNAPSHOT_PART_BYTES // 96 > SNAPSHOT_PART_BYTES // REMOVED_BYTES

log = logging.getLogger("replication.snapshots")

MANIFESTS = "snapshots/manifests/"
PARTS = "snapshots/parts/"
_NAME = re.compile(r"[0-7][0-9a-f]{15}-[0-9a-f]{8}")  # behind each number there is a next one
_TELLS_NOTHING = 1 << 63  # nobody believes it, so any segment may go


T = TypeVar("T")


class Part(msgspec.Struct, array_like=True, frozen=True):
    """checksum: xxh3_128 of the whole object."""

    size_bytes: Annotated[int, Meta(gt=0, le=SNAPSHOT_PART_BYTES_MAX)]
    checksum: Id


class Manifest(msgspec.Struct, array_like=True, frozen=True):
    """name: "<number>-<chance>". written_s: unix seconds by the clock of its writer, for people only."""

    name: Annotated[str, Meta(max_length=32)]
    written_s: UnixS
    packs: Count
    positions: Positions
    parts: Annotated[list[Part], Meta(max_length=SNAPSHOT_PARTS_MAX)]

    @property
    def number(self) -> int:
        return int(self.name[:16], 16)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


class _PartBody(msgspec.Struct, array_like=True):
    snapshot: str
    number: Number
    specs: Annotated[list[NamespaceSpec], Meta(max_length=SNAPSHOT_PART_ENTRIES_MAX)]
    entries: Annotated[list[msgspec.Raw], Meta(max_length=SNAPSHOT_PART_ENTRIES_MAX)]
    models: Annotated[list[msgspec.Raw], Meta(max_length=SEGMENT_MODELS_MAX)] = []
    removed: Annotated[list[msgspec.Raw], Meta(max_length=SNAPSHOT_PART_ENTRIES_MAX)] = []


class _Said(NamedTuple):
    """By a part."""

    entries: Sequence[Announced]
    models: Sequence[AnnouncedModel]
    removed: Sequence[Removed]


class Retired(NamedTuple):
    """How many objects were removed."""

    snapshots: int
    parts: int
    segments: int
    writers: int


def part_name(snapshot: str, number: int) -> str:
    return f"{PARTS}{snapshot}/{number:08x}"


# Of 65,536 parts and 100,000 writers.
MANIFEST_FORMAT: Final = Sealed(b"KVSNAP1\n", Manifest, 16 * MIB, lambda one: MANIFESTS + one.name)
PART_FORMAT: Final = Sealed(
    b"KVPART1\n", _PartBody, SNAPSHOT_PART_BYTES_MAX, lambda body: part_name(body.snapshot, body.number)
)


class Snapshots:
    """The snapshots of one region. Every method raises ObjectError where the store fails, those with a catalogue
    CatalogueDamaged."""

    def __init__(
        self,
        objects: Objects,
        clock: Callable[[], float],
        chance: random.Random,
        delete: Callable[[Sequence[str]], Awaitable[int]] | None = None,
    ) -> None:
        """clock: unix seconds. delete: removes objects, for as long as this process may; returns how many it could."""
        self._objects = objects
        self._delete_some = delete or self._delete_any
        self._away: set[str] = set()  # see `delete_each`
        self._clock = clock
        self.now_s: Callable[[], float] = lambda: float("inf")  # by the store's clock, where it is known
        self._chance = chance

    async def write(self, catalogue: Catalogue, passed: Mapping[str, int] | None = None) -> Manifest:
        """Write what this catalogue knows. passed: positions up to which it knows all, too. Cancelled or failed, it leaves parts that
        `retire` finds."""
        positions, renewals = {**catalogue.positions, **(passed or {})}, catalogue.renewals
        kept = await self.kept()
        is_young = len(kept) < SNAPSHOTS_KEPT
        positions |= {
            writer: number
            for writer, number in catalogue.retired.items()
            if is_young or any(writer not in one.positions for one in kept)
        }
        numbers = [int(name[:16], 16) async for name, _ in self._listed()]
        highest = max((number for number in numbers if number < NUMBERS_MAX), default=0)
        name = f"{highest + 1:016x}-{self._chance.getrandbits(32):08x}"
        parts: list[Part] = []
        packs = 0
        for entries in _pieces(catalogue.chunks(), lambda one: max(weight_bytes(one), ENTRY_BYTES)):
            await self._put_part(name, parts, tabled(entries))
            packs += len(entries)
        models = list(catalogue.models.values())
        for at in range(0, len(models), SEGMENT_MODELS_MAX):
            await self._put_part(name, parts, (*tabled(()), models[at : at + SEGMENT_MODELS_MAX]))
        for some in _pieces(catalogue.removed(), lambda one: REMOVED_BYTES):
            await self._put_part(name, parts, (*tabled(()), (), some))
        _check_same(catalogue, renewals)
        manifest = Manifest(name, self._clock(), packs, positions, parts)
        await self._put(MANIFESTS + name, MANIFEST_FORMAT.seal(manifest))
        return manifest

    async def _put_part(self, name: str, parts: list[Part], said: tuple[object, ...]) -> None:
        """The next one."""
        if len(parts) == SNAPSHOT_PARTS_MAX:
            raise ObjectUnavailable(f"{self._objects.where}: a snapshot of more than {len(parts)} parts")
        content = PART_FORMAT.seal((name, len(parts), *said))
        await self._put(part_name(name, len(parts)), content)
        parts.append(Part(len(content), xxhash.xxh3_128_digest(content)))

    async def _put(self, name: str, content: bytes) -> None:
        """Put and read back: segments are removed because this is there. Nobody else writes under this name."""
        for _ in range(SNAPSHOT_STORE_ATTEMPTS_MAX):
            await self._objects.put(name, content)
            try:
                if await self._objects.get_within(name, len(content)) == content:
                    return
            except ObjectDamaged:
                continue
        raise ObjectUnavailable(f"{self._objects.where}: {name}: read back, it is not what was put")

    async def newest_name(self) -> str:
        """Of the newest snapshot, sound or not; "" if there is none."""
        names = [name async for name, _ in self._listed()]
        return names[-1] if names else ""

    async def newest(self) -> Manifest | None:
        """The manifest of the newest snapshot that has a sound one."""
        async for manifest in self._newest_first():
            return manifest
        return None

    async def kept(self) -> list[Manifest]:
        """The manifests of the newest few, the newest first, that have sound ones."""
        found: list[Manifest] = []
        async for manifest in self._newest_first():
            found.append(manifest)
            if len(found) == SNAPSHOTS_KEPT:
                break
        return found

    async def read_newest(self, catalogue: Catalogue) -> Manifest | None:
        """Take over the newest snapshot that is whole and can be read; None if there is none. Where the store fails for some
        and hands out none, it raises that: what they would have said may be there in a minute."""
        failure: ObjectUnavailable | None = None
        async for manifest in self._newest_first():
            try:
                await self._read(manifest, catalogue)
            except (Damaged, ObjectError) as error:
                log.warning("%s: snapshot %s: %s", self._objects.where, manifest.name, error)
                failure = failure or (error if isinstance(error, ObjectUnavailable) else None)
                continue
            return manifest
        if failure is not None:
            raise failure
        return None

    async def retire(self) -> Retired:
        """Remove snapshots but the newest few, and segments that those cover."""
        listed = [info async for _, info in self._listed()]
        kept: list[Manifest] = []
        async for manifest in self._newest_first():
            if await self._is_whole(manifest):
                kept.append(manifest)
                if len(kept) == SNAPSHOTS_KEPT:
                    break
        else:
            return Retired(0, 0, 0, 0)
        oldest = kept[-1]
        old = [info.name for info in listed if info.name < MANIFESTS + oldest.name]
        # What is of a later version stays, and its parts with it.
        later = {name for name in old if await MANIFEST_FORMAT.is_later(self._objects, name)}
        manifests = await self._delete(name for name in old if name not in later)
        parts = 0
        for name in filter(_NAME.fullmatch, await self._objects.folders(PARTS)):
            if name < oldest.name and MANIFESTS + name not in later:
                async for page in self._objects.list(f"{PARTS}{name}/"):
                    parts += await self._delete(info.name for info in page)
        before_s = min(max(info.modified_s for info in listed), self.now_s()) - RETENTION_S
        segments = writers = 0
        for writer in await self._objects.folders(FEED):
            covered = min(manifest.positions.get(writer, 0) for manifest in kept)
            count, is_retired = (
                await self._retire_writer(writer, covered, before_s) if covered else (0, False)
            )
            segments, writers = segments + count, writers + is_retired
        return Retired(manifests, parts, segments, writers)

    async def _told(self, writer: str) -> int:
        """The number that the head of a writer tells; 0: nobody can say. Who is as far believes it, so the next one must be there: later heads
        may not have been written."""
        try:
            return (await HEAD_FORMAT.fetch(self._objects, head_name(writer))).number
        except (Damaged, ObjectError) as error:
            if isinstance(error, Damaged | ObjectMissing) and not isinstance(error, FormatUnknown):
                return _TELLS_NOTHING
            log.info("%s: segments of writer %s stay: %s", self._objects.where, writer, error)
            return 0

    async def _retire_writer(self, writer: str, covered: int, before_s: float) -> tuple[int, bool]:
        """Remove its segments before the one of this number, as far as they are old; all of it, if it is silent. Returns how many, and
        whether nothing is left."""
        if not (told := await self._told(writer)):
            return 0, False
        count, tried, end = 0, 0, min(covered, told + 1)
        async for page in self._objects.list(f"{FEED}{writer}/"):
            old = [
                info.name
                for info in page
                if info.modified_s < before_s and 0 < segment_number(info.name) < end
            ]
            left = page[len(old) :]
            if old and await SEGMENT_FORMAT.is_later(self._objects, old[0]):
                return count, False  # as all that one life of a writer has written
            is_silent = bool(left) and await self._is_silent(writer, left, covered, before_s)
            names = [info.name for info in page] if is_silent else old
            count, tried = count + await self._delete(names), tried + len(names)
            if left:
                return count, is_silent and count == tried
        return count, False

    async def _is_silent(
        self, writer: str, left: Sequence[ObjectInfo], covered: int, before_s: float
    ) -> bool:
        """Whether a writer has said nothing for long but what is covered. Its head is gone then: without it nobody takes what is
        left for all of it."""
        if any(info.modified_s >= before_s or segment_number(info.name) > covered for info in left):
            return False
        async for page in self._objects.list(f"{FEED}{writer}/", left[-1].name):
            if page:
                return False
        try:
            if (await self._objects.head(head_name(writer))).modified_s >= before_s:
                return False
            if await SEGMENT_FORMAT.is_later(self._objects, left[0].name):
                return False
            return bool(await self._delete([head_name(writer)]))
        except ObjectMissing:
            pass
        except ObjectError as error:
            log.info("%s: writer %s stays: %s", self._objects.where, writer, error)
            return False
        return True

    async def _delete(self, names: Iterable[str]) -> int:
        """Returns how many could be deleted."""
        names, count = list(names), 0
        for at in range(0, len(names), DELETE_NAMES_MAX):
            count += await self._delete_some(names[at : at + DELETE_NAMES_MAX])
        return count

    async def _delete_any(self, names: Sequence[str]) -> int:
        return len(names) - len(await delete_each(self._objects.delete, names, self._away))

    async def _listed(self) -> AsyncIterator[tuple[str, ObjectInfo]]:
        """The names of all snapshots that have a manifest, oldest first."""
        async for page in self._objects.list(MANIFESTS):
            for info in page:
                name = info.name[len(MANIFESTS) :]
                if _NAME.fullmatch(name):
                    yield name, info

    async def _newest_first(self) -> AsyncIterator[Manifest]:
        """All sound manifests."""
        for name in reversed([name async for name, _ in self._listed()]):
            try:
                manifest = await MANIFEST_FORMAT.fetch(self._objects, MANIFESTS + name)
            except ObjectUnavailable:
                raise
            except (Damaged, ObjectError) as error:
                log.warning("%s: %s", self._objects.where, error)
                continue
            yield manifest

    async def _is_whole(self, manifest: Manifest) -> bool:
        """Whether every part is there, as long as it should be."""
        wanted = {
            part_name(manifest.name, number): part.size_bytes for number, part in enumerate(manifest.parts)
        }
        async for page in self._objects.list(f"{PARTS}{manifest.name}/"):
            for info in page:
                if wanted.get(info.name) == info.size_bytes:
                    del wanted[info.name]
        return not wanted

    async def _read(self, manifest: Manifest, catalogue: Catalogue) -> None:
        renewals = catalogue.renewals
        for start in range(0, len(manifest.parts), SNAPSHOT_REQUESTS_MAX):
            numbers = range(start, min(start + SNAPSHOT_REQUESTS_MAX, len(manifest.parts)))
            for entries, models, removed in await together(
                self._part(manifest, number) for number in numbers
            ):
                await catalogue.remove_all(removed)
                if models:
                    catalogue.add_packs((), models)
                await catalogue.add_all(entries)
        _check_same(catalogue, renewals)
        catalogue.jump(manifest.positions)

    async def _part(self, manifest: Manifest, number: int) -> _Said:
        name, part = part_name(manifest.name, number), manifest.parts[number]
        content = await self._objects.get_within(name, part.size_bytes)
        if len(content) != part.size_bytes or xxhash.xxh3_128_digest(content) != part.checksum:
            raise Damaged(f"{name}: is not what its manifest says")
        body = PART_FORMAT.unseal(content, name)
        entries, models = (
            untabled(body.specs, body.entries, name).found,
            heard_models(body.models, name).found,
        )
        return _Said(entries, models, heard_removed(body.removed, name).found)


def _check_same(catalogue: Catalogue, renewals: int) -> None:
    """Half of what was read or learned is gone if the catalogue was begun again meanwhile."""
    if catalogue.renewals != renewals:
        raise CatalogueDamaged("the catalogue was made anew meanwhile")


def segments_behind(manifest: Manifest | None, positions: Mapping[str, int]) -> int:
    """How many segments somebody who begins with this snapshot has to read to reach these positions."""
    known = manifest.positions if manifest is not None else {}
    return sum(max(0, number - known.get(writer, 0)) for writer, number in positions.items())


def _pieces(chunks: Iterator[list[T]], weight: Callable[[T], int]) -> Iterator[list[T]]:
    """The same in pieces of the size of a part."""
    piece: list[T] = []
    size_bytes = 0
    for chunk in chunks:
        for one in chunk:
            piece.append(one)
            size_bytes += weight(one)
            if size_bytes >= SNAPSHOT_PART_BYTES:
                yield piece
                piece, size_bytes = [], 0
    if piece:
        yield piece
