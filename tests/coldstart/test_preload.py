"""Preloading: files are under their final name only when they are whole and true, and no byte comes twice."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldstart import blocks, open_model
from coldstart.disk import reading
from coldstart.disk.filling import Progress
from coldstart.disk.home import Home
from coldstart.disk.preload import Preloaded, preload
from coldstart.errors import ChunkDamaged, FilesWrong, InUse, ModelMissing, NoRoom
from replication.errors import ReplicationError
from replication.formats.manifests import MIB, Manifest
from tests.coldstart.models import Cuts, cut_evenly, files_at, made, put, random_files
from tests.objects import Faults, FaultyObjects, MemoryObjects, flip
from tiers.bucket.objects import Range
from tiers.errors import ObjectError


class Counted(MemoryObjects):
    """Counts how often each object was read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        self.reads[name] += 1
        return await super().get_ranges(name, ranges)


async def filled(objects: Any, files: dict[str, bytes], cuts: Cuts, **names: str) -> Manifest:
    manifest, contents = made(files, cuts, **names)
    await put(objects, manifest, contents)
    return manifest


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, bytes], Cuts]:
    """Files of any size, some empty, some the same, cut anywhere; bytes are few kinds, so that chunks repeat."""
    seed = draw(st.integers(0, 1 << 30))
    chance = random.Random(seed)
    files: dict[str, bytes] = {}
    cuts: dict[str, list[int]] = {}
    for number in range(draw(st.integers(1, 4))):
        path = f"{'a/b/' * (number % 2)}f{number}"
        size = draw(st.sampled_from([0, 1, 4095, 4096, 4097]) | st.integers(0, 200_000))
        content = chance.randbytes(size) if draw(st.booleans()) else bytes(size)
        inside = draw(
            st.lists(st.integers(1, max(1, size - 1)) | st.just(min(4096, max(1, size - 1))), max_size=8)
        )
        edges = sorted({0, size, *(at for at in inside if at < size)})
        files[path], cuts[path] = content, edges
    return files, cuts


@given(models())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_preloaded_is_what_was_published(model: tuple[dict[str, bytes], Cuts]) -> None:
    """Whatever the files and wherever they were cut; each chunk is fetched once, however often it is in them."""
    files, cuts = model
    objects = Counted()

    async def work(home: Home) -> Preloaded:
        await filled(objects, files, cuts)
        return await preload(objects, home, "m", streams=3)

    with tempfile.TemporaryDirectory() as directory:
        done = asyncio.run(work(Home(Path(directory))))
        assert files_at(done.path) == files
        assert done.path == Path(directory) / "models--m/snapshots/r1"
        assert set(objects.reads.values()) <= {1} and len(objects.reads) == len(done.manifest.chunks)


class Killed(BaseException):
    """What a process that is killed would have done next, it does not do."""


