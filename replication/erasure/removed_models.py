"""Removed models: revisions that nobody may have any more, in the region's own bucket, so that no mirror brings one back.

    models/removed/<model>/<revision>     Removal ─▶ the keeper says in the feed that it is removed, and deletes the manifest and its caches

Deletes are never copied between regions; a removal is. Who puts a manifest looks for its removal before and afterwards, and
takes it back if there is one by then: whoever was first, the manifest is gone in the end. Its chunks are left to `kvstore model gc`.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection
from typing import Final

import msgspec

from replication.constants import KIB
from replication.formats.keeping import ring
from replication.formats.manifests import CACHES, MODEL_NAME, ModelName, manifest_name
from replication.formats.members import Members, key_of, read_members
from replication.formats.ranges import Text, UnixS, UntilS
from replication.formats.sealed import Sealed
from replication.problems import Problems
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused

REMOVED = "models/removed/"
_PART = MODEL_NAME.removeprefix("^").removesuffix(r"\Z")
_NAME = re.compile(f"{_PART}/{_PART}")


class Removal(msgspec.Struct, frozen=True, array_like=True):
    """removed_s: unix seconds, for people. removed_by: in words. watched_until_s: until then the revision may not come back."""

    model: ModelName
    revision: ModelName
    removed_s: UnixS
    removed_by: Text
    watched_until_s: UntilS

    @property
    def name(self) -> str:
        return removal_name(self.model, self.revision)


def removal_name(model: str, revision: str) -> str:
    return f"{REMOVED}{model}/{revision}"


REMOVAL_FORMAT: Final = Sealed(b"KVMRMV1\n", Removal, 16 * KIB, lambda removal: removal.name)


async def read_removal(objects: Objects, model: str, revision: str, now_s: float) -> Removal | None:
    """The one that forbids this revision now; None without. Raises Damaged, ObjectError."""
    try:
        found = await REMOVAL_FORMAT.fetch(objects, removal_name(model, revision))
    except ObjectMissing:
        return None
    return found if now_s < found.watched_until_s else None


async def read_removals(
    objects: Objects, known: Collection[str] = (), problems: Problems | None = None
) -> Members[Removal]:
    """Those that are not known, by their keys. One that cannot be read is a problem, and left out. Raises ObjectError where there is
    no list."""
    return await read_members(
        objects,
        REMOVED,
        _NAME,
        lambda info: REMOVAL_FORMAT.fetch(objects, info.name),
        Problems(objects.where) if problems is None else problems,
        lambda info: key_of(info) in known,
    )


async def put_removal(objects: Objects, removal: Removal) -> None:
    """Unless one is there that is watched for as long. Raises FormatUnknown, ObjectError."""
    there = await REMOVAL_FORMAT.there(objects, removal.name)
    if there is None or there.watched_until_s < removal.watched_until_s:
        await REMOVAL_FORMAT.put(objects, removal)
        await ring(objects)


async def manifests_of(objects: Objects, model: str, revision: str) -> AsyncIterator[str]:
    """The names of a revision's manifests that are there: its own one, and those of its caches."""
    own = manifest_name(model, revision)
    try:
        await objects.head(own)
    except ObjectMissing:
        own = ""
    except (ObjectDamaged, ObjectRefused):
        pass  # something is there
    if own:
        yield own
    async for page in objects.list(f"{CACHES}{model}/{revision}/"):
        for info in page:
            yield info.name
