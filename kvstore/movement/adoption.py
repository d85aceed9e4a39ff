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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kvstore.constants import ADOPT_SLICE_ROWS
from kvstore.index.block import Block, Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.levels import Member
from kvstore.residency.residency import AdoptedRow, Residency
from tiers.base import NAMESPACE_BYTES
from tiers.device_table import Row
from tiers.errors import OpenError

log = logging.getLogger("kvstore.movement.adoption")

Rows = Sequence[Row]


class Adoption:
    """Fills the index from the arena and the devices."""

    def __init__(
        self,
        residency: Residency,
        namespaces: NamespaceRegistry,
        ready: Callable[[], None],
        adopted: Callable[[bool], None],
    ) -> None:
        """`ready` is called when one more device may be written to; `adopted` when the arena is in the index
        (False), and when everything is (True)."""
        self._residency = residency
        self._namespaces = namespaces
        self._ready = ready
        self._adopted = adopted
        self._reading: set[int] = set()  # devices

    @property
    def done(self) -> bool:
        """Whether every device that could be read is in the index."""
        return not self._reading

    def start(self) -> None:
        """Adopt the arena, and begin to read the devices."""
        self._adopt_arena()
        members = self._residency.nvme.members
        self._reading = {member.number for member in members}
        self._adopted(not members)
        for member in members:
            self._read_next(member, None)

    def _read_next(self, member: Member, scan: Iterator[Rows] | None) -> None:
        def work() -> tuple[Iterator[Rows], Rows | None] | None:
            rows = scan
            if rows is None:
                try:
                    member.device.open()
                except OpenError as error:
                    member.left_alone = str(error)
                    return None
                rows = member.device.scan()
            return rows, next(rows, None)

        def done(read: tuple[Iterator[Rows], Rows | None] | None) -> None:
            if read is None:
                member.left_alone = member.left_alone or "cannot be read"
                log.error("%s is left alone until the next start: %s", member.name, member.left_alone)
                self._reading.discard(member.number)
                self._adopted(self.done)
                return
            rows, chunk = read
            if chunk is None:
                self._settle_next(member, self._leaves(member))
                return
            self._load(member, chunk)
            self._read_next(member, rows)

        member.io.submit(work, done, failed=None)

    def _load(self, member: Member, rows: Rows) -> None:
        for namespace, run in self._by_namespace(member, rows):
            self._residency.adopted_on_nvme(member, namespace, run)

    def _leaves(self, member: Member) -> Iterator[list[Block]]:
        """Slices of the blocks on this device that nothing on NVMe hangs on, of one namespace each."""
        for namespace in list(self._namespaces):
            blocks = namespace.blocks.walk()
            while chunk := list(islice(blocks, ADOPT_SLICE_ROWS)):
                here = (block for block in chunk if block.where & IN_NVME and block.device == member.number)
                yield [block for block in here if not block.has_child_in(IN_NVME)]

    def _settle_next(self, member: Member, leaves: Iterator[list[Block]]) -> None:
        """Tell the policies who may leave, a slice at a time between requests; then the device is ready."""
        slice_ = next(leaves, None)
        if slice_ is None:
            self._finish(member)
            return
        self._residency.settle(*slice_)
        member.io.submit(lambda: None, lambda _: self._settle_next(member, leaves), failed=None)

    def _finish(self, member: Member) -> None:
        member.became_ready()
        self._reading.discard(member.number)
        self._residency.writes.forget_written()
        self._ready()
        self._adopted(self.done)

    def _by_namespace(self, member: Member, rows: Rows) -> Iterable[tuple[Namespace, list[AdoptedRow]]]:
        found: dict[tuple[bytes, int, bytes], tuple[Namespace | None, list[AdoptedRow]]] = {}
        digest, size, cut = b"", -1, b""  # of the row before: most have a neighbour of their namespace
        for slot, key, parent, size_bytes, _, stored_s, columns in rows:
            if size_bytes != size or columns != cut or not key.startswith(digest):
                kind = digest, size, cut = key[:NAMESPACE_BYTES], size_bytes, columns
                if kind not in found:
                    found[kind] = self._namespaces.found(key, size_bytes, columns), []
                namespace, run = found[kind]
            if namespace is None:
                member.drop(slot)  # not as its namespace's records are: nobody can ask for it
            else:
                run.append((key[NAMESPACE_BYTES:], parent[NAMESPACE_BYTES:], slot, stored_s))
        return [(namespace, run) for namespace, run in found.values() if namespace is not None]

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
