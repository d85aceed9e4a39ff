"""Copying packs from store to store: all of it, or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.objects import MemoryObjects, flip
from tiers.base import Get
from tiers.bucket.object_store import open_objects
from tiers.bucket.objects import Range
from tiers.checksum import digest, pack_columns
from tiers.errors import ObjectMissing, ObjectUnavailable, PackDamaged
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.codecs import SPLIT_ZSTD
from tiers.packs.pack_io import copy_pack, fetch_records, put_pack
from tiers.packs.packs import Pack, PackHeader

RECORD_BYTES = 1024


def stored(objects: MemoryObjects, codec: str = "", columns: Sequence[int] = ()) -> Pack:
    """A pack of three records, put there."""
    spec = NamespaceSpec(b"n" * 16, RECORD_BYTES, 16, 16, {}, pack_columns(columns, RECORD_BYTES))
    records = [bytes([index, 0]) * (RECORD_BYTES // 2) for index in range(3)]
    checksums = b"".join(digest(record, spec.columns) for record in records)
    return asyncio.run(put_pack(objects, PackHeader(spec, b"", b"h" * 48, checksums), records, codec))


async def tried(work: Coroutine[Any, Any, None]) -> list[BaseException | None]:
    """What it raised."""
    return await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize("columns", [(), (256, 768)])
@pytest.mark.parametrize("codec", ["", SPLIT_ZSTD])
def test_a_pack_is_copied_as_it_is(codec: str, columns: Sequence[int]) -> None:
    """The copy has the same name and the same bytes, whatever codec and columns."""
    source, to = MemoryObjects(), MemoryObjects()
    pack = stored(source, codec, columns)
    asyncio.run(copy_pack(source, to, pack))
    assert to.stored == source.stored and len(to.stored) == 1


@pytest.mark.parametrize("codec", ["", SPLIT_ZSTD])
def test_no_damage_is_copied(codec: str) -> None:
    """Whichever bit is flipped, and wherever it is cut off or longer, nothing is put, and the error names the pack; but for bits
    of a codec that mean nothing, with which all records are right."""
    source = MemoryObjects("na")
    pack = stored(source, codec)
    content = source.stored[pack.name]
    damaged = [flip(content, bit) for bit in range(0, 8 * len(content), 13)]
    damaged += [content[:end] for end in range(0, len(content), 97)] + [content + b"\0"]
    harmless = 0
    for wrong in damaged:
        to = MemoryObjects()
        source.stored[pack.name] = wrong
        [failure] = asyncio.run(tried(copy_pack(source, to, pack)))
        if failure is not None:
            assert isinstance(failure, PackDamaged) and f"na: {pack.name}" in str(failure) and not to.stored
            continue
        views = [(index, memoryview(bytearray(RECORD_BYTES))) for index in range(3)]
        assert asyncio.run(fetch_records(to, pack, views)) == [Get.HIT] * 3
        harmless += 1
    assert harmless <= (len(damaged) // 20 if codec else 0)


def test_another_pack_than_announced_is_not_copied() -> None:
    """A sound pack under the name of another one, and an announcement that does not fit, are damage."""
    source, to = MemoryObjects(), MemoryObjects()
    pack, other = stored(source), stored(MemoryObjects(), columns=(512, 512))
    wrong = [
        msgspec.structs.replace(pack, id=b"x" * 16),
        msgspec.structs.replace(pack, start=pack.start + 1),
        msgspec.structs.replace(pack, header=msgspec.structs.replace(pack.header, parent=b"p" * 16)),
        msgspec.structs.replace(pack, size_bytes=pack.size_bytes - 1),
        other,
    ]
    for announced in wrong:
        source.stored[announced.name] = source.stored[pack.name]
        with pytest.raises(PackDamaged):
            asyncio.run(copy_pack(source, to, announced))
    assert not to.stored


class Counting(MemoryObjects):
    """Remembers what was asked for."""

    asked: list[tuple[str, object]]

    async def get(self, name: str) -> memoryview:
        self.asked.append(("get", name))
        return await super().get(name)

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        self.asked.append(("get_ranges", list(ranges)))
        return await super().get_ranges(name, ranges)


def test_a_large_pack_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small pack is one request, a large one as many as it has pieces, each byte asked for once."""
    source, to = Counting(), MemoryObjects()
    source.asked = []
    pack = stored(source)
    asyncio.run(copy_pack(source, to, pack))
    assert source.asked == [("get", pack.name)]
    monkeypatch.setattr("tiers.packs.pack_io.PACK_PIECE_BYTES", 1000)
    source.asked, to = [], MemoryObjects()
    asyncio.run(copy_pack(source, to, pack))
    edges = [*range(0, pack.size_bytes, 1000), pack.size_bytes]
    assert source.asked == [("get_ranges", [edge]) for edge in pairwise(edges)]
    assert to.stored == source.stored


def test_what_is_missing_is_missing_in_the_source(tmp_path: Path) -> None:
    """ObjectMissing says that the source does not have it; a destination that is gone is not available."""
    source = MemoryObjects()
    pack = stored(source)
    with pytest.raises(ObjectMissing):
        asyncio.run(copy_pack(MemoryObjects(), MemoryObjects(), pack))

    class Gone(MemoryObjects):
        async def put(self, name: str, content: object, only_new: bool = False) -> bool:
            raise ObjectMissing("no such directory")

    with pytest.raises(ObjectUnavailable):
        asyncio.run(copy_pack(source, Gone(), pack))
    (tmp_path / "to").mkdir()
    asyncio.run(copy_pack(source, open_objects(f"file://{tmp_path / 'to'}"), pack))
    assert (tmp_path / "to" / pack.name).read_bytes() == source.stored[pack.name]
