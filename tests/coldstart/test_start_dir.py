"""Start directories: enough for an engine to start, nothing that looks like weights, and tensors while they come."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from coldstart.blocks import slots
from coldstart.disk import folders
from coldstart.errors import FilesWrong, ModelError
from coldstart.loading import start_dir
from coldstart.loading.loading import Loading
from coldstart.loading.start_dir import Revision, Starting, open_revision
from coldstart.loading.weight_plan import Plan
from tests.coldstart.revisions import Bucket, manifest_of
from tests.running import ROOT, kvstore
from tiers.bucket.object_store import open_objects

MIB = 1 << 20


def make_model(directory: Path) -> None:
    """Two files of some megabytes, and what lies beside them."""
    from safetensors.torch import save_file

    directory.mkdir()
    for number in range(2):
        chance = torch.Generator().manual_seed(number)
        named = {f"{number}.{name}": torch.randn(1000, 700, generator=chance) for name in "abc"}
        save_file(named | {f"{number}.small": torch.tensor([1.5])}, directory / f"model-{number}.safetensors")
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    (directory / "training.bin").write_bytes(random.Random(1).randbytes(MIB))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    make_model(tmp_path / "model")
    return Bucket(tmp_path / "model", tmp_path)


def started(bucket: Bucket, *words: str) -> Path:
    done = bucket.start(*words)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def load(directory: Path) -> tuple[Revision, dict[str, Any]]:
    """All tensors that a directory stands for, as a loader takes them."""
    revision = open_revision(directory)
    assert revision is not None
    files = [revision.weight_file(path) for path in sorted(directory.glob("*.safetensors"))]
    plan = Plan(files, lambda _: True, 4 * MIB)
    found = {name: tensor.clone() for name, tensor in Loading(plan, revision.chunks(plan, True)).tensors()}
    revision.close()
    return revision, found


def assert_right(bucket: Bucket, found: dict[str, Any]) -> None:
    expected: dict[str, Any] = {}
    for path in bucket.model.glob("*.safetensors"):
        expected |= load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_headers_alone_and_small_files_whole(bucket: Bucket) -> None:
    """No data and no holes: whoever opens such a file as weights is refused; other weights are left out."""
    directory = started(bucket)
    assert (directory / "config.json").read_bytes() == (bucket.model / "config.json").read_bytes()
    assert not (directory / "training.bin").exists()
    for path in bucket.model.glob("*.safetensors"):
        header_bytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert (directory / path.name).read_bytes() == path.read_bytes()[:header_bytes]
        with pytest.raises(SafetensorError):
            safe_open(directory / path.name, "pt").__enter__()


def test_tensors_come_while_the_weights_do(bucket: Bucket) -> None:
    """A preload is begun, each byte fetched once; afterwards the model is whole, and nothing is fetched any more."""
    directory = started(bucket)
    revision, found = load(directory)
    assert isinstance(revision, Starting)
    assert_right(bucket, found)
    assert revision._preload is not None and revision._preload.wait(60) == 0
    assert revision.is_whole() and started(bucket) == revision.place
    revision.look()
    size_bytes = sum({chunk.sha256: chunk.size_bytes for chunk in bucket.manifest.chunks}.values())
    assert revision.by_source(0)["bucket"] == size_bytes
    assert revision.fetched().startswith(f"bucket {size_bytes:,} bytes")
    again, found = load(directory)
    assert_right(bucket, found)
    assert again.fetched() == "nothing: it was on this disk"


def test_a_preload_that_is_killed_in_the_middle(bucket: Bucket) -> None:
    """Whoever loads says that it was killed; the next one goes on, and all is right."""
    directory = started(bucket)
    revision = open_revision(directory)
    assert isinstance(revision, Starting)
    files = [revision.weight_file(path) for path in sorted(directory.glob("*.safetensors"))]
    revision.begin()
    assert revision._preload is not None
    revision._preload.kill()
    revision._preload.wait()
    plan = Plan(files, lambda _: True, 4 * MIB)
    with pytest.raises(ModelError, match="cannot be preloaded: it was killed"):
        list(Loading(plan, revision.chunks(plan, True)).tensors())
    assert_right(bucket, load(directory)[1])


def test_a_bucket_that_is_gone(bucket: Bucket) -> None:
    """The load ends with what the preload said, in one line."""
    directory = started(bucket)
    shutil.rmtree(bucket.url.removeprefix("file://"))
    with pytest.raises(ModelError, match=r"tiny@r1: cannot be preloaded: .+") as raised:
        load(directory)
    assert "\n" not in str(raised.value)


def test_a_flipped_chunk_in_the_bucket(bucket: Bucket) -> None:
    """No tensor of it is given back, and the line says which chunk it is."""
    directory = started(bucket)
    file = next(file for file in bucket.manifest.files if file.path == "model-1.safetensors")
    path = Path(bucket.url.removeprefix("file://")) / bucket.manifest.chunks[file.chunks[2]].name
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ModelError, match=path.name):
        load(directory)


def test_what_is_no_start_directory(bucket: Bucket, tmp_path: Path) -> None:
    """Another directory is none of ours; one whose mark is damaged is refused, and a model without safetensors as well."""
    assert open_revision(tmp_path) is None and open_revision(tmp_path / "missing") is None
    directory = started(bucket)
    os.truncate(directory / ".kvstore-start", 100)
    with pytest.raises(FilesWrong, match=r"\.kvstore-start"):
        open_revision(directory)
    for path in bucket.model.glob("*.safetensors"):
        path.unlink()
    other = manifest_of(bucket.model, revision="r2")
    asyncio.run(bucket.put(other))
    done = kvstore("model", "start", "tiny@r2", *bucket.words)
    assert done.returncode == 1 and "has no safetensors" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("size", [1 << 40, (1 << 64) - 1, 10_000_000])
def test_a_header_that_lies_is_not_believed(bucket: Bucket, size: int) -> None:
    """One that would be longer than its file, or than any may be: one line, and no weights are fetched for it."""
    path = bucket.model / "model-0.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    asyncio.run(bucket.put(manifest_of(bucket.model, revision="r2")))
    done = kvstore("model", "start", "tiny@r2", *bucket.words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"model-0.safetensors is no safetensors file: its header would have {size} bytes" in done.stderr
    assert not list(bucket.models.rglob("model-0*"))


async def remade(bucket: Bucket, count: int = 1) -> set[Path]:
    """By so many at once, in one process."""
    objects, manifest = open_objects(bucket.url), manifest_of(bucket.model)
    await bucket.put(manifest)
    works = (start_dir.make_start(objects, manifest, bucket.models, []) for _ in range(count))
    return set(await asyncio.gather(*works))


def below(directory: Path) -> set[str]:
    return {path.name for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_start_directory_is_of_one_revision_alone(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    """Published anew with other files, it has those and no others; made once more of the same ones, it is the same directory, which
    who uses it still has. Two that make it at once, which may have one process id, do not meet, and leave nothing behind."""
    if not can_exchange:
        monkeypatch.setattr(folders, "_exchanged", lambda *_: False)
    (bucket.model / "added_tokens.json").write_text("{}")
    (directory,) = asyncio.run(remade(bucket, 2))
    weights = {"model-0.safetensors", "model-1.safetensors"}
    assert below(directory) == weights | {"config.json", "added_tokens.json", ".kvstore-start"}
    was = directory.stat().st_ino
    asyncio.run(remade(bucket))
    assert directory.stat().st_ino == was
    (bucket.model / "added_tokens.json").unlink()
    (bucket.model / "config.json").write_text('{"model_type": "other"}')
    asyncio.run(remade(bucket, 2))
    assert below(directory) == weights | {"config.json", ".kvstore-start"}
    assert (directory / "config.json").read_bytes() == (bucket.model / "config.json").read_bytes()
    assert os.listdir(bucket.models / ".under-way") == []


def test_what_is_whole_needs_no_bucket(bucket: Bucket) -> None:
    """Where its revision is named. Who asks for the newest one hears where it was published anew, with other files."""
    assert kvstore("model", "preload", "tiny", *bucket.words).returncode == 0
    (bucket.model / "config.json").write_text('{"model_type": "other"}')
    asyncio.run(bucket.put(manifest_of(bucket.model)))
    done = bucket.start()
    assert done.returncode == 1 and "published anew" in done.stderr and done.stderr.count("\n") == 1
    shutil.rmtree(bucket.url.removeprefix("file://"))
    done = kvstore("model", "start", "tiny@r1", *bucket.words)
    assert done.stdout == f"{bucket.models}/models--tiny/snapshots/r1\n"


def test_what_an_engine_needs_first_is_small(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside the weights that are larger than such files are: refused before anything is fetched."""
    monkeypatch.setattr(start_dir, "SMALL_BYTES_MAX", 10)
    with pytest.raises(
        FilesWrong, match=r"files beside the weights have 22 B of 10 B: kvstore model preload tiny@r1"
    ):
        asyncio.run(start_dir.make_start(open_objects(bucket.url), bucket.manifest, bucket.models, []))
    assert not bucket.models.exists()


