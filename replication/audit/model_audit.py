"""The audit of models: whether each that was announced is there with all of its chunks, and each that is there is announced.

    manifests listed ─┬─ erased ─────────────────▶ removed, deleted
                      ├─ cannot be read, twice ──▶ removed, deleted
                      ├─ lacks chunks, twice ────▶ said, removed: a mirror brings it again, or a publisher
                      └─ whole, not announced ───▶ announced, unless a mirror brings it
    catalogue ─▶ not listed, twice ──────────────▶ removed

Chunks that no manifest names are no business of an audit: `kvstore model gc` deletes them. A manifest is there when all of its
chunks are, but they may be lost later.

Memory: AUDIT_CHUNKS_MAX chunks of manifests, and the names of all manifests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Final, NamedTuple

from replication.audit.orphans import Finding, Hands, Kind, Terms
from replication.catalogue.catalogue import Catalogue
from replication.deleting import unchanged
from replication.erasure import removed_models
from replication.errors import Damaged
from replication.formats.announced_models import announced_model
from replication.formats.manifests import (
    CACHES,
    MANIFEST_BYTES_MAX,
    MANIFESTS,
    Manifest,
    is_manifest_later,
    named,
    read_manifest,
)
from replication.formats.members import key_of
from replication.formats.removed import Reason, removed
from replication.models.chunks import lacking
from replication.problems import Problems
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused

AUDIT_CHUNKS_MAX: Final = 1 << 18  # of manifests that are compared with what is there together

log = logging.getLogger("replication.model_audit")
Told = Callable[[Finding], None]


class ModelReport(NamedTuple):
    """listed: manifests that are there. missing: announced, and gone or without some of their chunks."""

    listed: int = 0
    missing: int = 0
    damaged: int = 0
    restored: int = 0
    removed: int = 0
    left: int = 0


class Looked(NamedTuple):
    """A manifest that is there. lacks: how many of its chunks are not."""

    info: ObjectInfo
    manifest: Manifest
    lacks: int


class ModelAudit:
    """Of one bucket and a catalogue of it."""

    def __init__(
        self,
        objects: Objects,
        catalogue: Catalogue,
        hands: Hands,
        clock: Callable[[], float],
        check_place: Callable[[], Awaitable[None]],
        again_s: float,
    ) -> None:
        """clock: unix seconds. check_place: raises where this is not the region any more. again_s: see `Audit`."""
        self._objects = objects
        self._catalogue = catalogue
        self._hands = hands
        self._clock = clock
        self._check_place = check_place
        self._again_s = again_s
        self._removals: dict[str, removed_models.Removal] = {}  # that are known, by their keys

    async def run(self, terms: Terms, told: Told) -> ModelReport:
        """One audit. Raises RegionError, ObjectError, CatalogueDamaged."""
        announced = dict(self._catalogue.models)
        there = {f"models/{folder}/" for folder in await self._objects.folders("models/")}
        listed = await self._listed(there, told)
        removed = await self._take_removed(listed, told) if removed_models.REMOVED in there else 0
        missing = await self._remove_missing([name for name in announced if name not in listed], told)
        damaged, bad = 0, dict[str, ObjectInfo]()
        restored = left = 0
        doubted: list[Looked] = []
        async for looked in self._looked(listed, bad):
            if looked.lacks:
                doubted.append(looked)
                continue
            is_said = await self._restored(looked, terms, told)
            restored, left = restored + bool(is_said), left + (is_said is None)
        if doubted or bad:
            await asyncio.sleep(self._again_s)
            lost, young = await self._judge_lacking(doubted, terms, told)
            missing, left = missing + lost, left + young
            damaged = await self._judge_damaged(bad, terms, told)
        return ModelReport(len(listed), missing, damaged, restored, removed, left)

    async def _listed(self, folders: set[str], told: Told) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        for folder in sorted({MANIFESTS, CACHES} & folders):
            async for page in self._objects.list(folder):
                for info in page:
                    if named(info.name) is None:
                        told(Finding(Kind.STRANGE, info.name, "no name of a manifest"))
                    else:
                        found[info.name] = info
        return found

    async def _take_removed(self, listed: dict[str, ObjectInfo], told: Told) -> int:
        """Those that a removal names leave the list, the bucket and the catalogue."""
        now_s, removals = self._clock(), (await removed_models.read_removals(self._objects)).found
        over = {
            (removal.model, removal.revision) for _, removal in removals if now_s < removal.watched_until_s
        }
        gone = [name for name in listed if (named(name) or ("", ""))[:2] in over]
        await self._take(over, gone)
        for name in gone:
            del listed[name]
            told(Finding(Kind.ERASED, name, "it was removed", "deleted"))
        return len(gone)

    async def look_for_removals(self, problems: Problems) -> bool:
        """Those that are new here are carried out at once; whether all could be read. Raises ObjectError, CatalogueDamaged."""
        members = await removed_models.read_removals(self._objects, self._removals, problems)
        for info, removal in members.found:
            if self._clock() < removal.watched_until_s:
                names = [
                    name
                    async for name in removed_models.manifests_of(
                        self._objects, removal.model, removal.revision
                    )
                ]
                await self._take({(removal.model, removal.revision)}, names)
            self._removals[key_of(info)] = removal
        return not members.unavailable

    async def take_announced(self) -> None:
        """What a known removal names and was announced since. Raises ObjectError, CatalogueDamaged."""
        now_s, known = self._clock(), self._removals.values()
        await self._take({(one.model, one.revision) for one in known if now_s < one.watched_until_s}, [])

    async def _take(self, revisions: set[tuple[str, str]], names: Sequence[str]) -> None:
        """Out of all catalogues, and then out of the bucket, with these manifests."""
        known = [one for one in self._catalogue.models.values() if (one.model, one.revision) in revisions]
        if known:
            await self._hands.announce([removed(one, Reason.ERASED) for one in known])
        for name in {*names, *(one.name for one in known)}:
            await self._hands.delete([name])

    async def _remove(self, names: Iterable[str], reason: Reason) -> None:
        known = self._catalogue.models
        await self._hands.announce([removed(known[name], reason) for name in names if name in known])

    async def _remove_missing(self, names: list[str], told: Told) -> int:
        doubted = [name for name in names if name in self._catalogue.models and await self._is_gone(name)]
        if not doubted:
            return 0
        await asyncio.sleep(self._again_s)
        gone = [name for name in doubted if await self._is_gone(name)]
        await self._check_place()  # behind the answers: a place that is away has nothing
        await self._remove(gone, Reason.GONE)
        for name in gone:
            told(Finding(Kind.MISSING, name, "announced, and not there", "removed"))
        return len(gone)

    async def _is_gone(self, name: str) -> bool:
        try:
            await self._objects.head(name)
        except ObjectMissing:
            return True
        except (ObjectDamaged, ObjectRefused) as error:
            log.warning("%s: not judged: %s", self._objects.where, error)
        return False

    # -- what is there --

    async def _looked(
        self, listed: dict[str, ObjectInfo], bad: dict[str, ObjectInfo]
    ) -> AsyncIterator[Looked]:
        """All that can be read; of the others the names."""
        some: list[tuple[ObjectInfo, Manifest]] = []
        for info in listed.values():
            try:
                parts = named(info.name)
                manifest = await read_manifest(self._objects, *(parts or ("", "", "")))
            except (Damaged, ObjectMissing, ObjectRefused):
                bad[info.name] = info
                continue
            some.append((info, manifest))
            if sum(len(one.chunks) for _, one in some) >= AUDIT_CHUNKS_MAX:
                for looked in await self._compared(some):
                    yield looked
                some = []
        for looked in await self._compared(some):
            yield looked

    async def _compared(self, some: list[tuple[ObjectInfo, Manifest]]) -> list[Looked]:
        chunks = [chunk for _, manifest in some for chunk in manifest.chunks]
        gone = {chunk.name for chunk in await lacking(self._objects, chunks)} if chunks else set[str]()
        return [
            Looked(info, manifest, sum(chunk.name in gone for chunk in manifest.chunks) if gone else 0)
            for info, manifest in some
        ]

    async def _restored(self, looked: Looked, terms: Terms, told: Told) -> bool | None:
        """Announce what is whole and not announced: whether it was; None: it is too young, or a mirror brings it."""
        model = announced_model(looked.manifest)
        known = self._catalogue.models.get(model.name)
        if known is not None and known.content == model.content:
            return False
        is_young = not terms.restores_all and looked.info.modified_s >= terms.settled_s
        origin = terms.origin(model.id)
        if is_young or origin is None:
            return None
        await self._hands.announce([announced_model(looked.manifest, origin)])
        reason = "nobody has announced it" if known is None else "another content of this name was announced"
        told(Finding(Kind.ORPHAN, model.name, reason, "announced"))
        return True

    async def _judge_lacking(self, doubted: list[Looked], terms: Terms, told: Told) -> tuple[int, int]:
        """How many lack chunks still; and how many are too young to be judged."""
        missing = young = 0
        for before in doubted:
            [looked] = await self._compared([(before.info, before.manifest)])
            if not looked.lacks:
                continue
            name = looked.manifest.name
            if name not in self._catalogue.models and looked.info.modified_s >= terms.settled_s:
                young += 1
                continue
            await self._check_place()
            is_known = name in self._catalogue.models
            await self._remove([name], Reason.GONE)
            missing += 1
            reason = f"{looked.lacks} of its {len(looked.manifest.chunks)} chunks are not there, or of another size"
            told(Finding(Kind.MISSING, name, reason, "removed" if is_known else ""))
        return missing, young

    async def _judge_damaged(self, bad: dict[str, ObjectInfo], terms: Terms, told: Told) -> int:
        """What comes back damaged again is damaged in the store. Returns how many were."""
        damaged = 0
        for name, info in bad.items():
            try:
                content = await self._objects.get_within(name, MANIFEST_BYTES_MAX)
                if is_manifest_later(content):
                    told(Finding(Kind.STRANGE, name, "a manifest of a later version"))
                    continue
                await read_manifest(self._objects, *(named(name) or ("", "", "")))
                continue
            except (ObjectMissing, ObjectRefused):
                continue
            except (Damaged, ObjectDamaged) as error:
                reason = str(error)
            if info.modified_s >= terms.settled_s:
                continue
            await self._remove([name], Reason.DAMAGED)
            is_deleted = await self._hands.delete(await unchanged(self._objects, [info]))
            damaged += 1
            told(Finding(Kind.DAMAGED, name, reason, "deleted" if is_deleted else "removed"))
        return damaged
