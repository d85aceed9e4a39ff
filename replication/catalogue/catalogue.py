"""The catalogue: every durable pack of a region, by id and by block, and its models.

    segment ─▶ add ─▶ rows (RocksDB), one atomic write ─▶ filter (memory)
                        position of the writer              held: any thread, no disk
                        packs, their keys                   find: rows, verified

    rows   i <pack id>                 ─▶ number              k <word> <number> <index>   ─▶ -
           p <number>                  ─▶ entry (msgpack)     w <writer>                  ─▶ position
           n <namespace>               ─▶ spec (msgpack)      c <namespace>               ─▶ packs, blocks, bytes
           t <kept until> <number>     ─▶ -                m <manifest's name>         ─▶ model (msgpack)
           g <number>                  ─▶ entry of a pack that is gone (msgpack)
           r <writer>                  ─▶ position of one of which nothing is left
           s                           ─▶ number of the newest snapshot of which all is known

Models are few, and kept in memory as well. Row "v" says that segments were read by who knows models: a catalogue without it, which
an older version left, is made anew.

A pack gets the next number when it is first heard of. Its blocks are found by words: 64 bits of a hash of their key.
What shares a word (two packs with one block, or by chance two blocks) are neighbours in the rows, and the entry says
which of them is meant; so nothing is read before it is written, the pack that was first is the first one found,
and when it is forgotten the next one is. One that is *lost*, whose life was not over and which nobody erased, is found
no more either; what it was is kept, because it says what follows on what.

What must always hold:

* Position and content are written together: after `kill -9` everything up to the position is known. More may be.
* A spot names a pack that has this very block at this index.
* A word is in the filter if a row has it, once the filter is loaded. Until then less is in it.

One thread calls everything but `held`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
import xxhash

from replication.catalogue.filter import KEPT_BYTES, PARTITION_BYTES, PARTITIONS, Filter
from replication.catalogue.rows import PREFIX_BYTES, RocksRows, Rows
from replication.catalogue.seen import Seen
from replication.constants import CATALOGUE_CHUNK_PACKS
from replication.errors import CatalogueDamaged
from replication.formats.announced import Announced, Entry, announced_of, entry_of, fields_of, merged
from replication.formats.announced_models import AnnouncedModel, merged_models
from replication.formats.segment import Segment
from tiers.base import NAMESPACE_BYTES
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import PACK_RECORDS_MAX, Pack, wrong_of_spec
from tiers.parsing import ParserErrors, parser_failure

LOST_PACKS_MAX: Final = 100_000  # that are remembered; 100 MB of rows
LOST_KEPT_S: Final = 24 * 3600.0  # behind the end of their lives, so that no clock is too late
LOAD_KEYS: Final = 2048  # of the filter, in one slice: about 2 ms

T = TypeVar("T")
_ID, _PACK, _KEY, _WRITER, _SPEC, _COUNT, _UNTIL = b"i", b"p", b"k", b"w", b"n", b"c", b"t"
_MODEL, _FORMAT, _FORMAT_NOW = b"m", b"v", b"2"
_GONE, _RETIRED, _COMPARED = b"g", b"r", b"s"
_NUMBER_BYTES = 6  # of a pack
_INDEX_BYTES = 2
_SPEC_BYTES = 4
_POSITION_BYTES = 8
_WORD_BYTES = 8
_UNTIL_BYTES = 5  # unix seconds
_INDEXES = tuple(index.to_bytes(_INDEX_BYTES, "big") for index in range(PACK_RECORDS_MAX))
_KEY_ROW = struct.Struct(f">{len(_KEY)}xQ{_NUMBER_BYTES + _INDEX_BYTES}x")
_digest = xxhash.xxh3_64_digest

assert len(_KEY) + _WORD_BYTES == PREFIX_BYTES


class Spot(NamedTuple):
    """Where a block is: the record of this index in this pack."""

    announced: Announced
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs


class Numbered(NamedTuple):
    """A pack, and its number: those that become known later have higher ones."""

    number: int
    announced: Announced


class Counts(msgspec.Struct, array_like=True):
    """bytes: of objects, headers included. A block that two packs have counts twice."""

    packs: int = 0
    blocks: int = 0
    bytes: int = 0


class Catalogue:
    """rows: where it is kept; what is there already is known at once, but for the filter: see `load`.
    retired: by writer of which nothing is left to read, up to which segment all is known. renewals: how often it was begun
    again. Who works on it for longer than one call looks whether that changed."""

    def __init__(self, rows: Rows) -> None:
        """Raises CatalogueDamaged."""
        self.renewals = 0
        self._rows = rows
        self._filter = Filter()
        self._read_all()

    @classmethod
    def open(cls, path: Path, identity: str) -> Catalogue:
        """The catalogue in this directory. identity: of the region; what belongs to another one is made anew, and
        so is what is damaged. Takes milliseconds. Raises CatalogueBusy, CatalogueDamaged."""
        rows = RocksRows(path, identity)
        try:
            return cls(rows)
        except CatalogueDamaged:
            rows.renew()
            return cls(rows)

    def close(self) -> None:
        self._rows.close()

    def renew(self) -> None:
        """Begin again with nothing: what was kept is damaged. Raises CatalogueDamaged where even that fails."""
        self.renewals += 1
        self._filter.clear()
        self._rows.renew()
        self._read_all()

    def _read_all(self) -> None:
        """What is kept in memory, the filter apart."""
        self._specs: list[NamespaceSpec] = []
        self._spec_numbers: dict[bytes, int] = {}  # by encoded spec
        self._counts: list[Counts] = []
        for _, value in _all(self._rows, _SPEC):
            self._spec_numbers[value] = len(self._specs)
            self._specs.append(spec := _decoded(value, NamespaceSpec))
            if wrong := wrong_of_spec(spec):
                raise CatalogueDamaged(f"a namespace with {wrong}")
        for _, value in _all(self._rows, _COUNT):
            self._counts.append(_decoded(value, Counts))
        if len(self._counts) != len(self._specs):
            raise CatalogueDamaged("namespaces and their counts do not agree")
        self._positions, self.retired = _numbers(self._rows, _WRITER), _numbers(self._rows, _RETIRED)
        [compared] = self._rows.get([_COMPARED])
        self.compared = int.from_bytes(compared or b"", "big")
        self._is_marked = self._rows.get([_FORMAT]) == [_FORMAT_NOW]
        if self._positions and not self._is_marked:
            raise CatalogueDamaged("it was made by a version that knows no models")
        models = (_decoded(value, AnnouncedModel) for _, value in _all(self._rows, _MODEL))
        self._models = {model.name: model for model in models}
        self._lost_count = len(self._rows.keys(_GONE, _behind(_GONE), LOST_PACKS_MAX))
        last = self._rows.last(_PACK, _behind(_PACK))
        self._next_number = int.from_bytes(last[1:], "big") + 1 if last else 1
        self._loaded_partitions = 0 if last else PARTITIONS

    # -- learning --------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Learn what a segment says, and that it was read. It must be the next one of its writer, or an old one."""
        position = self._positions.get(segment.writer, self.retired.get(segment.writer, 0))
        if segment.number <= position:
            return
        assert segment.number == position + 1, "a segment was passed over"
        self._apply(segment.entries, {segment.writer: segment.number}, segment.models)

    def add_packs(self, entries: Sequence[Announced], models: Sequence[AnnouncedModel] = ()) -> None:
        """Learn of packs and models from elsewhere: a snapshot, a listing. The caller cuts them as segments are cut."""
        self._apply(entries, {}, models)

    def expect(self, pack: Pack) -> None:
        """A pack that will be announced soon: its blocks count as held here. A restart forgets it."""
        spec, hashes = pack.header.spec, pack.header.hashes
        seed, size = _seed(spec.digest), spec.hash_bytes
        self._filter.add(
            xxhash.xxh3_64_intdigest(hashes[at : at + size], seed) for at in range(0, len(hashes), size)
        )

    def jump(self, positions: Mapping[str, int]) -> None:
        """Everything up to these positions was learned from elsewhere. Never goes back."""
        ahead = {
            writer: number for writer, number in positions.items() if number > self._positions.get(writer, 0)
        }
        if ahead:
            self._apply((), ahead)

    def retire(self, writers: Collection[str]) -> None:
        """There is nothing of these to read any more: their positions are among `retired` from now on."""
        known = {writer: self._positions[writer] for writer in writers if writer in self._positions}
        puts = [(_RETIRED + writer.encode(), _position(number)) for writer, number in known.items()]
        self._rows.write(puts, [_WRITER + writer.encode() for writer in known])
        self.retired |= known
        for writer in known:
            del self._positions[writer]

    def compare(self, snapshot: int) -> None:
        """All that the snapshot of this number covers is known here."""
        self._rows.write([(_COMPARED, _position(snapshot))], ())
        self.compared = snapshot

    def forget_writers(self, writers: Collection[str]) -> None:
        """Nobody needs to know how far these were."""
        self._rows.write((), [kind + writer.encode() for writer in writers for kind in (_WRITER, _RETIRED)])
        for writer in writers:
            self._positions.pop(writer, None)
            self.retired.pop(writer, None)

    def _apply(
        self,
        entries: Sequence[Announced],
        positions: Mapping[str, int],
        models: Sequence[AnnouncedModel] = (),
    ) -> None:
        news, puts, deletes = self._sorted_out(entries)
        said = self._models_said(models)
        puts += [(_MODEL + name.encode(), msgspec.msgpack.encode(model)) for name, model in said.items()]
        puts += [] if self._is_marked else [(_FORMAT, _FORMAT_NOW)]
        keys: list[bytes] = []
        specs = len(self._specs)
        counts: dict[int, Counts] = {}
        for number, announced in enumerate(news, self._next_number):
            spec = self._spec_number(announced.pack.header.spec)
            counts[spec] = _plus(counts.get(spec) or self._counts[spec], announced, 1)
            number_bytes = number.to_bytes(_NUMBER_BYTES, "big")
            puts.append((_ID + announced.pack.id, number_bytes))
            puts.append((_PACK + number_bytes, msgspec.msgpack.encode(fields_of(entry_of(announced, spec)))))
            puts += [(key, b"") for key in _until_key(announced, number_bytes)]
            keys += _keys_of(announced, number_bytes)
        for spec in range(specs, len(self._specs)):
            puts.append(
                (_SPEC + spec.to_bytes(_SPEC_BYTES, "big"), msgspec.msgpack.encode(self._specs[spec]))
            )
        puts += self._count_rows(counts)
        for writer, position in positions.items():
            puts.append((_WRITER + writer.encode(), _position(position)))
        back = self.retired.keys() & positions.keys()
        deletes += [_RETIRED + writer.encode() for writer in back]
        self._rows.write(chain(puts, ((key, b"") for key in keys)), deletes)
        for writer in back:
            del self.retired[writer]
        self._next_number += len(news)
        self._is_marked = True
        self._models |= said
        self._positions |= positions
        for spec, count in counts.items():
            self._counts[spec] = count
        self._filter.add(word for (word,) in _KEY_ROW.iter_unpack(b"".join(keys)))

    def _sorted_out(
        self, entries: Sequence[Announced]
    ) -> tuple[list[Announced], list[tuple[bytes, bytes]], list[bytes]]:
        """Those that are not known yet, each once; and the rows to put and to delete of known ones of which more is said."""
        by_id: dict[bytes, Announced] = {}
        for entry in entries:
            by_id[entry.pack.id] = merged(by_id.get(entry.pack.id, entry), entry)
        numbers = self._rows.get([_ID + pack_id for pack_id in by_id])
        news: list[Announced] = []
        puts: list[tuple[bytes, bytes]] = []
        deletes: list[bytes] = []
        for entry, number_bytes in zip(by_id.values(), numbers, strict=True):
            if number_bytes is None:
                news.append(entry)
                continue
            known, spec = self._entry(number_bytes)
            both = merged(known, entry)
            if both is known:
                continue
            puts.append((_PACK + number_bytes, msgspec.msgpack.encode(fields_of(entry_of(both, spec)))))
            if both.kept_until_s != known.kept_until_s:
                puts += [(key, b"") for key in _until_key(both, number_bytes)]
                deletes += _until_key(known, number_bytes)
        return news, puts, deletes

    def _models_said(self, models: Sequence[AnnouncedModel]) -> dict[str, AnnouncedModel]:
        """Those of which more is known now, by name."""
        said: dict[str, AnnouncedModel] = {}
        for model in models:
            known = said.get(model.name) or self._models.get(model.name)
            if known is None or merged_models(known, model) is not known:
                said[model.name] = model
        return said

    def _spec_number(self, spec: NamespaceSpec) -> int:
        encoded = msgspec.msgpack.encode(spec)
        number = self._spec_numbers.get(encoded)
        if number is None:
            number = self._spec_numbers[encoded] = len(self._specs)
            self._specs.append(spec)
            self._counts.append(Counts())
        return number

    def _count_rows(self, counts: Mapping[int, Counts]) -> list[tuple[bytes, bytes]]:
        return [
            (_COUNT + spec.to_bytes(_SPEC_BYTES, "big"), msgspec.msgpack.encode(count))
            for spec, count in counts.items()
        ]

    def forget(self, pack_id: bytes) -> bool:
        """A pack is gone from the store: its life was over, or it was erased. False if it was not known."""
        return self._forget(pack_id, is_lost=False)

    def lose(self, pack_id: bytes) -> bool:
        """A pack is gone from the store, or to be read no more, and nobody wanted that: see `lost`. False if it was not
        known."""
        return self._forget(pack_id, is_lost=True)

    def _forget(self, pack_id: bytes, is_lost: bool) -> bool:
        [number_bytes] = self._rows.get([_ID + pack_id])
        if number_bytes is None:
            return False
        announced, spec = self._entry(number_bytes)
        is_kept = is_lost and self._lost_count < LOST_PACKS_MAX
        kept = [(_GONE + number_bytes, msgspec.msgpack.encode(entry_of(announced, spec)))] if is_kept else []
        keys = _keys_of(announced, number_bytes)
        count = {spec: _plus(self._counts[spec], announced, -1)}
        rows = [_ID + pack_id, _PACK + number_bytes, *_until_key(announced, number_bytes), *keys]
        self._rows.write(chain(self._count_rows(count), kept), rows)
        self._lost_count += is_kept
        self._counts[spec] = count[spec]
        for key in keys:
            beginning = key[: len(_KEY) + KEPT_BYTES]
            if not self._rows.keys(beginning, _behind(beginning), 1):
                self._filter.discard(_word(key))
        return True

    def forget_model(self, name: str) -> bool:
        """A manifest, or a chunk of it, is gone from the store. False if it was not known."""
        if name not in self._models:
            return False
        self._rows.write((), [_MODEL + name.encode()])
        del self._models[name]
        return True

    def outlived(self, now_s: float, limit: int) -> list[Announced]:
        """Packs that were worth keeping until then and no longer, those first that should have gone first."""
        end = _UNTIL + max(0, int(now_s)).to_bytes(_UNTIL_BYTES, "big")
        keys = self._rows.keys(_UNTIL, end, limit)
        return [self._entry(key[-_NUMBER_BYTES:])[0] for key in keys]

    # -- asking ----------------------------------------------------------------------

    def held(self, namespace: bytes, hash_bytes: int, hashes: bytes, start: int) -> int:
        """The end, in blocks, of the durable prefix behind the first `start` blocks; `start` if there is none.

        By halves, because the durable set is closed under prefixes. Reads memory only, may be wrong in both
        directions. From any thread.
        """
        seed, words, digest = _seed(namespace), self._filter, xxhash.xxh3_64_intdigest
        low, high = start, len(hashes) // hash_bytes
        if low >= high or digest(hashes[low * hash_bytes : (low + 1) * hash_bytes], seed) not in words:
            return start
        low += 1
        while low < high:
            middle = (low + high) // 2
            if digest(hashes[middle * hash_bytes : (middle + 1) * hash_bytes], seed) in words:
                low = middle + 1
            else:
                high = middle
        return low

    def has(self, namespace: bytes, block_hash: bytes) -> bool:
        """Whether a block is durable. Exact; reads rows only where the filter cannot deny it."""
        return self.find([namespace + block_hash])[0] is not None

    def may_have(self, key: bytes) -> bool:
        """Whether a block may be durable: memory only, and wrong about one block in millions that is not."""
        return not self.loaded or _digest_word(key) in self._filter

    def find(self, keys: Sequence[bytes], but: Collection[bytes] = ()) -> list[Spot | None]:
        """Where these blocks are, None where that is not known. but: ids of packs that are passed over. Raises CatalogueDamaged.

        A block that follows on the one before in the same pack is found there, at no cost; any other in the pack that
        was known first, for about 15 µs.
        """
        packs: dict[bytes, Announced] = {}
        spots: list[Spot | None] = []
        last: Spot | None = None
        for key in keys:
            spot = last and _next(last, key)
            if spot is None:
                spot = self._look_up(key, packs, but)
            spots.append(spot)
            last = spot or last
        return spots

    def packs(self, ids: Sequence[bytes]) -> list[Announced | None]:
        """What is known of these packs, None of those that are not. Raises CatalogueDamaged."""
        return [one and one.announced for one in self.numbered(ids)]

    def numbered(self, ids: Sequence[bytes]) -> list[Numbered | None]:
        """The same with their numbers. Raises CatalogueDamaged."""
        numbers = self._rows.get([_ID + pack_id for pack_id in ids])
        entries = iter(self._entries([number for number in numbers if number is not None]))
        return [
            None if number is None else Numbered(int.from_bytes(number, "big"), next(entries)[0])
            for number in numbers
        ]

    def _look_up(self, key: bytes, packs: dict[bytes, Announced], but: Collection[bytes]) -> Spot | None:
        if not self.may_have(key):
            return None
        word = _digest(key[NAMESPACE_BYTES:], _seed(key[:NAMESPACE_BYTES]))
        for row in self._rows.with_prefix(_KEY + word):
            number_bytes, index = row[PREFIX_BYTES:-_INDEX_BYTES], int.from_bytes(row[-_INDEX_BYTES:], "big")
            if number_bytes not in packs:
                packs[number_bytes] = self._entry(number_bytes)[0]
            spot = Spot(packs[number_bytes], index)
            if _is_at(key, spot) and spot.announced.pack.id not in but:
                return spot
        return None

    def _entry(self, number_bytes: bytes) -> tuple[Announced, int]:
        """The pack of this number, and the number of its spec."""
        return self._entries([number_bytes])[0]

    def _entries(self, numbers: Sequence[bytes]) -> list[tuple[Announced, int]]:
        values = self._rows.get([_PACK + number for number in numbers])
        if None in values:
            raise CatalogueDamaged(f"a pack without its row: {numbers[values.index(None)].hex()}")
        return [self._announced(value) for value in values if value is not None]

    def _announced(self, value: bytes) -> tuple[Announced, int]:
        entry = _decoded(value, Entry)
        try:
            return announced_of(entry, self._specs), entry.spec
        except ValueError as error:
            raise CatalogueDamaged(f"a row that cannot be true: {error}") from error

    # -- all of it -------------------------------------------------------------------

    @property
    def positions(self) -> dict[str, int]:
        """By writer, up to which segment all is known. A copy."""
        return dict(self._positions)

    @property
    def models(self) -> Mapping[str, AnnouncedModel]:
        """By the names of their manifests. Changes when something is learned."""
        return self._models

    def model(self, model_id: bytes) -> AnnouncedModel | None:
        """The one of this id."""
        return next((model for model in self._models.values() if model.id == model_id), None)

    @property
    def counts(self) -> Counts:
        return Counts(*map(sum, zip(*((c.packs, c.blocks, c.bytes) for c in self._counts), strict=True)))

    def namespaces(self) -> list[tuple[NamespaceSpec, Counts]]:
        """Those that have packs now."""
        both = zip(self._specs, self._counts, strict=True)
        return [(spec, msgspec.structs.replace(count)) for spec, count in both if count.packs]

    @property
    def next_number(self) -> int:
        """Of the next pack that becomes known."""
        return self._next_number

    def chunks(self, first: int = 0) -> Iterator[list[Announced]]:
        """All packs from this number on, in the order in which they became known, CATALOGUE_CHUNK_PACKS at a time.

        May be paused between chunks: packs that become known meanwhile are in it, those forgotten may be.
        """
        start, end = _PACK + first.to_bytes(_NUMBER_BYTES, "big"), _behind(_PACK)
        while found := self._rows.scan(start, end, CATALOGUE_CHUNK_PACKS):
            yield [self._announced(value)[0] for _, value in found]
            start = found[-1][0] + b"\0"

    def lost(self, now_s: float) -> Iterator[list[Announced]]:
        """Packs that were lost. Those whose life is over are forgotten: nothing that hung on one of them was kept for longer.
        As `chunks`."""
        start, end, over_s = _GONE, _behind(_GONE), now_s - LOST_KEPT_S
        while found := self._rows.scan(start, end, CATALOGUE_CHUNK_PACKS):
            packs = [self._announced(value)[0] for _, value in found]
            over = [key for (key, _), one in zip(found, packs, strict=True) if 0 < one.kept_until_s < over_s]
            self._rows.write((), over)
            self._lost_count -= len(over)
            yield packs
            start = found[-1][0] + b"\0"

    def chunks_without(self, seen: Seen, behind: int) -> Iterator[list[Announced]]:
        """Of all packs before the number `behind` those whose numbers are not among these, CATALOGUE_CHUNK_PACKS looked at
        at a time. As `chunks`."""
        start, end = _PACK, _PACK + behind.to_bytes(_NUMBER_BYTES, "big")
        while found := self._rows.keys(start, end, CATALOGUE_CHUNK_PACKS):
            numbers = [key[len(_PACK) :] for key in found]
            unseen = [number for number in numbers if int.from_bytes(number, "big") not in seen]
            yield [announced for announced, _ in self._entries(unseen)]
            start = found[-1] + b"\0"

    # -- the filter after a start ----------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Whether the filter has all that the rows have. Before that, `held` answers less."""
        return self._loaded_partitions == PARTITIONS

    async def load(self) -> None:
        """Fill the filter from the rows, letting others run every few milliseconds. Raises CatalogueDamaged."""
        while not self.loaded:
            self._load_slice(LOAD_KEYS)
            await asyncio.sleep(0)

    def _load_slice(self, limit: int) -> None:
        """The next partitions: rows and partitions have the same order, so each is filled at once and for good."""
        first = self._loaded_partitions
        rows = self._rows.keys(_KEY + first.to_bytes(PARTITION_BYTES, "big"), _behind(_KEY), limit)
        if len(rows) < limit:
            end = PARTITIONS
        else:
            end = _partition(rows[-1])  # of which there may be more
            if end == first:
                self._load_slice(2 * limit)
                return
        prints: dict[int, dict[int, None]] = {}
        from_bytes = int.from_bytes
        behind_partition, behind_kept = len(_KEY) + PARTITION_BYTES, len(_KEY) + KEPT_BYTES
        for row in rows:
            partition = prints.setdefault(_partition(row), {})
            partition[from_bytes(row[behind_partition:behind_kept], "big")] = None
        for partition_number, found in prints.items():
            if partition_number < end:
                self._filter.fill(partition_number, found)
        self._loaded_partitions = end


