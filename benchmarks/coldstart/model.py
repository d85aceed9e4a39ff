"""The model that is moved: safetensors files of random bytes, published, preloaded, and put as plain files for others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from itertools import accumulate
from pathlib import Path

import obstore

from benchmarks.coldstart.bucket import PREFIX, Bucket
from coldstart.disk.home import Home
from coldstart.disk.preload import preload
from coldstart.published.publish import digested, manifest_of, publish
from coldstart.published.tree import find_files

MODEL = "bench"
FILES = 4
LARGE_BYTES = 32 << 20  # of most tensors, as in models of 8 billion parameters and more
SMALL_BYTES = (8 << 10, 8 << 10, 2 << 20)  # norms and biases between them
PLAIN = "plain"


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


async def put(bucket: Bucket, directory: Path) -> str:
    """Publish it; its revision."""
    objects, tree = bucket.objects(), find_files(directory)
    files = await digested(tree, lambda *_: None)
    manifest = manifest_of(files, MODEL, "", "benchmarks", str(directory), 1.0, {})
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
    asyncio.run(put(bucket, source))
    plain = put_plain(bucket, source) if is_plain else ""
    shutil.rmtree(source)
    return asyncio.run(preload(bucket.objects(), Home(scratch / "models"), MODEL)).path, plain
