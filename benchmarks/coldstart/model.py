"""The model that is moved: safetensors files of random bytes, published, preloaded, and put as plain files for others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import obstore

from benchmarks.coldstart.bucket import PREFIX, Bucket
from benchmarks.errors import BenchError
from coldstart.disk.home import Home
from coldstart.disk.preload import preload
from coldstart.published.publish import digested, manifest_of, publish
from coldstart.published.tree import find_files
from kvstore.tools.bench.daemon import Daemon, settings
from tests.running import kvstore
from tiers.bucket.objects import Objects
from tiers.constants import SLAB_BYTES
from tiers.dram.pages import choose_arena_path

MODEL = "bench"
FILES = 4
LARGE_BYTES = 32 << 20  # of most tensors, as in models of 8 billion parameters and more
SMALL_BYTES = (8 << 10, 8 << 10, 2 << 20)  # norms and biases between them
PLAIN = "plain"
SLACK_BYTES = 2 * SLAB_BYTES  # of an arena: what slabs round up, and as much for KV


def make(directory: Path, size_bytes: int) -> None:
    """So many bytes of tensors, about, in FILES files."""
    directory.mkdir()
    sizes = [min(LARGE_BYTES, size_bytes // FILES), *SMALL_BYTES]
    layers = max(1, size_bytes // FILES // sum(sizes))
    for number in range(FILES):
        with (directory / f"model-{number + 1:05}-of-{FILES:05}.safetensors").open("wb") as file:
            mine = sizes * layers
            ends = list(accumulate(mine, initial=0))
            header = {
                f"layers.{number * layers + at // len(sizes)}.{at % len(sizes)}.weight": {
                    "dtype": "BF16",
                    "shape": [size // 2],
                    "data_offsets": ends[at : at + 2],
                }
                for at, size in enumerate(mine)
            }
            text = json.dumps(header).encode()
            text += b" " * (-len(text) % 8)
            file.write(len(text).to_bytes(8, "little") + text)
            for size in mine:
                file.write(os.urandom(size))
    (directory / "config.json").write_text('{"model_type": "random"}')


async def put(objects: Objects, directory: Path) -> str:
    """Publish it; its revision."""
    tree = find_files(directory)
    files = await digested(tree, lambda *_: None)
    manifest = manifest_of(files, MODEL, "", "benchmarks", str(directory), {})
    await publish(objects, tree, manifest, again=False, progress=lambda *_: None)
    return manifest.revision


def put_plain(bucket: Bucket, directory: Path) -> str:
    """Its files as they are; the folder's URL."""
    for path in directory.glob("*.safetensors"):
        obstore.put(bucket.store(), f"{PLAIN}/{path.name}", path)
    return f"s3://{bucket.name}/{PREFIX}/{PLAIN}"


def made(bucket: Bucket, scratch: Path, size_bytes: int, is_plain: bool) -> tuple[Path, str]:
    """In the bucket, and on the disk as a preload leaves it: that directory, and the URL of the plain files ("" without)."""
    source = scratch / "source"
    make(source, size_bytes)
    asyncio.run(put(bucket.objects(), source))
    plain = put_plain(bucket, source) if is_plain else ""
    shutil.rmtree(source)
    return asyncio.run(preload(bucket.objects(), Home(scratch / "models"), MODEL)).path, plain


@contextmanager
def in_dram(scratch: Path, revision: Path, size_bytes: int) -> Iterator[Path]:
    """A daemon that has the model in DRAM; its socket. Raises BenchError."""
    models_bytes = size_bytes // SLAB_BYTES * SLAB_BYTES + SLACK_BYTES
    arena_bytes = models_bytes + SLACK_BYTES
    directory = choose_arena_path(None, "auto", arena_bytes, "bench").parent
    models = revision.parents[2]
    words = settings(directory, arena_bytes, models__dram_bytes=models_bytes, models__dir=str(models))
    with Daemon(scratch / "d", words) as daemon:
        daemon.wait_until_prefaulted(arena_bytes)
        done = kvstore("model", "load", MODEL, f"--socket={daemon.socket_path}", f"--set=models.dir={models}")
        if done.returncode:
            raise BenchError(done.stderr)
        yield daemon.socket_path