class Dying:
    """From the nth change of the file system on, every one raises: the process is dead."""

    CHANGES = (
        "pwrite",
        "rename",
        "replace",
        "fsync",
        "ftruncate",
        "mkdir",
        "utime",
        "unlink",
        "rmdir",
        "write",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.left = steps
        for name in self.CHANGES:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Killed
            return real(*arguments, **named)

        return call


def all_true(home: Home, files: dict[str, bytes]) -> None:
    """Whatever stands under a final name is whole and true."""
    for path in home.path.glob("models--*/snapshots/*"):
        assert files_at(path) == files


STREAMS = 3


@given(models(), st.integers(0, 120), st.integers(0, 60), st.booleans())
@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
def test_a_preload_killed_at_any_step_goes_on_where_it_was(
    model: tuple[dict[str, bytes], Cuts], first: int, second: int, is_direct: bool
) -> None:
    """Killed twice, then run to its end: nothing half-done has a final name, and a kill costs a chunk a stream at most."""
    files, cuts = model
    objects = Counted()
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        home = Home(Path(directory))
        if not is_direct:
            patch.setattr(blocks, "_NO_DIRECT", (*blocks._NO_DIRECT, 0))
            patch.setattr(blocks.Tree, "_write_direct", lambda *_: False)
        asyncio.run(filled(objects, files, cuts))
        for steps in (first, second):
            with pytest.MonkeyPatch.context() as dying:
                Dying(dying, steps)
                try:
                    asyncio.run(preload(objects, home, "m", streams=STREAMS))
                except Killed:
                    pass
            all_true(home, files)
        progress = Progress()
        done = asyncio.run(preload(objects, home, "m", progress=progress, streams=STREAMS))
        assert files_at(done.path) == files
        assert home.find("m").path == done.path and home.under_way() == []
        again = sum(count - 1 for count in objects.reads.values())
        assert again <= 2 * STREAMS
        assert not done.is_new or progress.left_bytes == 0


def test_a_damaged_chunk_is_tried_once_more_and_then_said(tmp_path: Path) -> None:
    """One line that names the chunk; what was true stays, nothing has a final name; mended, only that chunk is fetched."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(1), 3 * MIB)
    manifest = asyncio.run(filled(objects, files, cut_evenly(files, MIB // 4)))
    name = manifest.chunks[5].name
    good = objects.stored[name]
    objects.stored[name] = flip(good, 77)
    with pytest.raises(ChunkDamaged, match=f"{name}.*damaged in bucket"):
        asyncio.run(preload(objects, home, "m", streams=1))
    assert objects.reads[name] == 2
    assert not list(tmp_path.glob("models--*"))
    objects.stored[name] = good
    done = asyncio.run(preload(objects, home, "m"))
    assert files_at(done.path) == files
    assert {count for key, count in objects.reads.items() if key != name} == {1}


@pytest.mark.parametrize("seed", range(4))
def test_faulty_and_slow_stores_cost_time_only(tmp_path: Path, seed: int) -> None:
    """Reads that come damaged, cut off, late or not at all: begun again until it is done, what is there is true."""
    chance = random.Random(seed)
    inner = MemoryObjects()
    objects = FaultyObjects(inner, chance, Faults(failed=0.1, truncated=0.1, flipped=0.2, delay_s=0.01))
    files = random_files(chance, 2 * MIB)
    asyncio.run(filled(inner, files, cut_evenly(files, 50_000)))
    home = Home(tmp_path)
    for _ in range(200):
        try:
            done = asyncio.run(preload(objects, home, "m", "r1"))
            break
        except (ChunkDamaged, ObjectError, ReplicationError):
            all_true(home, files)
    assert files_at(done.path) == files


def test_a_second_revision_takes_what_the_first_has(tmp_path: Path) -> None:
    """Only what changed comes from the bucket; the rest is read from the disk, and what is damaged there is not believed."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(2), 4 * MIB, 2)
    asyncio.run(filled(objects, files, cut_evenly(files, 100_001)))
    first = asyncio.run(preload(objects, home, "m"))
    changed = {**files, "f1.bin": files["f1.bin"][:-1] + b"!"}
    asyncio.run(filled(objects, changed, cut_evenly(changed, 100_001), revision="r2"))
    path = first.path / "f0.bin"
    content = path.read_bytes()
    path.write_bytes(flip(content, 8 * 250_000))
    objects.reads.clear()
    progress = Progress()
    second = asyncio.run(preload(objects, home, "m", "r2", progress))
    assert files_at(second.path) == changed
    assert len(objects.reads) == 2 and set(objects.reads.values()) == {1}
    assert progress.by_source["bucket"] < 200_010 and progress.by_source["disk"] > 3 * MIB


def test_what_was_damaged_on_disk_is_mended(tmp_path: Path) -> None:
    """Read again when asked to: the chunk with a flipped bit is fetched, and nothing else."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(3), 2 * MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 300_000)))
    path = asyncio.run(preload(objects, home, "m")).path / "f2.bin"
    path.write_bytes(flip(path.read_bytes(), 5))
    objects.reads.clear()
    assert not asyncio.run(preload(objects, home, "m")).is_new
    assert asyncio.run(preload(objects, home, "m", is_verified=True)).is_new
    assert path.read_bytes() == files["f2.bin"] and sum(objects.reads.values()) == 1


def test_what_the_bucket_has_no_more_stays_where_it_is(tmp_path: Path) -> None:
    """A damaged revision is better than none: nothing is changed before it is known how it is mended."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(3), MIB)
    manifest = asyncio.run(filled(objects, files, cut_evenly(files, 300_000)))
    path = asyncio.run(preload(objects, home, "m")).path / "f2.bin"
    path.write_bytes(flip(path.read_bytes(), 5))
    asyncio.run(objects.delete([manifest.name]))
    with pytest.raises(ModelMissing):
        asyncio.run(preload(objects, home, "m", "r1", is_verified=True))
    assert home.find("m", "r1").path == path.parent and home.under_way() == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA])
