"""`kvstore model load` and `unload`, as processes beside a real daemon: what is said, and what is there then."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from coldstart.disk.home import MARK
from coldstart.loading.resident import Image
from kvstore.client import models
from replication.formats.manifests import Manifest, encode
from tests.coldstart.images import files_of, manifest_of
from tests.coldstart.models import put
from tests.objects import S3Server, flip
from tests.region.regions import S3_KEYS
from tests.running import Daemon, Place, kvstore
from tiers.bucket.object_store import open_objects

FILES = files_of(5, 3, 2_000_000)


class Node:
    """A model on the disk of a place, and a daemon beside it."""

    daemon: Daemon

    def __init__(self, place: Place) -> None:
        self.place = place
        self.models = place.path / "models"
        self.words = [f"--socket={place.socket}", f"--set=models.dir={self.models}"]
        sizes = ["--set=dram.capacity_bytes=64MiB", "--set=models.dram_bytes=32MiB"]
        self.settings = [*sizes, f"--set=models.dir={self.models}"]
        self.put("tiny")

    def put(self, name: str, files: dict[str, bytes] = FILES) -> Path:
        """As `kvstore model preload` leaves it."""
        manifest = manifest_of(files, name)
        root = self.models / f"models--{name}" / "snapshots" / "r1"
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        (root / MARK).write_bytes(encode(manifest))
        refs = self.models / f"models--{name}" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / "main").write_text("r1")
        return root

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return kvstore("model", *words, *self.words)


@pytest.fixture
def node(place: Place, serve: Callable[..., Daemon]) -> Node:
    made = Node(place)
    made.daemon = serve(place, *place.arguments, *made.settings)
    return made


def test_from_the_disk_into_dram_and_back(node: Node) -> None:
    """Loaded, shown, mapped with every byte, loaded again for nothing, given back: each says what it did."""
    done = json.loads(node.run("load", "tiny", "-o", "json").stdout)
    assert set(done) == {"model", "revision", "bytes", "by_source", "seconds"}
    assert done["by_source"] == {"disk": done["bytes"]} and done["bytes"] == sum(map(len, FILES.values()))
    with models.attach("tiny", "r1", node.place.socket) as model:
        image = Image(model.view)
        assert {path: bytes(image.file(path)) for path in FILES} == FILES
        refused = node.run("unload", "tiny")
        assert refused.returncode == 1 and "uses it" in refused.stderr
        del image
    assert "tiny@r1 is in DRAM: there already" in node.run("load", "tiny@r1").stdout
    shown = kvstore("status", f"--socket={node.place.socket}").stdout
    assert "models in DRAM" in shown and "whole" in shown
    gone = node.run("unload", "tiny")
    assert (gone.returncode, gone.stdout) == (0, "tiny@r1 is not in DRAM any more\n")
    assert models.listed(node.place.socket) == []


def test_what_goes_wrong_is_one_line(node: Node) -> None:
    """What is not on the disk, not in DRAM, damaged, too large, or asked of nobody."""
    root = node.put("damaged")
    weights = root / "model-00001-of-00002.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    node.put("large", files_of(5, 12, 4_000_000))
    for code, says, words in (
        (3, "not on this disk", ["load", "other"]),
        (3, "not in DRAM", ["unload", "tiny"]),
        (3, "not in DRAM", ["unload", "tiny@r1"]),
        (2, "allowed are", ["load", "../tiny"]),
        (1, "damaged in disk", ["load", "damaged"]),
        (1, "models.dram_bytes", ["load", "large"]),
        (4, "Start it with", ["load", "tiny", f"--socket={node.place.path / 'nobody'}"]),
    ):
        done = kvstore("model", *words[:2], *node.words, *words[2:])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done.stderr
        assert says in done.stderr, done.stderr
    assert all(model["state"] != "whole" for model in models.listed(node.place.socket))


def test_fsck_finds_a_wrong_byte_of_a_model(node: Node, place: Place, serve: Callable[..., Daemon]) -> None:
    """On a stopped daemon's arena: counted apart from records, found by --verify, dropped by --repair, and loaded again."""
    assert node.run("load", "tiny").returncode == 0
    node.daemon.stop()
    arena, content = place.arena(), FILES["model-00002-of-00002.safetensors"][-64:]
    data = arena.read_bytes()
    with arena.open("r+b") as file:
        file.seek(data.find(content))
        file.write(b"another byte")
    for words, code, says in (
        ([], 0, " slabs of models"),
        (["--verify"], 1, "dram: 1 corrupt slabs of models; --repair drops them"),
        (["--verify", "--repair"], 0, "dropped 1 corrupt slabs of models"),
        (["--verify"], 0, "0 corrupt"),
    ):
        done = kvstore("fsck", "--offline", *place.arguments, *node.settings, *words)
        assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done
    serve(place, *place.arguments, *node.settings)
    by_source = json.loads(node.run("load", "tiny", "-o", "json").stdout)["by_source"]
    assert 0 < by_source["disk"] < sum(map(len, FILES.values()))
    with models.attach("tiny", "r1", place.socket) as model:
        assert {path: bytes(Image(model.view).file(path)) for path in FILES} == FILES


