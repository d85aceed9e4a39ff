"""The catalogue: every durable pack of a region, by id and by block, and its models.

    segment ─▶ add ─▶ rows (RocksDB), one atomic write ─▶ filter (memory)
                        position of the writer              held: any thread, no disk
                        packs, their keys                   find: rows, verified

    rows   i <pack id>                 ─▶ number              k <word> <number> <index>   ─▶ -
           p <number>                  ─▶ entry (msgpack)     w <writer>                  ─▶ position
           n <namespace>               ─▶ spec (msgpack)      c <namespace>               ─▶ packs, blocks, bytes
           t <kept until> <number>     ─▶ -                m <manifest's name>         ─▶ model (msgpack)
           g <number>                  ─▶ entry of a pack that was lost (msgpack)
           r <writer>                  ─▶ position of one of which nothing is left
           s                           ─▶ number of the newest snapshot of which all is known
           u <word of parent> <number> ─▶ -                x <id>                      ─▶ until when what was announced is void

Models are few, and kept in memory as well. Row "v" says that segments were read by who knows models: a catalogue without it, which
an older version left, is made anew.

A pack gets the next number when it is first heard of. Its blocks are found by words: 64 bits of a hash of their key.
What shares a word (two packs with one block, or by chance two blocks) are neighbours in the rows, and the entry says
which of them is meant; so nothing is read before it is written, the pack that was first is the first one found,
and when it is removed the next one is. One that is *lost*, whose life was not over and which nobody erased, is found
no more either; what it was is kept, because it says what follows on what.

A catalogue forgets nothing by itself: removals are announced as packs are. Each voids what was announced until a moment, so
announcements and removals of any number of writers say the same, in whatever order they are read: a pack is there if it was
announced later than it was removed.

What must always hold:

* Position and content are written together: after `kill -9` everything up to the position is known. More may be.
* A spot names a pack that has this very block at this index.
* A word is in the filter if a row has it, once the filter is loaded. Until then less is in it.
* There are as many rows of packs as are counted: who walks through all of them is told if there are fewer.

One thread calls everything but `held`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from replication.catalogue import layout
from replication.catalogue.filter import KEPT_BYTES, PARTITION_BYTES, PARTITIONS, Filter
from replication.catalogue.rows import PREFIX_BYTES, Rows
from replication.catalogue.seen import Seen
from replication.constants import CATALOGUE_CHUNK_PACKS
from replication.errors import CatalogueDamaged, CatalogueUnwritable
from replication.formats.announced import Announced, Entry, announced_of, entry_of, fields_of, merged
from replication.formats.announced_models import AnnouncedModel, merged_models
from replication.formats.removed import LOST, Reason, Removed, latest, removed
from replication.formats.segment import Segment
from tiers.base import NAMESPACE_BYTES
from tiers.namespace_spec import NamespaceSpec
from tiers.packs.packs import Pack, wrong_of_spec

LOST_PACKS_MAX: Final = 100_000  # that are remembered; 100 MB of rows
LOST_KEPT_S: Final = 24 * 3600.0  # behind the end of their lives, so that no clock is too late
VOIDS_KEPT_S: Final = 3 * 24 * 3600.0  # removals are remembered for so long after they are read
TURN_LOOKS: Final = 64  # for blocks or packs, in one turn of the loop: about 2 ms
TURN_BLOCKS: Final = 1024  # learned in one turn, …
PACK_COSTS_BLOCKS: Final = 8  # … and as many for each pack
LOAD_KEYS: Final = 2048  # of the filter, in one slice: about 2 ms


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


class _Void(msgspec.Struct, array_like=True, frozen=True):
    """Until when what was announced of an id is void; when that was read, unix seconds."""

    said_s: float
    read_s: float
    reason: str = ""


class Catalogue:
    """rows: where it is kept; what is there already is known at once, but for the filter: see `load`.
    retired: by writer of which nothing is left to read, up to which segment all is known. renewals: how often it was begun
    again. Who works on it for longer than one call looks whether that changed."""

    def __init__(self, rows: Rows, clock: Callable[[], float] = time.time) -> None:
        """clock: unix seconds; says only for how long removals are remembered. Raises CatalogueDamaged."""
        self.renewals = 0
        self.removed_by: Counter[str] = Counter()  # packs since the start, by the reasons of their removals
        self.clock = clock
        self._rows = rows
        self._filter = Filter()
        self._read_all()

    @classmethod
    def open(cls, path: Path, identity: str) -> Catalogue:
        """The catalogue in this directory. identity: of the region; what belongs to another one is made anew, and
        so is what is damaged. Takes milliseconds. Raises CatalogueBusy, CatalogueDamaged, CatalogueUnwritable."""
        rows = Rows(path, identity)
        try:
            return cls(rows)
        except CatalogueUnwritable:
            rows.close()
            raise
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

    def reopen(self) -> None:
        """Go on with what was written, behind a CatalogueUnwritable; raises it where that is so still. Who follows a feed goes on from
        the positions that are known now."""
        self._rows.reopen()
        self._read_all()

    def _read_all(self) -> None:
        """What is kept in memory, the filter apart."""
        self._specs: list[NamespaceSpec] = []
        self._spec_numbers: dict[bytes, int] = {}  # by encoded spec
        self._counts: list[Counts] = []
        for _, value in layout.all_rows(self._rows, layout.SPEC):
            self._spec_numbers[value] = len(self._specs)
            self._specs.append(spec := layout.decoded(value, NamespaceSpec))
            if wrong := wrong_of_spec(spec):
                raise CatalogueDamaged(f"a namespace with {wrong}")
        for _, value in layout.all_rows(self._rows, layout.COUNT):
            self._counts.append(layout.decoded(value, Counts))
        if len(self._counts) != len(self._specs):
            raise CatalogueDamaged("namespaces and their counts do not agree")
        self._positions, self.retired = (
            layout.numbers(self._rows, layout.WRITER),
            layout.numbers(self._rows, layout.RETIRED),
        )
        [compared] = self._rows.get([layout.COMPARED])
        self.compared = int.from_bytes(compared or b"", "big")
        self._is_marked = self._rows.get([layout.FORMAT]) == [layout.FORMAT_NOW]
        if self._positions and not self._is_marked:
            raise CatalogueDamaged("an older version made it")
        models = (
            layout.decoded(value, AnnouncedModel) for _, value in layout.all_rows(self._rows, layout.MODEL)
        )
        self._models = {model.name: model for model in models}
        self._lost_count = len(self._rows.keys(layout.GONE, layout.behind(layout.GONE), LOST_PACKS_MAX))
        last = self._rows.last(layout.PACK, layout.behind(layout.PACK))
        self._next_number = int.from_bytes(last[1:], "big") + 1 if last else 1
        self._loaded_partitions = 0 if last else PARTITIONS

    # -- learning --------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """Learn what a segment says, and that it was read. It must be the next one of its writer, or an old one."""
        position = self._positions.get(segment.writer, self.retired.get(segment.writer, 0))
        if segment.number <= position:
            return
        assert segment.number == position + 1, "a segment was passed over"
        self._learn(segment, {segment.writer: segment.number})

    async def take_in(self, segment: Segment, is_own: bool = False) -> None:
        """`add`, or `add_own`, letting others run in between: what is known of it when it is cut short does no harm. Raises CatalogueDamaged,
        also where the catalogue is made anew meanwhile."""
        known, renewals = (
            self._positions.get(segment.writer, self.retired.get(segment.writer, 0)),
            self.renewals,
        )
        if is_own or segment.number > known:
            await self.remove_all(segment.removed)
            self._require(renewals)
            replace = msgspec.structs.replace
            await self.add_all([replace(entry, said_s=segment.written_s) for entry in segment.entries])
            rest = msgspec.structs.replace(segment, entries=(), removed=())
            (self.add_own if is_own else self.add)(rest)

    async def add_all(self, entries: Sequence[Announced]) -> None:
        """`add_packs` of any number. As `take_in`."""
        renewals = self.renewals
        for some in _slices(entries):
            self._require(renewals)
            self.add_packs(some)
            await asyncio.sleep(0)
        self._require(renewals)

    def _require(self, renewals: int) -> None:
        if self.renewals != renewals:
            raise CatalogueDamaged("the catalogue was made anew meanwhile")

    def add_own(self, segment: Segment) -> None:
        """The same of one that we have written, without a position: it is read again."""
        self._learn(segment, {})

    def _learn(self, segment: Segment, positions: Mapping[str, int]) -> None:
        said_s, replace = segment.written_s, msgspec.structs.replace
        self.remove(segment.removed)
        entries = [replace(entry, said_s=said_s) for entry in segment.entries]
        self._apply(entries, positions, [replace(model, said_s=said_s) for model in segment.models])

    def add_packs(self, entries: Sequence[Announced], models: Sequence[AnnouncedModel] = ()) -> None:
        """Learn of packs and models from elsewhere: a snapshot, a listing. The caller cuts them as segments are cut."""
        self._apply(entries, {}, models)

    def expect(self, pack: Pack) -> None:
        """A pack that will be announced soon: its blocks count as held here. A restart forgets it."""
        spec, hashes = pack.header.spec, pack.header.hashes
        seed, size = layout.seed_of(spec.digest), spec.hash_bytes
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
        puts = [
            (layout.RETIRED + writer.encode(), layout.position_bytes(number))
            for writer, number in known.items()
        ]
        self._rows.write(puts, [layout.WRITER + writer.encode() for writer in known])
        self.retired |= known
        for writer in known:
            del self._positions[writer]

    def compare(self, snapshot: int) -> None:
        """All that the snapshot of this number covers is known here."""
        self._rows.write([(layout.COMPARED, layout.position_bytes(snapshot))], ())
        self.compared = snapshot

    def forget_writers(self, writers: Collection[str]) -> None:
        """Nobody needs to know how far these were."""
        self._rows.write(
            (), [kind + writer.encode() for writer in writers for kind in (layout.WRITER, layout.RETIRED)]
        )
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
        puts += [
            (layout.MODEL + name.encode(), msgspec.msgpack.encode(model)) for name, model in said.items()
        ]
        puts += [] if self._is_marked else [(layout.FORMAT, layout.FORMAT_NOW)]
        keys: list[bytes] = []
        specs = len(self._specs)
        counts: dict[int, Counts] = {}
        for number, announced in enumerate(news, self._next_number):
            spec = self._spec_number(announced.pack.header.spec)
            counts[spec] = _plus(counts.get(spec) or self._counts[spec], announced, 1)
            number_bytes = number.to_bytes(layout.NUMBER_BYTES, "big")
            puts.append((layout.ID + announced.pack.id, number_bytes))
            puts.append(
                (layout.PACK + number_bytes, msgspec.msgpack.encode(fields_of(entry_of(announced, spec))))
            )
            rows = layout.until_key(announced, number_bytes) + layout.under_key(announced, number_bytes)
            puts += [(key, b"") for key in rows]
            keys += layout.keys_of(announced, number_bytes)
        for spec in range(specs, len(self._specs)):
            puts.append(
                (
                    layout.SPEC + spec.to_bytes(layout.SPEC_BYTES, "big"),
                    msgspec.msgpack.encode(self._specs[spec]),
                )
            )
        puts += self._count_rows(counts)
        for writer, position in positions.items():
            puts.append((layout.WRITER + writer.encode(), layout.position_bytes(position)))
        back = self.retired.keys() & positions.keys()
        deletes += [layout.RETIRED + writer.encode() for writer in back]
        try:
            self._rows.write(chain(puts, ((key, b"") for key in keys)), deletes)
        except CatalogueDamaged:
            self._forget_specs(specs)
            raise
        for writer in back:
            del self.retired[writer]
        self._next_number += len(news)
        self._is_marked = True
        self._models |= said
        self._positions |= positions
        for spec, count in counts.items():
            self._counts[spec] = count
        self._filter.add(word for (word,) in layout.KEY_ROW.iter_unpack(b"".join(keys)))

    def _sorted_out(
        self, entries: Sequence[Announced]
    ) -> tuple[list[Announced], list[tuple[bytes, bytes]], list[bytes]]:
        """Those that are not known yet, each once; the rows to put and to delete of known ones of which more is said. Void ones say
        nothing."""
        voids = self._voids([entry.pack.id for entry in entries])
        by_id: dict[bytes, Announced] = {}
        for entry in entries:
            void = voids.get(entry.pack.id)
            if void is None or entry.said_s > void.said_s:
                by_id[entry.pack.id] = merged(by_id.get(entry.pack.id, entry), entry)
        news: list[Announced] = []
        puts: list[tuple[bytes, bytes]] = []
        deletes = [layout.VOID + name for name in by_id.keys() & voids.keys()]
        numbers = self._rows.get([layout.ID + pack_id for pack_id in by_id])
        for entry, number_bytes in zip(by_id.values(), numbers, strict=True):
            if number_bytes is None:
                news.append(entry)
                continue
            known, spec = self._entry(number_bytes)
            both = merged(known, entry)
            if both is known:
                continue
            puts.append((layout.PACK + number_bytes, msgspec.msgpack.encode(fields_of(entry_of(both, spec)))))
            if both.kept_until_s != known.kept_until_s:
                puts += [(key, b"") for key in layout.until_key(both, number_bytes)]
                deletes += layout.until_key(known, number_bytes)
        return news, puts, deletes

    def _models_said(self, models: Sequence[AnnouncedModel]) -> dict[str, AnnouncedModel]:
        """Those of which more is known now, by name."""
        said: dict[str, AnnouncedModel] = {}
        voids = self._voids([model.name_id for model in models])
        for model in models:
            known = said.get(model.name) or self._models.get(model.name)
            void = voids.get(model.name_id)
            both = model if known is None else merged_models(known, model)
            if both is not known and (void is None or model.said_s > void.said_s):
                said[model.name] = both
        return said

    def _spec_number(self, spec: NamespaceSpec) -> int:
        encoded = msgspec.msgpack.encode(spec)
        number = self._spec_numbers.get(encoded)
        if number is None:
            number = self._spec_numbers[encoded] = len(self._specs)
            self._specs.append(spec)
            self._counts.append(Counts())
        return number

    def _forget_specs(self, first: int) -> None:
        """Those from this number on: they were not written."""
        for spec in self._specs[first:]:
            del self._spec_numbers[msgspec.msgpack.encode(spec)]
        del self._specs[first:], self._counts[first:]

    def _count_rows(self, counts: Mapping[int, Counts]) -> list[tuple[bytes, bytes]]:
        return [
            (layout.COUNT + spec.to_bytes(layout.SPEC_BYTES, "big"), msgspec.msgpack.encode(count))
            for spec, count in counts.items()
        ]

    # -- what is removed -------------------------------------------------------------

    def remove(self, some: Sequence[Removed]) -> int:
        """What was announced of these until then is void, also where it is read later. Returns how many were known, and are not any
        more. The caller cuts them: each pack costs as much as it has blocks, several times."""
        count, keys = self._remove(some)
        self._discard(keys)
        return count

    def _remove(self, some: Sequence[Removed]) -> tuple[int, list[bytes]]:
        """And the keys that the filter has still."""
        by_id = latest(some)
        numbers = self._rows.get([layout.ID + one_id for one_id in by_id])
        voids = self._voids(list(by_id))
        models = {model.name_id: model for model in self._models.values()}
        puts: list[tuple[bytes, bytes]] = []
        keys: list[bytes] = []
        deletes: list[bytes] = []
        counts: dict[int, Counts] = {}
        gone_models: list[str] = []
        reasons = Counter[str]()
        lost = 0
        for one, number_bytes in zip(by_id.values(), numbers, strict=True):
            if number_bytes is not None:
                announced, spec = self._entry(number_bytes)
                if announced.said_s > one.said_s:
                    continue
                if one.reason in LOST and self._lost_count + lost < LOST_PACKS_MAX:
                    entry = msgspec.msgpack.encode(entry_of(announced, spec))
                    puts.append((layout.GONE + number_bytes, entry))
                    lost += 1
                reasons[one.reason] += 1
                keys += (own := layout.keys_of(announced, number_bytes))
                deletes += [layout.ID + one.id, layout.PACK + number_bytes, *own]
                deletes += layout.until_key(announced, number_bytes)
                deletes += layout.under_key(announced, number_bytes)
                counts[spec] = _plus(counts.get(spec) or self._counts[spec], announced, -1)
            elif (model := models.get(one.id)) is not None:
                if model.said_s > one.said_s:
                    continue
                gone_models.append(model.name)
                deletes.append(layout.MODEL + model.name.encode())
            elif one.id in voids and voids[one.id].said_s >= one.said_s:
                continue
            void = _Void(one.said_s, self.clock(), one.reason)
            puts.append((layout.VOID + one.id, msgspec.msgpack.encode(void)))
        self._rows.write(chain(puts, self._count_rows(counts)), deletes)
        self.removed_by += reasons
        self._lost_count += lost
        for name in gone_models:
            del self._models[name]
        for spec, count in counts.items():
            self._counts[spec] = count
        return reasons.total() + len(gone_models), keys

    def _discard(self, keys: Iterable[bytes]) -> None:
        """Of rows that are gone, where no other one has the same word."""
        for key in keys:
            beginning = key[: len(layout.KEY) + KEPT_BYTES]
            if not self._rows.keys(beginning, layout.behind(beginning), 1):
                self._filter.discard(layout.word(key))

    async def remove_all(self, some: Sequence[Removed]) -> None:
        """The same of any number, letting others run in between."""
        for one in some:
            _, keys = self._remove([one])
            for at in range(0, len(keys), TURN_LOOKS):
                self._discard(keys[at : at + TURN_LOOKS])
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _voids(self, ids: Sequence[bytes]) -> dict[bytes, _Void]:
        values = self._rows.get([layout.VOID + one_id for one_id in ids])
        both = zip(ids, values, strict=True)
        return {one_id: layout.decoded(value, _Void) for one_id, value in both if value is not None}

    def void_until_s(self, ids: Sequence[bytes]) -> float:
        """Whoever announces these again says so later than that; 0.0 where none was removed. Raises CatalogueDamaged."""
        return max((void.said_s for void in self._voids(ids).values()), default=0.0)

    async def removals(self, packs: Sequence[Announced], reason: Reason) -> list[Removed]:
        """Of these, and of all that hangs on them and on nothing else. Raises CatalogueDamaged."""
        found = {one.pack.id: removed(one, reason) for one in packs}
        waiting = deque(packs)
        while waiting:
            gone = waiting.popleft()
            blocks = gone.pack.header.each_hash()
            while some := list(islice(blocks, TURN_LOOKS)):
                for one in self._hanging(gone.pack.header.spec, some, found):
                    found[one.pack.id] = removed(one, Reason.HANGING)
                    waiting.append(one)
                await asyncio.sleep(0)
        return list(found.values())

    def _hanging(
        self, spec: NamespaceSpec, blocks: Sequence[bytes], gone: Collection[bytes]
    ) -> list[Announced]:
        """What follows on these blocks, and on nothing else that is left without these ids."""
        found: dict[bytes, Announced] = {}
        for block in blocks:
            key = spec.digest + block
            for row in self._rows.with_prefix(
                layout.UNDER + layout.digest(block, layout.seed_of(spec.digest))
            ):
                child = self._entry(row[PREFIX_BYTES:])[0]
                header = child.pack.header
                is_under = header.spec.digest + header.parent == key and child.pack.id not in gone
                if is_under and self.find([key], gone) == [None]:
                    found[child.pack.id] = child
        return list(found.values())

    def is_over(self, pack_id: bytes, put_s: float) -> bool:
        """Whether a pack, if it was put then, was removed because its life was over. Raises CatalogueDamaged."""
        void = self._voids([pack_id]).get(pack_id)
        return void is not None and void.reason == Reason.OVER and put_s <= void.said_s

    def removed(self) -> Iterator[list[Removed]]:
        """All that is remembered, as `chunks`. What was read VOIDS_KEPT_S ago is forgotten: whoever has not said by now that it is
        there again, and had said so before, has been away for so long that others ask the bucket."""
        start, end, before_s = layout.VOID, layout.behind(layout.VOID), self.clock() - VOIDS_KEPT_S
        while found := self._rows.scan(start, end, CATALOGUE_CHUNK_PACKS):
            voids = [(key, layout.decoded(value, _Void)) for key, value in found]
            old = [key for key, void in voids if void.read_s < before_s]
            if old:
                self._rows.write((), old)
            yield [
                Removed(key[len(layout.VOID) :], void.said_s, void.reason)
                for key, void in voids
                if void.read_s >= before_s
            ]
            start = found[-1][0] + b"\0"

    def outlived(self, now_s: float) -> Iterator[list[Announced]]:
        """Packs that were worth keeping until then and no longer, those first that should have gone first. As `chunks`."""
        start, end = layout.UNTIL, layout.UNTIL + max(0, int(now_s)).to_bytes(layout.UNTIL_BYTES, "big")
        while keys := self._rows.keys(start, end, CATALOGUE_CHUNK_PACKS):
            yield [announced for announced, _ in self._entries([key[-layout.NUMBER_BYTES :] for key in keys])]
            start = keys[-1] + b"\0"

    # -- asking ----------------------------------------------------------------------

    def held(self, namespace: bytes, hash_bytes: int, hashes: bytes, start: int) -> int:
        """The end, in blocks, of the durable prefix behind the first `start` blocks; `start` if there is none.

        By halves, because the durable set is closed under prefixes. Reads memory only, may be wrong in both
        directions. From any thread.
        """
        seed, words, digest = layout.seed_of(namespace), self._filter, xxhash.xxh3_64_intdigest
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
        return not self.loaded or layout.digest_word(key) in self._filter

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

    async def find_all(self, keys: Sequence[bytes], but: Collection[bytes] = ()) -> list[Spot | None]:
        """The same of any number, letting others run in between."""
        spots: list[Spot | None] = []
        for at in range(0, len(keys), TURN_LOOKS):
            if at:
                await asyncio.sleep(0)
            spots += self.find(keys[at : at + TURN_LOOKS], but)
        return spots

    async def packs_all(self, ids: Sequence[bytes]) -> list[Announced | None]:
        """`packs` of any number, letting others run in between."""
        found: list[Announced | None] = []
        for at in range(0, len(ids), TURN_LOOKS):
            if at:
                await asyncio.sleep(0)
            found += self.packs(ids[at : at + TURN_LOOKS])
        return found

    def packs(self, ids: Sequence[bytes]) -> list[Announced | None]:
        """What is known of these packs, None of those that are not. Raises CatalogueDamaged."""
        return [one and one.announced for one in self.numbered(ids)]

    def numbered(self, ids: Sequence[bytes]) -> list[Numbered | None]:
        """The same with their numbers. Raises CatalogueDamaged."""
        numbers = self._rows.get([layout.ID + pack_id for pack_id in ids])
        entries = iter(self._entries([number for number in numbers if number is not None]))
        return [
            None if number is None else Numbered(int.from_bytes(number, "big"), next(entries)[0])
            for number in numbers
        ]

    def _look_up(self, key: bytes, packs: dict[bytes, Announced], but: Collection[bytes]) -> Spot | None:
        if not self.may_have(key):
            return None
        word = layout.digest(key[NAMESPACE_BYTES:], layout.seed_of(key[:NAMESPACE_BYTES]))
        for row in self._rows.with_prefix(layout.KEY + word):
            number_bytes, index = (
                row[PREFIX_BYTES : -layout.INDEX_BYTES],
                int.from_bytes(row[-layout.INDEX_BYTES :], "big"),
            )
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
        values = self._rows.get([layout.PACK + number for number in numbers])
        if None in values:
            raise CatalogueDamaged(f"a pack without its row: {numbers[values.index(None)].hex()}")
        return [self._announced(value) for value in values if value is not None]

    def _announced(self, value: bytes) -> tuple[Announced, int]:
        entry = layout.decoded(value, Entry)
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
        start, end = layout.PACK + first.to_bytes(layout.NUMBER_BYTES, "big"), layout.behind(layout.PACK)
        counted, count = self.counts.packs + self.removed_by.total(), 0
        while found := self._rows.scan(start, end, CATALOGUE_CHUNK_PACKS):
            count += len(found)
            yield [self._announced(value)[0] for _, value in found]
            start = found[-1][0] + b"\0"
        counted -= self.removed_by.total()
        if first <= 1 and count < counted:
            raise CatalogueDamaged(f"{count} packs were found where {counted} are counted")

    def lost(self, now_s: float) -> Iterator[list[Announced]]:
        """Packs that were lost. Those whose life is over are forgotten: nothing that hung on one of them was kept for longer.
        As `chunks`."""
        start, end, over_s = layout.GONE, layout.behind(layout.GONE), now_s - LOST_KEPT_S
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
        start, end = layout.PACK, layout.PACK + behind.to_bytes(layout.NUMBER_BYTES, "big")
        while found := self._rows.keys(start, end, CATALOGUE_CHUNK_PACKS):
            numbers = [key[len(layout.PACK) :] for key in found]
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
        rows = self._rows.keys(
            layout.KEY + first.to_bytes(PARTITION_BYTES, "big"), layout.behind(layout.KEY), limit
        )
        if len(rows) < limit:
            end = PARTITIONS
        else:
            end = _partition(rows[-1])  # of which there may be more
            if end == first:
                self._load_slice(2 * limit)
                return
        prints: dict[int, dict[int, None]] = {}
        from_bytes = int.from_bytes
        behind_partition, behind_kept = len(layout.KEY) + PARTITION_BYTES, len(layout.KEY) + KEPT_BYTES
        for row in rows:
            partition = prints.setdefault(_partition(row), {})
            partition[from_bytes(row[behind_partition:behind_kept], "big")] = None
        for partition_number, found in prints.items():
            if partition_number < end:
                self._filter.fill(partition_number, found)
        self._loaded_partitions = end


def _slices(entries: Sequence[Announced]) -> Iterator[list[Announced]]:
    """A pack costs as much as some blocks."""
    some, looks = list[Announced](), 0
    for entry in entries:
        if some and looks + entry.blocks > TURN_BLOCKS:
            yield some
            some, looks = [], 0
        some.append(entry)
        looks += entry.blocks + PACK_COSTS_BLOCKS
    if some:
        yield some


def _partition(row: bytes) -> int:
    return int.from_bytes(row[len(layout.KEY) : len(layout.KEY) + PARTITION_BYTES], "big")


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
