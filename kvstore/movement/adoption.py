"""Adoption: what the owned levels still hold when a daemon starts becomes the index.

    arena rows (READY) ─▶ in DRAM, unverified until their checksum matched             at once
    rows of a device   ─▶ on NVMe (their checksum is compared at every read)    in slices, each
                          device in its own thread: one that hangs or is damaged holds up no other

The daemon answers from its first moment, with what is in the index until then. Nothing is
written to a device, or evicted from it, before its scan is complete, because only then its
free slots are known.

Recency is not stored: the order of eviction starts anew, with what is asked for first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice

from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.residency_bits import IN_DRAM
from kvstore.residency.levels import Member
from kvstore.residency.residency import AdoptedRow, Residency
from kvstore.steps import Steps
from tiers.base import NAMESPACE_BYTES
from tiers.errors import OpenError
from tiers.nvme.device_table import Piece

ADOPT_ANSWERS_S = 5.0  # for a device to be opened, and for each piece of it
ADOPT_PIECES = 1  # pieces of 512 rows that are read at a time while starting
ADOPT_ROWS = 128  # rows indexed between two looks at requests: less than a millisecond, but parts may split

log = logging.getLogger("kvstore.movement.adoption")

Kind = tuple[bytes, int, bytes]  # of rows: their namespace's digest, the size of their records, its columns
Run = tuple[Kind, list[AdoptedRow]]


class Adoption:
    """Fills the index from the arena and the devices."""

    def __init__(
        self,
        residency: Residency,
        namespaces: NamespaceRegistry,
        ready: Callable[[], None],
        adopted: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ready` is called when one more device may be written to; `adopted` when the arena is in the index
        (False), and when everything is (True)."""
        self._residency = residency
        self._namespaces = namespaces
        self._ready = ready
        self._adopted = adopted
        self._clock = clock
        self._reading: dict[int, float] = {}  # devices, and when each was heard of last
        self.is_cleared: Callable[[str, bytes], bool] = lambda disk, digest: False

    @property
    def done(self) -> bool:
        """Whether every device that could be read is in the index."""
        return not self._reading

    @property
    def is_reading(self) -> bool:
        """Whether rows are coming in. A device that does not answer is not waited for."""
        return any(self._clock() - heard_s < ADOPT_ANSWERS_S for heard_s in self._reading.values())

    def start(self) -> None:
        """Adopt the arena, and begin to read the devices."""
        self._adopt_arena()
        members = self._residency.nvme.members
        self._reading = {member.number: self._clock() for member in members}
        self._adopted(not members)
        for member in members:
            self._read_next(member, None)

    def again(self, member: Member, tried: Callable[[], None]) -> None:
        """Try to open one that was left alone. `tried` is called when that is known."""

        def work() -> str:
            try:
                member.device.open()
            except OpenError as error:
                return str(error)
            return ""

        def done(problem: str) -> None:
            if not problem:
                log.info("%s is used: %s", member.name, member.directory)
                self._read_next(member, member.device.scan())
            member.left_alone = problem
            tried()

        member.io.submit(work, done, failed=member.left_alone)

    def _read_next(self, member: Member, scan: Iterator[Piece] | None) -> None:
        self._reading[member.number] = self._clock()

        def work() -> tuple[Iterator[Piece], list[Run]] | None:
            rows = scan
            if rows is None:
                try:
                    member.device.open()
                except OpenError as error:
                    member.left_alone = str(error)
                    return None
                rows = member.device.scan()
            try:
                return rows, [run for piece in islice(rows, ADOPT_PIECES) for run in runs_of(piece)]
            except OSError as error:
                member.left_alone = f"cannot be read: {error.strerror or error}"
                return None

        def done(read: tuple[Iterator[Piece], list[Run]] | None) -> None:
            if read is None:
                member.left_alone = member.left_alone or "cannot be read"
                self._reading.pop(member.number, None)
                self._adopted(self.done)
                return
            rows, runs = read
            if not runs:
                self._finish(member)
                return
            self._residency.background.begin(self._load_steps(member, rows, runs))

        member.io.submit(work, done, failed=None)

    def _load_steps(self, member: Member, rows: Iterator[Piece], runs: list[Run]) -> Steps[None]:
        for kind, run in runs:
            for at in range(0, len(run), ADOPT_ROWS):
                if at:
                    yield
                self._load(member, kind, run[at : at + ADOPT_ROWS])
        self._read_next(member, rows)

    def _load(self, member: Member, kind: Kind, run: list[AdoptedRow]) -> None:
        digest, size_bytes, columns = kind
        namespace = self._namespaces.found(digest + run[0][0], size_bytes, columns)
        if namespace is not None and not self.is_cleared(member.device.disk, digest):
            self._residency.adopted_on_nvme(member, namespace, run)
        else:
            # Cleared meanwhile; or not as its namespace's records are, so that nobody can ask for it.
            for _, _, slot, _ in run:
                member.drop(slot)

    def _finish(self, member: Member) -> None:
        member.became_ready()
        self._reading.pop(member.number, None)
        self._residency.background.begin(self._residency.writes.forget_written_steps())
        self._ready()
        self._adopted(self.done)

    def _adopt_arena(self) -> None:
        residency = self._residency
        for slot, record in residency.arena.adopted_slots():
            namespace = self._namespaces.found(record.key, record.size_bytes, record.columns)
            block_hash = record.key[NAMESPACE_BYTES:]
            known = namespace.blocks.get(block_hash) if namespace is not None else None
            if namespace is None or (known is not None and known.where & IN_DRAM):
                residency.arena.free_run([slot])
                continue
            parent = record.parent[NAMESPACE_BYTES:]
            residency.adopted_in_dram(namespace, block_hash, parent, slot, record.stored_s)
            residency.counters.adopted += 1
        for block in residency.unverified:
            residency.settle(block)


def runs_of(piece: Piece) -> list[Run]:
    """The rows by their kind. Called in the thread that read them: the engine's thread gets fewer objects."""
    digests = [key[:NAMESPACE_BYTES] for key in piece.keys]
    hashes = [key[NAMESPACE_BYTES:] for key in piece.keys]
    above = [parent[NAMESPACE_BYTES:] for parent in piece.parents]
    run = list(zip(hashes, above, piece.slots, piece.stored_s, strict=True))
    kinds = digests, piece.sizes_bytes, piece.columns
    if all(field.count(field[0]) == len(run) for field in kinds):
        return [((digests[0], piece.sizes_bytes[0], piece.columns[0]), run)]
    found: dict[Kind, list[AdoptedRow]] = {}
    for kind, row in zip(zip(*kinds, strict=True), run, strict=True):
        found.setdefault(kind, []).append(row)
    return list(found.items())
