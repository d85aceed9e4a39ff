"""Packs: what is written comes back, and nothing that is damaged does."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
import tracemalloc
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.objects import Faults, FaultyObjects, MemoryObjects, S3Server, flip
from tests.tiers.records import columns_of, content
from tiers.base import Get
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import Objects
from tiers.checksum import digest
from tiers.errors import ObjectMissing, ObjectUnavailable, PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.codecs import CODECS, SPLIT_ZSTD, decode_into, encode
from tiers.packs.pack_io import PACK_FIRST_BYTES, PACK_INLINE_BYTES_MAX, fetch_records, put_pack, read_pack
from tiers.packs.packs import PRELUDE_BYTES, Pack, PackHeader, describe

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def header_of(
    records: Sequence[bytes], hash_bytes: int = 32, columns: bytes = b"", seed: int = 0
) -> PackHeader:
    """Of these records, of one size."""
    chance = random.Random(seed)
    spec = NamespaceSpec(b"namespace" + bytes(7), len(records[0]), hash_bytes, 16, {"model": "m"}, columns)
    checksums = b"".join(digest(record, columns) for record in records)
    parent = chance.randbytes(hash_bytes) if chance.random() < 0.5 else b""
    return PackHeader(spec, parent, chance.randbytes(hash_bytes * len(records)), checksums)


def numbers(size_bytes: int, seed: int = 0) -> bytes:
    """bf16 values like those of a cache: gaussian, each channel with a scale of its own."""
    chance = random.Random(seed)
    scales = [2 ** chance.gauss(0, 2) for _ in range(64)]
    floats = [chance.gauss(0, scales[at % 64]) for at in range(size_bytes // 2)]
    whole = struct.pack(f"<{len(floats)}f", *floats)
    found = bytearray(size_bytes)
    found[0::2], found[1::2] = whole[2::4], whole[3::4]
    return bytes(found)


def views(count: int, size_bytes: int) -> list[tuple[int, memoryview]]:
    return [(index, memoryview(bytearray(size_bytes))) for index in range(count)]


async def contents(objects: Objects, pack: Pack) -> list[bytes]:
    """All records, which must be hits."""
    wanted = views(pack.header.count, pack.header.spec.record_bytes)
    assert await fetch_records(objects, pack, wanted) == [Get.HIT] * len(wanted)
    return [bytes(view) for _, view in wanted]


@settings(max_examples=60)
@given(
    count=st.integers(1, 40),
    size_bytes=st.integers(1, 3000),
    hash_bytes=st.integers(8, 64),
    number=st.integers(0, 2),
    codec=st.sampled_from(CODECS),
    seed=st.integers(0, 1000),
)
def test_round_trip(count: int, size_bytes: int, hash_bytes: int, number: int, codec: str, seed: int) -> None:
    """Whatever records are put, their pack is read by its name as it was made, and every record is a hit with its bytes,
    in any order and any choice of them."""
    chance = random.Random(seed)
    records = [
        chance.choice((content(n, size_bytes), chance.randbytes(size_bytes), bytes(size_bytes)))
        for n in range(count)
    ]
    header = header_of(records, hash_bytes, columns_of(number, size_bytes), seed)

    async def work() -> None:
        objects = MemoryObjects()
        pack = await put_pack(
            objects, header, list(map(chance.choice((bytes, bytearray, memoryview)), records)), codec
        )
        assert await read_pack(objects, header.spec.digest, pack.id) == pack
        assert pack.header.checksums == header.checksums and pack.header.codec == codec
        assert await put_pack(objects, header, records, codec) == pack and len(objects.stored) == 1
        assert await contents(objects, pack) == records
        some = chance.sample(views(count, size_bytes), chance.randint(1, count))
        assert await fetch_records(objects, pack, some) == [Get.HIT] * len(some)
        assert [bytes(view) for _, view in some] == [records[index] for index, _ in some]

    run(work())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "size_bytes"), [(64, 64 << 10), (5, 1 << 20), (3, 1000), (1500, 512)])
def test_round_trip_on_real_stores(
    count: int, size_bytes: int, codec: str, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Packs of any size, with long headers, too, round-trip through a directory and a real S3 server."""
    one = numbers(16 << 10)
    records = [(one[n * 8 :] + one * (size_bytes // len(one) + 1))[:size_bytes] for n in range(count)]
    header = header_of(records)
    stores = (
        open_objects(f"file://{tmp_path_factory.mktemp('packs')}"),
        open_objects(f"s3://kvstore/packs{codec}", s3_server.options()),
    )

    async def work(objects: Objects) -> None:
        pack = await put_pack(objects, header, records, codec)
        assert (pack.start > PACK_FIRST_BYTES) == (count == 1500)
        assert await read_pack(objects, header.spec.digest, pack.id) == pack
        assert await contents(objects, pack) == records
        assert (await objects.head(pack.name)).size_bytes == pack.size_bytes

    for objects in stores:
        run(work(objects))


def test_wrong_records_are_not_put() -> None:
    """Records that do not match their header, by number, length or one bit, raise and nothing is stored."""
    records = [content(number, 500) for number in range(5)]
    header = header_of(records)
    wrong: list[tuple[PackHeader, list[bytes]]] = [
        (header, records[:4]),
        (header, [*records, records[0]]),
        (header, [*records[:4], records[4][:-1]]),
        (header, [*records[:4], records[4] + b"x"]),
        (header, [*records[:4], flip(records[4], 77)]),
        (header, [records[1], records[0], *records[2:]]),
        (msgspec.structs.replace(header, hashes=header.hashes[:-1]), records),
        (
            msgspec.structs.replace(header, spec=msgspec.structs.replace(header.spec, columns=b"none")),
            records,
        ),
    ]

    async def work() -> None:
        objects = MemoryObjects()
        for codec in CODECS:
            for bad_header, bad_records in wrong:
                with pytest.raises(PackDamaged):
                    await put_pack(objects, bad_header, bad_records, codec)
        with pytest.raises(ValueError, match="allowed are"):
            await put_pack(objects, header, records, "lzma")
        assert not objects.stored

    run(work())


async def stored_pack(objects: MemoryObjects, codec: str = "") -> tuple[Pack, list[bytes]]:
    records = [numbers(512, number) for number in range(6)]
    return await put_pack(objects, header_of(records), records, codec), records


def test_every_flipped_bit_of_a_header_is_found() -> None:
    """A pack of which any single bit of prelude or header is flipped is not read."""

    async def work() -> None:
        objects = MemoryObjects()
        pack, _ = await stored_pack(objects)
        whole = objects.stored[pack.name]
        for bit in range(8 * pack.start):
            objects.stored[pack.name] = flip(whole, bit)
            with pytest.raises(PackDamaged, match=pack.name):
                await read_pack(objects, pack.header.spec.digest, pack.id)

    run(work())


def test_other_objects_are_no_packs() -> None:
    """What is cut off, too long, foreign, empty or another pack under this name is not read."""

    async def work() -> None:
        objects = MemoryObjects()
        pack, records = await stored_pack(objects)
        whole = objects.stored[pack.name]
        other, first = describe(header_of(records, seed=1))
        _, first_elsewhere = describe(
            msgspec.structs.replace(
                pack.header, spec=msgspec.structs.replace(pack.header.spec, digest=b"M" * 16)
            )
        )
        wrong = [
            whole[:size] for size in (0, 1, PRELUDE_BYTES - 1, PRELUDE_BYTES, pack.start - 1, pack.start)
        ]
        wrong += [whole[:-1], whole + b"x", b"{}", bytes(1000), first + bytes(other.size_bytes - other.start)]
        wrong += [first_elsewhere + whole[pack.start :], whole[:8] + b"\xff" * 8 + whole[16:]]
        for damaged in wrong:
            objects.stored[pack.name] = damaged
            with pytest.raises(PackDamaged, match="packs/"):
                await read_pack(objects, pack.header.spec.digest, pack.id)
        with pytest.raises(ObjectMissing):
            await read_pack(objects, pack.header.spec.digest, other.id)

    run(work())


def test_answers() -> None:
    """What is not in a pack is a miss, a pack that is gone is a miss, one that is cut off or out of reach has
    failed; the others of the same call are not touched by it."""

    async def work() -> None:
        objects = FaultyObjects(inner := MemoryObjects(), random.Random(0))
        pack, records = await stored_pack(inner)
        wanted = views(6, 512)
        wanted[1] = (6, wanted[1][1])
        wanted[2] = (-1, wanted[2][1])
        wanted[3] = (3, wanted[3][1][:-1])
        hit, miss, failed = Get.HIT, Get.MISS, Get.FAILED
        assert await fetch_records(objects, pack, wanted) == [hit, miss, miss, miss, hit, hit]
        assert [bytes(wanted[at][1]) for at in (0, 4, 5)] == [records[at] for at in (0, 4, 5)]
        assert await fetch_records(objects, pack, []) == []
        objects.faults.failed = 1.0
        assert await fetch_records(objects, pack, wanted) == [failed, miss, miss, miss, failed, failed]
        objects.faults.failed = 0.0
        unknown = msgspec.structs.replace(pack.header, codec="later", sizes=(512,) * 6)
        assert await fetch_records(objects, msgspec.structs.replace(pack, header=unknown), wanted) == [
            Get.UNKNOWN,
            miss,
            miss,
            miss,
            Get.UNKNOWN,
            Get.UNKNOWN,
        ]
        no_columns = msgspec.structs.replace(
            pack.header, spec=msgspec.structs.replace(pack.header.spec, columns=b"none")
        )
        assert Get.HIT not in await fetch_records(
            objects, msgspec.structs.replace(pack, header=no_columns), wanted
        )
        inner.stored[pack.name] = inner.stored[pack.name][:-1]
        assert (await fetch_records(objects, pack, views(6, 512)))[5] is Get.CORRUPT
        await inner.delete([pack.name])
        assert await fetch_records(objects, pack, views(6, 512)) == [miss] * 6

    run(work())


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_bit_of_a_record_is_found(codec: str) -> None:
    """Whichever bit of a stored record is flipped, it is CORRUPT or still has its bytes, and its neighbours are hits."""

    async def work() -> None:
        objects = MemoryObjects()
        pack, records = await stored_pack(objects, codec)
        whole = objects.stored[pack.name]
        ranges = pack.ranges()
        for bit in range(8 * ranges[2][0], 8 * ranges[2][1]):
            objects.stored[pack.name] = flip(whole, bit)
            wanted = views(4, 512)
            answers = await fetch_records(objects, pack, wanted)
            assert answers[:2] + answers[3:] == [Get.HIT] * 3
            assert answers[2] is Get.CORRUPT or (codec and bytes(wanted[2][1]) == records[2])

    run(work())


@pytest.mark.parametrize("codec", CODECS)
def test_never_wrong_bytes(codec: str) -> None:
    """Over thousands of reads from a store that fails, cuts off and flips bits, each hit has the right bytes, and
    each other answer is one that the fault explains."""

    async def work() -> None:
        chance = random.Random(7)
        objects = FaultyObjects(MemoryObjects(), chance, Faults(rotten=0.05, lost=0.05))
        packs: list[tuple[Pack, list[bytes]]] = []
        for seed in range(60):
            records = [numbers(256, 100 * seed + number) for number in range(chance.randint(1, 8))]
            try:
                packs.append(
                    (await put_pack(objects, header_of(records, seed=seed), records, codec), records)
                )
            except ObjectUnavailable:
                pass  # its answer was lost
        objects.faults = Faults(failed=0.1, truncated=0.1, flipped=0.3)
        seen = dict.fromkeys(Get, 0)
        for _ in range(3000):
            pack, records = chance.choice(packs)
            wanted = chance.sample(views(len(records), 256), chance.randint(1, len(records)))
            for (index, view), answer in zip(wanted, await fetch_records(objects, pack, wanted), strict=True):
                seen[answer] += 1
                assert answer is not Get.HIT or view == records[index]
        assert seen[Get.MISS] == 0 and min(seen[Get.HIT], seen[Get.CORRUPT], seen[Get.FAILED]) > 300

    run(work())


def test_a_cancelled_read_leaves_the_views_alone() -> None:
    """When a read ends because it was cancelled, nobody writes into its views any more."""
    size_bytes, entered, go_on = PACK_INLINE_BYTES_MAX, threading.Event(), threading.Event()
    records = [random.Random(number).randbytes(size_bytes) for number in range(4)]

    class Slow(MemoryObjects):
        async def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
            asyncio.get_running_loop().run_in_executor(None, go_on.wait)  # the only thread is busy
            entered.set()
            return await super().get_ranges(name, ranges)

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        objects = Slow()
        pack = await put_pack(objects, header_of(records), records)
        wanted = views(4, size_bytes)
        reading = asyncio.ensure_future(fetch_records(objects, pack, wanted))
        while not entered.is_set():
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)  # its copy waits for the thread
        reading.cancel()
        await asyncio.sleep(0.05)
        assert not reading.done(), "the views are given back while the copy is still to come"
        reading.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        after = [bytes(view) for _, view in wanted]
        await asyncio.sleep(0.05)
        assert [bytes(view) for _, view in wanted] == after

    run(work())


# -- the codec --


@settings(max_examples=200)
@given(record=st.binary(min_size=1, max_size=300), copies=st.integers(1, 5))
def test_codec_round_trip(record: bytes, copies: int) -> None:
    """Every record decodes to itself, is never longer than it was, and needs its own length to be decoded."""
    record *= copies
    stored = memoryview(encode(SPLIT_ZSTD, record))
    view = memoryview(bytearray(len(record)))
    assert len(stored) <= len(record)
    assert decode_into(SPLIT_ZSTD, stored, view) and view == record
    if len(stored) < len(record):
        assert not decode_into(SPLIT_ZSTD, stored, memoryview(bytearray(len(record) + 2)))


def test_codec_pays_for_numbers() -> None:
    """bf16 values become shorter by a quarter at least; noise stays as it is."""
    record = numbers(64 << 10)
    assert len(encode(SPLIT_ZSTD, record)) < 0.75 * len(record)
    noise = random.Random(0).randbytes(4096)
    assert encode(SPLIT_ZSTD, noise) is noise


def test_damaged_codes_are_harmless() -> None:
    """Whatever bytes are decoded, even with a size of terabytes in them, the answer is False or some record: no error,
    and no more memory than a record."""
    chance, record = random.Random(5), numbers(2048)
    good = bytes(encode(SPLIT_ZSTD, record))
    codes = [chance.randbytes(chance.randrange(1, 2048)) for _ in range(500)]
    codes += [good[: chance.randrange(len(good))] for _ in range(200)]
    codes += [flip(good, chance.randrange(8 * len(good))) for _ in range(2000)]
    huge = zstandard.ZstdCompressor(level=1).compress(bytes(4 << 20))
    lies = good[4:8] + b"\xe0" + b"\xff" * 8 + good[9:]  # a frame that says it has 2**64 - 1 bytes
    codes += [len(part).to_bytes(4, "little") + part + bytes(1024) for part in (huge, lies)]
    view = memoryview(bytearray(2048))
    tracemalloc.start()
    try:
        answers = [decode_into(SPLIT_ZSTD, memoryview(code), view) for code in codes]
        most_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answers.count(False) > 700 and answers[-2:] == [False, False]
    assert most_bytes < 1 << 20
