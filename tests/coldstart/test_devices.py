"""Devices: what a driver says, through a double of its library, and what is done without one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from coldstart.fleet.devices import Device, Watch, devices, first_name, visible, weight_bytes, wrong_of_load
from tests.coldstart.fake_nvml import GIB, fake_nvml
from tests.doctor.looked import doctor, of
from tests.running import ROOT, Place

ONE = Device(0, "GPU-aaaa-1", "NVIDIA H100", 80 * GIB, 64 * GIB, 1, (5, 16))
TWO = Device(1, "GPU-bbbb-2", "NVIDIA GRID", 80 * GIB, 64 * GIB, None, None)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The double, for this process."""
    there = fake_nvml(tmp_path / "nvml")
    monkeypatch.syspath_prepend(str(there))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield there
    sys.modules.pop("pynvml", None)


@pytest.mark.usefixtures("library")
def test_what_a_driver_does_not_say_is_not_known(tmp_path: Path) -> None:
    """One device says all, the other one little: names as bytes, no link, no address."""
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "numa_node").write_text("1\n")
    assert devices(tmp_path) == [ONE, TWO]
    assert ONE.link_bytes_per_s == pytest.approx(63.04e9) and TWO.link_bytes_per_s is None
    (tmp_path / "0000:17:00.0" / "numa_node").write_text("-1\n")  # as machines with one node say it
    assert devices(tmp_path)[0].numa_node is None


@pytest.mark.usefixtures("library")
def test_a_device_that_is_lost_hides_no_other_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The driver refuses whatever is asked about it."""
    import pynvml

    def handle(index: int) -> int:
        if index == 0:
            raise pynvml.NVMLError("GPU is lost")
        return index

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert devices(tmp_path) == [TWO]


def test_without_library_or_driver_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, and one whose driver does not answer: an empty list, and no name."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert devices() == [] and first_name({}) == ""
    monkeypatch.delitem(sys.modules, "pynvml")
    monkeypatch.syspath_prepend(str(fake_nvml(tmp_path / "nvml", driver=False)))
    assert devices() == []
    sys.modules.pop("pynvml", None)


@pytest.mark.parametrize(
    ("names", "seen"),
    [
        (None, [0, 1]), ("", []), ("1,0", [1, 0]), ("GPU-bbbb", [1]), ("0,7,1", [0]), ("GPU-", []), ("MIG-1", []), ("-1", []),
    ],
)  # fmt: skip
def test_an_engine_sees_what_its_environment_says(names: str | None, seen: list[int]) -> None:
    """By number and by the beginning of a UUID, in that order; nothing behind an unknown one, as CUDA has it."""
    environ = {} if names is None else {"CUDA_VISIBLE_DEVICES": names}
    assert [device.number for device in visible([ONE, TWO], environ)] == seen


def test_weights_that_cannot_fit_are_refused() -> None:
    """By the free memory of each device that is used; what is not known refuses nothing."""
    assert wrong_of_load(128 * GIB, 2, [ONE, TWO]) == ""
    said = wrong_of_load(129 * GIB, 2, [ONE, TWO])
    assert said == "64.5 GiB of weights for each of 2 devices: device 0 (NVIDIA H100) has 64 GiB free"
    assert wrong_of_load(129 * GIB, 2, []) == ""
    assert wrong_of_load(129 * GIB, 1, [ONE._replace(free_bytes=None)]) == ""


def test_weights_count_once() -> None:
    """As gpt-oss and Mistral are published: with the same weights again in a folder, or in one file beside the shards."""
    shards = [(f"model-0000{n}-of-00003.safetensors", 4 * GIB) for n in range(1, 4)]
    beside = [("config.json", 1), ("pytorch_model.bin", 12 * GIB)]
    assert weight_bytes([*shards, *beside]) == 12 * GIB
    assert weight_bytes([*shards, *beside, ("original/model.safetensors", 12 * GIB)]) == 12 * GIB
    assert weight_bytes([*shards, ("consolidated.safetensors", 13 * GIB)]) == 13 * GIB
    assert weight_bytes([("a/model.safetensors", GIB)]) == 0


def test_a_driver_that_hangs_holds_nobody_up() -> None:
    """Whoever asks has the last answer, for a minute; and one question is under way, however often it is asked."""
    now_s, asked = [0.0], []
    may_answer, answered = threading.Event(), threading.Event()

    def ask() -> list[Device]:
        asked.append(now_s[0])
        may_answer.wait(60)
        answered.set()
        return [ONE]

    def wait_for_answer() -> None:
        assert answered.wait(60)
        assert watch._asking is not None
        watch._asking.join(60)
        answered.clear()

    watch = Watch(ask, lambda: now_s[0])
    assert watch.newest() == watch.newest() == []
    may_answer.set()
    wait_for_answer()
    assert watch.newest() == [ONE] and asked == [0.0]
    may_answer.clear()
    now_s[0] = 30.0
    assert watch.newest() == watch.newest() == [ONE] and len(asked) <= 2
    now_s[0] = 61.0
    assert watch.newest() == []
    may_answer.set()
    wait_for_answer()
    assert watch.newest() == [ONE] and len(asked) == 2


@pytest.mark.usefixtures("library")
def test_metrics_have_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the labels of the table, and only what is known; without devices none of these metrics is there."""
    from kvstore.tools.web import collector

    def found() -> dict[str, list[float]]:
        return {family.name: [s.value for s in family.samples] for family in collector._devices()}

    class Seen(Watch):
        def newest(self) -> list[Device]:
            return [ONE, TWO]

    monkeypatch.setattr(collector, "_WATCH", Seen())
    assert found() == {
        "kvstore_device_total_bytes": [80.0 * GIB, 80.0 * GIB],
        "kvstore_device_free_bytes": [64.0 * GIB, 64.0 * GIB],
        "kvstore_device_link_bytes_per_second": [pytest.approx(63.04e9)],
        "kvstore_device_numa_node": [1.0],
    }
    monkeypatch.setattr(collector, "_WATCH", Watch(list))
    assert found() == {}


def test_the_doctor_shows_devices(tmp_path: Path, place: Place) -> None:
    """A line for each; without the library none on a machine without a driver."""
    path = os.pathsep.join((str(ROOT), str(fake_nvml(tmp_path / "nvml"))))
    words = (*place.arguments[:2], "--set=dram.capacity_bytes=16MiB", "--set=dram.slab_bytes=4MiB")
    found = doctor(*words, code=0, PYTHONPATH=path)
    assert of(found, "device 0") == ["NVIDIA H100: 64 GiB free, NUMA node unknown, PCIe 5 x16 (63 GB/s)"]
    assert of(found, "device 1") == ["NVIDIA GRID: 64 GiB free, NUMA node unknown, link unknown"]
