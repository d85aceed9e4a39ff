"""Preloading: a revision of a model from the region's bucket to files on this node.

    which revision? ─▶ whole here already? ─yes─▶ done      (of the same files, where the bucket was asked)
          │                 │ no
          │                 ╰▶ room, lock ─┬─▶ filled (coldstart/disk/filling.py) ─▶ one rename ─▶ done
          ╰ newest by the store's clock    ╰─▶ another process fills it: follow how far it is, and look again

Cancelled or killed at any instant, it leaves files under way, of which the next one keeps what is true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from coldstart.blocks import Tree
from coldstart.disk.filling import STREAMS, Filling, Progress
from coldstart.disk.home import Home, Revision, Said, UnderWay, name_of, said_at
from coldstart.disk.reading import untrue
from coldstart.disk.sources import Bucket, Local
from coldstart.errors import FilesWrong, ModelMissing
from coldstart.published.models import read
from replication.formats.manifests import Manifest
from tiers.bucket.objects import Objects
from tiers.together import in_full, meanwhile

LOOK_S: Final = 0.2  # between two looks how far another process is
SAY_S: Final = 0.5  # between two words about how far this one is


class Preloaded(NamedTuple):
    """is_new: this call has filled it."""

    path: Path
    manifest: Manifest
    is_new: bool


Follow = Callable[[Said], None]


async def preload(
    objects: Objects,
    home: Home,
    model: str,
    revision: str = "",
    progress: Progress | None = None,
    is_verified: bool = False,
    streams: int = STREAMS,
    follow: Follow = lambda said: None,
) -> Preloaded:
    """Have a revision whole on this node. revision "": the newest one, which its name alone stands for then.

    is_verified: read again what is whole here already, and mend it. follow: hears of how far it is, whoever fills it.
    Where one is named that is whole here, the bucket is not asked. Raises ModelError, Damaged, ObjectError, OSError.
    """
    manifest = None if revision else await read(objects, model)
    chosen = manifest.revision if manifest is not None else revision
    progress = progress or Progress()
    is_new = False
    is_untrue = is_verified and await asyncio.to_thread(_is_untrue, home, model, chosen)
    while is_untrue or (found := await asyncio.to_thread(_whole, home, model, chosen, manifest)) is None:
        manifest = manifest or await read(objects, name_of(model, chosen))  # else what is here stays as it is
        filling = await _begun(home, manifest, is_untrue)
        is_untrue = False
        if filling is None:
            if (said := said_at(home.place_under_way(model, chosen))) is not None:
                follow(said)
            await asyncio.sleep(LOOK_S)
            continue
        with filling:
            sources = [Local(await asyncio.to_thread(_others, home)), Bucket(objects)]
            async with meanwhile(_say(filling, progress, follow)):
                await Filling(Tree(filling.path), manifest, sources, progress, streams).fill()
            follow(_said(progress))
            await asyncio.to_thread(home.finish, filling, not revision)
        is_new = True
    await asyncio.to_thread(home.refer, model, chosen, not revision)
    return Preloaded(found.path, found.manifest, is_new)


def _whole(home: Home, model: str, revision: str, manifest: Manifest | None) -> Revision | None:
    """manifest: None where the bucket was not asked. Else one of other files is none: it was removed, and published anew."""
    try:
        found = home.find(model, revision)
    except (ModelMissing, FilesWrong):
        return None
    return found if manifest is None or found.manifest.content == manifest.content else None


async def _begun(home: Home, manifest: Manifest, is_untrue: bool) -> UnderWay | None:
    """As `Home.begin`; where who waits is cancelled, what it has begun is given up."""
    work = asyncio.get_running_loop().run_in_executor(None, home.begin, manifest, is_untrue)
    try:
        return await in_full(work)
    except asyncio.CancelledError:
        if work.exception() is None and (begun := work.result()) is not None:
            begun.close()
        raise


def _is_untrue(home: Home, model: str, revision: str) -> bool:
    """It is here, and not what it should be."""
    try:
        use = home.use(model, revision)
    except (ModelMissing, FilesWrong):
        return False
    with use:
        return bool(untrue(use.path, use.manifest))


def _others(home: Home) -> dict[Path, Manifest]:
    """Whole revisions on this disk, which may have some of its chunks."""
    return {one.path: one.manifest for one in home.revisions()}


async def _say(filling: UnderWay, progress: Progress, follow: Follow) -> None:
    while True:
        said = _said(progress)
        follow(said)
        await asyncio.to_thread(filling.say, said)
        await asyncio.sleep(SAY_S)


def _said(progress: Progress) -> Said:
    return Said(
        progress.total_bytes, progress.kept_bytes, dict(progress.by_source), round(progress.bytes_per_s)
    )
