"""Loading from files: tensors that are right, or an error; whatever their sizes, whoever keeps them, however many ranks read."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from coldstart.disk.home import read_mark
from coldstart.errors import ChunkDamaged, FilesWrong
from coldstart.loading import ring as rings
from coldstart.loading.loading import Loading, WholeFiles, weight_file
from coldstart.loading.ring import LEFT_S, SharedRing, make_shared
from coldstart.loading.weight_plan import Piece, Plan
from replication.formats import manifests
from tests.coldstart.late_device import LateDevice
from tests.coldstart.revisions import mark

MIB = 1 << 20
SMALL_CHUNK = 64 << 10
WRITTEN_BYTES = 1000  # of tensors that a model may write into
Tensors = dict[str, Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 KiB: megabytes do for many laps of a ring."""
    monkeypatch.setattr("coldstart.published.cutting.CHUNK_BYTES_MAX", SMALL_CHUNK)
    monkeypatch.setattr("coldstart.published.cutting.JOINED_BYTES_MAX", SMALL_CHUNK // 4)
    monkeypatch.setattr("coldstart.loading.loading._WRITTEN_BYTES_MAX", WRITTEN_BYTES)


def numbers(seed: int, *sizes: int) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    return {f"t{place}": draw.integers(0, 256, size, dtype=np.uint8) for place, size in enumerate(sizes)}


def model(directory: Path, *files: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A whole revision of these files."""
    directory.mkdir(exist_ok=True)
    for number, tensors in enumerate(files):
        save_file(tensors, directory / f"model-{number}.safetensors")
    mark(directory)
    return directory


def plan_of(
    directory: Path, buffer_bytes: int = 2 * MIB, wanted: Callable[[str], bool] = lambda _: True
) -> Plan:
    manifest = read_mark(directory)
    assert manifest is not None
    files = [
        weight_file(directory / file.path, file, manifest)
        for file in manifest.files
        if file.path.endswith(".safetensors")
    ]
    return Plan(files, wanted, buffer_bytes)


def loading_of(plan: Plan, **more: Any) -> Loading:
    return Loading(plan, WholeFiles(plan.paths), **more)


def as_saved(directory: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same(found: Tensors, directory: Path) -> None:
    expected = as_saved(directory)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


MANY = [random.Random(5).choice([0, 3, 700, 9_000, 70_000, 300_000]) for _ in range(150)]


def test_every_tensor_in_the_order_of_the_bytes(tmp_path: Path) -> None:
    """Of many laps of the ring, small and large, empty ones too, and of several files."""
    directory = model(tmp_path / "m", numbers(1, *MANY), {"last": np.arange(5, dtype=np.float32)})
    plan = plan_of(directory)
    assert plan.size_bytes > 3 * plan.ring_bytes
    loading = loading_of(plan)
    seen = [(name, tensor.clone()) for name, tensor in loading.tensors()]
    assert_same(dict(seen), directory)
    placed = [tensor.name for file in sorted(directory.glob("*.safetensors")) for tensor in header_of(file)]
    assert [name for name, _ in seen] == placed
    assert loading.read_bytes == plan.size_bytes


def header_of(path: Path) -> list[Any]:
    from coldstart.published.cutting import read_header

    with path.open("rb") as file:
        header = read_header(file.fileno())
    assert header is not None
    return header.tensors


def test_tensors_that_somebody_keeps_stay_right(tmp_path: Path) -> None:
    """An engine may keep all of them, or views of some: none is written over, and the ring goes on."""
    directory = model(tmp_path / "m", numbers(2, *MANY))
    assert_same(dict(loading_of(plan_of(directory)).tensors()), directory)
    kept: Tensors = {}
    for name, tensor in loading_of(plan_of(directory)).tensors():
        if name.endswith("7") and len(tensor):
            kept[name] = tensor.narrow(0, len(tensor) // 2, len(tensor) - len(tensor) // 2)
    gc.collect()
    expected = as_saved(directory)
    for name, tensor in kept.items():
        assert torch.equal(tensor, expected[name][len(expected[name]) // 2 :]), name


def test_copies_that_go_on_behind_their_call(tmp_path: Path) -> None:
    """From registered memory a device copies when it likes: no byte of the ring is given to others before, and none unregistered."""
    directory = model(tmp_path / "m", numbers(9, *MANY))
    device = LateDevice()
    for name, tensor in loading_of(plan_of(directory), pins=device).tensors():
        device.copy(name, tensor)
        del tensor
    assert device.late_bytes > plan_of(directory).ring_bytes and not device.registered
    assert_same(device.found, directory)
    device.refuses = True  # then copies are over when their call is
    for name, tensor in loading_of(plan_of(directory), pins=device).tensors():
        device.copy(name, tensor)
    assert_same(device.found, directory)


class LettingGo(LateDevice):
    """While it unregisters memory, another thread lets tensors go; it is over when those who read have filled their room."""

    def __init__(self, held: Tensors, chunks: WholeFiles) -> None:
        super().__init__()
        self._held, self._chunks = held, chunks
        self.read: list[Piece] = []
        chunks.read = self._reads(chunks.read)  # type: ignore[method-assign]  # it is looked on

    def _reads(self, read: Callable[..., bool]) -> Callable[..., bool]:
        def reads(piece: Piece, view: memoryview, stopped: Callable[[], bool]) -> bool:
            is_true = read(piece, view, stopped)
            self.read.append(piece)
            return is_true

        return reads

    def unpin(self, address: int) -> None:
        super().unpin(address)
        expected = len(self.read) + 3
        letting_go = threading.Thread(target=self._let_go)
        letting_go.start()
        letting_go.join()
        while len(self.read) < expected:
            time.sleep(0.001)

    def _let_go(self) -> None:
        for name in list(self._held)[:5]:
            del self._held[name]


def test_a_thread_that_lets_tensors_go_while_the_ring_is_full_of_them(tmp_path: Path) -> None:
    """What is read into the room that it makes is given back as it was read: the ring is not left for it."""
    directory = model(tmp_path / "m", numbers(13, *[60_000] * 100))
    plan, held, expected = plan_of(directory), Tensors(), as_saved(directory)
    chunks = WholeFiles(plan.paths)
    device = LettingGo(held, chunks)
    seen = 0
    for name, tensor in Loading(plan, chunks, pins=device).tensors():
        held[name] = tensor
        seen += 1
        assert torch.equal(tensor, expected[name]), name
        del tensor
    assert seen == len(expected) and len(held) == len(expected) - 5
    assert all(torch.equal(tensor, expected[name]) for name, tensor in held.items())


def test_memory_is_bounded_where_nobody_keeps_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ring does for all of it: none of its memory is left to anybody."""
    made = []
    true_anonymous = rings.private_memory
    monkeypatch.setattr(rings, "private_memory", lambda size: made.append(size) or true_anonymous(size))
    plan = plan_of(model(tmp_path / "m", numbers(3, *MANY)))
    for _ in loading_of(plan).tensors():
        pass
    assert made == [plan.ring_bytes]


def test_a_tensor_larger_than_the_ring(tmp_path: Path) -> None:
    """It gets memory of its own."""
    directory = model(tmp_path / "m", numbers(4, 100, 5 * MIB + 13, 100, 3 * MIB))
    plan = plan_of(directory)
    assert plan.ring_bytes == 2 * MIB
    assert_same(dict(loading_of(plan).tensors()), directory)


TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "float8_e4m3fn",
         "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64"]  # fmt: skip


def test_every_type_and_shape(tmp_path: Path) -> None:
    """As safetensors itself gives them back."""
    from safetensors.torch import save_file as save_torch

    tensors = {
        name: torch.arange(24, dtype=torch.uint8)
        .repeat(8)[: 6 * getattr(torch, name).itemsize]
        .view(getattr(torch, name))
        .view(1, 2, 3)
        for name in TYPES
        if name != "bool"
    }
    tensors |= {"bool": torch.tensor([[True, False]]), "scalar": torch.tensor(2.5), "none": torch.empty(0, 4)}
    (tmp_path / "m").mkdir()
    save_torch(tensors, tmp_path / "m" / "model.safetensors")
    mark(tmp_path / "m")
    found = dict(loading_of(plan_of(tmp_path / "m")).tensors())
    for name, tensor in load_file(tmp_path / "m" / "model.safetensors").items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            name
        )


