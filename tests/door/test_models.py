"""Models in DRAM through the door: what processes map is what was filled, and stays theirs as long as they look at it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from coldstart.loading.resident import Image, fill, layout_of
from kvstore.client import Client, models
from kvstore.errors import Refused, Unavailable
from kvstore.protocol import frames
from kvstore.protocol.answers import Model
from replication.formats.manifests import Manifest
from tests.coldstart.images import Memory, files_of, manifest_of
from tests.door.daemon import MIB, Daemon
from tiers.dram.owners import USERS_BASE

SLAB_BYTES = 2 * MIB
FILES = files_of(7, 4, 1_500_000)


@pytest.fixture
def daemon(tmp_path: Path, arena_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "s", arena_path, 16 * SLAB_BYTES)
    made.engine.models.capacity_bytes = 10 * SLAB_BYTES
    yield made
    assert made.call(made.engine.check) == []
    made.close()


def bring(daemon: Daemon, model: str = "random", files: dict[str, bytes] = FILES) -> Manifest:
    manifest = manifest_of(files, model)
    size_bytes = layout_of(manifest).size_bytes
    with models.fill(model, "r1", manifest.content[:16], size_bytes, daemon.socket_path) as filling:
        asyncio.run(fill(filling, manifest, [Memory(files)]))
        assert filling.ready == set(range(filling.count))
    return manifest


def state(daemon: Daemon) -> list[Model]:
    return models.listed(daemon.socket_path)


def wait_until_unused(daemon: Daemon) -> None:
    while state(daemon)[0]["users"]:
        pass


def test_what_was_filled_is_mapped_by_others(daemon: Daemon) -> None:
    """Every file and tensor, contiguous and read-only, in a process that has nothing but the socket."""
    manifest = bring(daemon)
    with models.attach("random", "r1", daemon.socket_path) as model:
        image = Image(model.view)
        assert image.manifest == manifest and model.content == manifest.content[:16]
        assert {path: bytes(image.file(path)) for path in FILES} == FILES
        for path in image.weights():
            for tensor, view in image.tensors(path):
                model.touch(image.place(path) + tensor.start, len(view))
                assert view == FILES[path][tensor.start : tensor.end]
        assert model.view.readonly and model.valid()
        assert state(daemon)[0]["users"] == 1
        del image, view


def test_views_keep_what_they_show(daemon: Daemon) -> None:
    """A model that was closed, or whose daemon knows no user, stays where it is until its last view is gone."""
    bring(daemon)
    model = models.attach("random", "r1", daemon.socket_path)
    view = Image(model.view).file("config.json")
    model.close()
    while daemon.call(lambda: daemon.engine.models._by_label["random@r1"].users):
        pass
    with pytest.raises(Refused, match="uses it"):
        models.drop("random", "r1", daemon.socket_path)
    assert view == FILES["config.json"]
    del view, model
    gc.collect()
    models.drop("random", "r1", daemon.socket_path)
    assert state(daemon) == [] and daemon.arena.stats().model_bytes == 0


def test_a_use_ends_with_its_connection(daemon: Daemon) -> None:
    """Nobody gives anything back: who is gone uses nothing."""
    bring(daemon)
    model = models.attach("random", "r1", daemon.socket_path)
    assert state(daemon)[0]["users"] == 1
    del model
    gc.collect()
    wait_until_unused(daemon)
    models.drop("random", "r1", daemon.socket_path)


def test_a_filler_that_goes_leaves_room(daemon: Daemon) -> None:
    """What it did not commit is free when it has let go of its memory; the next one reads only what is missing."""
    manifest = manifest_of(FILES)
    size_bytes = layout_of(manifest).size_bytes
    filling = models.fill("random", "r1", manifest.content[:16], size_bytes, daemon.socket_path)
    wrong = Memory(FILES)
    wrong.flipped = {manifest.chunks[-1].sha256}
    with pytest.raises(Exception, match="its bytes are not those of its name"):
        asyncio.run(fill(filling, manifest, [wrong]))
    with pytest.raises(Refused, match="in_use"):
        models.fill("random", "r1", manifest.content[:16], size_bytes, daemon.socket_path)
    filling.close()
    while state(daemon)[0]["state"] != "partial":
        pass
    source = Memory(FILES)
    with models.fill("random", "r1", manifest.content[:16], size_bytes, daemon.socket_path) as again:
        kept = set(again.ready)
        by_source = asyncio.run(fill(again, manifest, [source]))
    assert kept and by_source["memory"] < manifest.size_bytes
    with models.attach("random", "r1", daemon.socket_path) as model:
        assert {path: bytes(Image(model.view).file(path)) for path in FILES} == FILES


def test_a_connection_that_is_lost_ends_the_filling(daemon: Daemon) -> None:
    """Slabs of a connection that is gone are never written through another one."""
    filling = models.fill("random", "r1", bytes(16), 3 * SLAB_BYTES, daemon.socket_path)
    assert filling.arrived(2, 5)
    for connection in list(daemon.door.connections):
        daemon.call(connection.abort)
    while daemon.call(lambda: daemon.engine.models._by_label):
        pass
    with pytest.raises((Unavailable, Refused)):
        filling.commit({0: bytes(16)})
    with pytest.raises((Unavailable, Refused)):
        filling.arrived(5, 5)
    filling.close()
    daemon.call(daemon.engine.tick)
    assert daemon.call(daemon.engine.check) == []


def test_a_lock_outlives_the_daemon(tmp_path: Path, arena_path: Path) -> None:
    """Who uses a model when its daemon is killed keeps it: the next one sees the lock, and takes nothing away."""
    first = Daemon(tmp_path / "s", arena_path, 16 * SLAB_BYTES)
    first.engine.models.capacity_bytes = 10 * SLAB_BYTES
    bring(first)
    model = models.attach("random", "r1", first.socket_path)
    let_go = first.arena.close
    first.arena.close = lambda unlink=False: let_go()  # type: ignore[method-assign]  # killed: its files stay
    first.close()
    second = Daemon(tmp_path / "s", arena_path, 16 * SLAB_BYTES)
    second.call(second.engine.adopt)
    assert second.arena.adopted
    second.engine.models.capacity_bytes = 10 * SLAB_BYTES
    second.call(second.io.run)
    assert state(second)[0]["state"] == "whole" and state(second)[0]["users"] == 1
    with pytest.raises(Refused, match="uses it"):
        models.drop("random", "r1", second.socket_path)
    assert model.valid() and bytes(Image(model.view).file("config.json")) == FILES["config.json"]
    del model
    gc.collect()
    models.drop("random", "r1", second.socket_path)
    assert second.call(second.engine.check) == []
    second.close()


def test_what_is_not_there_is_said(daemon: Daemon) -> None:
    """One line each: a model that nobody brought, one that is being filled, one that does not fit."""
    with pytest.raises(Refused, match="not in DRAM"):
        models.attach("random", "r1", daemon.socket_path)
    with models.fill("random", "r1", bytes(16), SLAB_BYTES, daemon.socket_path):
        with pytest.raises(Refused, match="filling"):
            models.attach("random", "r1", daemon.socket_path)
    with pytest.raises(Refused, match=r"models\.dram_bytes"):
        models.fill("random", "r2", bytes(16), 11 * SLAB_BYTES, daemon.socket_path)
    with pytest.raises(Refused):
        models.fill("random", "r2", bytes(16), 0, daemon.socket_path)


@pytest.mark.parametrize(
    "label", ["", "m", "m@", "@1", "../m@1", "m@1\n", "M@1", "m" * 97 + "@1", "m@" + "1" * 120]
)
def test_a_name_that_is_none_is_refused(label: str, daemon: Daemon) -> None:
    """Before anything is done with it, by the frames themselves."""
    frame = frames.encode_frame(frames.AttachModel(label))
    with pytest.raises(msgspec.ValidationError):
        frames.request_decoder.decode(bytes(frame[frames.HEADER_BYTES :]))
    with pytest.raises(Refused):
        models.attach(*label.partition("@")[::2], daemon.socket_path)


def test_without_the_arena_there_is_nothing_to_fill(daemon: Daemon) -> None:
    """A connection that did not attach is told so, and stays."""
    with Client(daemon.socket_path, timeout_s=20, attach=False) as client:
        for make in (
            lambda w, _: w.ReserveModel("m@1", bytes(16), 1),
            lambda w, _: w.CommitModel("m@1", [0], bytes(16)),
            lambda w, _: w.AttachModel("m@1"),
        ):
            with pytest.raises(Refused, match="only for a connection with the arena"):
                client._call((), make)
        client.ping()


def test_loads_are_counted_by_source(daemon: Daemon) -> None:
    """What processes say that they loaded adds up in the live answer; a source that there is not is refused, and counts nothing."""
    for by_source in ({"dram": 100}, {"bucket": 70, "disk": 3}, {"dram": 11}, {}):
        models.loaded("random", "r1", by_source, 0.5, daemon.socket_path)  # type: ignore[arg-type]
    for wrong in ({"tape": 1}, {"dram": -1}):
        with pytest.raises((Refused, Unavailable)):
            models.loaded("random", "r1", wrong, 0.5, daemon.socket_path)  # type: ignore[arg-type]
    with Client(daemon.socket_path, timeout_s=20, attach=False) as client:
        told = client.live()["model_loads"]
    assert told == {"count": 4, "seconds": 2.0, "by_source": {"dram": 111, "bucket": 70, "disk": 3}}


def test_many_slabs_come_in_several_answers(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of more slabs than an answer tells is mapped whole."""
    monkeypatch.setattr(frames, "MODEL_SLABS_MAX", 2)
    bring(daemon)
    assert state(daemon)[0]["bytes"] > 2 * SLAB_BYTES
    with models.attach("random", "r1", daemon.socket_path) as model:
        assert {path: bytes(Image(model.view).file(path)) for path in FILES} == FILES
    assert USERS_BASE > 1 << 16
