"""Publishing: what lies in the bucket is the model, each byte once; and what is no whole model is refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coldstart.errors import FilesWrong, ModelError, ModelExists, ModelMissing
from coldstart.published import collecting
from coldstart.published.models import find, read
from coldstart.published.publish import Stored, digested, manifest_of, publish
from coldstart.published.tree import Tree, find_files
from replication.errors import IntentLost
from replication.formats import manifests as manifests_module
from replication.formats.manifests import (
    CHUNKS,
    MANIFEST_CHUNKS_MAX,
    MANIFESTS,
    PUBLISHING,
    Manifest,
    encode,
    manifest_name,
)
from tests.coldstart.model_files import (
    chunk_names,
    contents,
    lacking,
    make_model,
    manifests,
    silent,
    unpacked,
)
from tests.objects import MemoryObjects
from tiers.bucket.objects import Bytes
from tiers.errors import ObjectUnavailable


async def prepared(tree: Tree, name: str = "m", revision: str = "", by: str = "me") -> Manifest:
    return manifest_of(await digested(tree, silent), name, revision, by, "here", {})


async def _published(
    objects: MemoryObjects, directory: Path, name: str, revision: str, again: bool
) -> Stored:
    tree = find_files(directory)
    return await publish(objects, tree, await prepared(tree, name, revision), again, silent)


def put(
    objects: MemoryObjects, directory: Path, name: str = "m", revision: str = "", again: bool = False
) -> Stored:
    """Publish a directory."""
    return asyncio.run(_published(objects, directory, name, revision, again))


class FailingObjects(MemoryObjects):
    """The bucket fails after so many chunks."""

    puts_left = 1 << 30

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        if name.startswith(CHUNKS):
            self.puts_left -= 1
            if self.puts_left < 0:
                raise ObjectUnavailable("no answer")
        return await super().put(name, content, only_new)


def test_a_file_system_may_give_less_than_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some do, over a network; the rest is asked for again, and the model is none that changes."""
    objects, model, whole = MemoryObjects(), make_model(tmp_path / "m"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:10_000]], at))
    assert unpacked(objects, put(objects, model).manifest) == contents(model)


def test_what_is_published_is_the_model(tmp_path: Path) -> None:
    """Every file comes back byte by byte; nothing is left of how it got there; the name finds it."""
    objects, model = MemoryObjects(), make_model(tmp_path / "m")
    stored = put(objects, model)
    assert unpacked(objects, stored.manifest) == contents(model)
    assert not stored.was_there and stored.put == len(stored.manifest.chunks) == len(chunk_names(objects))
    assert {name.split("/")[1] for name in objects.stored} == {"chunks", "manifests"}
    assert asyncio.run(read(objects, "m")) == stored.manifest
    assert stored.manifest.revision == stored.manifest.content.hex()[:16]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "c.safetensors", "é"]), min_size=1, max_size=3).map("/".join),
        st.binary(max_size=200) | st.integers(0, 255).map(lambda byte: bytes([byte]) * (17 << 20)),
        min_size=1,
        max_size=4,
    )
)
def test_any_files_come_back(tmp_path: Path, files: dict[str, bytes]) -> None:
    """Whatever they are called and however large: but what calls itself safetensors and is none is refused."""
    directory = tmp_path / os.urandom(8).hex()
    for path, content in files.items():
        place = directory / path
        if any(parent.is_file() for parent in place.parents) or place.is_dir():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    there, objects = contents(directory), MemoryObjects()
    if any(path.endswith(".safetensors") for path in there):
        with pytest.raises(FilesWrong, match="no whole safetensors file"):
            put(objects, directory)
        assert not objects.stored
        return
    assert unpacked(objects, put(objects, directory).manifest) == there


def test_a_revision_that_changes_one_tensor_in_twenty_stores_as_much(tmp_path: Path) -> None:
    """5 % of the tensors: at most 7 % of the bytes, whatever lies between them."""
    objects = MemoryObjects()
    first = put(objects, make_model(tmp_path / "one", tensors=40, tensor_bytes=5 << 18))
    second = put(objects, make_model(tmp_path / "two", tensors=40, tensor_bytes=5 << 18, changed=2))
    assert first.manifest.revision != second.manifest.revision
    assert 2 * (5 << 18) <= second.put_bytes <= 0.07 * second.manifest.size_bytes