def write_raw(path: Path, entries: dict[str, Any], content: bytes, pad: int = 0) -> None:
    text = json.dumps(entries).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


@pytest.mark.parametrize("pad", range(4))
def test_tensors_that_lie_askew(tmp_path: Path, pad: int) -> None:
    """A header of any length moves the numbers off their borders."""
    (tmp_path / "m").mkdir()
    values = np.arange(6000, dtype=np.float32)
    entries = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [6000], "data_offsets": [1, 24001]},
    }
    write_raw(tmp_path / "m" / "model.safetensors", entries, b"x" + values.tobytes(), pad)
    mark(tmp_path / "m")
    found = dict(loading_of(plan_of(tmp_path / "m")).tensors())
    assert torch.equal(found["floats"], torch.from_numpy(values)) and found["byte"].item() == ord("x")


def test_what_is_not_wanted_is_not_read(tmp_path: Path) -> None:
    """Pieces in which no tensor is wanted stay on the disk."""
    directory = model(tmp_path / "m", numbers(6, *[100_000] * 20))
    plan = plan_of(directory, wanted=lambda name: name in ("t3", "t17"))
    loading = loading_of(plan)
    found = {name: tensor.clone() for name, tensor in loading.tensors()}
    assert set(found) == {"t3", "t17"} and torch.equal(found["t17"], as_saved(directory)["t17"])
    assert loading.read_bytes == plan.size_bytes == 200_000


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_flipped_bit_is_an_error_that_names_it(tmp_path: Path, share: float) -> None:
    """And no tensor with it is given back; those before it are right."""
    directory = model(tmp_path / "m", numbers(7, *[50_000] * 60))
    path = directory / "model-0.safetensors"
    at = int(path.stat().st_size * share)
    expected = as_saved(directory)
    flip(path, at)
    found: Tensors = {}

    def load() -> None:
        for name, tensor in loading_of(plan_of(directory)).tensors():
            found[name] = tensor.clone()

    with pytest.raises(ChunkDamaged, match=r"bytes \d+ to \d+ are not those that were published") as raised:
        load()
    words = str(raised.value).split()
    low, high = int(words[words.index("bytes") + 1]), int(words[words.index("to") + 1])
    assert low <= at < high and str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_flipped_bit_in_the_header(tmp_path: Path) -> None:
    """The header is verified before it is believed."""
    directory = model(tmp_path / "m", numbers(8, 1000, 1000))
    flip(directory / "model-0.safetensors", 8 + 60)
    with pytest.raises((ChunkDamaged, FilesWrong), match="model-0"):
        dict(loading_of(plan_of(directory)).tensors())


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    """Before anything of it is read."""
    directory = model(tmp_path / "m", numbers(9, 100_000))
    os.truncate(directory / "model-0.safetensors", 90_000)
    with pytest.raises(FilesWrong, match=r"90000 bytes, published were 100\d\d\d"):
        plan_of(directory)


