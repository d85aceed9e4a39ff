"""Images of models in memory: filled from chunks slab by slab, gone on with, read without a copy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldstart.errors import ChunkDamaged, ModelMissing, NoRoom
from coldstart.loading import resident
from coldstart.loading.resident import Image, fill, layout_of
from replication.errors import Damaged
from replication.formats.manifests import Chunk
from tests.coldstart.images import Memory, files_of, manifest_of
from tiers.checksum import digest
from tiers.errors import ObjectUnavailable

SLAB_BYTES = 1 << 16
GARBAGE = 0xA5


class Slabs:
    """As a client's filling: memory full of what was there before. A slab may be touched once it has arrived, and not any
    more when it is ready."""

    def __init__(self, size_bytes: int, slab_bytes: int = SLAB_BYTES, limit: int = 1 << 30) -> None:
        self.slab_bytes, self.count = slab_bytes, -(-size_bytes // slab_bytes)
        self.memory = bytearray([GARBAGE]) * (self.count * slab_bytes)
        self.view = memoryview(self.memory)
        self.ready: set[int] = set()
        self.there: set[int] = set()
        self.limit = limit
        self._sealed: dict[int, bytes] = {}

    def arrived(self, index: int, wait_s: float) -> bool:
        if len(self.there | {index}) <= self.limit:
            self.there.add(index)
        return index in self.there

    def commit(self, checksums: Mapping[int, bytes]) -> None:
        for index, checksum in checksums.items():
            assert index not in self.ready and index in self.there
            assert digest(self.slab(index)) == checksum
            self._sealed[index] = checksum
        self.ready |= checksums.keys()

    def slab(self, index: int) -> memoryview:
        return self.view[index * self.slab_bytes : (index + 1) * self.slab_bytes]

    def is_untouched(self) -> bool:
        """What was committed is as it was, and nothing else was written but what arrived."""
        absent = set(range(self.count)) - self.there - self.ready
        garbage = bytes([GARBAGE]) * self.slab_bytes
        return all(digest(self.slab(i)) == c for i, c in self._sealed.items()) and all(
            self.slab(i) == garbage for i in absent
        )


def whole(files: dict[str, bytes], slab_bytes: int = SLAB_BYTES) -> Slabs:
    manifest = manifest_of(files)
    slabs = Slabs(layout_of(manifest).size_bytes, slab_bytes)
    asyncio.run(fill(slabs, manifest, [Memory(files)]))
    return slabs


@given(
    seed=st.integers(0, 99),
    size_bytes=st.sampled_from([10, 5_000, 200_000]),
    slab_bytes=st.sampled_from([4096, 1 << 16, 1 << 22]),
)
@settings(max_examples=30, deadline=None)
def test_what_is_filled_is_what_was_published(seed: int, size_bytes: int, slab_bytes: int) -> None:
    """Every file and tensor is read from the image as it was, wherever slabs end; what is between files is zero."""
    files = files_of(seed, 3, size_bytes)
    slabs = whole(files, slab_bytes)
    assert slabs.ready == set(range(slabs.count)) and slabs.is_untouched()
    image = Image(slabs.view.toreadonly())
    assert {path: bytes(image.file(path)) for path in files} == files
    assert all(image.place(path) % 4096 == 0 for path in files)
    for path in image.weights():
        for tensor, view in image.tensors(path):
            assert view == files[path][tensor.start : tensor.end] and view.readonly
    ends = sorted(image.place(path) + len(files[path]) for path in files)
    assert not any(slabs.view[ends[-1] :])


@given(
    seed=st.integers(0, 99), ready=st.sets(st.integers(0, 30)), slab_bytes=st.sampled_from([4096, 1 << 16])
)
@settings(max_examples=30, deadline=None)
def test_a_filling_is_gone_on_with(seed: int, ready: set[int], slab_bytes: int) -> None:
    """What was committed is neither written nor read again, but for chunks that lie in other slabs, too."""
    files = files_of(seed, 3, 60_000)
    true, manifest = whole(files, slab_bytes), manifest_of(files)
    slabs = Slabs(layout_of(manifest).size_bytes, slab_bytes)
    before = {index: digest(true.slab(index)) for index in ready if index < slabs.count}
    for index in before:
        slabs.slab(index)[:] = true.slab(index)
    slabs.there |= before.keys()
    slabs.commit(before)
    memory = Memory(files)
    by_source = asyncio.run(fill(slabs, manifest, [memory]))
    assert slabs.view == true.view and slabs.is_untouched()
    assert by_source["memory"] <= manifest.size_bytes
    if len(before) == slabs.count:
        assert not memory.read_chunks


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("is_overwritten", [False, True])
def test_what_lies_in_several_places_comes_once(
    monkeypatch: pytest.MonkeyPatch, streams: int, is_overwritten: bool
) -> None:
    """A model has the same weights twice: they are copied in memory, unless somebody has written over them since."""
    files = files_of(1)
    files |= {f"original/{path}": content for path, content in files.items()}
    manifest, memory = manifest_of(files), Memory(files)
    slabs, told = Slabs(layout_of(manifest).size_bytes), list[int]()
    real = resident._is_copied

    def copied(first: memoryview, view: memoryview, chunk: Chunk) -> bool:
        source = bytearray(first)
        source[0] ^= is_overwritten
        return real(memoryview(source), view, chunk)

    monkeypatch.setattr(resident, "_is_copied", copied)
    by_source = asyncio.run(fill(slabs, manifest, [memory], told.append, streams=streams))
    image = Image(slabs.view)
    assert {path: bytes(image.file(path)) for path in files} == files
    assert by_source["memory"] == manifest.size_bytes // (1 if is_overwritten else 2)
    assert sum(told) == manifest.size_bytes


def test_a_wrong_chunk_is_never_committed() -> None:
    """A source with a wrong byte is passed over for the next one; without another one the slab is not committed."""
    files = files_of(1)
    manifest = manifest_of(files)
    wrong, right = Memory(files, "disk"), Memory(files, "bucket")
    wrong.flipped = {manifest.chunks[2].sha256}
    slabs = Slabs(layout_of(manifest).size_bytes)
    by_source = asyncio.run(fill(slabs, manifest, [wrong, right]))
    assert by_source["bucket"] == manifest.chunks[2].size_bytes
    assert Image(slabs.view).file("config.json") == files["config.json"]
    slabs = Slabs(layout_of(manifest).size_bytes)
    with pytest.raises(ChunkDamaged, match="damaged in disk"):
        asyncio.run(fill(slabs, manifest, [wrong]))
    assert len(slabs.ready) < slabs.count and slabs.is_untouched()


def test_a_source_that_fails_is_passed_over() -> None:
    """The next one has it; where none has, it is said why, and of a chunk that is nowhere, that it is."""
    files = files_of(1)
    manifest = manifest_of(files)
    away, right = Memory(files, "disk"), Memory(files, "bucket")
    away.failing = {manifest.chunks[2].sha256}
    slabs = Slabs(layout_of(manifest).size_bytes)
    assert asyncio.run(fill(slabs, manifest, [away, right]))["bucket"] == manifest.chunks[2].size_bytes
    for sources, failure in (([away], ObjectUnavailable), ([Memory({}, "disk")], ChunkDamaged)):
        with pytest.raises(failure):
            asyncio.run(fill(Slabs(layout_of(manifest).size_bytes), manifest, sources))


def test_without_room_it_says_so() -> None:
    """Where KV does not give way, what was filled is committed, and who calls again goes on."""
    files = files_of(2)
    manifest = manifest_of(files)
    slabs = Slabs(layout_of(manifest).size_bytes, limit=3)
    with pytest.raises(NoRoom, match="goes on"):
        asyncio.run(fill(slabs, manifest, [Memory(files)], room_s=0))
    assert slabs.ready <= {0, 1, 2} and slabs.is_untouched()
    slabs.limit = slabs.count
    asyncio.run(fill(slabs, manifest, [Memory(files)]))
    assert slabs.ready == set(range(slabs.count)) and Image(slabs.view).manifest == manifest


@pytest.mark.parametrize("at", [0, 9, 40])
def test_memory_that_is_no_image_is_damaged(at: int) -> None:
    """A wrong magic, size or manifest is one error, whatever is in the rest."""
    slabs = whole(files_of(3))
    slabs.view[at] ^= 0xFF
    with pytest.raises(Damaged):
        Image(slabs.view)


def test_an_image_that_is_cut_off_is_damaged() -> None:
    """Files that end behind the memory are not handed out."""
    slabs = whole(files_of(3))
    for size_bytes in (0, 8, 100, layout_of(manifest_of(files_of(3))).size_bytes - 1):
        with pytest.raises(Damaged):
            Image(slabs.view[:size_bytes])


def test_a_file_that_is_not_there_is_named() -> None:
    """Who asks for a file that the model does not have gets its name, and not another file's bytes."""
    with pytest.raises(ModelMissing, match=r"other\.txt"):
        Image(whole(files_of(3)).view).file("other.txt")