def test_what_is_there_is_published_already(tmp_path: Path) -> None:
    """The same files again put nothing and change nothing; a chunk that is gone, or is cut off, is put."""
    objects, model = MemoryObjects(), make_model(tmp_path / "m")
    first = put(objects, model)
    before = dict(objects.stored)
    second = put(objects, model)
    assert second.was_there and second.put == 0 and objects.stored == before
    gone, short = sorted(chunk_names(objects))[:2]
    asyncio.run(objects.delete([gone]))
    objects.stored[short] = objects.stored[short][:-1]
    assert put(objects, model).put == 2 and objects.stored == before
    assert put(objects, model, again=True).put == len(first.manifest.chunks)


def test_a_failure_leaves_no_revision_and_a_rerun_puts_the_rest(tmp_path: Path) -> None:
    """What was put before the bucket failed is not put again, and its intent keeps it from being collected."""
    objects, model = FailingObjects(), make_model(tmp_path / "m")
    objects.puts_left = 3
    with pytest.raises(ObjectUnavailable):
        put(objects, model)
    assert not list(manifests(objects)) and len(chunk_names(objects)) == 3
    done = asyncio.run(collecting.collect(objects, 0, silent))
    assert done.deleted == 0 and len(chunk_names(objects)) == 3
    objects.puts_left = 1 << 30
    stored = put(objects, model)
    assert stored.put == len(stored.manifest.chunks) - 3 and not lacking(objects)


def test_a_name_with_other_files_is_refused(tmp_path: Path) -> None:
    """It says who published the other one and when, and changes nothing; without a revision the two are two."""
    objects = MemoryObjects(clock=lambda: 1e9)
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", seed=1)
    put(objects, one, revision="v1")
    before = dict(objects.stored)
    with pytest.raises(
        ModelExists, match=r"m@v1 is there with other files, published by me on 2001-09-09 at 01:46 UTC"
    ):
        put(objects, two, revision="v1")
    assert objects.stored == before
    assert put(objects, two).manifest.revision != "v1" and len(list(manifests(objects))) == 2


def test_of_two_who_publish_one_name_at_once_one_is_told(tmp_path: Path) -> None:
    """Both begin while neither is there: one manifest is there in the end, whole, and the other one hears whose it is. With the same files both
    have done it."""

    async def both(objects: MemoryObjects, directories: list[Path]) -> list[object]:
        trees = [find_files(directory) for directory in directories]
        ready = [await prepared(tree, revision="v1", by=f"number {n}") for n, tree in enumerate(trees)]
        work = [
            publish(objects, tree, manifest, False, silent)
            for tree, manifest in zip(trees, ready, strict=True)
        ]
        return list(await asyncio.gather(*work, return_exceptions=True))

    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two", seed=1)
    objects = MemoryObjects()
    ends = asyncio.run(both(objects, [one, two]))
    [lost] = [end for end in ends if isinstance(end, ModelExists)]
    [won] = [end for end in ends if isinstance(end, Stored)]
    assert won.manifest.published_by in str(lost) and not lacking(objects)
    assert [manifest.content for manifest in manifests(objects)] == [won.manifest.content]
    same = asyncio.run(both(objects := MemoryObjects(), [one, one]))
    assert all(isinstance(end, Stored) for end in same) and not lacking(objects)
    assert len({end.manifest.published_by for end in same if isinstance(end, Stored)}) == 1


def test_files_that_change_are_not_published(tmp_path: Path) -> None:
    """Between the look and the reading, and between the reading and the putting: nothing is there in the end."""
    objects, model = MemoryObjects(), make_model(tmp_path / "m")

    async def changes_after(step: str) -> None:
        tree = find_files(model)
        if step == "look":
            (model / "config.json").write_text('{"model_type": "other"}')
        manifest = await prepared(tree)
        if step == "reading":
            shard = model / "model-00001-of-00002.safetensors"
            shard.write_bytes(shard.read_bytes()[:-1] + b"x")
        await publish(objects, tree, manifest, False, silent)

    for step in ("look", "reading"):
        with pytest.raises(FilesWrong, match="it is changed while it is"):
            asyncio.run(changes_after(step))
    assert not list(manifests(objects))


