"""Erasing: blocks that a tombstone names leave the tiers of this node, for good.

    tombstone ─▶ each namespace that it names ─▶ all blocks, or those behind one ─▶ dropped, leaves first, in slices

What is in use is tried again for a while. What comes anew meanwhile may be dropped, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from kvstore.index.block import Block, Namespace
from kvstore.index.namespaces import NamespaceRegistry, drop_some
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_ANY
from kvstore.residency.residency import Residency
from kvstore.retention.expiry import leaves_first
from replication.formats.tombstones import Tombstone

ERASE_STEP_BLOCKS = 100  # dropped between two yields
ERASE_TRIES_MAX = 600  # steps in a row in which everything left was in use; about ten minutes


@dataclass(slots=True, eq=False)
class _Task:
    namespace: Namespace
    block_hash: bytes  # b"": all of it
    tries: int = 0  # in a row that dropped nothing
    walk: Iterator[Block | None] = field(default_factory=lambda: iter(()))  # of what is behind that block


class Erasing:
    """Called from the engine's thread only."""

    def __init__(self, residency: Residency, namespaces: NamespaceRegistry) -> None:
        self._residency = residency
        self._namespaces = namespaces
        self._tasks: deque[_Task] = deque()

    def erase(self, tombstone: Tombstone) -> None:
        """Drop what it names, in the steps that follow."""
        for namespace in self._namespaces:
            if tombstone.names(namespace.spec):
                self._tasks.append(_Task(namespace, tombstone.block_hash))

    def step(self) -> bool:
        """Drop some blocks, for about a millisecond; whether there is more to do at once."""
        if not self._tasks:
            return False
        task = self._tasks.popleft()
        if task.block_hash:
            dropped, is_done = self._drop_behind(task)
        else:
            dropped = drop_some(task.namespace, self._drop)
            is_done = not task.namespace.blocks
        task.tries = 0 if dropped else task.tries + 1
        if not is_done and task.tries < ERASE_TRIES_MAX:
            self._tasks.append(task)
        return bool(dropped)

    def _drop(self, block: Block) -> bool:
        return self._residency.drop(block, outcomes.EXPIRED)

    def _drop_behind(self, task: _Task) -> tuple[int, bool]:
        """How many blocks were dropped of those that hang on one, itself included; and whether none is left."""
        blocks = task.namespace.blocks
        dropped, piece = 0, list(islice(task.walk, ERASE_STEP_BLOCKS))
        for block in piece:
            if block is not None and block.where & IN_ANY and block.children is None:
                dropped += self._drop(block)
        if len(piece) < ERASE_STEP_BLOCKS:  # the end of a pass: what was in use is tried again
            task.walk = leaves_first([blocks.get(task.block_hash)])
        return dropped, task.block_hash not in blocks
