"""How near `kvstore model preload` comes to what the bucket and the disk do by themselves.

    s3_raw      every chunk into memory, as many at a time as a preload has, nothing compared and nothing written
    disk_raw    as many bytes from memory to files that were allocated before, past the page cache, then synced
    preload     a model from the bucket to its directory, verified and synced

    python -m benchmarks.coldstart.preload [--directory DIR] [--size 512MiB] [--rounds 5] [--endpoint URL --bucket NAME] [-o json]

The three take turns, so that what else the machine does meets all of them; figures are medians. Without an endpoint the bucket is
moto's, an emulator, which shares the cores of this machine. The keys of another one come from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from coldstart.blocks import Tree, allocate, slots
from coldstart.filling import STREAMS
from coldstart.home import Home
from coldstart.preload import preload
from kvstore.units import parse_bytes
from replication.manifests import CHUNK_BYTES_MAX, Chunk, Manifest
from tests.coldstart.models import cut_evenly, made, put
from tests.objects import S3Server
from tiers.object_options import ObjectOptions
from tiers.object_store import open_objects
from tiers.objects import Objects
from tiers.together import together

FILES = 4
AT: int = 1000  # where the runs of disk_raw begin: at no border of a block, as chunks do


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--directory", type=Path, default=None, help="on the disk that is measured (default: a temporary one)"
    )
    parser.add_argument("--size", type=parse_bytes, default=parse_bytes("512MiB"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--endpoint", default="", help="of a real server, whose bucket is there")
    parser.add_argument("--bucket", default="kvstore")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    args = parser.parse_args()
    with (
        _bucket(args.endpoint, args.bucket) as objects,
        tempfile.TemporaryDirectory(dir=args.directory) as scratch,
    ):
        figures = measure(objects, Path(scratch), args.size, args.rounds)
    if args.output == "json":
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:<24}{value:.3g}")
    return 0


def measure(objects: Objects, scratch: Path, size_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s, medians; and the share of the slower limit that a preload reaches."""
    chance = random.Random(0)
    files = {f"model-{n}.bin": chance.randbytes(size_bytes // FILES) for n in range(FILES)}
    manifest, contents = made(files, cut_evenly(files, CHUNK_BYTES_MAX))
    del files
    asyncio.run(put(objects, manifest, contents))
    del contents
    ways: dict[str, Callable[[], None]] = {
        "s3_raw_gbps": lambda: asyncio.run(_raw_bucket(objects, manifest)),
        "disk_raw_gbps": lambda: _raw_disk(scratch / "raw", manifest),
        "preload_gbps": lambda: _preload(objects, scratch / "models"),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began_s = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - began_s)
            for path in scratch.iterdir():
                shutil.rmtree(path)
    figures = {name: manifest.size_bytes / statistics.median(seconds) / 1e9 for name, seconds in took.items()}
    slower = min(figures["s3_raw_gbps"], figures["disk_raw_gbps"])
    return {**figures, "preload_share": figures["preload_gbps"] / slower}


async def _raw_bucket(objects: Objects, manifest: Manifest) -> None:
    jobs = iter(manifest.chunks)

    async def stream(view: memoryview) -> None:
        for chunk in jobs:
            if not await objects.read_into(chunk.name, 0, [view[: chunk.size_bytes]]):
                await objects.get_ranges(chunk.name, [(0, chunk.size_bytes)])

    await together(stream(slot.run(0, CHUNK_BYTES_MAX)) for slot in slots(STREAMS, CHUNK_BYTES_MAX))


def _raw_disk(root: Path, manifest: Manifest) -> None:
    root.mkdir()
    for file in manifest.files:
        allocate(root / file.path, file.size_bytes + AT)
    tree, ring = Tree(root), slots(STREAMS, CHUNK_BYTES_MAX)

    def write(job: tuple[str, int, Chunk]) -> None:
        path, at, chunk = job
        slot = ring.pop()
        tree.write(path, at + AT, slot.run(at + AT, chunk.size_bytes), True)
        ring.append(slot)

    jobs = [(file.path, at, chunk) for file in manifest.files for at, chunk in manifest.chunks_of(file)]
    with ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(write, jobs))
        list(threads.map(tree.sync, [file.path for file in manifest.files]))


def _preload(objects: Objects, models: Path) -> None:
    asyncio.run(preload(objects, Home(models), "m", "r1"))


@contextmanager
def _bucket(endpoint: str, bucket: str) -> Iterator[Objects]:
    if endpoint:
        options = ObjectOptions(
            endpoint=endpoint, allow_http=endpoint.startswith("http:"), region="us-east-1"
        )
        yield open_objects(f"s3://{bucket}/preload", options)
        return
    server = S3Server()
    try:
        server.make_bucket(bucket)
        yield open_objects(f"s3://{bucket}/preload", server.options())
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
