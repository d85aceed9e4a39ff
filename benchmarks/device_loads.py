"""How fast the weights of a model come to an accelerator, from this node's DRAM and disk, against what it does with others' code.

    a model, published to a directory, preloaded, loaded into the DRAM of a daemon
    each way: tensors copied one by one into memory of the device that is there, as an engine does it
    after each: every byte on the device compared with the files

Figures are medians in GB/s; `first_…` is of the first load of this process, which is not in the median. The page cache is
emptied before what reads the disk, and full before what is said to be out of it.

    python -m benchmarks.device_loads [--directory DIR] [--size 8GiB] [--rounds 4] [-o json]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks import command
from benchmarks.coldstart.model import MODEL, in_dram, make, put
from benchmarks.coldstart.ours import disk_read
from benchmarks.command import as_table, parser_of, run
from benchmarks.errors import BenchError
from coldstart.disk.home import Home
from coldstart.disk.preload import preload
from coldstart.disk.reading import open_model
from coldstart.loading.loading import BUFFER_BYTES, Loading
from coldstart.loading.resident_weights import ResidentWeights
from coldstart.loading.start_dir import open_revision
from coldstart.loading.weight_plan import Plan
from connectors.device.movers import weight_pins
from kvstore.client import models
from kvstore.units import parse_bytes
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import open_objects

DEVICE = "cuda"
PINNED_BYTES = 1 << 30  # of the one copy that is the limit
READERS = 8  # of the disk by itself
Tensors = Iterator[tuple[str, Any]]
say = partial(command.say, "device_loads")


class Weights:
    """A model on this node, its true tensors on the device, and memory there for what is loaded."""

    def __init__(self, scratch: Path, size_bytes: int) -> None:
        """Raises ModelError, ObjectError, OSError."""
        source, bucket = scratch / "source", scratch / "bucket"
        bucket.mkdir()
        objects = open_objects(f"file://{bucket}", ObjectOptions())
        make(source, size_bytes)
        asyncio.run(put(objects, source))
        shutil.rmtree(source)
        self.directory = asyncio.run(preload(objects, Home(scratch / "models"), MODEL)).path
        shutil.rmtree(bucket)
        self.files = sorted(self.directory.glob("*.safetensors"))
        self.size_bytes = sum(path.stat().st_size for path in self.files)
        self._true = {name: tensor for path in self.files for name, tensor in load_file(path, DEVICE).items()}
        self._there = {name: torch.empty_like(tensor) for name, tensor in self._true.items()}

    def take(self, tensors: Tensors) -> None:
        """As an engine does it."""
        for name, tensor in tensors:
            self._there[name].copy_(tensor)

    def poison(self) -> None:
        """What is not loaded is not true."""
        for tensor in self._there.values():
            tensor.view(torch.uint8).bitwise_not_()

    def check(self, way: str) -> None:
        """Raises BenchError."""
        for name, tensor in self._true.items():
            if not torch.equal(tensor.view(torch.uint8), self._there[name].view(torch.uint8)):
                raise BenchError(f"{way}: {name} on the device is not what was published")

    def page_cache(self, is_full: bool) -> None:
        for path in self.files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            if is_full:
                with path.open("rb") as file:
                    while file.read(16 << 20):
                        pass


# ---- ways ---------------------------------------------------------------------------------------


def from_dram(weights: Weights, socket: Path, is_pinned: bool) -> Tensors:
    """As the load format does it."""
    revision = open_revision(weights.directory)
    assert revision is not None
    model = models.attach(MODEL, weights.directory.name, socket)
    with closing(ResidentWeights(model, revision.manifest, weights.directory, weights.files)) as resident:
        yield from resident.tensors(lambda name: True, weight_pins(say) if is_pinned else None)


def from_nvme(weights: Weights, is_pinned: bool) -> Tensors:
    revision = open_revision(weights.directory)
    assert revision is not None
    plan = Plan([revision.weight_file(path) for path in weights.files], lambda name: True, BUFFER_BYTES)
    pins = weight_pins(say) if is_pinned else None
    return Loading(plan, revision.chunks(plan, True), pins=pins).tensors()


def from_pages(weights: Weights) -> Tensors:
    with open_model(weights.directory) as model:
        for name, tensor in model.items():
            yield name, tensor.torch()


def from_safetensors(weights: Weights) -> None:
    """On the device it has memory of its own."""
    for path in weights.files:
        load_file(path, DEVICE)


def ways(weights: Weights, socket: Path) -> dict[str, tuple[Callable[[], None], bool | None]]:
    """Each with whether the page cache is full before; None: it does not matter."""

    def loads(make: Callable[[], Tensors]) -> Callable[[], None]:
        return lambda: weights.take(make())

    return {
        "dram": (loads(lambda: from_dram(weights, socket, True)), None),
        "dram_not_pinned": (loads(lambda: from_dram(weights, socket, False)), None),
        "nvme": (loads(lambda: from_nvme(weights, True)), False),
        "nvme_not_pinned": (loads(lambda: from_nvme(weights, False)), False),
        "open_model_cached": (loads(lambda: from_pages(weights)), True),
        "safetensors_cached": (lambda: from_safetensors(weights), True),
        "safetensors": (lambda: from_safetensors(weights), False),
    }


# ---- measuring ----------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def limit_gbps(rounds: int) -> float:
    """One copy from pinned memory to the device."""
    host = torch.randint(0, 255, (PINNED_BYTES,), dtype=torch.uint8).pin_memory()
    there = torch.empty(PINNED_BYTES, dtype=torch.uint8, device=DEVICE)
    taken = [timed(lambda: there.copy_(host, non_blocking=True)) for _ in range(rounds + 1)]
    return PINNED_BYTES / statistics.median(taken[1:]) / 1e9


def attach_ms(weights: Weights, socket: Path) -> float:
    began_s = time.perf_counter()
    models.attach(MODEL, weights.directory.name, socket).close()
    return round(1000 * (time.perf_counter() - began_s), 2)


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The report. Raises BenchError, DaemonError."""
    if not torch.cuda.is_available():
        raise BenchError("no accelerator that torch knows")
    torch.cuda.init()
    rounds, weights = args.rounds, Weights(scratch, args.size)
    os.environ["THREADS"] = str(READERS)
    disk = disk_read({"revision": str(weights.directory)})
    seconds: dict[str, list[float]] = {}
    with in_dram(scratch, weights.directory, weights.size_bytes) as socket:
        attached = [attach_ms(weights, socket) for _ in range(rounds + 1)]
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}")
            seconds.setdefault("disk", []).append(disk())
            for name, (work, is_full) in ways(weights, socket).items():
                if is_full is not None:
                    weights.page_cache(is_full)
                weights.poison()
                seconds.setdefault(name, []).append(timed(work))
                if not name.startswith("safetensors"):
                    weights.check(name)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "limit_gbps": round(limit_gbps(rounds), 1),
    }
    for name, taken in seconds.items():
        report[f"{name}_gbps"] = round(weights.size_bytes / statistics.median(taken[1:]) / 1e9, 2)
        report[f"first_{name}_gbps"] = round(weights.size_bytes / taken[0] / 1e9, 2)
    report["first_attach_ms"], report["attach_ms"] = attached[0], statistics.median(attached[1:])
    return {**report, "model_bytes": weights.size_bytes, "rounds": rounds}


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("device_loads", __doc__)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("8GiB"))
    parser.add_argument("--rounds", type=int, default=4)
    return run(parser, measure, as_table("loads to the device"))


if __name__ == "__main__":
    sys.exit(main())
