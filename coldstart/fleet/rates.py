"""What this machine does: rates that a plan is made of, measured in a moment."""

from __future__ import annotations

import mmap
import time
from typing import Final

from replication.formats.manifests import Chunk, Manifest
from tiers.bucket.objects import Objects
from tiers.copying import copy
from tiers.together import each

MEMORY_BYTES: Final = 256 << 20
PIECES: Final = 16  # of that memory: two threads take turns
STORE_BYTES_MAX: Final = 512 << 20
STORE_READS: Final = 16  # at a time


def memory_rate() -> float:
    """Bytes a second that two threads copy, of memory that was touched before; the best of three."""
    source, target = (
        memoryview(mmap.mmap(-1, MEMORY_BYTES)) for _ in range(2)
    )  # given back with their last view
    step = MEMORY_BYTES // PIECES
    pairs = [(target[at : at + step], source[at : at + step]) for at in range(0, MEMORY_BYTES, step)]
    copy([(into, into) for into, _ in pairs])
    copy([(out_of, out_of) for _, out_of in pairs])
    took = []
    for _ in range(3):
        began_s = time.perf_counter()
        copy(pairs)
        took.append(time.perf_counter() - began_s)
    return MEMORY_BYTES / min(took)


async def store_rate(objects: Objects, manifest: Manifest) -> float:
    """Bytes a second that come from a bucket, of the chunks of a model, several at a time. Raises ObjectError."""
    wanted: list[Chunk] = []
    left = STORE_BYTES_MAX
    for chunk in sorted(manifest.chunks, key=lambda chunk: -chunk.size_bytes):
        if chunk.size_bytes > left:
            break
        wanted.append(chunk)
        left -= chunk.size_bytes
    began_s = time.perf_counter()
    await each(lambda chunk: objects.get_within(chunk.name, chunk.size_bytes), wanted, STORE_READS)
    took_s = time.perf_counter() - began_s
    return sum(chunk.size_bytes for chunk in wanted) / took_s if wanted else 0.0