def test_who_waits_for_bytes_opens_a_file_once(bucket: Bucket) -> None:
    """However often it looks at what is not true yet; one that is filled anew is opened again."""
    revision = open_revision(started(bucket))
    assert isinstance(revision, Starting)
    files = [revision.weight_file(path) for path in sorted(revision.directory.glob("*.safetensors"))]
    for file in files:
        revision.under_way.mkdir(parents=True, exist_ok=True)
        (revision.under_way / file.path.name).write_bytes(bytes(4 * MIB * 3))
    plan = Plan(files, lambda _: True, 4 * MIB)
    following, piece = revision.chunks(plan, begins=False), plan.pieces[-1]
    view = slots(1, piece.chunk.size_bytes)[0].run(piece.at, piece.chunk.size_bytes)

    def looked(times: int) -> set[str]:
        """What is open then."""
        looks = iter(range(times))
        assert not following.read(piece, view, lambda: next(looks, None) is None)
        return set(os.listdir("/proc/self/fd"))

    assert looked(1) == looked(4)
    path = revision.under_way / files[piece.file].path.name
    path.unlink()
    shutil.copy(bucket.model / path.name, path)
    assert following.read(piece, view, lambda: False)
    following.close()


def test_a_start_directory_counts_where_it_was_made(bucket: Bucket, tmp_path: Path) -> None:
    """It says what is run, and where to: one that came with somebody's model is refused."""
    directory = started(bucket)
    (tmp_path / "link").symlink_to(directory)
    assert isinstance(open_revision(tmp_path / "link"), Starting)
    shutil.copytree(directory, tmp_path / "copy")
    with pytest.raises(FilesWrong, match="not of this place: kvstore model start tiny@r1"):
        open_revision(tmp_path / "copy")


def test_a_model_comes_where_its_start_directory_says(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the engine's environment names another directory for models than that of whoever made it."""
    done = kvstore("model", "start", "tiny", "--to", bucket.url, KVSTORE_MODELS__DIR=str(bucket.models))
    monkeypatch.setenv("KVSTORE_MODELS__DIR", str(tmp_path / "elsewhere"))
    assert_right(bucket, load(Path(done.stdout.strip()))[1])
    assert not (tmp_path / "elsewhere").exists()


def test_the_folder_that_an_engine_runs_in_is_not_searched_for_our_code(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preload is ours, also where something else is called kvstore there."""
    directory = started(bucket)
    (tmp_path / "here" / "kvstore").mkdir(parents=True)
    (tmp_path / "here" / "kvstore" / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path / "here")
    assert_right(bucket, load(directory)[1])


def test_what_an_engine_imports_of_it() -> None:
    """Nothing of buckets and databases: a loader is imported in every rank."""
    heavy = ("obstore", "boto3", "rocksdict", "pydantic", "grpc", "torch", "aiohttp", "zstandard")
    code = (
        f"import coldstart.loading.start_dir, sys; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