def test_a_pinned_model_stays_in_dram(node: Node) -> None:
    """`kvstore model pin` holds for DRAM, too: another model finds no room, however long nobody used the pinned one."""
    assert node.run("load", "tiny").returncode == 0
    assert node.run("pin", "tiny").returncode == 0
    node.put("other", files_of(6, 9, 2_500_000))
    refused = node.run("load", "other")
    assert refused.returncode == 1 and "models.dram_bytes" in refused.stderr
    assert node.run("unpin", "tiny").returncode == 0
    assert node.run("load", "other").returncode == 0
    assert [model["name"] for model in models.listed(node.place.socket)] == ["other"]


def test_straight_from_the_bucket(node: Node, s3_server: S3Server, tmp_path: Path) -> None:
    """What this disk has not comes from the bucket into DRAM, and nothing of it is written; chunks that another revision here
    has are read there; a damaged one refuses it."""
    old, new = files_of(7), files_of(7) | {"more.bin": bytes(range(256)) * 4000}
    node.put("model", old)
    manifest = manifest_of(new, "model", "r2")
    prefix = f"{tmp_path.name}/dram"
    objects = open_objects(f"s3://kvstore/{prefix}", s3_server.options())
    asyncio.run(put(objects, manifest, chunks_of(new, manifest)))
    bucket = ["--to", f"s3://kvstore/{prefix}", "--endpoint", s3_server.endpoint]
    files_before = sorted(node.models.rglob("*"))

    def load(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return kvstore("model", "load", name, *node.words, *words, **S3_KEYS)

    (more,) = (chunk for _, chunk in manifest.chunks_of(manifest.files[-1]))
    asyncio.run(objects.put(more.name, flip(new["more.bin"], 99)))
    refused = load("model@r2", *bucket)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused.stderr
    assert f"{more.name}: its bytes are not those of its name: damaged in bucket" in refused.stderr
    asyncio.run(objects.put(more.name, new["more.bin"]))
    done = json.loads(load("model@r2", *bucket, "-o", "json").stdout)
    assert done["by_source"]["bucket"] == len(new["more.bin"])
    with models.attach("model", "r2", node.place.socket) as model:
        image = Image(model.view)
        assert {path: bytes(image.file(path)) for path in new} == new
        del image
    assert sorted(node.models.rglob("*")) == files_before
    assert "model@r1 is in DRAM" in load("model", *bucket).stdout  # what the name stands for on this disk
    for code, says, words in (
        (3, "not on this disk", ["model@r2"]),
        (3, "no revision r3", ["model@r3", *bucket]),
    ):
        failed = load(*words)
        assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (code, "", 1), failed.stderr
        assert says in failed.stderr


def chunks_of(files: dict[str, bytes], manifest: Manifest) -> dict[str, bytes]:
    """Their contents, by name."""
    return {
        chunk.name: files[file.path][at : at + chunk.size_bytes]
        for file in manifest.files
        for at, chunk in manifest.chunks_of(file)
    }
