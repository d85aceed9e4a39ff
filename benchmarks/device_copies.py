"""How fast blocks go between an accelerator and the arena, against one large copy of the same bytes.

    save    blocks ──▶ records, hashed            load    records ──▶ blocks
    limit   one cudaMemcpyAsync of as many bytes, pinned memory on the host

An arena of this process's own, registered as the connector does it. Each shape is a lease of 64 MiB; figures are
medians in GB/s, the part of the limit that one thread reached, and what several threads reached together. vLLM's
batched copy is used where vLLM is installed. `beside`: a device that computes matrix products all the while: their rate, as a
part of what it is alone, and what one thread copies meanwhile. Every byte of that is compared.

    python -m benchmarks.device_copies [--rounds 30] [--threads 2] [-o json]
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import parser_of, run, say
from benchmarks.errors import BenchError
from connectors.device import BlockMover, blocks_of
from connectors.device.cuda import CudaDriver
from connectors.device.movers import movers_for
from connectors.device.pinning import Pinning
from kvstore.client.arena_view import ArenaView, mapped
from kvstore.tools.cli.output import print_table

KIB, MIB = 1 << 10, 1 << 20
LEASE_BYTES = 64 * MIB
BESIDE_SHAPE, BESIDE_S = "2 MiB, one run", 2.0
_say = partial(say, "device_copies")
SHAPES = {  # layers, bytes of one layer's run, whether all layers of a block are one run
    "2 MiB, a run a layer (32 x 64 KiB)": (32, 64 * KIB, False),
    "2 MiB, one run": (32, 64 * KIB, True),
    "640 KiB, a run a layer (80 x 8 KiB)": (80, 8 * KIB, False),
    "640 KiB, one run": (80, 8 * KIB, True),
    "64 KiB, a run a layer (16 x 4 KiB)": (16, 4 * KIB, False),
    "64 KiB, one run": (16, 4 * KIB, True),
}


def cache_of(layers: int, run_bytes: int, together: bool, blocks: int) -> list[Any]:
    """A KV cache of random bytes: its layers, each [block, byte]."""
    order = (blocks, layers, run_bytes) if together else (layers, blocks, run_bytes)
    cache = torch.randint(0, 255, order, dtype=torch.uint8, device="cuda")
    return list(cache.permute(1, 0, 2) if together else cache)


def median_gbps(work: Callable[[], None], size_bytes: int, rounds: int) -> float:
    """GB/s of the median round; three rounds before are not counted."""
    taken = []
    for number in range(-3, rounds):
        started = time.perf_counter()
        work()
        if number >= 0:
            taken.append(time.perf_counter() - started)
    return size_bytes / statistics.median(taken) / 1e9


def limits(view: ArenaView, rounds: int) -> dict[str, float]:
    """One copy of a lease's bytes in each direction."""
    device = torch.empty(LEASE_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.frombuffer(view.view(0, LEASE_BYTES), dtype=torch.uint8)

    def out() -> None:
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    def into() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    return {"save": median_gbps(out, LEASE_BYTES, rounds), "load": median_gbps(into, LEASE_BYTES, rounds)}


def measure(args: argparse.Namespace, _: Path) -> dict[str, Any]:
    """The report. Raises BenchError."""
    if not torch.cuda.is_available():
        raise BenchError("no accelerator that torch knows")
    with contextlib.suppress(ImportError):
        import vllm._custom_ops  # noqa: F401 - its batched copy
    fd = os.memfd_create("arena")
    os.ftruncate(fd, args.threads * LEASE_BYTES)
    view = mapped(fd, args.threads * LEASE_BYTES, fd, mmap.PAGESIZE, True)
    driver = CudaDriver(torch.empty(1, device="cuda").device)
    pinning = Pinning(driver, _say)
    pinning.pin(view)
    report = {"device": torch.cuda.get_device_name(0), **by_shape(args, view)}
    report["beside"] = beside(view)
    pinning.close()
    report["batched"] = hasattr(torch.ops._C_cache_ops, "swap_blocks_batch")
    return report


def by_shape(args: argparse.Namespace, view: ArenaView) -> dict[str, Any]:
    """A line for each."""
    report: dict[str, Any] = {"limit_gbps": limits(view, args.rounds), "shapes": {}}
    for name, (layers, run_bytes, together) in SHAPES.items():
        count = LEASE_BYTES // (layers * run_bytes)
        blocks = blocks_of(cache_of(layers, run_bytes, together, 2 * count), 2 * count)
        mover = movers_for({0: blocks}, _say)[0][0]
        ids = random.Random(1).sample(range(2 * count), count)
        size = blocks.record_bytes
        slots = [view.view(size * number, size) for number in range(args.threads * count)]
        line = report["shapes"][name] = {}
        for verb, copy in (("save", mover.save), ("load", mover.load)):
            one, all_threads = (_work(copy, mover, ids, slots, threads) for threads in (1, args.threads))
            gbps = median_gbps(one, LEASE_BYTES, args.rounds)
            line[f"{verb}_gbps"] = round(gbps, 2)
            line[f"{verb}_of_limit"] = round(gbps / report["limit_gbps"][verb], 3)
            together_gbps = median_gbps(all_threads, LEASE_BYTES * args.threads, args.rounds)
            line[f"{verb}_threads_gbps"] = round(together_gbps, 2)
        torch.cuda.empty_cache()
    return report


def beside(view: ArenaView) -> dict[str, float]:
    """Copies in a thread while this one keeps the device busy. Raises BenchError where a byte is wrong."""
    layers, run_bytes, together = SHAPES[BESIDE_SHAPE]
    count = LEASE_BYTES // (layers * run_bytes)
    cache = cache_of(layers, run_bytes, together, 2 * count)
    mover = movers_for({0: blocks_of(cache, 2 * count)}, _say)[0][0]
    slots = [view.view(mover.record_bytes * number, mover.record_bytes) for number in range(count)]
    before = [layer[:count].clone() for layer in cache]
    mark, alone = mover.mark(), products_per_s(BESIDE_S)
    report: dict[str, float] = {}
    for verb, copy, ids in (
        ("save", mover.save, range(count)),
        ("load", mover.load, range(count, 2 * count)),
    ):
        stop, copies = threading.Event(), [0]

        def go(copy: Callable[..., Any] = copy, ids: range = ids, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                copy(ids, slots, mark)
                copies[0] += 1  # noqa: B023 - of this turn: the thread ends in it

        thread = threading.Thread(target=go)
        began_s = time.perf_counter()
        thread.start()
        rate = products_per_s(BESIDE_S)
        stop.set()
        thread.join()
        report[f"{verb}_gbps"] = round(copies[0] * LEASE_BYTES / (time.perf_counter() - began_s) / 1e9, 2)
        report[f"products_while_{verb}"] = round(rate / alone, 3)
    if not all(torch.equal(was, layer[count:]) for was, layer in zip(before, cache, strict=True)):
        raise BenchError("what was loaded beside computing is not what was saved")
    return report


def products_per_s(seconds: float) -> float:
    """Of two large matrices, one behind the other."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    began_s, number = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - began_s) < seconds:
        for _ in range(4):
            torch.mm(left, right)
        torch.cuda.current_stream().synchronize()
        number += 4
    return number / taken_s


def _work(
    copy: Callable[..., Any], mover: BlockMover, ids: list[int], slots: list[memoryview], threads: int
) -> Callable[[], None]:
    """So many threads, a lease each."""

    def lease(number: int) -> None:
        copy(ids, slots[number * len(ids) : (number + 1) * len(ids)], mover.mark())

    def work() -> None:
        running = [threading.Thread(target=lease, args=(number,)) for number in range(1, threads)]
        for thread in running:
            thread.start()
        lease(0)
        for thread in running:
            thread.join()

    return work


def _show(report: dict[str, Any]) -> None:
    rows = [(name, *line.values()) for name, line in report["shapes"].items()]
    print_table("copies of 64 MiB", ["record", *next(iter(report["shapes"].values()))], rows)
    print_table("conditions", ["field", "value"], [(k, str(v)) for k, v in report.items() if k != "shapes"])


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("device_copies", __doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    return run(parser, measure, _show)


if __name__ == "__main__":
    sys.exit(main())
