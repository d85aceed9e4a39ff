"""Verifying models from outside: every byte of their chunks, and what another region has that should be here."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec

from replication.audit.orphans import Finding, Kind
from replication.catalogue.catalogue import Catalogue
from replication.deleting import delete_each, unchanged
from replication.erasure.removed_models import read_removal
from replication.errors import Damaged, IntentLost, ModelDiffers, ModelRemoved
from replication.formats.announced_models import AnnouncedModel
from replication.formats.manifests import Chunk, named, read_manifest
from replication.formats.rules import Rule, weights_rule_for
from replication.models.chunks import wrong_bytes
from replication.models.copy_model import ModelCopy
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused
from tiers.together import together

DEEP_CHUNKS: Final = 4  # read at a time
Told = Callable[[Finding], None]


class ReadChunks(msgspec.Struct):
    """Chunks that were read to their last byte. models: of which one is damaged."""

    chunks: int = 0
    bytes: int = 0
    damaged: int = 0
    models: list[str] = []


async def read_chunks(
    objects: Objects, catalogue: Catalogue, share: float, chance: random.Random, told: Told, repairs: bool
) -> AsyncIterator[ReadChunks]:
    """Read this share of the chunks of announced models, each once; what was read so far, again and again. repairs: damaged
    ones are deleted, so that a mirror or a publisher puts them anew. Raises ObjectError."""
    done, seen = ReadChunks(), set[bytes]()
    for model in list(catalogue.models.values()):
        try:
            manifest = await read_manifest(objects, *(named(model.name) or ("", "", "")))
        except (Damaged, ObjectMissing, ObjectRefused):
            continue  # the audit has said it
        drawn = [chunk for chunk in manifest.chunks if chunk.sha256 not in seen and chance.random() < share]
        seen.update(chunk.sha256 for chunk in drawn)
        for at in range(0, len(drawn), DEEP_CHUNKS):
            some = drawn[at : at + DEEP_CHUNKS]
            wrongs = await together(_damage(objects, chunk) for chunk in some)
            for chunk, wrong in zip(some, wrongs, strict=True):
                done.chunks += 1
                done.bytes += chunk.size_bytes
                if wrong:
                    done.damaged += 1
                    done.models.append(model.name)
                    is_deleted = repairs and await _is_deleted(objects, chunk)
                    reason = f"{wrong}; of {model.model}@{model.revision}"
                    told(Finding(Kind.DAMAGED, chunk.name, reason, "deleted" if is_deleted else ""))
            yield done


async def _is_deleted(objects: Objects, chunk: Chunk) -> bool:
    """What is damaged still; one that was put again meanwhile stays."""
    try:
        info = await objects.head(chunk.name)
    except (ObjectMissing, ObjectDamaged, ObjectRefused):
        return False
    if not await _damage(objects, chunk):
        return False
    names = await unchanged(objects, [info])
    return bool(names) and not await delete_each(objects.delete, names)


async def _damage(objects: Objects, chunk: Chunk) -> str:
    """Why it is damaged; "" if it is not, or is gone. Asked twice: the way may be to blame once."""
    wrong = ""
    for _ in range(2):
        try:
            content = await objects.get_within(chunk.name, chunk.size_bytes)
            wrong = await wrong_bytes(chunk, content)
        except ObjectMissing:
            return ""
        except ObjectDamaged as error:
            wrong = str(error)
        if not wrong:
            return ""
    return wrong


async def lacking_models(
    known: Catalogue,
    objects: Objects,
    region: str,
    there: Catalogue,
    source: str,
    rules: Sequence[Rule],
    now_s: float,
) -> list[AnnouncedModel]:
    """Models that region `source` has announced, and that should be in this one by the rules, or were made here. Raises Damaged,
    ObjectError."""
    found = []
    for model in there.models.values():
        is_here = (here := known.models.get(model.name)) is not None and here.content == model.content
        is_ruled = not model.origin and weights_rule_for(rules, source, region, model.model) is not None
        if is_here or not (is_ruled or model.origin == region):
            continue
        if await read_removal(objects, model.model, model.revision, now_s) is None:
            found.append(model)
    return found


async def copied(
    model: AnnouncedModel,
    source: Objects,
    objects: Objects,
    region: str,
    name: str,
    clock: Callable[[], float],
) -> tuple[AnnouncedModel | None, str]:
    """Copy a model of region `name`: what is to be announced, or None and why it could not be. Raises ObjectError."""
    try:
        await ModelCopy(source, objects, model, f"verify {region}", clock).run()
    except (Damaged, IntentLost, ModelDiffers, ModelRemoved, ObjectMissing, ObjectRefused) as error:
        return None, str(error)
    origin = "" if model.origin == region else name
    return msgspec.structs.replace(model, origin=origin), ""