def test_a_header_that_lies_about_a_tensor(tmp_path: Path) -> None:
    """Bytes that are no tensor of that shape, or of a type that nobody knows, are refused by name."""
    (tmp_path / "m").mkdir()
    for entry in ({"dtype": "F32", "shape": [3]}, {"dtype": "F31", "shape": [2]}):
        write_raw(tmp_path / "m" / "model.safetensors", {"odd": {**entry, "data_offsets": [0, 8]}}, b"x" * 8)
        mark(tmp_path / "m")
        with pytest.raises(FilesWrong, match="odd"):
            dict(loading_of(plan_of(tmp_path / "m")).tensors())


# ---- ranks ----------------------------------------------------------------------------------


def rank(
    directory: Path, path: Path, index: int, count: int, keeps: bool, dies_after: int, answers: Any
) -> None:
    """One rank, in a process of its own: the digests of what it got, and how much it read."""
    import hashlib

    plan = plan_of(directory)
    ring = SharedRing(path, plan.ring_bytes, len(plan.pieces), index, count)
    answers.put(("open", index, 0, {}))
    while not all(
        map(ring.is_there, range(count))
    ):  # as ranks of an engine do: who comes later counts as gone
        time.sleep(0.01)
    loading = loading_of(plan, ring=ring)
    kept, found = [], {}
    for number, (name, tensor) in enumerate(loading.tensors()):
        if number == dies_after:
            os.kill(os.getpid(), 9)
        found[name] = tensor
        if not keeps:
            found[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
            if len(tensor) <= WRITTEN_BYTES:
                tensor.zero_()  # as models do with biases, on all ranks but one
        kept.append(tensor) if keeps else None
    if keeps:
        found = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}
    answers.put(("done", index, loading.read_bytes, found))