def test_a_bad_sector_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Bytes that cannot be read are found by who verifies, with the place, and written again by a preload."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(3), 2 * MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 300_000)))
    path = asyncio.run(preload(objects, home, "m")).path
    inode, real, write = (path / "f2.bin").stat().st_ino, blocks.RunsFile.read, blocks.Tree.write
    bad = {(inode, 300_000)}

    def read(file: blocks.RunsFile, view: memoryview, at: int) -> bool:
        if (os.fstat(file.fd).st_ino, at) in bad:
            raise OSError(number, os.strerror(number))
        return real(file, view, at)

    def mended(tree: blocks.Tree, name: str, at: int, *arguments: Any) -> None:
        bad.discard(((tree.root / name).stat().st_ino, at))
        write(tree, name, at, *arguments)

    monkeypatch.setattr(blocks.RunsFile, "read", read)
    monkeypatch.setattr(blocks.Tree, "write", mended)
    with pytest.raises(FilesWrong, match=r"f2\.bin: damaged at byte 300000"):
        open_model("m", tmp_path, is_verified=True)
    objects.reads.clear()
    assert asyncio.run(preload(objects, home, "m", is_verified=True)).is_new and not bad
    assert files_at(path) == files and sum(objects.reads.values()) == 1


def test_nobody_takes_away_what_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who would evict it hears that it is in use."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(3), MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 300_000)))
    asyncio.run(preload(objects, home, "m"))
    refused = []

    def evicted(*arguments: Any) -> bool:
        with pytest.raises(InUse) as raised:
            home.evict("m")
        refused.append(raised)
        return True

    monkeypatch.setattr(reading, "is_true", evicted)
    assert not asyncio.run(preload(objects, home, "m", is_verified=True)).is_new and refused


def test_a_revision_that_was_published_anew_is_another_one(tmp_path: Path) -> None:
    """Removed from the bucket, and there again with other files: who asks the bucket gets those, and nothing of the old ones. While
    somebody uses it nothing is changed, and that is said."""
    objects, home = Counted(), Home(tmp_path)
    old, new = ({f"{name}.bin": name.encode() * 100_000, "config.json": b"{}"} for name in "ab")
    asyncio.run(filled(objects, old, cut_evenly(old, 30_000)))
    path = asyncio.run(preload(objects, home, "m")).path
    manifest = asyncio.run(filled(objects, new, cut_evenly(new, 30_000)))
    assert not asyncio.run(preload(objects, home, "m", "r1")).is_new  # the bucket is not asked
    with home.use("m"), pytest.raises(InUse, match="published anew"):
        asyncio.run(preload(objects, home, "m"))
    assert files_at(path) == old
    done = asyncio.run(preload(objects, home, "m"))
    assert done.is_new and files_at(path) == new and done.manifest.content == manifest.content
    assert not asyncio.run(preload(objects, home, "m")).is_new


@pytest.mark.parametrize("is_verified", [False, True])
def test_what_has_no_room_takes_nothing_away(tmp_path: Path, is_verified: bool) -> None:
    """Published anew with files that do not fit; or damaged, where models may have less by now: what is here stays."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(3), MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 300_000)))
    path = asyncio.run(preload(objects, home, "m")).path
    if is_verified:
        (path / "f2.bin").write_bytes(flip(files["f2.bin"], 5))
    else:
        larger = random_files(random.Random(4), 2 * MIB)
        asyncio.run(filled(objects, larger, cut_evenly(larger, 300_000)))
    before = files_at(path)
    with pytest.raises(NoRoom):
        asyncio.run(preload(objects, Home(tmp_path, MIB // 2), "m", is_verified=is_verified))
    assert home.find("m").path == path and files_at(path) == before and home.under_way() == []


def test_a_file_that_was_cut_off_is_whole_again(tmp_path: Path) -> None:
    """What does not have its length is no revision, and is filled again from where it is not true."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(3), 2 * MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 300_000)))
    path = asyncio.run(preload(objects, home, "m")).path / "f2.bin"
    os.truncate(path, 100)
    with pytest.raises(FilesWrong, match="preload m@r1 mends it"):
        home.find("m")
    assert asyncio.run(preload(objects, home, "m")).is_new
    assert files_at(path.parent) == files


