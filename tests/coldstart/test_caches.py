"""Compile caches: published beside a model, restored whole by whom they fit, and whether an engine took them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coldstart.errors import ChunkDamaged, FilesWrong, ModelError
from coldstart.fleet.caches import RESTORED_NS, Home, exports, find_caches, is_signed, read_key, signed, used
from coldstart.fleet.environment import environment_digest
from replication.formats.manifests import Chunk, File, Manifest, chunk_name, content_of, encode, manifest_name
from tests.coldstart.fake_nvml import GIB, fake_nvml
from tests.coldstart.model_files import make_model
from tests.objects import MemoryObjects
from tests.running import ROOT, kvstore

KEY = b"k" * 32
ABOUT = {"engine": "vllm", "torch": "2.13", "tensor parallel": "1"}
COMPILED = "torch_compile_cache/torch_aot_compile/abc"
FILES = {
    f"{COMPILED}/rank_0_0/model": b"code" * 1000,
    f"{COMPILED}/inductor_cache/a.so": b"more code",
    "torch_compile_cache/0123456789/rank_0_0/backbone/cache.py": b"{}",
    "startup_plan/startup_plan_1.json": b"",
}


def manifest_of(
    files: dict[str, bytes], about: dict[str, str] | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """A manifest of these files, each of one chunk, and the objects of the chunks."""
    chunks, made = [], []
    for path, content in files.items():
        digest = hashlib.sha256(content).digest()
        if content:
            chunks.append(Chunk(digest, b"0" * 16, len(content)))
        made.append(File(path, len(content), digest, [len(chunks) - 1] if content else []))
    manifest = Manifest("m", "r", content_of(made), 0.0, "me", "here", about or dict(ABOUT), chunks, made)
    return manifest, {chunk_name(hashlib.sha256(each).digest()): each for each in files.values() if each}


def bucket_with(*manifests: tuple[Manifest, dict[str, bytes]]) -> MemoryObjects:
    objects = MemoryObjects()

    async def fill() -> None:
        for manifest, chunks in manifests:
            for name, content in chunks.items():
                await objects.put(name, content)
            await objects.put(manifest.name, encode(manifest))

    asyncio.run(fill())
    return objects


def ours(
    files: dict[str, bytes] = FILES, key: bytes = KEY, **about: str
) -> tuple[Manifest, dict[str, bytes]]:
    manifest, chunks = manifest_of(files, {**ABOUT, **about})
    return signed(manifest, key), chunks


def restored(objects: MemoryObjects, manifest: Manifest, into: Path) -> Path:
    return asyncio.run(Home(into).restore(objects, manifest))


def read(cache: Path) -> None:
    """What an engine does to a file, on a file system that keeps times."""
    os.utime(cache / COMPILED / "rank_0_0" / "model", ns=(2 * RESTORED_NS, RESTORED_NS))


def files_below(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_what_fits_is_restored_as_it_was(tmp_path: Path) -> None:
    """Every file, for its user alone; a second time nothing is fetched, and what the engine added stays."""
    objects = bucket_with(ours())
    found = asyncio.run(find_caches(objects, "m", "r", ABOUT, KEY))
    assert found.manifest is not None and found.why == ""
    cache = restored(objects, found.manifest, tmp_path / "into")
    assert files_below(cache) == FILES
    assert stat.S_IMODE((tmp_path / "into").stat().st_mode) == 0o700
    for name in FILES:
        assert stat.S_IMODE((cache / name).stat().st_mode) == 0o600, name
    (cache / "added").write_text("by the engine")
    assert restored(MemoryObjects(), found.manifest, tmp_path / "into") == cache
    assert (cache / "added").exists()
    assert exports(cache)["VLLM_CACHE_ROOT"] == str(cache)


def test_the_same_caches_published_anew_are_there(tmp_path: Path) -> None:
    """What an engine is using is not taken away because another manifest says when it was published."""
    manifest, chunks = ours()
    cache = restored(bucket_with((manifest, chunks)), manifest, tmp_path)
    (cache / "added").write_text("by the engine")
    assert restored(MemoryObjects(), msgspec.structs.replace(manifest, published_s=9.0), tmp_path) == cache
    assert (cache / "added").exists()


def test_the_newest_that_fits_is_taken() -> None:
    """Others are left: of another environment, of another key, unsigned, damaged; the answer says why none fits."""
    strangers = ours(key=b"x" * 32)
    unsigned = manifest_of(FILES)
    other = ours(torch="2.12")
    for one, why in (
        (strangers, "not signed with our key"),
        (unsigned, "not signed with our key"),
        (other, "torch: theirs 2.12, here 2.13"),
    ):
        found = asyncio.run(find_caches(bucket_with(one), "m", "r", ABOUT, KEY))
        assert found.manifest is None and why in found.why
    everything = bucket_with(strangers, unsigned, other, ours())
    everything.stored[manifest_name("m", "r", "0" * 32)] = b"damaged"
    asyncio.run(everything.put(manifest_name("m", "r", "1" * 32), b"damaged"))
    assert asyncio.run(find_caches(everything, "m", "r", ABOUT, KEY)).manifest == ours()[0]
    assert asyncio.run(find_caches(MemoryObjects(), "m", "r", ABOUT, KEY)).why == "there are none"


def test_a_signature_is_of_everything_that_counts() -> None:
    """It does not hold for another model, revision, environment or content, nor with another key."""
    manifest, _ = ours()
    assert is_signed(manifest, KEY) and not is_signed(manifest, b"x" * 32)
    changes: list[dict[str, Any]] = [
        {"model": "other"},
        {"revision": "other"},
        {"content": b"0" * 32},
        {"about": {**manifest.about, "torch": "2.12"}},
        {"about": ABOUT},
    ]
    for change in changes:
        assert not is_signed(msgspec.structs.replace(manifest, **change), KEY), change


@pytest.mark.parametrize("damage", ["flipped", "cut off", "gone"])
def test_a_damaged_chunk_leaves_nothing(tmp_path: Path, damage: str) -> None:
    """All or nothing: no directory under its final name, and a later try with good chunks is whole."""
    manifest, chunks = ours()
    objects = bucket_with((manifest, chunks))
    name = chunk_name(manifest.chunks[1].sha256)
    content = objects.stored[name]
    objects.stored[name] = {"flipped": b"X" + content[1:], "cut off": content[:-1], "gone": b""}[damage]
    with pytest.raises(ChunkDamaged, match="not what its name says"):
        restored(objects, manifest, tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())
    objects.stored[name] = content
    assert files_below(restored(objects, manifest, tmp_path / "into")) == FILES


def test_chunks_that_make_another_file_are_found(tmp_path: Path) -> None:
    """Chunks true by their names, in a file that has another digest: the signature is of files, not of chunks."""
    manifest, chunks = ours({"a": b"one", "b": b"two"})
    a, b = manifest.files
    swapped = msgspec.structs.replace(
        manifest,
        files=[msgspec.structs.replace(a, chunks=b.chunks), msgspec.structs.replace(b, chunks=a.chunks)],
    )
    assert is_signed(swapped, KEY)
    with pytest.raises(ChunkDamaged, match="not what its digest says"):
        restored(bucket_with((swapped, chunks)), swapped, tmp_path / "into")


def test_what_a_kill_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """Files of a restore that was killed are gone with the next one."""
    left = tmp_path / "into" / ".under-way" / "cache"
    left.mkdir(parents=True)
    (left / "half").write_text("half")
    manifest, chunks = ours()
    assert files_below(restored(bucket_with((manifest, chunks)), manifest, tmp_path / "into")) == FILES
    assert not (tmp_path / "into" / ".under-way").exists()


def test_an_engine_that_compiles_anew_is_a_miss(tmp_path: Path) -> None:
    """Nothing read yet; then a hit; then a miss for each new key, plain or ahead of time, and for one that was written again."""
    manifest, chunks = ours()
    cache = restored(bucket_with((manifest, chunks)), manifest, tmp_path / "into")
    assert used(cache) == ([], 0) and not used(cache).is_hit
    read(cache)
    assert used(cache) == ([], 1) and used(cache).is_hit
    (cache / COMPILED / "inductor_cache" / "new.so").write_text("of the same key")
    assert used(cache).is_hit
    (cache / "torch_compile_cache" / "torch_aot_compile" / "def").mkdir()
    (cache / "torch_compile_cache" / "9876543210").mkdir()
    assert used(cache).made == ["9876543210", "def"] and not used(cache).is_hit
    (cache / COMPILED / "rank_0_0" / "model").write_bytes(b"compiled again")  # it could not be loaded
    assert used(cache).made == ["9876543210", "abc", "def"]
    with pytest.raises(FilesWrong, match="nothing was restored there"):
        used(tmp_path / "elsewhere" / "cache")


def test_keys_are_secret_and_long(tmp_path: Path) -> None:
    """A file that others may read, a short one and none are refused in a line that has no key."""
    path = tmp_path / "key"
    for content, mode, said in (
        (KEY, 0o644, "chmod 600"),
        (b"short", 0o600, "5 bytes: allowed are 32"),
        (KEY, 0o600, ""),
    ):
        path.write_bytes(content + b"\n")
        path.chmod(mode)
        if said:
            with pytest.raises(ModelError, match=said) as caught:
                read_key(path)
            assert content.decode() not in str(caught.value)
        else:
            assert read_key(path) == KEY
    with pytest.raises(ModelError, match="No such file"):
        read_key(tmp_path / "nosuch")


def test_the_environment_is_what_decides_what_is_compiled() -> None:
    """A switch of the engine changes its digest; places, doors, logs and secrets do not."""
    digest = environment_digest({})
    assert environment_digest({"VLLM_USE_AOT_COMPILE": "0"}) != digest
    assert environment_digest({"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}) != digest
    others = {
        "VLLM_CACHE_ROOT": "/a",
        "VLLM_PORT": "1",
        "VLLM_API_KEY": "s",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "HOME": "/b",
    }
    assert environment_digest({**others, "CUDA_VISIBLE_DEVICES": "3", "TRITON_CACHE_DIR": "/c"}) == digest


class Deployment:
    """A bucket with a model, a key and a cache that an engine made; and the command."""

    def __init__(self, path: Path) -> None:
        self.bucket, self.key, self.cache = path / "bucket", path / "key", path / "cache"
        self.bucket.mkdir()
        self.key.write_bytes(KEY)
        self.key.chmod(0o600)
        self.model = make_model(path / "Tiny")
        self.into = path / "into"
        for name, content in FILES.items():
            place = self.cache / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)

    def run(self, verb: str, *words: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
        place = () if verb == "publish" else ("--into", self.into)
        return kvstore(
            "model", verb, *words, *place, "--to", f"file://{self.bucket}", "--key-file", self.key, **extra
        )

    def publish(self, *words: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
        return self.run("publish", self.model, "--name", "tiny", "--with-cache", self.cache, *words, **extra)


@pytest.fixture
def there(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


def test_the_command_restores_what_was_published(there: Deployment) -> None:
    """A miss before, with an empty directory to compile into; a hit behind; the exports are for a shell."""
    assert (
        kvstore(
            "model", "publish", there.model, "--name", "tiny", "--to", f"file://{there.bucket}"
        ).returncode
        == 0
    )
    miss = there.run("env", "tiny")
    assert miss.returncode == 0 and miss.stderr == "compile caches: miss: there are none\n", miss.stderr
    empty = Path(dict(line.split("=") for line in miss.stdout.splitlines())["export VLLM_CACHE_ROOT"])
    assert empty.is_dir() and not list(empty.iterdir())
    done = there.publish()
    assert done.returncode == 0 and "compile caches are published" in done.stdout, done.stderr
    hit = json.loads(there.run("env", "tiny", "-o", "json").stdout)
    assert hit["hit"] and files_below(Path(hit["exports"]["VLLM_CACHE_ROOT"])) == FILES
    other = there.run("env", "tiny", "--tp", "2")
    assert other.returncode == 0 and "miss: tensor parallel: theirs 1, here 2" in other.stderr
    switched = there.run("env", "tiny", VLLM_USE_AOT_COMPILE="0")
    assert switched.returncode == 0 and "miss: environment: theirs" in switched.stderr


def test_the_command_says_afterwards_whether_it_was_used(there: Deployment) -> None:
    """3 before an engine has started, 0 for a hit, 1 for a miss, 3 where nothing was restored."""
    there.publish()
    assert there.run("env", "tiny", "--check").returncode == 3
    cache = Path(json.loads(there.run("env", "tiny", "-o", "json").stdout)["exports"]["VLLM_CACHE_ROOT"])
    unknown = there.run("env", "tiny", "--check")
    assert unknown.returncode == 3 and unknown.stdout.startswith("unknown: nothing was read")
    read(cache)
    assert (
        there.run("env", "tiny", "--check").stdout
        == "hit: 1 restored file read, nothing compiled beside them\n"
    )
    (cache / "torch_compile_cache" / "torch_aot_compile" / "def").mkdir()
    missed = there.run("env", "tiny", "--check")
    assert missed.returncode == 1 and missed.stdout.startswith("miss: the engine compiled anew, under def")


def test_without_a_key_nothing_is_taken_or_published(there: Deployment) -> None:
    """env is a miss that says so, with another key as well; publish refuses before it reads the model."""
    there.publish()
    there.key.write_bytes(b"x" * 32)
    assert "miss: one of" in there.run("env", "tiny").stderr
    bucket = ("--to", f"file://{there.bucket}")
    miss = kvstore("model", "env", "tiny", "--into", there.into, *bucket)
    assert miss.returncode == 0 and "miss: there is no key" in miss.stderr
    refused = kvstore(
        "model", "publish", there.model, "--name", "other", "--with-cache", there.cache, *bucket
    )
    assert (
        refused.returncode == 2 and "need a key" in refused.stderr and len(refused.stderr.splitlines()) == 1
    )
    assert "other" not in kvstore("model", "ls", *bucket).stdout


def test_caches_that_cannot_be_published_stop_the_model_too(there: Deployment) -> None:
    """What is wrong with them, or with what they are of, is said before anything of the model is put."""
    for words, code in ((["--tp", "0"], 2), (["--with-cache", there.into / "none"], 3)):
        refused = there.publish(*words)
        assert refused.returncode == code and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert not list(there.bucket.iterdir())


def test_a_damaged_bucket_is_one_line(there: Deployment) -> None:
    """Exit code 1, no exports, nothing restored."""
    there.publish()
    name = chunk_name(hashlib.sha256(FILES[f"{COMPILED}/rank_0_0/model"]).digest())
    (there.bucket / name).write_bytes(b"evil" * 1000)
    ended = there.run("env", "tiny")
    assert (ended.returncode, ended.stdout) == (1, "") and "not what its name says" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and not list(there.into.iterdir())


def test_weights_that_cannot_fit_are_refused_before_a_start(there: Deployment, tmp_path: Path) -> None:
    """By the free memory of the devices that the engine would see; one that has room goes on."""
    there.publish()
    for free_bytes, code in ((64 * GIB, 0), (1000, 1)):
        path = os.pathsep.join((str(ROOT), str(fake_nvml(tmp_path / "nvml", free_bytes))))
        ended = there.run("env", "tiny", PYTHONPATH=path)
        assert ended.returncode == code, ended.stderr
    assert ended.stdout == "" and "1000 B free" in ended.stderr and len(ended.stderr.splitlines()) == 1