def _seed(namespace: bytes) -> int:
    return int.from_bytes(namespace[:_WORD_BYTES], "little")


def _digest_word(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key[NAMESPACE_BYTES:], _seed(key[:NAMESPACE_BYTES]))


def _word(row: bytes) -> int:
    return int.from_bytes(row[len(_KEY) : PREFIX_BYTES], "big")


def _partition(row: bytes) -> int:
    return int.from_bytes(row[len(_KEY) : len(_KEY) + PARTITION_BYTES], "big")


def _behind(prefix: bytes) -> bytes:
    """The first key behind all that begin with this."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def _keys_of(announced: Announced, number_bytes: bytes) -> list[bytes]:
    """The key rows of a pack."""
    header = announced.pack.header
    hashes, size, seed = header.hashes, header.spec.hash_bytes, _seed(header.spec.digest)
    return [
        _KEY + _digest(hashes[at : at + size], seed) + number_bytes + index
        for at, index in zip(range(0, len(hashes), size), _INDEXES, strict=False)
    ]


def _until_key(announced: Announced, number_bytes: bytes) -> list[bytes]:
    """The row by which a pack is found when its life is over; none if that never is."""
    if not announced.kept_until_s:
        return []
    return [_UNTIL + announced.kept_until_s.to_bytes(_UNTIL_BYTES, "big") + number_bytes]


def _is_at(key: bytes, spot: Spot) -> bool:
    header = spot.announced.pack.header
    return key == header.spec.digest + header.hash_at(spot.index)


def _next(spot: Spot, key: bytes) -> Spot | None:
    """The spot behind this one, if this key is there."""
    following = Spot(spot.announced, spot.index + 1)
    return following if _is_at(key, following) else None


def _plus(counts: Counts, announced: Announced, sign: int) -> Counts:
    size_bytes = announced.pack.size_bytes
    return Counts(
        counts.packs + sign, counts.blocks + sign * announced.blocks, counts.bytes + sign * size_bytes
    )


def _all(rows: Rows, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    start, end = prefix, _behind(prefix)
    while found := rows.scan(start, end, CATALOGUE_CHUNK_PACKS):
        yield from found
        start = found[-1][0] + b"\0"


def _numbers(rows: Rows, prefix: bytes) -> dict[str, int]:
    """By writer."""
    try:
        return {key[1:].decode(): int.from_bytes(value, "big") for key, value in _all(rows, prefix)}
    except UnicodeDecodeError as error:
        raise CatalogueDamaged(f"a row of a writer that is none: {error}") from error


def _position(number: int) -> bytes:
    return number.to_bytes(_POSITION_BYTES, "big")


def _decoded(value: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except ParserErrors as error:
        raise CatalogueDamaged(f"a row that is not understood: {parser_failure(error)}") from error
