"""Resealing: what was sealed with an older key of the deployment is sealed with its first one, so that the older may go.

Packs and chunks stay as they are: a pack is over some day, and until then its key has to stay in the file; a chunk has no seal.
An object that cannot be opened stays, too, and is counted. Nobody else is waited for: what is replaced in the same second, such as
a head, may become the one before, which is a hint; an erasure must not be given meanwhile.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple

from replication.formats.manifests import CHUNKS, MANIFEST_BYTES_MAX
from replication.formats.region import MARKER
from tiers.bucket.sealed_objects import SealedObjects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused
from tiers.packs.packs import PACKS


class Resealed(NamedTuple):
    """resealed: were sealed with an older key. sealed: with the first one before. left: cannot be opened; problem: why the first one
    cannot."""

    resealed: int
    sealed: int
    left: int
    problem: str


async def reseal(objects: SealedObjects) -> Resealed:
    """All small objects of a region. Raises ObjectError where the store fails; what was done is done then."""
    resealed = sealed = left = 0
    problem = ""
    async for name in _names(objects):
        try:
            is_new = await objects.reseal(name, MANIFEST_BYTES_MAX)
            resealed, sealed = resealed + is_new, sealed + (not is_new)
        except ObjectMissing:
            continue  # it was removed just now
        except (ObjectDamaged, ObjectRefused) as error:
            left, problem = left + 1, problem or str(error)
    return Resealed(resealed, sealed, left, problem)


async def _names(objects: SealedObjects) -> AsyncIterator[str]:
    yield MARKER
    folders = {f"{folder}/" for folder in await objects.folders("")} - {PACKS, "models/"}
    folders |= {f"models/{folder}/" for folder in await objects.folders("models/")} - {CHUNKS}
    for folder in sorted(folders):
        async for page in objects.list(folder):
            for info in page:
                yield info.name
