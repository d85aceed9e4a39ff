"""Which models a bucket has: names, revisions, the manifest of each; and taking one away.

    NAME             the revision that was published last (replication/models/published.py)
    NAME@REVISION    that one

A manifest is put when all of its chunks are there, so what is listed is whole. Taking one away removes the manifest: its chunks
are collected later (coldstart/published/collecting.py), those that no other revision has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coldstart.errors import ModelError, ModelMissing
from replication.erasure.removed_models import Removal, put_removal
from replication.formats.manifests import CACHES, Manifest, is_model_name, read_manifest
from replication.models.published import Published, in_order, latest_first, published
from tiers.bucket.objects import Objects
from tiers.errors import ObjectMissing

NAMES_SHOWN = 8  # of those that there are, where one is not


Progress = Callable[[str, int, int], None]  # what, how much of it is done, how much there is


async def find(objects: Objects, wanted: str) -> Published:
    """wanted: NAME or NAME@REVISION. Raises ModelMissing, ModelError, ObjectError."""
    model, at, revision = wanted.partition("@")
    check_name("model", model)
    if at:
        check_name("revision", revision)
    found = await (published if at else latest_first)(objects, model)
    if not found:
        others = sorted({one.model for one in await published(objects)})
        raise ModelMissing(f"{objects.where}: no model {model}: there {_are(others)}")
    for one in found:
        if not at or one.revision == revision:
            return one
    there = [one.revision for one in in_order(found)]
    raise ModelMissing(f"{objects.where}: no revision {revision} of {model}: there {_are(there)}")


async def read(objects: Objects, wanted: str) -> Manifest:
    """wanted: NAME or NAME@REVISION. Raises ModelMissing, ModelError, Damaged, ObjectError."""
    one = await find(objects, wanted)
    try:
        return await read_manifest(objects, one.model, one.revision)
    except ObjectMissing as error:
        raise ModelMissing(f"{objects.where}: {wanted}: it was removed a moment ago") from error


async def remove(objects: Objects, wanted: Published, removal: Removal | None = None) -> None:
    """A revision with its caches; without reading what they say. Done again, it removes what a kill left. removal: what stays in a
    region, so that nobody brings it back. Raises ObjectError."""
    if removal is not None:
        await put_removal(objects, removal)
    caches = await published(objects, f"{wanted.model}/{wanted.revision}", CACHES)
    await objects.delete([one.object_name for one in caches])
    await objects.delete([wanted.object_name])


def check_name(what: str, name: str) -> None:
    """what: "model", "revision". Raises ModelError where it cannot be the name of one."""
    if not is_model_name(name):
        shown = name[:100].encode("unicode_escape", "backslashreplace").decode()
        raise ModelError(
            f"{what} {shown or '(none)'}: allowed are up to 96 of a-z 0-9 . _ -, the first one a letter or a digit"
        )


def _are(names: Sequence[str]) -> str:
    if not names:
        return "is none"
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{'is' if len(names) == 1 else 'are'} {', '.join(names[:NAMES_SHOWN])}{more}"
