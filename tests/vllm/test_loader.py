"""Load format `kvstore` under vLLM's loader interface: the same tensors as the default loader, by the same rules."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from safetensors.numpy import save_file
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from coldstart.disk.home import read_mark
from coldstart.disk.sources import Local
from coldstart.errors import ChunkDamaged, FilesWrong
from coldstart.loading.resident import CONTENT_BYTES, fill, layout_of
from connectors.transfer.weights import weights_digest
from connectors.vllm.identity.model_files import weight_files
from connectors.vllm_plugin import register
from kvstore.client import Client, ClientError, models
from tests.coldstart.revisions import Bucket, into_dram, mark
from tests.running import Daemon, Place

pytestmark = pytest.mark.vllm

EXPERTS = 4


@pytest.fixture(autouse=True, scope="module")
def plugin() -> None:
    register()
    register()  # vLLM runs plugins more than once


def tensors(seed: int, *names: str) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal((seed % 5 + 2, 64)).astype(np.float32) for name in names}


def layers(*numbers: int) -> dict[str, Any]:
    """Of a model with experts."""
    named = {}
    for number in numbers:
        names = [f"model.layers.{number}.mlp.experts.{expert}.w1.weight" for expert in range(EXPERTS)]
        scales = [f"model.layers.{number}.mlp.experts.{expert}.w1.weight_scale" for expert in range(EXPERTS)]
        named |= tensors(number, f"model.layers.{number}.norm.weight", *names, *scales)
    return named


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Twelve files, an index, and one more file that it does not name."""
    directory = tmp_path / "sharded"
    directory.mkdir()
    weight_map = {}
    for number in range(12):
        name = f"model-{number}.safetensors"
        save_file(layers(number), directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(layers(number), name)
    save_file(tensors(99, "stray"), directory / "stray.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    mark(directory)
    return directory


def loader_of(load_format: str = "kvstore", **extra: Any) -> Any:
    return get_model_loader(
        LoadConfig(load_format=load_format, model_loader_extra_config=extra, use_tqdm_on_load=False)
    )


def weights(loader: Any, directory: Path, **model: Any) -> dict[str, Any]:
    found = loader.get_all_weights(*asked(directory, **model))
    return {name: tensor.clone() for name, tensor in found}


def asked(directory: Path, **model: Any) -> tuple[Any, Any]:
    """The configuration, and a model, that weights are asked for."""
    return SimpleNamespace(model=str(directory), revision=None), SimpleNamespace(**model)


def assert_as_default(directory: Path, experts: set[int] | None = None, **model: Any) -> dict[str, Any]:
    ours, theirs = loader_of(), loader_of("auto")
    ours.local_expert_ids = theirs.local_expert_ids = experts
    found, expected = weights(ours, directory, **model), weights(theirs, directory, **model)
    assert_same(found, expected)
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys() and expected
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        bits = [each.reshape(-1).view(torch.uint8) for each in (found[name], tensor)]
        assert torch.equal(*bits), name


def test_it_is_vllms_default_loader_in_all_but_reading() -> None:
    """Registered by the entry point, once, and a subclass of what vLLM uses itself."""
    assert isinstance(loader_of(), DefaultModelLoader)
    assert type(loader_of("auto")) is DefaultModelLoader


def test_wrong_settings_are_refused() -> None:
    """Unknown keys as by vLLM; ours with what is allowed."""
    assert loader_of(buffer_bytes=1 << 22, threads=2, enable_weights_track=False) is not None
    with pytest.raises(ValueError, match="bufer_bytes"):
        loader_of(bufer_bytes=1)
    with pytest.raises(ValueError, match=r"threads = 0: allowed is a number from 1"):
        loader_of(threads=0)
    with pytest.raises(ValueError, match=r"buffer_bytes = 'a lot'"):
        loader_of(buffer_bytes="a lot")


def test_sharded_files_with_an_index(sharded: Path) -> None:
    """The files of the index, and no others."""
    assert "stray" not in assert_as_default(sharded)


def test_experts_of_other_ranks_are_not_read(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their weights are left out, their scales are not: as vLLM's own filter says."""
    found = assert_as_default(sharded, experts={1})
    assert any(".experts.2.w1.weight_scale" in name for name in found)
    assert not any(name.endswith(".experts.2.w1.weight") for name in found)


def test_weights_that_a_model_has_no_use_for(sharded: Path) -> None:
    """What it says it does not use is not read; if it uses nothing, all is."""
    ours = weights(loader_of(), sharded, is_unused_checkpoint_weight=lambda name: ".layers.1" in name)
    assert ours and not any(".layers.1" in name for name in ours)
    assert_as_default(sharded, is_unused_checkpoint_weight=lambda name: True)


def test_fp8_with_its_scales(tmp_path: Path) -> None:
    """Bit for bit, those that are no numbers, too."""
    from safetensors.torch import save_file as save_tensors

    directory = tmp_path / "m"
    directory.mkdir()

    def bits(rows: int) -> torch.Tensor:
        return torch.arange(256, dtype=torch.uint8).repeat(rows, 1)

    types = {"a.weight": bits(128).view(torch.float8_e4m3fn), "b.weight": bits(3).view(torch.float8_e5m2)}
    scales = {
        "a.weight_scale_inv": torch.rand(1, 2),
        "b.weight_scale": torch.tensor(0.5),
        "c.weight_scale": bits(2).view(torch.float8_e8m0fnu),
    }
    save_tensors(types | scales, directory / "model.safetensors")
    mark(directory)
    assert assert_as_default(directory)["a.weight"].dtype is torch.float8_e4m3fn


def test_patterns_of_a_model(sharded: Path) -> None:
    """A model may choose its files itself."""
    assert set(assert_as_default(sharded, allow_patterns_overrides=["stray*"])) == {"stray"}


def test_weights_from_several_places(sharded: Path, tmp_path: Path) -> None:
    """Secondary weights come with their prefix, from a directory that is a revision, and from one that is none."""
    for marked in (True, False):
        other = tmp_path / f"other-{marked}"
        other.mkdir()
        save_file(tensors(7, "eye"), other / "model.safetensors")
        if marked:
            mark(other)
        second = DefaultModelLoader.Source(str(other), None, prefix="vision.")
        assert "vision.eye" in assert_as_default(sharded, secondary_weights=[second])


def test_pickles_are_verified_and_read_by_vllm(tmp_path: Path) -> None:
    """Files that are no safetensors come from the default loader, once their bytes are known to be true."""
    directory = tmp_path / "m"
    directory.mkdir()
    torch.save({"w": torch.arange(1000.0)}, directory / "pytorch_model.bin")
    mark(directory)
    assert set(assert_as_default(directory)) == {"w"}
    flip(directory / "pytorch_model.bin")
    with pytest.raises(ChunkDamaged, match=r"pytorch_model\.bin"):
        weights(loader_of(), directory)


def test_a_plain_directory(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is no revision is read as always, and a line says so."""
    (sharded / ".kvstore-model").unlink()
    with caplog.at_level("INFO", "vllm.kvstore"):
        assert_as_default(sharded)
    assert [record.message for record in caplog.records if "is no revision of kvstore" in record.message]


def test_one_line_says_what_a_load_did(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bytes came from, that they were verified, how long it took."""
    lines: list[str] = []
    monkeypatch.setattr("connectors.vllm.loader._log.info", lambda text, *facts: lines.append(text % facts))
    weights(loader_of(), sharded)
    (line,) = lines
    assert line.startswith("kvstore: tiny@r1: fetched nothing: it was on this disk · verified ")
    assert "loaded" in line


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def test_a_flipped_byte_is_refused(sharded: Path) -> None:
    """One line names the file and the bytes, and nothing of that chunk reaches the model."""
    flip(sharded / "model-7.safetensors")
    with pytest.raises(ChunkDamaged, match=r"model-7\.safetensors: bytes \d+ to \d+") as raised:
        weights(loader_of(), sharded)
    assert "\n" not in str(raised.value)


def test_a_truncated_shard_is_refused(sharded: Path) -> None:
    """Before any tensor is given back."""
    os.truncate(sharded / "model-7.safetensors", 2000)
    with pytest.raises(FilesWrong, match=r"model-7\.safetensors: 2000 bytes, published were"):
        next(loader_of().get_all_weights(*asked(sharded)))


def test_a_file_that_was_not_published_is_refused(sharded: Path) -> None:
    """A stranger among the shards that the loader would read."""
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(sharded / "model-1.safetensors", sharded / "model-1b.safetensors")
    with pytest.raises(FilesWrong, match=r"model-1b\.safetensors: not a file of tiny@r1"):
        weights(loader_of(), sharded)


def test_it_reads_the_files_that_name_the_weights(sharded: Path) -> None:
    """An engine's identity is of the same files, however it loads them."""
    config = SimpleNamespace(model=str(sharded), revision=None, quantization=None, hf_overrides={})
    files = weight_files(config, LoadConfig(load_format="kvstore"))
    assert files == weight_files(config, LoadConfig()) and len(files) == 12


# ---- DRAM -----------------------------------------------------------------------------------


@pytest.fixture
def dram(place: Place, serve: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> Daemon:
    """A daemon that keeps models, where loaders find it by themselves."""
    monkeypatch.setenv("KVSTORE_SOCKET_PATH", str(place.socket))
    monkeypatch.setattr("coldstart.loading.loading._WRITTEN_BYTES_MAX", 0)  # all that is given back are views
    sizes = ["--set=dram.capacity_bytes=64MiB", "--set=models.dram_bytes=32MiB"]
    return serve(place, *place.arguments, *sizes)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What loads say."""
    said: list[str] = []
    monkeypatch.setattr("connectors.vllm.loader._log.info", lambda text, *facts: said.append(text % facts))
    return said


def test_a_model_in_dram_is_read_from_there(sharded: Path, dram: Daemon, lines: list[str]) -> None:
    """By the same rules as files, and whatever became of those; when nobody holds its tensors it may leave."""
    expected = weights(loader_of("auto"), sharded)
    into_dram(sharded, dram.socket)
    flip(sharded / "model-7.safetensors")
    found = weights(loader_of(), sharded)
    assert_same(found, expected)
    (line,) = lines
    assert line.startswith("kvstore: tiny@r1: fetched nothing: it was in this node's DRAM · verified ")
    size_bytes = sum(tensor.nbytes for tensor in found.values())
    assert counted(dram) == (1, {"dram": size_bytes})
    assert f"loaded {size_bytes:,} bytes" in line
    experts = weights(loader_of_rank(1), sharded)
    assert any(".experts.1.w1.weight" in name for name in experts)
    assert not any(name.endswith(".experts.2.w1.weight") for name in experts)
    kept = next(loader_of().get_all_weights(*asked(sharded)))
    with pytest.raises(ClientError, match="uses it"):
        models.drop("tiny", "r1", dram.socket)
    del kept
    gc.collect()
    models.drop("tiny", "r1", dram.socket)
    with pytest.raises(ChunkDamaged):
        weights(loader_of(), sharded)


def counted(daemon: Daemon) -> tuple[int, dict[str, int]]:
    """Loads, and bytes by source, as the daemon has heard of them."""
    with Client(daemon.socket, attach=False) as client:
        loads = client.live()["model_loads"]
    return loads["count"], loads["by_source"]


def loader_of_rank(expert: int) -> Any:
    loader = loader_of()
    loader.local_expert_ids = {expert}
    return loader


def test_a_start_directory_of_a_model_in_dram(
    sharded: Path, dram: Daemon, tmp_path: Path, lines: list[str]
) -> None:
    """Nothing of it is on the disk, nor will be: it is loaded out of DRAM, and KV is named by what is there, as by its files."""
    (sharded / ".kvstore-model").unlink()
    bucket = Bucket(sharded, tmp_path)
    done = bucket.start()
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "bucket")
    directory = Path(done.stdout.strip())
    into_dram(sharded, dram.socket, bucket.manifest)
    assert_same(weights(loader_of(), directory), weights(loader_of("auto"), sharded))
    assert "it was in this node's DRAM" in lines[0]
    config = SimpleNamespace(model=str(directory), revision=None, quantization=None, hf_overrides={})
    held = weight_files(config, LoadConfig(load_format="kvstore"), socket=str(dram.socket))
    config.model = str(sharded)
    files, stop = weight_files(config, LoadConfig()), threading.Event()
    assert weights_digest(held, tmp_path / "a", stop) == weights_digest(files, tmp_path / "b", stop)
    models_drop_soon(held, dram)
    assert not list(bucket.models.glob("models--*"))


def models_drop_soon(held: list[Any], dram: Daemon) -> None:
    """What names KV keeps the model in DRAM no longer than it is looked at."""
    with pytest.raises(ClientError, match="uses it"):
        models.drop("tiny", "r1", dram.socket)
    held.clear()
    gc.collect()
    models.drop("tiny", "r1", dram.socket)


def test_a_model_on_its_way_into_dram_is_waited_for(sharded: Path, dram: Daemon, lines: list[str]) -> None:
    """As long as it comes nearer; one whose filler is gone, or does nothing, is not: its files are read."""
    manifest = read_mark(sharded)
    assert manifest is not None
    size_bytes, content = layout_of(manifest).size_bytes, manifest.content[:CONTENT_BYTES]
    with models.fill("tiny", "r1", content, size_bytes, dram.socket) as filling:
        with pytest.raises(ClientError, match="filling"):
            models.attach("tiny", "r1", dram.socket, stalled_s=0.2)
        with ThreadPoolExecutor(1) as thread:
            loaded = thread.submit(weights, loader_of(), sharded)
            asyncio.run(fill(filling, manifest, [Local({sharded: manifest})]))
            assert_same(loaded.result(), weights(loader_of("auto"), sharded))
    assert "it was in this node's DRAM" in lines[-1]
    models.drop("tiny", "r1", dram.socket)
    with models.fill("tiny", "r1", content, size_bytes, dram.socket):
        pass  # nothing of it came
    assert weights(loader_of(), sharded)
    assert "fetched nothing: it was on this disk" in lines[-1]


def test_the_daemon_is_killed_while_tensors_are_taken(
    sharded: Path, dram: Daemon, place: Place, serve: Callable[..., Daemon], lines: list[str]
) -> None:
    """They stay right, under the daemon that comes next, too, which gives their memory to nobody; without one, files are read."""
    expected = weights(loader_of("auto"), sharded)
    into_dram(sharded, dram.socket)
    coming = loader_of().get_all_weights(
        SimpleNamespace(model=str(sharded), revision=None), SimpleNamespace()
    )
    found = dict(next(coming) for _ in range(20))
    dram.process.kill()
    dram.process.wait()
    assert weights(loader_of(), sharded).keys() == expected.keys()
    assert "fetched nothing: it was on this disk" in lines[-1]
    after = serve(place, *dram.arguments)
    while models.listed(after.socket)[0]["state"] != "whole":
        pass
    found |= dict(coming)
    assert_same(found, expected)
    assert "it was in this node's DRAM" in lines[-1]


def test_other_files_of_that_name_in_dram(
    sharded: Path, dram: Daemon, tmp_path: Path, lines: list[str]
) -> None:
    """They are not taken: a line says so, and the revision comes from the disk."""
    other = tmp_path / "other"
    other.mkdir()
    save_file(layers(3), other / "model.safetensors")
    mark(other)
    into_dram(other, dram.socket)
    assert_as_default(sharded)
    count, by_source = counted(dram)
    assert count == 1 and by_source.keys() == {"disk"} and by_source["disk"] > 0
    assert "not taken from DRAM: tiny@r1: other files of that name" in lines[0] and "on this disk" in lines[1]