def test_two_at_once_fetch_one_copy(tmp_path: Path) -> None:
    """One fills, the other follows how far it is, and both end with the same directory."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(4), 2 * MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 30_000)))
    slow = FaultyObjects(objects, random.Random(0), Faults(delay_s=0.1))
    heard = []

    async def both() -> list[Preloaded]:
        first = asyncio.ensure_future(preload(slow, home, "m", "r1", streams=2))
        while not home.under_way():
            await asyncio.sleep(0.01)
        return [await preload(slow, home, "m", "r1", follow=heard.append), await first]

    one, two = asyncio.run(both())
    assert (one.is_new, two.is_new) == (False, True) and one.path == two.path
    assert set(objects.reads.values()) == {1}
    assert heard and heard[-1].total_bytes > 0 and heard[-1].left_bytes < heard[-1].total_bytes


def test_cancelled_it_keeps_what_came(tmp_path: Path) -> None:
    """Whoever does not want to wait loses a chunk a stream."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(5), 2 * MIB)
    asyncio.run(filled(objects, files, cut_evenly(files, 30_000)))
    slow = FaultyObjects(objects, random.Random(0), Faults(delay_s=0.05))
    progress = Progress()

    async def cancelled() -> None:
        work = asyncio.ensure_future(preload(slow, home, "m", "r1", progress, streams=4))
        while progress.came_bytes < MIB // 2:
            await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    again = Progress()
    asyncio.run(preload(objects, home, "m", "r1", again))
    assert again.kept_bytes >= progress.came_bytes - 4 * 30_000
    assert sum(objects.reads.values()) <= len(objects.reads) + 4


def test_cancelled_while_it_waits_for_room_it_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one can begin at once."""
    objects, home = Counted(), Home(tmp_path)
    files = random_files(random.Random(5), MIB)
    manifest = asyncio.run(filled(objects, files, cut_evenly(files, 30_000)))
    is_asked, begin = threading.Event(), home.begin

    def asked(wanted: Manifest, is_untrue: bool) -> object:
        is_asked.set()
        return begin(wanted, is_untrue)

    monkeypatch.setattr(home, "begin", asked)

    async def cancelled() -> None:
        with home._locked():  # somebody else makes room
            work = asyncio.ensure_future(preload(objects, home, "m", "r1"))
            while not is_asked.is_set():
                await asyncio.sleep(0.01)
            work.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    begun = begin(manifest)
    assert begun is not None
    begun.close()


def test_the_newest_revision_is_what_a_name_stands_for(tmp_path: Path) -> None:
    """A revision that is named changes what the name alone stands for only where that is nothing yet."""
    objects, home = MemoryObjects(), Home(tmp_path)
    for at_s, revision in enumerate(("r2", "r1"), 1):
        files = {"config.json": revision.encode()}
        manifest, contents = made(files, cut_evenly(files, 10), revision=revision)
        asyncio.run(put(objects, msgspec.structs.replace(manifest, published_s=float(at_s)), contents))
    assert asyncio.run(preload(objects, home, "m", "r2")).path.name == "r2"
    assert home.find("m").path.name == "r2"
    assert asyncio.run(preload(objects, home, "m")).path.name == "r1"
    assert home.find("m").path.name == "r1"
    asyncio.run(preload(objects, home, "m", "r2"))
    assert home.find("m").path.name == "r1"
    for name, revision, said in (
        ("nothing", "", "no model nothing: there is m"),
        ("m", "r3", "no revision r3 of m"),
    ):
        with pytest.raises(ModelMissing, match=said):
            asyncio.run(preload(objects, home, name, revision))