def test_a_link_that_comes_later_leads_nowhere(tmp_path: Path) -> None:
    """A directory below the one that is allowed that is a link by the time it is read, and a folder that is exchanged for a link to
    the very same files elsewhere, after they were found."""
    allowed, outside = tmp_path / "allowed", make_model(tmp_path / "outside")
    allowed.mkdir()
    (allowed / "m").symlink_to(outside)
    with pytest.raises(FilesWrong, match="it is not below"):
        find_files(allowed / "m", allowed)
    inner = make_model(allowed / "n" / "inner")
    tree = find_files(allowed / "n", allowed)
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FilesWrong, match="it is changed while it is read"):
        asyncio.run(digested(tree, silent))


def test_what_fits_in_no_manifest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More chunks than a file may have, or more files: nobody could read what would be there, so nothing is put."""
    model, objects = make_model(tmp_path / "m"), MemoryObjects()
    tree = find_files(model)
    some = asyncio.run(digested(tree, silent))
    large = [one._replace(chunks=one.chunks * MANIFEST_CHUNKS_MAX) for one in some]
    says = r"here: 5 files in \d+ chunks are more than a model may have: its manifest: "
    with pytest.raises(FilesWrong, match=says):
        manifest_of(large, "m", "", "me", "here", {})
    monkeypatch.setattr(manifests_module._WRITTEN, "size_bytes_max", 300)
    with pytest.raises(FilesWrong, match=says):
        put(objects, model)
    assert not objects.stored


def test_a_snapshot_of_hugging_face_is_a_model(tmp_path: Path) -> None:
    """Its links lead to the blobs, and are followed; the model, the snapshot and a plain directory are the same content."""
    model, cache = make_model(tmp_path / "m"), tmp_path / "models--org--tiny"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc\n")
    for path, content in contents(model).items():
        (cache / "blobs" / f"blob-{path}").write_bytes(content)
        (snapshot / path).symlink_to(f"../../blobs/blob-{path}")
    (snapshot / ".gitattributes").symlink_to("nowhere")
    plain = put(MemoryObjects(), model).manifest.content
    assert {put(MemoryObjects(), place).manifest.content for place in (cache, snapshot)} == {plain}
    assert find_files(cache).left_out == 1
    (cache / "snapshots" / "def").mkdir()
    (cache / "refs" / "main").unlink()
    with pytest.raises(FilesWrong, match=r"which of its snapshots.*abc, def"):
        find_files(cache)


def test_what_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    """One line that names the file and says why."""

    def refused(says: str) -> None:
        with pytest.raises(FilesWrong, match=says) as caught:
            find_files(model)
        assert str(model) in str(caught.value) and "\n" not in str(caught.value)

    model = make_model(tmp_path / "m")
    (tmp_path / "secret").write_text("x")
    shard = model / "model-00001-of-00002.safetensors"
    for name, target, says in (
        ("link", tmp_path / "secret", "leads outside of"),
        ("link", "gone", "leads nowhere"),
        ("link", "link", "leads nowhere"),
        ("link", ".", "a link to a folder"),
    ):
        (model / name).symlink_to(target)
        refused(says)
        (model / name).unlink()
    os.mkfifo(model / "pipe")
    refused("it is a pipe")
    (model / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(model / "door"))
        refused("it is a socket")
    (model / "door").unlink()
    (model / os.fsdecode(b"x\xff")).touch()
    refused("not UTF-8")
    (model / os.fsdecode(b"x\xff")).unlink()
    shard.rename(tmp_path / "away")
    refused("it names model-00001-of-00002.safetensors, not there")
    (tmp_path / "away").rename(shard)
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(FilesWrong, match=f"{shard}: .* bytes are no whole safetensors file"):
        put(MemoryObjects(), model)
    for path in model.iterdir():
        path.unlink()
    refused("no files are there")


def test_pickles_that_nobody_wanted_are_no_loss(tmp_path: Path) -> None:
    """Their index is fetched with the other small files; where one of them is there, or nothing else, the others are missing."""
    model, index = make_model(tmp_path / "m"), "pytorch_model.bin.index.json"
    pickles = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    (model / index).write_text(json.dumps({"weight_map": dict(zip("ab", pickles, strict=True))}))
    assert index in {file.path for file in find_files(model).files}
    (model / pickles[0]).write_bytes(b"x")
    with pytest.raises(FilesWrong, match=f"it names {pickles[1]}, not there"):
        find_files(model)
    (model / pickles[0]).unlink()
    for path in (*model.glob("*.safetensors"), model / "model.safetensors.index.json"):
        path.unlink()
    with pytest.raises(FilesWrong, match=f"it names {pickles[0]} and 1 more, not there"):
        find_files(model)


def test_names_find_revisions(tmp_path: Path) -> None:
    """A name is the revision that was put last by the store's clock; what is not there says what is."""
    now_s = [100.0]
    objects = MemoryObjects(clock=lambda: now_s[0])
    for n, revision in enumerate(("v2", "v1", "v3")):
        put(objects, make_model(tmp_path / revision, seed=n, tensors=2), revision=revision)
        now_s[0] += 1
    assert asyncio.run(find(objects, "m")).revision == "v3"
    assert asyncio.run(find(objects, "m@v1")).revision == "v1"
    for wanted, error, says in (
        ("m@v4", ModelMissing, "no revision v4 of m: there are v3, v1, v2"),
        ("other", ModelMissing, "no model other: there is m"),
        ("../m", ModelError, "model ../m: allowed are"),
        ("m@", ModelError, r"revision \(none\): allowed are"),
        ("M", ModelError, "model M: allowed are"),
    ):
        with pytest.raises(error, match=says):
            asyncio.run(find(objects, wanted))


