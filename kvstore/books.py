"""The books: index, arena, NVMe rows, leases and policies tell one story.

Run by every test, when the daemon idles, and by `kvstore fsck`. It changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore import index
from kvstore.blocks import IN_DRAM, IN_NVME, NO_SLOT, Block
from kvstore.leases import ReadLease, WriteLease
from kvstore.namespaces import Namespace

if TYPE_CHECKING:
    from kvstore.engine import Engine


def check(engine: Engine) -> list[str]:
    """One line per violated invariant, empty when sound."""
    problems = list(engine.arena.check())
    if engine.nvme is not None:
        problems += engine.nvme.check()
    blocks = [block for namespace in engine.namespaces for block in namespace.blocks.values()]
    for namespace in engine.namespaces:
        problems += index.check(namespace)
    problems += _check_dram(engine, blocks)
    problems += _check_nvme(engine, blocks)
    problems += _check_pins(engine, blocks)
    problems += engine.accounts.check()
    problems += _check_quotas(engine)
    if engine.adoption.done:
        problems += engine.retention.check()
    return problems


def _check_dram(engine: Engine, blocks: list[Block]) -> list[str]:
    problems = []
    resident = [block for block in blocks if block.where & IN_DRAM]
    for block in blocks:
        if bool(block.where & IN_DRAM) != (block.slot != NO_SLOT):
            problems.append(f"dram: block {block.hash[:8].hex()}: where and slot disagree")
        elif block.slot != NO_SLOT and engine.arena.record(block.slot).key != block.key:
            problems.append(f"dram: slot {block.slot} holds another key than block {block.hash[:8].hex()}")
    ready = engine.arena.stats().records
    if ready != len(resident):
        problems.append(f"dram: {ready} READY slots in the arena, {len(resident)} blocks in the index")
    return problems


def _check_nvme(engine: Engine, blocks: list[Block]) -> list[str]:
    if (
        not engine.room.nvme_ready
        or engine.nvme is None
        or not engine.demoter.idle
        or engine.promoter.underway
        or engine.watch.blocks_underway()
    ):
        return []  # rows are being written or dropped right now
    held = [block.namespace for block in blocks if block.where & IN_NVME]
    stats = engine.nvme.stats()
    given_up = len(engine.room.doomed) + len(engine.room.deleting) + engine.counters.dooms_dropped
    if not len(held) <= stats.records <= len(held) + given_up:
        return [f"nvme: {stats.records} rows, {len(held)} blocks in the index, {given_up} rows given up"]
    counted = sum(engine.room.slot_bytes(namespace, IN_NVME) for namespace in held)
    if stats.classes and not given_up and counted != stats.used_bytes:
        return [f"nvme: {stats.used_bytes} bytes in use, {counted} by the sizes of its blocks"]
    return []


def _check_quotas(engine: Engine) -> list[str]:
    on_the_way: Counter[tuple[Namespace, int]] = Counter()
    for session in engine.sessions:
        for lease in session.leases.values():
            if isinstance(lease, WriteLease):
                on_the_way[lease.namespace, IN_DRAM] += len(lease.slots)
    on_the_way.update((block.namespace, IN_DRAM) for block in engine.promoter.blocks_with_slots())
    on_the_way.update((block.namespace, IN_NVME) for block in engine.demoter.blocks_underway())
    return engine.room.quotas.check(engine.namespaces, on_the_way)


def _check_pins(engine: Engine, blocks: list[Block]) -> list[str]:
    problems = []
    held: Counter[Block] = Counter()
    for session in engine.sessions:
        for lease in session.leases.values():
            if isinstance(lease, ReadLease):
                held.update(block for block in lease.blocks if block is not None)
    held.update(engine.promoter.blocks_underway())
    held.update(engine.demoter.blocks_underway())
    held.update(engine.watch.blocks_underway())
    for block in blocks:
        if block.pins != held[block]:
            problems.append(f"leases: block {block.hash[:8].hex()}: {block.pins} pins, {held[block]} holders")
    for namespace in engine.namespaces:
        leased = {
            lease.hashes[position]
            for session in engine.sessions
            for lease in session.leases.values()
            if isinstance(lease, WriteLease) and lease.namespace is namespace
            for position in lease.slots
        }
        if leased != namespace.writing:
            problems.append(
                f"leases: namespace {namespace.id}: blocks being written and write leases disagree"
            )
    return problems
