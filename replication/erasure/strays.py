"""Strays: packs that a tombstone names, as the bucket lists them. Nobody may have announced them.

    packs/ ─▶ folders ─▶ whose? one pack's header says it ─┬▶ all of it is erased: every pack in it
                                                           ╰▶ a prefix of it is: packs that no catalogue knows, by their headers

What cannot be read (of a later version, say) and is in no folder that goes as a whole may be erased or not: it stays, and is counted.

A node that was killed between putting a pack and announcing it leaves one; so does a catalogue that has forgotten.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence, Set
from typing import Final

from replication.constants import AUDIT_REQUESTS_MAX, SPECS_CHOSEN_MAX
from replication.formats.announced import Announced
from replication.formats.tombstones import Tombstone
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused, PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import read_pack
from tiers.packs.packs import PACKS, pack_identity
from tiers.together import together

HEADERS_TRIED_MAX: Final = 8  # of one folder, until one says whose it is

UNREAD_MAX: Final = 256  # of one folder that are counted

_FOLDER = re.compile(r"[0-9a-f]{32}")


class Strays:
    """Of one bucket."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.unread: dict[
            str, list[str]
        ] = {}  # by folder, why packs of which nobody can say whether they are erased cannot be read
        self._specs: dict[str, NamespaceSpec] = {}  # by folder

    def concerns(self, name: str, tombstone: Tombstone) -> bool:
        """Whether a pack may be named, as far as it is known whose it is."""
        identity = pack_identity(name)
        spec = self._specs.get(identity[0].hex()) if identity is not None else None
        return spec is None or tombstone.names(spec)

    def doubtful(self, tombstone: Tombstone) -> list[str]:
        """Why packs cannot be read that it may name, a line each."""
        found: list[str] = []
        for folder, reasons in self.unread.items():
            spec, digest = self._specs.get(folder), bytes.fromhex(folder)
            if tombstone.names(spec) if spec is not None else digest in (tombstone.namespaces or (digest,)):
                found += reasons
        return found

    async def pages(
        self,
        tombstones: Sequence[Tombstone],
        is_known: Callable[[bytes], bool],
        covers: Callable[[Announced], bool],
    ) -> AsyncIterator[list[str]]:
        """Names of packs that are erased, page by page. is_known: whether the catalogue has this pack, which is looked at there.
        covers: whether one is erased; it learns from each that is. Raises ObjectError."""
        self.unread.clear()
        for folder in filter(_FOLDER.fullmatch, await self._objects.folders(PACKS)):
            spec = await self._spec(folder)
            named = [tombstone for tombstone in tombstones if tombstone.names(spec)]
            if any(not tombstone.block_hash for tombstone in named):
                self.unread.pop(folder, None)
                async for page in self._objects.list(f"{PACKS}{folder}/"):
                    yield [info.name for info in page if pack_identity(info.name) is not None]
            elif named:
                passed: set[str] = set()
                while found := await self._behind(folder, is_known, covers, passed):
                    passed.update(found)
                    yield found

    async def _behind(
        self,
        folder: str,
        is_known: Callable[[bytes], bool],
        covers: Callable[[Announced], bool],
        passed: Set[str],
    ) -> list[str]:
        """A page's packs of a folder that are behind a prefix, but for those that were passed on. What hangs on them may have been
        listed before: look again."""
        async for page in self._objects.list(f"{PACKS}{folder}/"):
            unknown = [info for info in page if info.name not in passed and not _has(is_known, info)]
            found: list[str] = []
            for at in range(0, len(unknown), AUDIT_REQUESTS_MAX):
                for read in await together(map(self._read, unknown[at : at + AUDIT_REQUESTS_MAX])):
                    if isinstance(read, Announced) and covers(read):
                        found.append(read.pack.name)
                    elif isinstance(read, str):
                        self._doubt(folder, read)
            if found:
                return found
        return []

    async def _spec(self, folder: str) -> NamespaceSpec:
        """Whose packs a folder has: no more than its digest, where no header that is there can be read."""
        if folder not in self._specs:
            tried, reasons = 0, list[str]()
            async for page in self._objects.list(f"{PACKS}{folder}/"):
                for info in page[: HEADERS_TRIED_MAX - tried]:
                    tried += 1
                    read = await self._read(info)
                    if isinstance(read, Announced):
                        if len(self._specs) >= SPECS_CHOSEN_MAX:
                            self._specs.clear()
                        self._specs[folder] = read.pack.header.spec
                        return read.pack.header.spec
                    reasons += [read] if read else []
                if tried >= HEADERS_TRIED_MAX:
                    break
            for reason in reasons:
                self._doubt(folder, reason)
            return NamespaceSpec(bytes.fromhex(folder), 0, 0)
        return self._specs[folder]

    def _doubt(self, folder: str, reason: str) -> None:
        reasons = self.unread.setdefault(folder, [])
        if reason not in reasons and len(reasons) < UNREAD_MAX:
            reasons.append(reason)

    async def _read(self, info: ObjectInfo) -> Announced | str | None:
        """Why it cannot be read, where it cannot be; None where it is no pack, or gone."""
        identity = pack_identity(info.name)
        if identity is None:
            return None
        try:
            return Announced(await read_pack(self._objects, *identity))
        except ObjectMissing:
            return None
        except (ObjectDamaged, ObjectRefused, PackDamaged) as error:
            return str(error)


def _has(is_known: Callable[[bytes], bool], info: ObjectInfo) -> bool:
    identity = pack_identity(info.name)
    return identity is None or is_known(identity[1])