def test_published_last_is_latest_whatever_clocks_say(tmp_path: Path) -> None:
    """Within one second of the store, behind one that says it is of the future, and with the store's clock set back; one that is
    published again stays where it was."""
    now_s = [1000.0]
    objects = MemoryObjects(clock=lambda: now_s[0])
    models = {
        name: make_model(tmp_path / name, seed=n, tensors=2) for n, name in enumerate(("b", "a", "c", "d"))
    }

    def latest_after(name: str) -> str:
        put(objects, models[name], revision=name)
        return asyncio.run(find(objects, "m")).revision

    assert [latest_after("b"), latest_after("a")] == ["b", "a"]
    future = msgspec.structs.replace(put(objects, models["c"], revision="c").manifest, published_s=1e9)
    asyncio.run(objects.put(future.name, encode(future)))
    assert latest_after("d") == "d"
    asyncio.run(objects.delete([future.name, manifest_name("m", "d")]))
    now_s[0] = 10.0
    assert latest_after("c") == "c" and latest_after("b") == "c"


def test_chunks_are_put_out_of_the_memory_that_they_were_read_into(tmp_path: Path) -> None:
    """A store copies what somebody may still write into: that would be twice the memory that is promised."""

    class Keeping(MemoryObjects):
        async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
            assert not name.startswith(CHUNKS) or memoryview(content).readonly
            return await super().put(name, content, only_new)

    assert put(Keeping(), make_model(tmp_path / "m")).put


def test_an_intent_that_was_lost_ends_in_no_manifest(tmp_path: Path) -> None:
    """Whoever slept so long that its intent ran out finds that out before it names chunks that may be gone."""
    model = make_model(tmp_path / "m")

    class Forgetting(MemoryObjects):
        async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
            if name.startswith(CHUNKS):
                await self.delete([name for name in self.stored if name.startswith(PUBLISHING)])
            return await super().put(name, content, only_new)

    objects = Forgetting()
    with pytest.raises(IntentLost, match="run it again"):
        put(objects, model)
    assert not [name for name in objects.stored if name.startswith(MANIFESTS)]
