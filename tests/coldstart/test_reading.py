"""open_model: tensors over the files, for anyone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import _SIZE, save_file

from coldstart import open_model
from coldstart.disk.home import Home
from coldstart.disk.preload import preload
from coldstart.errors import FilesWrong, InUse
from tests.coldstart.models import cut_evenly, made, put
from tests.objects import MemoryObjects, flip


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(17, 33, dtype=torch.float32),
        "b": torch.randn(5, dtype=torch.float32).to(torch.bfloat16),
        "c": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def models_dir(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """With a model "m" of two files, preloaded."""
    save_file({name: tensors[name] for name in "ab"}, tmp_path / "1.safetensors")
    save_file({name: tensors[name] for name in ("c", "empty")}, tmp_path / "2.safetensors")
    files = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")} | {"config.json": b"{}"}
    objects = MemoryObjects()
    asyncio.run(put(objects, *made(files, cut_evenly(files, 500))))
    asyncio.run(preload(objects, Home(tmp_path / "models"), "m"))
    return tmp_path / "models"


def test_tensors_are_those_of_the_files(models_dir: Path, tensors: dict[str, torch.Tensor]) -> None:
    """By name, as a mapping and in order; while it is open the model stays, and what was handed out may be kept."""
    with open_model("m", models_dir, is_verified=True) as model:
        found = {name: tensor.torch() for name, tensor in model.items()}
        assert len(model) == 4 and model["a"].shape == (17, 33) and model["b"].dtype == "BF16"
        assert bytes(model["a"].view) == tensors["a"].numpy().tobytes() and model["a"].view.readonly
        with pytest.raises(InUse):
            Home(models_dir).evict("m")
    Home(models_dir).evict("m")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


def test_every_type_of_safetensors_is_one_of_torch(tmp_path: Path) -> None:
    """All that its own library writes, with their types and shapes; an element of some holds two, and half an element is none."""
    bits = torch.arange(64, dtype=torch.uint8).reshape(2, 32) % 2
    types = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    saved = {str(one): bits.clone().view(one) for one in types if f"{one}" in map(str, _SIZE)}
    assert len(saved) >= 20
    save_file(saved, tmp_path / "all.safetensors")
    with open_model(tmp_path) as model, safe_open(tmp_path / "all.safetensors", "pt") as theirs:
        for name in saved:
            ours, other = model[name].torch(), theirs.get_tensor(name)
            assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
            assert torch.equal(ours.view(torch.uint8), other.view(torch.uint8))
    header = b'{"a":{"dtype":"F4","shape":[128,1],"data_offsets":[0,64]}}'
    (tmp_path / "all.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with open_model(tmp_path) as model, pytest.raises(FilesWrong, match="are no F4 of shape"):
        model["a"].torch()


def test_what_is_written_to_a_tensor_stays_here(models_dir: Path) -> None:
    """It changes pages of this process, and no file."""
    with open_model("m@r1", models_dir) as model:
        model["a"].torch().zero_()
        assert not model["a"].torch().any()
    with open_model("m", models_dir, is_verified=True) as model:
        assert model["a"].torch().any()


def test_a_directory_is_opened_as_it_is(models_dir: Path, tmp_path: Path) -> None:
    """One of ours is in use then; of any other one nothing says that it is true."""
    ours = Home(models_dir).find("m").path
    with open_model(ours) as model:
        assert model.manifest is not None and Home(models_dir).is_used("m", "r1")
    with open_model(tmp_path) as model:
        assert model.manifest is None and set(model) == {"a", "b", "c", "empty"}
    with pytest.raises(FilesWrong, match="nothing to verify it with"):
        open_model(tmp_path, is_verified=True)


def test_a_flipped_bit_is_found_when_asked_for(models_dir: Path) -> None:
    """One line says where, and what mends it."""
    path = Home(models_dir).find("m").path / "1.safetensors"
    content = path.read_bytes()
    path.write_bytes(flip(content, 8 * (len(content) - 1)))
    with pytest.raises(FilesWrong, match=r"1\.safetensors: damaged at byte .*preload m@r1 --verify mends it"):
        open_model("m", models_dir, is_verified=True)
    assert not Home(models_dir).is_used("m", "r1")


def test_a_file_that_is_cut_off_is_said(tmp_path: Path) -> None:
    """And nothing of it is a tensor."""
    save_file({"a": torch.zeros(1000)}, tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-1])
    with pytest.raises(FilesWrong, match=r"y\.safetensors: no safetensors file"):
        open_model(tmp_path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Nobody waits for whoever might write into it."""
    os.mkfifo(tmp_path / "y.safetensors")
    with pytest.raises(FilesWrong, match=r"y\.safetensors: no safetensors file"):
        open_model(tmp_path)
