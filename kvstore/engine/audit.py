"""The audit: proves that index, arena, devices, leases, quotas and totals agree.

    arena slice ─▶ leases ─▶ index slice ─▶ index slice ─▶ … ─▶ sums        requests are served in between

It changes nothing, touches no device, and comes in steps, so that it may run in a daemon that serves.
Two kinds of truths:

* what is true of one block at any moment (its slot, its parent, its prefix) is proven always;
* sums (slots and blocks, pins and leases, bytes and quotas) are compared only if nothing changed while
  they were counted. Else they are counted again, AUDIT_TRIES_MAX times in all, and then left alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, islice

from kvstore.constants import STEP_SLOW_BLOCKS
from kvstore.engine.parts import Parts
from kvstore.engine.sessions import ReadLease, WriteLease
from kvstore.index import forest
from kvstore.index.block import NO_SLOT, Block, Namespace
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.steps import Steps

AUDIT_TRIES_MAX = 3  # times that sums are counted while something changes, before they are left alone
# Of a device's slots; a prime, because slots are numbered from slab to slab in steps of a power of two.
SLOT_PARTS = 4093


def check_steps(engine: Parts) -> Steps[list[str]]:
    """One line per violated invariant, empty when sound."""
    for _ in range(AUDIT_TRIES_MAX):
        before = _state(engine)
        count = _Count(engine)
        yield from count.all()
        if before == _state(engine):
            return count.problems + count.wrong_sums
    return count.problems


def _state(engine: Parts) -> list[object]:
    """Something that differs after any change of what the sums are about."""
    return [
        engine.counters.as_dict(),
        engine.arena.stats(),
        [(member.device.stats(), member.dropped, member.device.aside) for member in engine.nvme.members],
        [(number, len(session.leases)) for number, session in enumerate(engine.sessions)],
        [(namespace.id, len(namespace.blocks), len(namespace.writing)) for namespace in engine.namespaces],
        list(engine.loader.waiting),
        list(engine.writer.writing),
        list(engine.verifier.pinned()),
        [list(watch.pinned()) for watch in engine.watches],
        engine.persister.pinned() if engine.persister is not None else [],
        engine.retention.book.rules(),
        engine.blocks.guards.changes,
        engine.adoption.done,
        engine.models.changes(),
    ]


class _Count:
    """One pass over everything. problems: true whatever else happened; wrong_sums: if nothing did."""

    def __init__(self, engine: Parts) -> None:
        self.problems: list[str] = []
        self.wrong_sums: list[str] = []
        self._engine = engine
        self._pins: Counter[Block] = Counter()
        self._held: Counter[tuple[Namespace, int]] = Counter()  # records in the index, by tier
        self._coming: Counter[tuple[Namespace, int]] = Counter()  # that have a slot, not in the index yet
        # By slot, in many small dicts: one that grows, or goes, holds up the loop for as long as it has entries.
        self._on_device: list[list[dict[int, Block]]] = [
            [{} for _ in range(SLOT_PARTS)] for _ in engine.nvme.members
        ]

    def all(self) -> Steps[None]:
        engine = self._engine
        for lines in engine.arena.check_slices():
            self.wrong_sums += lines
            yield
        yield from self._count_leases()
        for namespace in list(engine.namespaces):
            yield from self._count_blocks(namespace)
        self._compare_dram()
        self._compare_nvme()
        for parts in self._on_device:
            while parts:
                parts.pop()
                yield
        self.wrong_sums += engine.models.check()
        slices = [
            engine.blocks.quotas.check_slices(engine.namespaces, self._held, self._coming),
            engine.accounts.check_slices(),
            engine.retention.check_slices() if engine.adoption.done else iter(()),
        ]
        for lines in chain.from_iterable(slices):
            self.wrong_sums += lines
            yield

    def _count_leases(self) -> Steps[None]:
        """What leases and I/O jobs hold: pins, and slots that are being filled."""
        engine = self._engine
        reads: Iterator[Block] = chain(
            engine.loader.pinned(),
            list(engine.writer.writing),
            engine.verifier.pinned(),
            *(watch.pinned() for watch in engine.watches),
            engine.persister.pinned() if engine.persister is not None else (),
        )
        self._pins.update(reads)
        self._coming.update((block.namespace, IN_DRAM) for block in engine.loader.blocks_with_slots())
        self._coming.update((block.namespace, IN_NVME) for block in engine.writer.writing)
        written: defaultdict[Namespace, set[bytes]] = defaultdict(set)
        for session in list(engine.sessions):
            for lease in list(session.leases.values()):
                if isinstance(lease, ReadLease):
                    self._pins.update(block for block in lease.blocks if block is not None)
                elif isinstance(lease, WriteLease):
                    self._coming[lease.namespace, IN_DRAM] += len(lease.slots)
                    written[lease.namespace].update(map(lease.hashes.__getitem__, lease.slots))
                yield
        for namespace in engine.namespaces:
            if written[namespace] != namespace.writing:
                self.wrong_sums.append(
                    f"leases: namespace {namespace.id}: blocks being written and write leases disagree"
                )

    def _count_blocks(self, namespace: Namespace) -> Steps[None]:
        known = namespace.blocks
        walk = known.walk_items()
        while piece := list(islice(walk, STEP_SLOW_BLOCKS)):
            for block_hash, block in piece:
                if known.get(block_hash) is not block:
                    continue  # it went meanwhile
                self.problems += forest.check_block(namespace, block_hash, block)
                self._count_block(block)
                if block.children is not None:
                    self.problems += yield from forest.check_children(block)
            yield

    def _count_block(self, block: Block) -> None:
        where, name = block.where, block.hash[:8].hex()
        if bool(where & IN_DRAM) != (block.slot != NO_SLOT):
            self.problems.append(f"dram: block {name}: where and slot disagree")
        elif where & IN_DRAM and self._engine.arena.record(block.slot).key != block.key:
            self.problems.append(f"dram: slot {block.slot} holds another key than block {name}")
        if where & IN_DRAM:
            self._held[block.namespace, IN_DRAM] += 1
        if where & IN_NVME:
            self._held[block.namespace, IN_NVME] += 1
            device, slot = block.place
            if self._on_device[device][slot % SLOT_PARTS].setdefault(slot, block) is not block:
                self.wrong_sums.append(f"nvme: slot {slot} of device {device} has two blocks")
        if block.pins != self._pins[block]:
            self.wrong_sums.append(f"leases: block {name}: {block.pins} pins, {self._pins[block]} holders")

    def _compare_dram(self) -> None:
        ready = self._engine.arena.stats().records
        resident = sum(count for (_, bit), count in self._held.items() if bit == IN_DRAM)
        if ready != resident:
            self.wrong_sums.append(f"dram: {ready} READY slots in the arena, {resident} blocks in the index")

    def _compare_nvme(self) -> None:
        engine = self._engine
        for member in engine.nvme.members:
            if not member.ready or any(m is member for m in engine.writer.writing.values()):
                continue
            used = sum(each.used for each in member.device.stats().classes)
            held = sum(map(len, self._on_device[member.number]))
            if used != held + member.dropped + member.device.aside:
                self.wrong_sums.append(
                    f"nvme: {member.name}: {used} slots in use, {held} blocks, {member.dropped} dropped"
                )
