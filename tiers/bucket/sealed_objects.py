"""Sealed objects: a store whose content is believed only where it was written with a key of the deployment.

    put ──▶ sealed, bound to region and name ──▶ store ──▶ opened, or ObjectDamaged ──▶ get

Everything above sees the same names, contents and sizes as without a key. Packs and chunks of models go through as they are:
they are read in parts, and their readers verify each part (tiers/bucket/seals.py).

An object that cannot be opened counts as damaged; others are not affected. One that says that it is sealed with a key that is
not in the file is refused, and never deleted, for the file may lack a key. Each name is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, TypeVar

from tiers.bucket.objects import Bytes, ObjectInfo, Objects, Range
from tiers.bucket.seals import Sealed, Seals, Unsealed
from tiers.constants import KEY_ID_BYTES, MIB, TAG_BYTES
from tiers.errors import ObjectDamaged, ObjectKeyUnknown
from tiers.parsing import is_later
from tiers.together import in_thread

SEALED_MAGIC: Final = b"KVSEAL1\n"
SEAL_BYTES: Final = len(SEALED_MAGIC) + KEY_ID_BYTES + TAG_BYTES + 1  # more than the content
IN_PARTS: Final = ("packs/", "models/chunks/")  # verified by their readers
INLINE_BYTES_MAX: Final = 2 * MIB  # sealed and opened by the loop itself, in 2 ms
NAMES_LOGGED_MAX: Final = 4096  # then they are logged again

T = TypeVar("T")

log = logging.getLogger("tiers.seals")


class SealedObjects(Objects):
    """untrusted: how often something was not believed."""

    def __init__(self, objects: Objects, seals: Seals, region: str) -> None:
        """region: names this place among all of the deployment, and the deployment."""
        self.where = objects.where
        self.seals = self._seals = seals
        self._objects = objects
        self._region = region
        self._logged: set[str] = set()

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if not name.startswith(IN_PARTS):
            plain = content
            content = await _worked(len(plain), lambda: self._sealed(name, plain))
        return await self._objects.put(name, content, only_new)

    async def get(self, name: str) -> memoryview:
        content = await self._objects.get(name)
        return content if name.startswith(IN_PARTS) else await self._opened(name, content)

    async def get_within(self, name: str, size_bytes_max: int) -> memoryview:
        if name.startswith(IN_PARTS):
            return await self._objects.get_within(name, size_bytes_max)
        return await self._opened(name, await self._objects.get_within(name, size_bytes_max + SEAL_BYTES))

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        found = await self._objects.get_if_changed(name, e_tag, size_bytes_max + SEAL_BYTES)
        return found and (await self._opened(name, found[0]), _plain(found[1]))

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        return await self._objects.get_ranges(name, ranges)

    async def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> bool:
        return await self._objects.read_into(name, start, views)

    async def head(self, name: str) -> ObjectInfo:
        return _plain(await self._objects.head(name))

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        async for page in self._objects.list(prefix, after):
            yield list(map(_plain, page))

    async def folders(self, prefix: str) -> Sequence[str]:
        return await self._objects.folders(prefix)

    async def delete(self, names: Sequence[str]) -> None:
        await self._objects.delete(names)

    async def sweep(self) -> int:
        return await self._objects.sweep()

    async def reseal(self, name: str, size_bytes_max: int) -> bool:
        """Seal an object with the first key; False where it is already. Raises ObjectError."""
        content = await self._objects.get_within(name, size_bytes_max + SEAL_BYTES)
        plain = await self._opened(name, content)
        sealed = await _worked(len(plain), lambda: self._sealed(name, plain))
        return sealed != content and await self._objects.put(name, sealed)

    # -- seals --

    def _sealed(self, name: str, content: Bytes) -> bytes:
        return SEALED_MAGIC + b"".join(self._seals.seal(self._bound_to(name), content))

    async def _opened(self, name: str, content: memoryview) -> memoryview:
        """What it says. Raises ObjectDamaged, ObjectKeyUnknown."""
        try:
            return memoryview(await _worked(len(content), lambda: self._content(name, content)))
        except Unsealed as error:
            self._note(name, error)
            kind = ObjectKeyUnknown if error.is_of_other_key else ObjectDamaged
            raise kind(f"{self.where}: {name}: {error}") from error

    def _content(self, name: str, content: memoryview) -> bytes:
        if is_later(content, SEALED_MAGIC):
            raise Unsealed("sealed in the manner of a later version", is_of_other_key=True)
        if bytes(content[: len(SEALED_MAGIC)]) != SEALED_MAGIC or len(content) < SEAL_BYTES:
            raise Unsealed("it has no seal")
        body = bytes(content[len(SEALED_MAGIC) :])
        key_id, rest = body[:KEY_ID_BYTES], body[KEY_ID_BYTES:]
        return self._seals.open(self._bound_to(name), Sealed(key_id, rest[:TAG_BYTES], rest[TAG_BYTES:]))

    def _bound_to(self, name: str) -> str:
        return f"object {self._region} {name}"

    def _note(self, name: str, why: Unsealed) -> None:
        self.untrusted += 1
        if name not in self._logged:
            if len(self._logged) >= NAMES_LOGGED_MAX:
                self._logged.clear()
            self._logged.add(name)
            log.warning("%s: %s: not believed: %s", self.where, name, why)


def _plain(info: ObjectInfo) -> ObjectInfo:
    """As it would be without a seal."""
    if info.name.startswith(IN_PARTS):
        return info
    return info._replace(size_bytes=max(0, info.size_bytes - SEAL_BYTES))


async def _worked(size_bytes: int, work: Callable[[], T]) -> T:
    """Many bytes are no work for the loop. The content must not change meanwhile."""
    return work() if size_bytes <= INLINE_BYTES_MAX else await in_thread(work)
