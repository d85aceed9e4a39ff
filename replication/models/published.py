"""Which revisions of models a bucket has, and which of a model is the latest: what its name alone stands for.

    its manifest says when      by the clock of the store that it was published to, in each region that it was copied to
    the time of its object      when it came here: counts where the manifest says nothing, or cannot be read

One order for all who ask. Two of one moment are in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from replication.errors import Damaged
from replication.formats.manifests import MANIFESTS, Head, named, read_head
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing, ObjectRefused
from tiers.together import each

READ_AT_ONCE: Final = 8
LATEST_S: Final = 253402300799.0  # the last second of the last year that a date can have


class Published(NamedTuple):
    """A manifest in a bucket. key: of caches, "" of a model. published_s: unix seconds; where it was not read, when it was put here."""

    model: str
    revision: str
    key: str
    object_name: str
    published_s: float

    def said(self, head: Head) -> Published:
        """The same, with what its manifest says."""
        return self._replace(published_s=head.published_s) if 0 < head.published_s < LATEST_S else self


async def published(objects: Objects, model: str = "", folder: str = MANIFESTS) -> list[Published]:
    """All of them, or those of one model; none is read. folder: MANIFESTS or CACHES. Raises ObjectError."""
    found = []
    async for page in objects.list(f"{folder}{model}/" if model else folder):
        for info in page:
            if (parts := named(info.name)) is not None:
                found.append(Published(*parts, info.name, info.modified_s))
    return found


def in_order(found: Iterable[Published]) -> list[Published]:
    """The latest first."""
    return sorted(found, key=lambda one: (one.published_s, one.model, one.revision, one.key), reverse=True)


async def latest_first(objects: Objects, model: str, folder: str = MANIFESTS) -> list[Published]:
    """Those of one model. Reads each. Raises ObjectError."""

    async def said(one: Published) -> Published | None:
        try:
            return one.said(await read_head(objects, one.model, one.revision, one.key))
        except ObjectMissing:
            return None  # removed meanwhile
        except (Damaged, ObjectRefused):
            return one

    found = await each(said, await published(objects, model, folder), READ_AT_ONCE)
    return in_order(one for one in found if one is not None)
