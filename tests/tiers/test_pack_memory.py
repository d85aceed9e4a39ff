"""Memory for packs: what is assembled in it, and when it is used again."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.objects import MemoryObjects
from tiers.checksum import digest
from tiers.errors import PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.pack_io import put_pack
from tiers.packs.pack_memory import PACK_ROOM_BYTES_MAX, PackMemory, PackRoom
from tiers.packs.packs import PACK_RECORDS_MAX, PackHeader, describe
from tiers.slots import SLOT_ALIGN_BYTES


def filled(room: PackRoom, records: list[bytes]) -> PackMemory:
    memory = room.take(len(records), len(records[0]))
    for view, record in zip(memory, records, strict=True):
        view[:] = record
    return memory


def header_of(records: list[bytes]) -> PackHeader:
    spec = NamespaceSpec(b"memory for packs", len(records[0]), 32, 16)
    hashes = b"".join(digest(record) * 2 for record in records)
    return PackHeader(spec, b"", hashes, b"".join(map(digest, records)))


@given(
    st.integers(1, 9),
    st.sampled_from([1, 100, SLOT_ALIGN_BYTES - 1, SLOT_ALIGN_BYTES, 3 * SLOT_ALIGN_BYTES + 5, 1 << 17]),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_what_is_put_from_it_is_the_same_object(
    count: int, size_bytes: int, seed: int, is_used: bool
) -> None:
    """As when the records are copied, whatever was in the memory before, records that are no multiple of a page included."""
    chance, room = random.Random(seed), PackRoom()
    records = [chance.randbytes(size_bytes) for _ in range(count)]
    if is_used:
        room.give_back(filled(room, [b"\xff" * (size_bytes + 4096)] * count))
    memory, header = filled(room, records), header_of(records)
    assert all(view.nbytes == size_bytes for view in memory)

    async def put() -> None:
        copied, in_place = MemoryObjects(), MemoryObjects()
        pack = await put_pack(copied, header, records)
        assert await put_pack(in_place, header, memory) == pack
        assert await in_place.get(pack.name) == await copied.get(pack.name)

    asyncio.run(put())
    room.give_back(memory)
    assert room.take(count, size_bytes).memory is memory.memory


def test_a_damaged_record_is_not_put() -> None:
    """What does not match its checksum is named, and nothing is sent."""
    records = [bytes([number]) * 5000 for number in range(4)]
    memory = filled(PackRoom(), records)
    memory[2][4999] ^= 1
    objects = MemoryObjects()
    with pytest.raises(PackDamaged, match="record 2 of 4"):
        asyncio.run(put_pack(objects, header_of(records), memory))
    assert not objects.stored


def test_memory_that_somebody_reads_is_left_to_them() -> None:
    """A request that was given up may still send it."""
    room = PackRoom()
    records = [b"a" * 8192, b"b" * 8192]
    memory = filled(room, records)
    _, first = describe(header_of(records))
    sending = memoryview(memory.object(first))
    expected = bytes(sending)
    room.give_back(memory)
    other = filled(room, [b"c" * 8192] * 2)
    assert other.memory is not memory.memory
    assert sending == expected


def test_what_is_kept_is_bounded_and_fits_what_is_asked_for() -> None:
    """At most PACK_ROOM_BYTES_MAX, and nothing smaller than a pack is lent for it."""
    room = PackRoom()
    lent = [room.take(8, 4 << 20) for _ in range(6)]
    for memory in lent:
        room.give_back(memory)
    assert 0 < sum(map(len, room._kept)) <= PACK_ROOM_BYTES_MAX
    kept = list(room._kept)
    assert room.take(PACK_RECORDS_MAX, 1 << 20).memory not in kept  # larger than any
    assert room.take(1, 1).memory in kept
