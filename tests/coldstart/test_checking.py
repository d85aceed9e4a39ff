"""Verifying what a bucket has of models: one that nobody here may read takes no other one with it, and what leaves meanwhile is no loss."""

from __future__ import annotations

import asyncio
import random

from coldstart.fleet.caches import find_caches
from coldstart.published.checking import Report, verify
from kvstore.tools.cli.commands.model_ls import _listed
from replication.formats.manifests import Chunk, Manifest, chunk_name, key_of, manifest_name
from replication.models.published import published
from tests.coldstart.model_files import silent
from tests.coldstart.models import cut_evenly, made, put
from tests.objects import MemoryObjects
from tiers.bucket.objects import Objects
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals


def publish(objects: Objects, model: str, about: dict[str, str] | None = None) -> Manifest:
    files = {"w.bin": random.Random(model).randbytes(1000)}
    manifest, contents = made(files, cut_evenly(files, 300), model)
    if about:
        manifest = Manifest(
            *(getattr(manifest, name) for name in manifest.__struct_fields__[:6]),
            about,
            manifest.chunks,
            manifest.files,
        )
    asyncio.run(put(objects, manifest, contents))
    return manifest


async def verified(objects: Objects) -> Report:
    return await verify(objects, await published(objects), True, silent)


def test_a_manifest_of_a_strange_key_takes_no_other_with_it() -> None:
    """Whoever may write to a bucket can put one: it is said, and everything else is listed, verified and found."""
    inner = MemoryObjects()
    ours, theirs = (SealedObjects(inner, Seals([key * 32]), "acme/na") for key in (b"k", b"x"))
    publish(ours, "m")
    publish(theirs, "n")
    about = {"engine": "vllm"}
    publish(theirs, "m", about)
    rows = {row["model"]: row for row in asyncio.run(_listed(ours, ""))["revisions"]}
    assert not rows["m"]["problem"] and "not in key_file" in rows["n"]["problem"]
    report = asyncio.run(verified(ours))
    assert [(found.kind, found.name) for found in report.findings] == [("manifest", manifest_name("n", "r1"))]
    assert report.read_bytes == 1000
    found = asyncio.run(find_caches(ours, "m", "r1", about, b"k" * 32))
    assert found.manifest is None and "not in key_file" in found.why
    assert asyncio.run(ours.head(manifest_name("m", "r1", key_of(about))))


class Leaving(MemoryObjects):
    """A model is removed, and its chunks are collected, once the first of these is read."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: Manifest | None = None

    async def get_within(self, name: str, size_bytes_max: int) -> memoryview:
        if self.leaves is not None and name in [chunk.name for chunk in self.leaves.chunks]:
            gone, self.leaves = self.leaves, None
            await self.delete([gone.name, *(chunk.name for chunk in gone.chunks)])
        return await super().get_within(name, size_bytes_max)


def test_what_is_removed_meanwhile_is_not_missing() -> None:
    """A chunk that no revision names any more is nobody's loss; one that another revision names is."""
    objects = Leaving()
    publish(objects, "m")
    objects.leaves = publish(objects, "n")
    assert asyncio.run(verified(objects)).findings == []
    lost: Chunk = publish(objects, "m").chunks[0]
    asyncio.run(objects.delete([chunk_name(lost.sha256)]))
    [found] = asyncio.run(verified(objects)).findings
    assert (found.kind, found.name, found.files) == ("missing", lost.name, ["m@r1/w.bin"])
