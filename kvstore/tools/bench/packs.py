"""Packs put into the region's bucket and fetched from it, against obstore alone with objects of the same sizes.

put N objects │ copy records out of memory, put N packs │ get N objects │ fetch N packs │   some at once, round by round
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import obstore

from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.plan import Plan
from kvstore.tools.bench.rounds import Rounds
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_store import open_objects
from tiers.bucket.object_urls import open_store
from tiers.bucket.objects import Objects
from tiers.checksum import digest
from tiers.copying import copy
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import fetch_records, put_pack
from tiers.packs.pack_memory import PackRoom
from tiers.packs.packs import Pack, PackHeader
from tiers.together import together

if TYPE_CHECKING:  # exists in obstore's stubs only
    from obstore.store import ObjectStore

T = TypeVar("T")
HASH_BYTES = 32
BLOCK_TOKENS = 16


class Packs:
    """Records of one namespace, and what is done with packs of them. `store` is the same place as `objects`."""

    def __init__(self, plan: Plan, objects: Objects, store: ObjectStore) -> None:
        self._plan = plan
        self._objects = objects
        self._store = store
        count = plan.region_pack_bytes // plan.region_record_bytes
        self._records = [random.Random(number).randbytes(plan.region_record_bytes) for number in range(count)]
        self._plain = b"".join(self._records)
        self._sums = b"".join(map(digest, self._records))
        self._spec = NamespaceSpec(b"region benchmark", plan.region_record_bytes, HASH_BYTES, BLOCK_TOKENS)
        self._room = PackRoom()
        self._views = [
            [memoryview(bytearray(plan.region_record_bytes)) for _ in range(count)]
            for _ in range(plan.region_at_once)
        ]
        self._names = itertools.count()

    async def measure(self) -> dict[str, Value]:
        """Medians of the rounds."""
        plan = self._plan
        rounds = Rounds(plan.region_packs * plan.region_pack_bytes, plan.warm_up_rounds)
        for _ in range(plan.warm_up_rounds + plan.region_rounds):
            bare = [f"plain/{next(self._names)}" for _ in range(plan.region_packs)]
            rounds.add("put_bare", await self._timed(bare, self._put_bare))
            rounds.add("get_bare", await self._timed(bare, self._get_bare))
            await self._objects.delete(bare)  # so that both sides find the store as empty
            started = time.perf_counter()
            packs = await self.put(self._objects, plan.region_packs)
            rounds.add("put", time.perf_counter() - started)
            rounds.add("get", await self._timed(packs, self._fetch))
            await self._objects.delete([pack.name for pack in packs])
        return {
            "pack_put_gbps": rounds.gbps("put"),
            "pack_put_ratio": rounds.ratio("put", "put_bare"),
            "pack_get_gbps": rounds.gbps("get"),
            "pack_get_ratio": rounds.ratio("get", "get_bare"),
            "pack_bytes": plan.region_pack_bytes,
            "pack_record_bytes": plan.region_record_bytes,
            "packs_at_once": plan.region_at_once,
        }

    async def put(self, objects: Objects, count: int) -> list[Pack]:
        """So many packs, as a daemon puts them: out of memory that others may fill again."""
        packs: list[Pack] = []

        async def put(_: int, __: int) -> None:
            memory = self._room.take(len(self._records), self._plan.region_record_bytes)
            pairs = list(zip(memory, self._records, strict=True))
            await asyncio.get_running_loop().run_in_executor(None, copy, pairs)
            packs.append(await put_pack(objects, self._header(), memory))
            self._room.give_back(memory)

        await self._timed(range(count), put)
        return packs

    async def bare(self, count: int) -> tuple[float, float]:
        """Seconds that obstore alone takes to put as much as so many packs have, and to get it."""
        names = [f"plain/{next(self._names)}" for _ in range(count)]
        seconds = await self._timed(names, self._put_bare), await self._timed(names, self._get_bare)
        await self._objects.delete(names)
        return seconds

    async def _timed(self, items: Sequence[T], work: Callable[[T, int], Awaitable[None]]) -> float:
        """All items, some at once, each in a lane of its own."""
        left = iter(items)

        async def lane(which: int) -> None:
            for item in left:
                await work(item, which)

        started = time.perf_counter()
        await together(map(lane, range(self._plan.region_at_once)))
        return time.perf_counter() - started

    async def _put_bare(self, name: str, _: int) -> None:
        await obstore.put_async(self._store, name, self._plain, use_multipart=False)

    async def _get_bare(self, name: str, _: int) -> None:
        answer = await obstore.get_async(self._store, name)
        await answer.bytes_async()

    async def _fetch(self, pack: Pack, lane: int) -> None:
        await fetch_records(self._objects, pack, list(enumerate(self._views[lane])))

    def _header(self) -> PackHeader:
        hashes = random.Random(next(self._names)).randbytes(len(self._records) * HASH_BYTES)
        return PackHeader(self._spec, b"", hashes, self._sums)


def measure(plan: Plan, home: Path, _arena_directory: Path) -> dict[str, Value]:
    """Medians of the rounds, below a prefix of its own, which is removed at the end. Raises TierError."""
    url = scratch_url(plan.region_url or f"file://{home}")
    return asyncio.run(_measure(plan, url, replace(plan.region_options, create=True)))


async def _measure(plan: Plan, url: str, options: ObjectOptions) -> dict[str, Value]:
    async with scratch(url, options) as objects:
        return await Packs(plan, objects, open_store(url, options)[1]).measure()


def scratch_url(url: str) -> str:
    """A prefix below `url` of its own."""
    return f"{url.rstrip('/')}/bench-{random.SystemRandom().getrandbits(48):x}"


@asynccontextmanager
async def scratch(url: str, options: ObjectOptions) -> AsyncIterator[Objects]:
    """All that is there goes at the end."""
    objects = open_objects(url, options)
    try:
        yield objects
    finally:
        await clear(objects)


async def clear(objects: Objects) -> None:
    """Remove all of a region, or of a benchmark."""
    for folder in await objects.folders(""):
        async for page in objects.list(f"{folder}/"):
            await objects.delete([info.name for info in page])
