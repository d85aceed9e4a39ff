"""The region's bucket: packs and a mirror against obstore alone, catching up, and what a catalogue costs a lookup.

    packs put and fetched (kvstore/tools/bench/packs.py), mirrored (mirror.py)
    a feed of 100,000 entries ─▶ a catalogue that knows nothing
    an engine over a catalogue of ten million blocks │ an engine without     lookups of prompts that nobody has stored

Everything lies below a prefix of its own, which is removed at the end.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks.bench.mirror import measure_mirror
from benchmarks.bench.plan import Plan
from kvstore.engine.engine import Engine
from kvstore.index.block import Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.movement.shared import Done, SharedLevel, Wanted
from kvstore.tools.bench.figures import Value
from kvstore.tools.bench.packs import BLOCK_TOKENS, HASH_BYTES, Packs, scratch, scratch_url
from kvstore.tools.bench.rounds import Rounds
from kvstore.tools.replay.cell import NoIo
from kvstore.tools.replay.slots import CountedSlots
from replication.catalogue.catalogue import Catalogue
from replication.feed.feed import FeedWriter
from replication.feed.tail import Tail
from replication.formats.announced import Announced
from tiers.base import NAMESPACE_BYTES, Get
from tiers.bucket.object_store import open_objects
from tiers.bucket.object_urls import open_store
from tiers.bucket.objects import Objects
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACK_RECORDS_MAX, PackHeader, describe
from tiers.together import meanwhile


def measure(plan: Plan, home: Path, _arena_directory: Path) -> dict[str, Value]:
    """Medians of the rounds. Raises TierError."""
    return asyncio.run(_measure(plan, home))


async def _measure(plan: Plan, home: Path) -> dict[str, Value]:
    url = scratch_url(plan.region_url or f"file://{home}")
    far_url = scratch_url(plan.mirror_url) if plan.mirror_url else url
    options = replace(plan.region_options, create=True)
    far_options = replace(plan.mirror_options, create=True) if plan.mirror_url else options
    async with scratch(url, options) as objects, scratch(far_url, far_options) as far_objects:
        packs = Packs(plan, objects, open_store(url, options)[1])
        values = await packs.measure()
        values |= await measure_mirror(
            plan,
            packs,
            Packs(plan, far_objects, open_store(far_url, far_options)[1]),
            lambda place: open_objects(f"{url}/{place}", options),
            lambda place: open_objects(f"{far_url}/{place}", far_options),
            home,
        )
        values["catchup_100k_entries_s"] = await _catch_up(plan, objects, home)
    return values | _misses(plan)


# -- catching up --


async def _catch_up(plan: Plan, objects: Objects, home: Path) -> float:
    """Seconds of a daemon that knows nothing until it knows all entries of the feed."""
    chance = random.Random(1)
    writer = FeedWriter(objects, "00000000000000aa", time.time, chance)
    entries = [_entry(number) for number in range(plan.region_entries)]
    for start in range(0, len(entries), plan.region_segment_entries):
        await writer.announce(entries[start : start + plan.region_segment_entries])
    catalogue = Catalogue.open(home / "catalogue", "benchmark")
    tail = Tail(objects, catalogue, time.time, chance)
    started = time.perf_counter()
    try:
        async with meanwhile(tail.run()):
            await tail.caught_up.wait()
            assert catalogue.counts.packs == plan.region_entries
            return round(time.perf_counter() - started, 2)
    finally:
        catalogue.close()


def _entry(number: int) -> Announced:
    """A pack of 16 blocks, which is nowhere."""
    spec = NamespaceSpec(b"region benchmark", 4096, HASH_BYTES, BLOCK_TOKENS)
    header = PackHeader(spec, b"", random.Random(number).randbytes(16 * HASH_BYTES), bytes(16 * 16))
    return Announced(describe(header)[0])


# -- misses --


class _Known(SharedLevel):
    """A shared level that has a catalogue and nothing else."""

    name = "object"

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def held(self, namespace: Namespace, hashes: bytes, start: int) -> int:
        return self._catalogue.held(namespace.digest, namespace.hash_bytes, hashes, start)

    def probe(self, done: Callable[[bool], None]) -> None:
        done(True)

    def fetch(self, wanted: Sequence[Wanted], done: Done) -> None:
        done([(Get.MISS, None)] * len(wanted))


def _misses(plan: Plan) -> dict[str, Value]:
    """What the catalogue adds to the lookup of a prompt of 2,048 blocks that nobody has stored, in µs."""
    with (
        tempfile.TemporaryDirectory() as place,
        closing(Catalogue.open(Path(place) / "catalogue", "benchmark")) as catalogue,
    ):
        spec = NamespaceSpec(b"region benchmark", 4096, HASH_BYTES, BLOCK_TOKENS)
        chance = random.Random(2)
        for _ in range(plan.region_known_blocks // PACK_RECORDS_MAX):
            hashes = chance.randbytes(PACK_RECORDS_MAX * HASH_BYTES)
            catalogue.expect(describe(PackHeader(spec, b"", hashes, bytes(16 * PACK_RECORDS_MAX)))[0])
        nodes = [(_node([]), "without"), (_node([_Known(catalogue)]), "with")]
        rounds = Rounds(1)
        for _ in range(plan.region_misses):
            prompt = chance.randbytes(plan.lookup_blocks * HASH_BYTES)
            for (engine, space), name in nodes:
                rounds.time(name, lambda: engine.find([space], prompt))  # noqa: B023 called at once
    return {
        "lookup_miss_extra_us": round(1e6 * (rounds.median_s("with") - rounds.median_s("without")), 2),
        "region_known_blocks": plan.region_known_blocks,
    }


def _node(shared: Sequence[SharedLevel]) -> tuple[Engine, int]:
    engine = Engine(
        CountedSlots(1, NAMESPACE_BYTES + HASH_BYTES), [], NamespaceRegistry(), NoIo(), shared=shared
    )
    return engine, engine.register(NamespaceSpec(b"region benchmark", 4096, HASH_BYTES, BLOCK_TOKENS))
