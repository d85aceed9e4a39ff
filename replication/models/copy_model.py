"""A model, copied from one bucket to another one.

    manifest ─▶ removed? ─▶ intent at home ─▶ chunks that home lacks: get ─▶ xxh3, SHA-256 ─▶ put      COPY_CHUNKS_MAX at a time
             ─▶ removed meanwhile? ─▶ manifest put, unless it is there ─▶ removed by now? then deleted again

What must always hold:

* A manifest is put when all of its chunks are there, and each that was copied had the bytes that its name and its manifest say.
* What is there already is not copied again: who is killed goes on where he was.
* A manifest of other content is never replaced. One that is damaged, or has the same content in other chunks and lacks some, is; one
  that is the same stays untouched, whatever chunks of it are mended.

Memory: COPY_CHUNKS_MAX chunks and two manifests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from replication.erasure.removed_models import read_removal
from replication.errors import Damaged, ModelDiffers, ModelRemoved
from replication.formats.announced_models import AnnouncedModel
from replication.formats.manifests import MANIFEST_BYTES_MAX, Chunk, Manifest, decode, is_manifest_later
from replication.models.chunks import lacking, wrong_bytes
from replication.models.collecting import Intent, publishing
from replication.store_clock import over_by
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.together import together

COPY_CHUNKS_MAX: Final = 8  # under way at a time, of 16 MiB at most

Pace = Callable[[int], Awaitable[None]]


async def _no_pace(size_bytes: int) -> None:
    pass


class ModelCopy:
    """One of them. copied_bytes: of chunks that were put. left_bytes: of those that home lacks still."""

    def __init__(
        self,
        source: Objects,
        home: Objects,
        announced: AnnouncedModel,
        who: str,
        clock: Callable[[], float],
        pace: Pace = _no_pace,
    ) -> None:
        """who: see `publishing`. clock: unix seconds. pace: waited for before so many bytes are fetched."""
        self.copied_bytes = 0
        self.left_bytes = announced.size_bytes
        self._source = source
        self._home = home
        self._announced = announced
        self._who = who
        self._over_s = over_by(clock)
        self._pace = pace

    async def run(self) -> None:
        """Until all of it is at home, with its manifest. Raises ModelRemoved, ModelDiffers, Damaged, IntentLost, ObjectMissing (the
        source has no such manifest), ObjectError."""
        content = await self._read(self._source)
        if content is None:
            raise ObjectMissing(f"{self._source.where}: {self._announced.name}: is announced, and not there")
        manifest = self._decoded(content, self._source)
        if manifest.content != self._announced.content:
            raise Damaged(f"{self._source.where}: {manifest.name}: is not the one that was announced")
        await self._require_not_removed()
        there, is_new = await self._there()
        if there is not None and not await lacking(self._home, there.chunks):
            self.left_bytes = 0
            # Of a run that was killed between its manifest and the end of its intent.
            await Intent(self._home, manifest, self._who).end()
            return
        async with publishing(self._home, manifest, self._who) as intent:
            await self._copy_chunks(await lacking(self._home, manifest.chunks))
            if there is not None and (there.chunks, there.files) == (manifest.chunks, manifest.files):
                await self._require_not_removed()
            else:
                await self._put(content, is_new, intent)

    async def _read(self, objects: Objects) -> bytes | None:
        try:
            return bytes(await objects.get_within(self._announced.name, MANIFEST_BYTES_MAX))
        except ObjectMissing:
            return None
        except ObjectDamaged as error:
            raise Damaged(str(error)) from error

    def _decoded(self, content: bytes, objects: Objects) -> Manifest:
        where = f"{objects.where}: {self._announced.name}"
        manifest = decode(content, where)
        if manifest.name != self._announced.name:
            raise Damaged(f"{where}: says it is {manifest.name}")
        return manifest

    async def _there(self) -> tuple[Manifest | None, bool]:
        """The manifest at home, None if there is none that is right; and whether nothing has its name. Raises ModelDiffers."""
        try:
            content = await self._read(self._home)
            if content is None:
                return None, True
            if is_manifest_later(content):
                raise ModelDiffers(
                    f"{self._home.where}: {self._announced.name}: a manifest of a later version is here; it stays"
                )
            there = self._decoded(content, self._home)
        except Damaged:
            return None, False
        if there.content != self._announced.content:
            raise ModelDiffers(
                f"{self._home.where}: {there.name}: another content is here, published by {there.published_by}; "
                f"that of {self._source.where} is not copied: publish one of them as another revision"
            )
        return there, False

    async def _require_not_removed(self) -> None:
        """Raises ModelRemoved."""
        model, revision = self._announced.model, self._announced.revision
        for objects in (self._home, self._source):
            if await read_removal(objects, model, revision, self._over_s()) is not None:
                raise ModelRemoved(f"{objects.where}: {model}@{revision}: was removed")

    # -- chunks --

    async def _copy_chunks(self, chunks: list[Chunk]) -> None:
        """All that can be; raises what was wrong with the first that is damaged, or gone, at the source."""
        self.left_bytes = sum(chunk.size_bytes for chunk in chunks)
        left, wrong = iter(chunks), list[str]()
        await together(self._copy_some(left, wrong) for _ in range(min(COPY_CHUNKS_MAX, len(chunks))))
        if wrong:
            more = f", and {len(wrong) - 1} more chunks" if len(wrong) > 1 else ""
            raise Damaged(f"{wrong[0]}{more}")

    async def _copy_some(self, left: Iterator[Chunk], wrong: list[str]) -> None:
        for chunk in left:
            await self._pace(chunk.size_bytes)
            try:
                content = await self._fetched(chunk)
            except (Damaged, ObjectMissing, ObjectRefused) as error:
                wrong.append(str(error))
                continue
            try:
                await self._home.put(chunk.name, content)
            except ObjectMissing as error:  # a directory that is gone
                raise ObjectUnavailable(str(error)) from error
            self.copied_bytes += chunk.size_bytes
            self.left_bytes -= chunk.size_bytes

    async def _fetched(self, chunk: Chunk) -> memoryview:
        """Its bytes, if they are right. Raises Damaged, ObjectError."""
        try:
            content = await self._source.get_within(chunk.name, chunk.size_bytes)
        except ObjectDamaged as error:
            raise Damaged(str(error)) from error
        if wrong := await wrong_bytes(chunk, content):
            raise Damaged(f"{self._source.where}: {chunk.name}: {wrong}")
        return content

    # -- the manifest --

    async def _put(self, content: bytes, is_new: bool, intent: Intent) -> None:
        await self._require_not_removed()
        await intent.require()
        name = self._announced.name
        if not await self._home.put(name, content, only_new=is_new):
            await self._there()  # somebody's of the same content, or it raises
        try:
            await self._require_not_removed()
        except ModelRemoved:
            await self._home.delete([name])
            raise
