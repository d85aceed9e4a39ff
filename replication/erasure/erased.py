"""Erased: the tombstones of a region that are known, and what they forbid.

    bucket ─▶ look ─▶ known ─▶ forbids: these blocks?      end: how far may a prompt be used?      any thread

One loop calls `look`; everybody else asks. What is known is replaced by one assignment, so nobody sees half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from replication.constants import SPECS_CHOSEN_MAX
from replication.formats.tombstones import Tombstone, read_tombstones
from replication.problems import Problems
from tiers.bucket.objects import Objects
from tiers.namespace_spec import NamespaceSpec


class _Named(NamedTuple):
    """What tombstones name of one namespace, and until when. whole_until_s: all of it; blocks: what is behind these."""

    whole_until_s: float
    blocks: dict[bytes, int]
    tombstones: Sequence[Tombstone]


class _Known(NamedTuple):
    """by_subject: by the namespaces that they name, or by the tenant: there may be thousands of others. named: by namespace and its
    tenant, as it was asked for."""

    by_id: dict[str, Tombstone]
    by_subject: dict[bytes | str, list[Tombstone]]
    named: dict[tuple[bytes, str], _Named]

    @classmethod
    def of(cls, by_id: dict[str, Tombstone]) -> _Known:
        by_subject: dict[bytes | str, list[Tombstone]] = {}
        for one in by_id.values():
            for subject in one.namespaces or (one.tenant,):
                by_subject.setdefault(subject, []).append(one)
        return cls(by_id, by_subject, {})


class Erased:
    """Of one region, for as long as its process lives. is_read: all that the bucket has were read, once, but for those that nobody
    can read: these are problems. unavailable: why some could not be read when it was looked last, "" if all could."""

    def __init__(self, over_s: Callable[[], float] = lambda: 0.0, known: Iterable[Tombstone] = ()) -> None:
        """over_s: what has ended by then is over, unix seconds by the clock of the store; as long as nobody knows that, nothing is.
        known: what an earlier life was told, in force before anything is read."""
        self.is_read = False
        self.unavailable = ""
        self.problems = Problems()
        self.over_s = over_s
        self._read: set[str] = set()  # names and ETags
        self._heard: dict[str, Tombstone] = {}  # by id, read in this life
        self._known = _Known.of({one.id: one for one in known})

    @property
    def tombstones(self) -> list[Tombstone]:
        """Those that are watched for now."""
        over_s = self.over_s()
        return [tombstone for tombstone in self._known.by_id.values() if over_s < tombstone.watched_until_s]

    def naming(self, spec: NamespaceSpec) -> list[Tombstone]:
        """Of these, those that name a namespace."""
        over_s = self.over_s()
        return [tombstone for tombstone in self._of(spec).tombstones if over_s < tombstone.watched_until_s]

    async def look(self, objects: Objects) -> list[Tombstone]:
        """Learn of new tombstones. Returns those by which something is to be erased, once more perhaps, or kept again. Raises ObjectError where
        there is no list; what can be read is learned in any case."""
        self.problems.where = objects.where
        members = await read_tombstones(objects, self._read, self.problems)
        read, self.unavailable = members.by_key, members.unavailable
        by_id, before = self._heard, self._known.by_id
        over_s = self.over_s()  # what is over erases nothing, though somebody may put it again
        newer = {one.id: one for one in read.values() if one.id not in by_id or one.outranks(by_id[one.id])}
        known = {**{one.id: one for one in before.values() if newer.get(one.id, one).is_taken_back}, **by_id}
        news = [one for one in newer.values() if _is_news(one, known.get(one.id), over_s)]
        if read:
            self._heard = {**by_id, **newer}
            highest = [
                one for one in newer.values() if one.id not in before or not before[one.id].outranks(one)
            ]
            self._known = _Known.of({**before, **{one.id: one for one in highest}})
            self._read |= read.keys()
        self.is_read = self.is_read or not self.unavailable
        return news

    def forbids(self, spec: NamespaceSpec, hashes: bytes = b"") -> bool:
        """Whether these blocks of a namespace, or one before them in `hashes`, are erased."""
        if self.over_s() < self._of(spec).whole_until_s:
            return True
        count = len(hashes) // spec.hash_bytes
        return self.end(spec, hashes, 0, count) < count

    def end(self, spec: NamespaceSpec, hashes: bytes, start: int, end: int) -> int:
        """How many of the first `end` blocks of a prompt may be used, if all before `start` may: up to what is erased, never less
        than `start`.

        About 0.2 ms for 2,048 blocks of a namespace of which prefixes are erased, however many; 1 µs of any other.
        """
        named, size = self._of(spec), spec.hash_bytes
        if named is _NOTHING:
            return max(start, end)
        over_s = self.over_s()
        if over_s < named.whole_until_s:
            return start
        if named.blocks:
            blocks = [hashes[at : at + size] for at in range(start * size, end * size, size)]
            if not named.blocks.keys().isdisjoint(blocks):
                alive = (at for at, block in enumerate(blocks, start) if over_s < named.blocks.get(block, 0))
                end = next(alive, end)
        return max(start, end)

    def _of(self, spec: NamespaceSpec) -> _Named:
        by_id, by_subject, named = self._known
        if not by_id:
            return _NOTHING
        name = spec.digest, spec.fields.get("tenant", "")
        found = named.get(name)
        if found is None:
            found = _named(spec, [*by_subject.get(name[0], ()), *by_subject.get(name[1], ())])
            if len(named) >= SPECS_CHOSEN_MAX:
                named.clear()
            named[name] = found
        return found


_NOTHING = _Named(0.0, {}, ())


def _is_news(one: Tombstone, known: Tombstone | None, over_s: float) -> bool:
    """Whether what a newer one names is to be erased: it was not, it was erased again, or it was not watched for any more. Or is not to
    be any more."""
    if one.is_taken_back:
        return known is not None and over_s < known.watched_until_s
    is_again = known is None or one.serial > known.serial or known.watched_until_s <= over_s
    return is_again and over_s < one.watched_until_s


def _named(spec: NamespaceSpec, tombstones: Iterable[Tombstone]) -> _Named:
    whole_until_s, blocks = 0.0, dict[bytes, int]()
    naming = [tombstone for tombstone in tombstones if tombstone.names(spec)]
    for tombstone in naming:
        if tombstone.block_hash:
            blocks[tombstone.block_hash] = max(tombstone.watched_until_s, blocks.get(tombstone.block_hash, 0))
        else:
            whole_until_s = max(whole_until_s, tombstone.watched_until_s)
    return _Named(whole_until_s, blocks, naming) if naming else _NOTHING
