"""What a key of the deployment costs: packs put and fetched with it and without, round by round.

    python -m benchmarks.seals [--url file:///dir] [--record-bytes 2MiB] [-o json]

Packs of 16 MiB, put out of memory as a daemon puts them, and fetched into memory that it gives; and small objects of 1 MiB, as
segments and parts of snapshots are. One at a time: so the figures are the speed of one core and of the store.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence

from benchmarks.command import as_table, parser_of, run
from kvstore.units import parse_bytes
from tiers.base import Get
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import Objects
from tiers.bucket.sealed_objects import SealedObjects
from tiers.bucket.seals import Seals
from tiers.checksum import digest
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import fetch_records, put_pack
from tiers.packs.pack_memory import PackRoom
from tiers.packs.packs import PackHeader

PACK_BYTES, OBJECT_BYTES, ROUNDS = 16 << 20, 1 << 20, 15


async def _s(work: Awaitable[object]) -> float:
    started_s = time.perf_counter()
    await work
    return time.perf_counter() - started_s


async def _round(objects: Objects, header: PackHeader, records: Sequence[bytes]) -> dict[str, float]:
    """Bytes a second of each."""
    room = PackRoom().take(len(records), len(records[0]))
    for view, record in zip(room, records, strict=True):
        view[:] = record
    views = [memoryview(bytearray(record)) for record in records]
    small = random.randbytes(OBJECT_BYTES)
    put_s = await _s(put := asyncio.ensure_future(put_pack(objects, header, room)))
    pack = put.result()
    fetch_s = await _s(got := asyncio.ensure_future(fetch_records(objects, pack, list(enumerate(views)))))
    assert got.result() == [Get.HIT] * len(records)
    object_put_s = await _s(objects.put("small", small))
    object_get_s = await _s(objects.get_within("small", OBJECT_BYTES))
    await objects.delete([pack.name, "small"])
    return {
        "put_pack": pack.size_bytes / put_s,
        "fetch_records": pack.size_bytes / fetch_s,
        "put_object": OBJECT_BYTES / object_put_s,
        "get_object": OBJECT_BYTES / object_get_s,
    }


async def measure(url: str, record_bytes: int) -> dict[str, float]:
    """Medians, in GB/s."""
    plain = open_objects(url)
    ways = {"without": plain, "with": SealedObjects(plain, Seals([b"k" * 32]), "bench/na")}
    records = [random.randbytes(record_bytes) for _ in range(PACK_BYTES // record_bytes)]
    spec = NamespaceSpec(b"n" * 16, record_bytes, 16, 16, {"model": "m"})
    hashes, checksums = (b"".join(map(digest, parts)) for parts in (map(digest, records), records))
    found = defaultdict[str, list[float]](list)
    for number in range(ROUNDS + 2):
        for name, objects in ways.items():
            for what, rate in (
                await _round(objects, PackHeader(spec, b"", hashes, checksums), records)
            ).items():
                if number >= 2:  # the first ones touch new memory
                    found[f"{what}_{name}_gbps"].append(rate / 1e9)
    return {name: round(statistics.median(rates), 3) for name, rates in found.items()}


def main() -> int:
    """See `benchmarks.command.run`."""
    parser = parser_of("seals", __doc__)
    parser.add_argument("--url", default="memory://seals", help="of a store (default memory://)")
    parser.add_argument("--record-bytes", default="2MiB", help="of a record, up to 16MiB (default 2MiB)")
    return run(
        parser,
        lambda args, _: asyncio.run(measure(args.url, min(PACK_BYTES, parse_bytes(args.record_bytes)))),
        as_table("what seals cost"),
    )


if __name__ == "__main__":
    sys.exit(main())