def run_ranks(
    directory: Path, count: int, keeps: int = -1, dies: int = -1
) -> tuple[dict[int, int], dict[int, Any]]:
    """Bytes read and digests by rank. keeps: the rank that keeps its tensors; dies: the one that is killed in the middle."""
    plan = plan_of(directory)
    path = make_shared(plan.ring_bytes, len(plan.pieces), count)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(
            target=rank,
            args=(directory, path, index, count, index == keeps, 60 if index == dies else -1, answers),
        )
        for index in range(count)
    ]
    for process in ranks:
        process.start()
    try:
        expected = count + count - (dies >= 0)
        said = [answers.get(timeout=120) for _ in range(expected)]
    finally:
        path.unlink()
        for process in ranks:
            process.join(30)
            process.kill()
    done = [words for words in said if words[0] == "done"]
    return {words[1]: words[2] for words in done}, {words[1]: words[3] for words in done}


def digests(directory: Path) -> dict[str, str]:
    import hashlib

    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in as_saved(directory).items()
    }


@pytest.mark.parametrize("keeps", [-1, 1])
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_read_each_byte_once(tmp_path: Path, count: int, keeps: int) -> None:
    """All get all tensors, also where one keeps its own and others write into small ones; what they read adds up to the files once."""
    directory = model(tmp_path / "m", numbers(10, *MANY))
    read, found = run_ranks(directory, count, keeps)
    assert all(found[index] == digests(directory) for index in range(count))
    assert sum(read.values()) == plan_of(directory).size_bytes and min(read.values()) > 0


def test_a_rank_that_is_killed_does_not_stop_the_others(tmp_path: Path) -> None:
    """They read the rest themselves, and it is right."""
    directory = model(tmp_path / "m", numbers(11, *MANY))
    read, found = run_ranks(directory, 3, dies=1)
    assert found[0] == found[2] == digests(directory)
    assert sum(read.values()) < 2.5 * plan_of(directory).size_bytes


class NotYet:
    """Chunks that are still under way."""

    def read(self, piece: Piece, view: memoryview, stopped: Callable[[], bool]) -> bool:
        while not stopped():
            time.sleep(0.001)
        return False

    def close(self) -> None:
        pass


def test_a_rank_that_ends_while_it_waits_leaves_no_damage_behind(tmp_path: Path) -> None:
    """What it has not read is not damaged: the other one reads it itself, and all of it is right."""
    directory = model(tmp_path / "m", numbers(12, *[60_000] * 20))
    plan = plan_of(directory)
    path = make_shared(plan.ring_bytes, len(plan.pieces), 2)
    try:
        rings = [SharedRing(path, plan.ring_bytes, len(plan.pieces), index, 2) for index in range(2)]
    finally:
        path.unlink()
    stays = loading_of(plan, ring=rings[0]).tensors()
    found = dict([next(stays)])
    ends = Loading(plan, NotYet(), rings[1]).tensors()
    next(ends)
    ends.close()
    assert_same(found | dict(stays), directory)


def test_a_ring_whose_makers_are_dead_is_removed() -> None:
    """Its memory would be gone until the next boot: who makes the next one removes its name; that of a new one stays."""
    old, new = (make_shared(1 << 21, 1, 2) for _ in range(2))
    os.utime(old, (time.time() - LEFT_S - 1,) * 2)
    third = make_shared(1 << 21, 1, 2)
    try:
        assert (old.exists(), new.exists(), third.exists()) == (False, True, True)
    finally:
        for path in (old, new, third):
            path.unlink(missing_ok=True)


def test_what_a_shared_ring_asks_for(tmp_path: Path) -> None:
    """A file of another user, too short, or in which somebody else has this rank's place, is no ring of ours."""
    path = make_shared(2 * MIB, 10, 2)
    try:
        first = SharedRing(path, 2 * MIB, 10, 0, 2)
        with pytest.raises(OSError, match="this rank's place"):
            SharedRing(path, 2 * MIB, 10, 0, 2)
        with pytest.raises(OSError, match="not the ring"):
            SharedRing(path, 4 * MIB, 10, 1, 2)
        first.close()
    finally:
        path.unlink()


def test_the_chunks_of_this_test_are_small() -> None:
    """Else the tests above make no laps."""
    from coldstart.published import cutting

    assert cutting.CHUNK_BYTES_MAX == SMALL_CHUNK < manifests.CHUNK_BYTES_MAX
