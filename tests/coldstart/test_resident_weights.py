"""Weights from DRAM: tensors over the image of a model, the same ones as from its files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from coldstart.disk.sources import Local
from coldstart.errors import FilesWrong, ModelError
from coldstart.loading import loading
from coldstart.loading.resident import Image, fill, layout_of
from coldstart.loading.resident_weights import ResidentWeights
from replication.formats.manifests import Manifest
from tests.coldstart.late_device import LateDevice
from tests.coldstart.revisions import mark
from tests.coldstart.test_resident import Slabs


class Mapped:
    """A model that is whole in memory, as a client has it mapped."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.slabs = Slabs(layout_of(manifest).size_bytes)
        asyncio.run(fill(self.slabs, manifest, [Local({directory: manifest})]))
        self.view = self.slabs.view.toreadonly()
        self.is_valid = True
        self.touched_bytes = 0

    def valid(self) -> bool:
        return self.is_valid

    def touch(self, start: int, size_bytes: int) -> None:
        self.touched_bytes += size_bytes

    def close(self) -> None:
        self.view = memoryview(b"")


def fp8_block(rows: int, columns: int, seed: int) -> dict[str, torch.Tensor]:
    """As checkpoints quantised to FP8 in blocks have it: numbers, and one scale for each block."""
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (rows, columns), generator=draw, dtype=torch.uint8)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=draw)
    return {"weight": bits.view(torch.float8_e4m3fn), "weight_scale_inv": scales}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Manifest]:
    """FP8 and others, in two files, one tensor larger than a chunk, an empty one, one that lies askew."""
    tensors: dict[str, Any] = {
        f"layers.{layer}.{name}": tensor
        for layer in range(3)
        for name, tensor in fp8_block(256 + 7 * layer, 384, layer).items()
    }
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file(tensors, directory / "model-00001-of-00002.safetensors")
    more = {
        "large": torch.arange(3 << 20),
        "empty": torch.empty(0, 4),
        "one": torch.tensor(7, dtype=torch.uint8),
    }
    save_file(more, directory / "model-00002-of-00002.safetensors")
    return directory, mark(directory)


def resident_of(model: tuple[Path, Manifest], mapped: Mapped | None = None) -> ResidentWeights:
    directory, manifest = model
    return ResidentWeights(
        mapped or Mapped(directory, manifest), manifest, directory, sorted(directory.glob("*.safetensors"))
    )


def test_tensors_are_those_of_the_files(model: tuple[Path, Manifest]) -> None:
    """Of every type, FP8 with its scales, too, bit for bit; those that nobody wants are not touched."""
    mapped = Mapped(*model)
    resident = resident_of(model, mapped)
    expected = {
        name: tensor
        for path in sorted(model[0].glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    assert {tensor.name for file in resident.files for tensor in file.tensors} == expected.keys()
    found = dict(resident.tensors(lambda name: name != "layers.1.weight"))
    assert found.keys() == expected.keys() - {"layers.1.weight"}
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, expected[name])]
        assert torch.equal(*bits), name
    assert resident.loaded_bytes == mapped.touched_bytes == sum(tensor.nbytes for tensor in found.values())


def test_files_are_registered_while_they_are_copied(model: tuple[Path, Manifest]) -> None:
    """Each as a whole, and not where little of it is copied: by ranks that take a slice each, or who wants few of its tensors."""
    expected = dict(resident_of(model).tensors(lambda name: True))
    sizes = [path.stat().st_size for path in sorted(model[0].glob("*.safetensors"))]
    for wanted, ranks, pinned_bytes in (
        (lambda name: True, 1, sum(sizes)),
        (lambda name: True, 4, 0),
        (lambda name: name.startswith("layers."), 2, sizes[0]),
        (lambda name: name == "layers.1.weight_scale_inv", 1, 0),
    ):
        device = LateDevice()
        for name, tensor in resident_of(model).tensors(wanted, device, ranks):
            device.copy(name, tensor)
        assert device.pinned_bytes == pinned_bytes and not device.registered
        assert device.found.keys() == set(filter(wanted, expected))
        for name, tensor in device.found.items():
            bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, expected[name])]
            assert torch.equal(*bits), name


def test_a_load_that_ends_early_leaves_nothing_registered(model: tuple[Path, Manifest]) -> None:
    """The engine that asked for its tensors has failed."""
    device = LateDevice()
    tensors = resident_of(model).tensors(lambda name: True, device)
    device.copy(*next(tensors))
    tensors.close()
    assert device.pinned_bytes and not device.registered


def test_large_tensors_are_no_copies_and_small_ones_may_be_written(model: tuple[Path, Manifest]) -> None:
    """A model that writes into what it is given, as some do with biases, changes nothing that others see."""
    mapped = Mapped(*model)
    start = torch.frombuffer(mapped.slabs.memory, dtype=torch.uint8).data_ptr()
    before = bytes(mapped.slabs.memory)
    for name, tensor in resident_of(model, mapped).tensors(lambda name: True):
        is_view = start <= tensor.data_ptr() < start + len(before)
        assert is_view == (tensor.nbytes > loading._WRITTEN_BYTES_MAX), name
        if not is_view:
            tensor.view(torch.uint8).zero_()
    assert bytes(mapped.slabs.memory) == before


def test_what_is_not_that_revision_is_refused(model: tuple[Path, Manifest], tmp_path: Path) -> None:
    """Other files of that name, a file that it has not, one that is no safetensors, memory that is no image."""
    directory, manifest = model
    mapped = Mapped(directory, manifest)
    other = tmp_path / "other"
    other.mkdir()
    save_file({"w": torch.ones(3)}, other / "model.safetensors")
    for wrong, paths in (
        ((other, mark(other)), [other / "model.safetensors"]),
        (model, [directory / "stray.safetensors"]),
        (model, [directory / "config.json"]),
    ):
        with pytest.raises(ModelError):
            ResidentWeights(mapped, wrong[1], wrong[0], paths)
    mapped.view = memoryview(bytes(1 << 16))
    with pytest.raises(FilesWrong, match="no image"):
        resident_of(model, mapped)


def test_memory_that_others_were_given_is_an_error(model: tuple[Path, Manifest]) -> None:
    """Said at the end of the load: until then nobody computes with it."""
    mapped = Mapped(*model)
    tensors = resident_of(model, mapped).tensors(lambda name: True)
    next(tensors)
    mapped.is_valid = False
    with pytest.raises(FilesWrong, match="given to others"):
        list(tensors)
    assert Image(mapped.view).manifest == model[1]
