"""Packs, written to and read from a store of objects.

    put_pack       records ─▶ copied, unless they are a `PackMemory`; each compared with its checksum ─▶ one object
    read_pack      HEAD, first bytes ─▶ header, compared with the name and the size
    fetch_records  ranges, neighbours in one request ─▶ codec ─▶ into the caller's views ─▶ checksum: HIT, or no hit
                   a large run of S3: received in the caller's views
    verified_pack  store ─▶ header and every record compared with what was announced
    copy_pack      store ─▶ header and every record compared with what was announced ─▶ another store

A pack never holds a record that does not match its checksum: what is compared is what is sent. A record that
comes back is compared in the caller's view, so what is a HIT is what the caller has.

Bytes are moved and hashed by a thread and not by the event loop, if they are many. The thread lets go of the
interpreter every 2 MiB; joining 64 MiB in one call would hold it for 30 ms.

A pack is put without asking whether it is there. The caller knows that from the catalogue already; a HEAD
would cost every pack a request and a round trip to save one upload in thousands; and a pack that rotted is
healed by putting it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from tiers.base import Get
from tiers.bucket.objects import Bytes, Objects
from tiers.bucket.seals import Seals, Unsealed
from tiers.checksum import digest
from tiers.constants import KIB, MIB, TAG_BYTES
from tiers.copying import copy_and_digest, digest_all, share
from tiers.errors import (
    ObjectDamaged,
    ObjectError,
    ObjectMissing,
    ObjectRefused,
    ObjectUnavailable,
    PackDamaged,
    PackUnknown,
)
from tiers.packs.codecs import CODECS, decode_into, encode
from tiers.packs.pack_memory import PackMemory
from tiers.packs.packs import (
    PRELUDE_BYTES,
    SEALED_PACK_MAGIC,
    Pack,
    PackHeader,
    describe,
    encoded,
    header_end,
    pack_name,
    parse,
)
from tiers.parsing import is_later
from tiers.together import in_thread

DIRECT_READ_BYTES_MIN: Final = 1 * MIB  # less is not worth a thread
DIRECT_RECORD_BYTES_MIN: Final = 64 * KIB  # shorter ones are copied as fast as they are received one by one
PACK_FIRST_BYTES: Final = 64 * KIB  # read at first: the headers of about 1,000 records
PACK_INLINE_BYTES_MAX: Final = 256 * KIB  # copied and hashed by the event loop itself, in 30 µs
PACK_PIECE_BYTES: Final = 32 * MIB  # of a pack that is copied, with one request
PACK_TURN_BYTES: Final = 2 * MIB  # moved before other threads have a turn: 0.3 ms

T = TypeVar("T")
IsTrue = Callable[[int, Bytes], bool]  # of a record's place in its pack, and its bytes as they are stored


async def put_pack(objects: Objects, header: PackHeader, records: Sequence[Bytes], codec: str = "") -> Pack:
    """Store records as one pack; putting it again changes nothing. The records must not change until this returns; a
    `PackMemory` never again, before it is released.

    header: without codec and sizes, which are filled in. codec: of tiers/packs/codecs.py; a record that it does not make
    shorter is stored plain. Raises PackDamaged, before anything is sent, where a record is not what the header
    says, and ObjectError.
    """
    name = pack_name(header.spec.digest, b"")
    if len(records) != header.count:
        raise PackDamaged(f"{name}: {len(records)} records for a header of {header.count}")
    size_bytes = sum(map(len, records))
    pack, content = await _in_thread(size_bytes, lambda: _assemble(header, records, codec, objects.seals))
    await objects.put(pack.name, content)
    return pack


async def read_pack(objects: Objects, namespace: bytes, pack_id: bytes) -> Pack:
    """What a pack says of itself. Raises PackUnknown, PackDamaged where it is not the pack of this name, and ObjectError."""
    name = pack_name(namespace, pack_id)
    where = f"{objects.where}: {name}"
    size_bytes = (await objects.head(name)).size_bytes
    try:
        (first,) = await objects.get_ranges(name, [(0, min(size_bytes, PACK_FIRST_BYTES))])
        end = header_end(first, where)
        if end > size_bytes:
            raise PackDamaged(f"{where}: {size_bytes} bytes: its header alone has {end}")
        if end > len(first):
            (first,) = await objects.get_ranges(name, [(0, end)])
    except ObjectDamaged as error:
        raise PackDamaged(str(error)) from error
    pack = parse(first, where, objects.seals)
    if (pack.header.spec.digest, pack.id) != (namespace, pack_id):
        raise PackDamaged(f"{where}: holds another pack: {pack.name}")
    if pack.size_bytes != size_bytes:
        raise PackDamaged(f"{where}: {size_bytes} bytes: by its header it has {pack.size_bytes}")
    return pack


async def is_pack_later(objects: Objects, name: str) -> bool:
    """Whether a pack is of a later version, as its beginning says; False where it cannot be read. Raises ObjectUnavailable."""
    try:
        (first,) = await objects.get_ranges(name, [(0, PRELUDE_BYTES)])
    except (ObjectMissing, ObjectDamaged, ObjectRefused):
        return False
    return is_later(first, SEALED_PACK_MAGIC)


async def fetch_records(objects: Objects, pack: Pack, wanted: Sequence[tuple[int, memoryview]]) -> list[Get]:
    """Read records, by their index, into views of exactly their size; one answer each, in the same order.

    HIT: the view holds the bytes, and their checksum matched. MISS: no such object or index, or a view of another size. UNKNOWN: a codec
    or a key that is not known here. CORRUPT: other bytes came back, or fewer. REFUSED: the store does not hand it out. FAILED: the
    store failed. After any other answer than HIT the view's content is undefined. Never raises but when cancelled, and returns only when
    the views are not written any more.
    """
    header = pack.header
    answers = [Get.MISS] * len(wanted)
    fits = [
        at
        for at, (index, view) in enumerate(wanted)
        if 0 <= index < header.count and view.nbytes == header.spec.record_bytes
    ]
    is_true = _truth(header, objects.seals)
    if header.codec not in CODECS or is_true is None:
        for at in fits:
            answers[at] = Get.UNKNOWN
        return answers
    if not fits:
        return answers
    asked = [wanted[at] for at in fits]
    results = await _fetch_in_place(objects, pack, asked, is_true)
    if results is None:
        results = await _fetch_copies(objects, pack, asked, is_true)
    for at, result in zip(fits, results, strict=True):
        answers[at] = result
    return answers


async def _fetch_in_place(
    objects: Objects, pack: Pack, wanted: Sequence[tuple[int, memoryview]], is_true: IsTrue
) -> list[Get] | None:
    """Records of a run, received where they belong; None where that is not worth it, or did not work."""
    header, first = pack.header, wanted[0][0]
    size_bytes = len(wanted) * header.spec.record_bytes
    is_run = all(index == first + offset for offset, (index, _) in enumerate(wanted))
    is_large = header.spec.record_bytes >= DIRECT_RECORD_BYTES_MIN and size_bytes >= DIRECT_READ_BYTES_MIN
    views = [view for _, view in wanted]
    if header.codec or not is_run or not is_large:
        return None
    if not await objects.read_into(pack.name, pack.ranges()[first][0], views):
        return None
    return await _in_thread(size_bytes, lambda: _judged(header, is_true, wanted, views, is_in_place=True))


async def _fetch_copies(
    objects: Objects, pack: Pack, wanted: Sequence[tuple[int, memoryview]], is_true: IsTrue
) -> list[Get]:
    """Records of any indexes, out of the bytes that the store hands out."""
    header, places = pack.header, pack.ranges()
    try:
        parts = await objects.get_ranges(pack.name, [places[index] for index, _ in wanted])
    except ObjectMissing:
        return [Get.MISS] * len(wanted)
    except ObjectDamaged:
        return [Get.CORRUPT] * len(wanted)
    except ObjectRefused:
        return [Get.REFUSED] * len(wanted)
    except ObjectError:
        return [Get.FAILED] * len(wanted)
    return await _in_thread(
        len(wanted) * header.spec.record_bytes, lambda: _judged(header, is_true, wanted, parts)
    )


async def copy_pack(source: Objects, to: Objects, pack: Pack, got: Callable[[], None] = lambda: None) -> None:
    """Put an announced pack into another store, if all of it is right. All of it is in memory meanwhile. got: called
    before it is put.

    Raises PackDamaged, before anything is put; ObjectMissing where the source does not have it, and no other
    time; ObjectError.
    """
    content = await verified_pack(source, pack)
    got()
    try:
        await to.put(pack.name, content)
    except ObjectMissing as error:  # a directory that is gone
        raise ObjectUnavailable(str(error)) from error


async def verified_pack(source: Objects, pack: Pack) -> memoryview:
    """All bytes of an announced pack, if they are right. Raises PackDamaged, PackUnknown, ObjectMissing, ObjectError."""
    content = await _whole(source, pack)
    where = f"{source.where}: {pack.name}"
    await _in_thread(pack.size_bytes, lambda: _verify(pack, content, where, source.seals))
    return content


async def _whole(source: Objects, pack: Pack) -> memoryview:
    """The bytes of a pack, in pieces that arrive in time if it is large. No memory is taken for bytes that are not there."""
    try:
        if pack.size_bytes <= PACK_PIECE_BYTES:
            return await source.get_within(pack.name, pack.size_bytes)
        return await _in_pieces(source, pack)
    except ObjectDamaged as error:
        raise PackDamaged(str(error)) from error


async def _in_pieces(source: Objects, pack: Pack) -> memoryview:
    size_bytes = (await source.head(pack.name)).size_bytes
    if size_bytes != pack.size_bytes:
        raise PackDamaged(
            f"{source.where}: {pack.name}: {size_bytes} bytes: announced were {pack.size_bytes}"
        )
    content = bytearray(pack.size_bytes)
    for start in range(0, pack.size_bytes, PACK_PIECE_BYTES):
        end = min(start + PACK_PIECE_BYTES, pack.size_bytes)
        (part,) = await source.get_ranges(pack.name, [(start, end)])
        content[start:end] = part
    return memoryview(content).toreadonly()


# -- in a thread --


def _assemble(
    header: PackHeader, records: Sequence[Bytes], codec: str, seals: Seals | None
) -> tuple[Pack, memoryview]:
    """The pack, and the whole object, which cannot change any more."""
    where = pack_name(header.spec.digest, b"")
    if isinstance(records, PackMemory) and not codec:
        return _assemble_in_place(header, records, where, seals)
    turns = _Turns()
    stored = records
    if codec:
        stored = [turns.after(encode(codec, record), len(record)) for record in records]
        header = msgspec.structs.replace(header, codec=codec, sizes=tuple(map(len, stored)))
    pack, first = describe(_tagged(header, stored, seals), seals)
    content = bytearray(first)  # grows: to make it at once would fill it with zeros first
    plain = memoryview(bytearray(header.spec.record_bytes if codec else 0))
    for index, (start, end) in enumerate(pack.ranges()):
        content += stored[index]
        with memoryview(content)[start:] as part:
            if len(part) != end - start or not _is_sound(header, index, part, plain):
                raise _unsound(where, header, index)
        turns.after(None, end - start)
    return pack, memoryview(content).toreadonly()


def _assemble_in_place(
    header: PackHeader, records: PackMemory, where: str, seals: Seals | None
) -> tuple[Pack, memoryview]:
    """Nothing is copied: only this module has this memory."""
    records.join()
    pack, first = describe(_tagged(header, records, seals), seals)
    for index, found in enumerate(digest_all(records, header.spec.columns)):
        if found != header.checksum_at(index):
            raise _unsound(where, header, index)
    return pack, records.object(first)


def _tagged(header: PackHeader, stored: Sequence[Bytes], seals: Seals | None) -> PackHeader:
    """With the tags of its records, where there is a key. A codec may make several contents of one record, so what is stored has a
    checksum of its own."""
    if seals is None:
        return header
    salt = digest(b"".join(map(digest, stored))) if header.codec else bytes(TAG_BYTES)
    tagger = seals.tagger(encoded(header, with_tags=False) + salt)
    tags = share(lambda at: tagger.tag(at, stored[at]), len(stored), sum(map(len, stored)))
    return msgspec.structs.replace(header, tags=b"".join([tagger.key_id, salt, *tags]))


def _truth(header: PackHeader, seals: Seals | None) -> IsTrue | None:
    """Whether records are those that were put, even where an attacker can write to the bucket; None where that cannot be known. Without a
    key every one is taken for true: a checksum finds accidents."""
    if seals is None:
        return lambda index, stored: True
    if not header.tags:
        return None
    try:
        tagger = seals.tagger(encoded(header, with_tags=False) + header.tag_at(-1), header.key_id)
    except Unsealed:
        return None
    return lambda index, stored: tagger.is_true(index, stored, header.tag_at(index))


def _verify(pack: Pack, content: memoryview, where: str, seals: Seals | None) -> None:
    """Raises PackDamaged where a byte is not what was announced."""
    if len(content) != pack.size_bytes:
        raise PackDamaged(f"{where}: {len(content)} bytes: announced were {pack.size_bytes}")
    if parse(content, where, seals) != pack:
        raise PackDamaged(f"{where}: another pack than the one that was announced")
    header = pack.header
    if header.codec not in CODECS:
        raise PackUnknown(f"{where}: of a later version: codec {header.codec!r}, known here are {CODECS}")
    is_true = _truth(header, seals)
    if is_true is None:
        raise PackDamaged(f"{where}: its records have no tags of a key that is known here")
    turns, plain = _Turns(), memoryview(bytearray(header.spec.record_bytes if header.codec else 0))
    for index, (start, end) in enumerate(pack.ranges()):
        part = content[start:end]
        if not is_true(index, part) or not _is_sound(header, index, part, plain):
            raise _unsound(where, header, index)
        turns.after(None, end - start)


def _unsound(where: str, header: PackHeader, index: int) -> PackDamaged:
    return PackDamaged(f"{where}: record {index} of {header.count} is not what its checksum says")


def _is_sound(header: PackHeader, index: int, part: memoryview, plain: memoryview) -> bool:
    """Whether the bytes of a record, as stored, are those of its checksum. plain: room to decode into."""
    record = part
    if header.codec:
        if not decode_into(header.codec, part, plain):
            return False
        record = plain
    return digest(record, header.spec.columns) == header.checksum_at(index)


def _take(header: PackHeader, jobs: Sequence[tuple[memoryview, memoryview]]) -> list[bytes]:
    """Fill the views with what is stored, and hash them: their checksums, b"" of those that could not be filled."""
    columns = header.spec.columns
    if not header.codec:
        return copy_and_digest(jobs, columns=columns)
    turns = _Turns()
    return [
        turns.after(digest(view, columns) if decode_into(header.codec, part, view) else b"", len(view))
        for view, part in jobs
    ]


def _judged(
    header: PackHeader,
    is_true: IsTrue,
    wanted: Sequence[tuple[int, memoryview]],
    parts: Sequence[memoryview],
    is_in_place: bool = False,
) -> list[Get]:
    """Answers of records as they came; what is not true is not even decoded. is_in_place: the parts are the views."""
    true = share(lambda at: is_true(wanted[at][0], parts[at]), len(parts), sum(map(len, parts)))
    some = [at for at, is_one in enumerate(true) if is_one]
    answers = [Get.CORRUPT] * len(wanted)
    try:
        if is_in_place:
            found = digest_all([parts[at] for at in some], header.spec.columns)
        else:
            found = _take(header, [(wanted[at][1], parts[at]) for at in some])
    except ValueError:  # columns that are none
        return answers
    for at, checksum in zip(some, found, strict=True):
        if checksum == header.checksum_at(wanted[at][0]):
            answers[at] = Get.HIT
    return answers


class _Turns:
    """Lets other threads have the interpreter now and then: copying, and hashing less than 100 KiB, does not. A turn
    costs 80 µs; without, they would wait for the 5 ms after which the interpreter takes it away."""

    def __init__(self) -> None:
        self._left_bytes = PACK_TURN_BYTES

    def after(self, result: T, size_bytes: int) -> T:
        self._left_bytes -= size_bytes
        if self._left_bytes <= 0:
            self._left_bytes = PACK_TURN_BYTES
            time.sleep(0)
        return result


async def _in_thread(size_bytes: int, work: Callable[[], T]) -> T:
    """The result of `work` on so many bytes; here and now if they are few. Ends when the work has ended, even if
    it is cancelled: the caller's buffers are in use until then."""
    if size_bytes <= PACK_INLINE_BYTES_MAX:
        return work()
    return await in_thread(work)
