"""Clearing: an operator empties this node's tiers of a tenant, a namespace, a prefix, or of everything.

    clear ─▶ pass: leaves first, in slices ─▶ what was in use? another pass ─▶ rows of NVMe cleared (uncleared.py) ─▶ answered
                  │
                  ├▶ pinned by a rule, or something pinned hangs on it: stays
                  └▶ in use, or something in use hangs on it: stays, unless it is given back soon

What is answered as cleared is gone for good: a restart does not find it again, nor on a disk that was away. Blocks that come meanwhile may be
cleared, too. The region's bucket is never touched; what is durable there is fetched again when it is asked for.
A namespace that has become empty and that no client uses is forgotten.

With `dry` nothing leaves: the same walk says what would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.commands.rule_names import one_namespace
from kvstore.commands.uncleared import EVERYTHING, Sweeps, Uncleared
from kvstore.constants import CLEARS_MAX, EXPIRY_LOOKS, EXPIRY_SLICE_S, RETENTION_DELETE_ROWS
from kvstore.errors import BadRequest, LimitExceeded, NotFound, NotReady
from kvstore.index.block import Block, Namespace
from kvstore.index.forest import all_leaves_first, leaves_first
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.io_pool import Io
from kvstore.movement.adoption import Adoption
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM, IN_NVME
from kvstore.residency.residency import Residency
from kvstore.retention.quotas import tenant_of
from kvstore.retention.rules import Book

CLEAR_PAUSE_S = 0.1  # between two passes of a clearing, when something was in use
CLEAR_USED_S = 3.0  # for which a clearing tries blocks in use again
# For rows of NVMe to be cleared: the answer does not wait longer for a device that hangs.
CLEAR_ROWS_S = 10.0


class Cleared(NamedTuple):
    """blocks: held when they were looked at first, with the bytes of their slots. pinned_blocks, used_blocks: of these, what
    stays. forgotten_namespaces: that held nothing any more. rows_left: of NVMe, not cleared yet; no restart finds them."""

    blocks: int
    dram_bytes: int
    nvme_bytes: int
    pinned_blocks: int
    used_blocks: int
    cleared_blocks: int
    forgotten_namespaces: int
    rows_left: int


class Task:
    """One clear: how far it is."""

    def __init__(
        self, spaces: Sequence[Namespace], block_hash: bytes, dry: bool, done: Callable[[Cleared], None]
    ) -> None:
        self.spaces, self.block_hash, self.dry, self.done = spaces, block_hash, dry, done
        self.blocks = self.cleared = self.forgotten = 0
        self.held_bytes = {IN_DRAM: 0, IN_NVME: 0}
        self.next_s = 0.0  # nothing is to be done before
        self.passes_until_s: float | None = None  # None: this is the first pass
        self.rows_until_s: float | None = None  # None: there is still a pass to do
        self.begin_pass()

    def begin_pass(self) -> None:
        """From the first namespace on. What stays is counted anew."""
        self.walk = self._blocks()
        self.dropped = self.pinned = self.used = 0  # in this pass
        self.stays: set[Block] = set()  # what hangs on these stays

    def _blocks(self) -> Iterator[Block | None]:
        for namespace in self.spaces:
            yield None  # most may be empty
            if self.block_hash:
                yield from leaves_first([namespace.blocks.get(self.block_hash)])
            else:
                yield from all_leaves_first(namespace)

    def cleared_all(self, rows_left: int) -> Cleared:
        """The answer."""
        return Cleared(
            self.blocks,
            self.held_bytes[IN_DRAM],
            self.held_bytes[IN_NVME],
            self.pinned,
            self.used,
            self.cleared,
            self.forgotten,
            rows_left,
        )


class Clearing:
    """Called from the engine's thread only."""

    def __init__(
        self,
        residency: Residency,
        namespaces: NamespaceRegistry,
        adoption: Adoption,
        is_behind: Callable[[], bool],
        io: Io,
        clock: Callable[[], float],
    ) -> None:
        """is_behind: whether so many rows wait to be cleared that nothing more is to be dropped for now."""
        self._residency = residency
        self._namespaces = namespaces
        self._adoption = adoption
        self._is_behind = is_behind
        self._io = io
        self._clock = clock
        self._sweeps = Sweeps(residency, Uncleared(), clock)
        adoption.is_cleared = self._sweeps.uncleared.names
        self._tasks: deque[Task] = deque()

    def keep(self, uncleared: Uncleared) -> None:
        """Before anything is adopted: what disks have still to clear is kept there."""
        self._sweeps.uncleared = uncleared
        self._adoption.is_cleared = uncleared.names

    @property
    def underway(self) -> int:
        return len(self._tasks)

    def clear(
        self,
        spaces: Sequence[Namespace],
        block_hash: bytes,
        everything: bool,
        dry: bool,
        done: Callable[[Cleared], None],
    ) -> None:
        """Drop what these namespaces hold, or with a hash what hangs on that block, itself included. everything: they are all.
        `done` is called once, which may be before this returns. Raises NotReady, LimitExceeded."""
        if self._adoption.is_reading:
            raise NotReady("the rows of NVMe are still being read after the start: try again in a moment")
        if len(self._tasks) >= CLEARS_MAX:
            raise LimitExceeded(f"{CLEARS_MAX} clears are under way: no more are allowed")
        if not dry:
            self.forget_rows([EVERYTHING] if everything else [namespace.digest for namespace in spaces])
        self._tasks.append(Task(list(spaces), block_hash, dry, done))
        self.step()

    def forget_rows(self, digests: Sequence[bytes]) -> None:
        """No disk is to give anything back, later, that these namespaces do not hold in the end."""
        self._sweeps.uncleared.add((member.device.disk for member in self._residency.nvme.members), digests)

    def step(self) -> bool:
        """Drop some blocks, for a few milliseconds; whether there is more to do soon."""
        now_s = self._clock()
        for _ in range(len(self._tasks)):
            task = self._tasks.popleft()
            if task.next_s > now_s:
                self._tasks.append(task)
            elif self._is_over(task):
                rows_left = sum(member.dropped for member in self._residency.nvme.members)
                task.done(task.cleared_all(0 if task.dry else rows_left))
            else:
                self._tasks.append(task)
                break
        if any(task.rows_until_s is None for task in self._tasks):
            return True
        for member in self._residency.nvme.members:
            if self._sweeps.uncleared.of(member.device.disk):
                member.tend(RETENTION_DELETE_ROWS)
        return self._sweeps.step() or bool(self._tasks) or not self._sweeps.uncleared.is_kept(self._io)

    def _is_over(self, task: Task) -> bool:
        """Do the next piece of a task. Returns whether that was the last one."""
        if task.rows_until_s is not None:
            return self._has_cleared_rows(task.rows_until_s)
        if not task.dry and self._is_behind():
            return False
        until_s = self._clock() + EXPIRY_SLICE_S
        while self._clock() < until_s:
            batch = list(islice(task.walk, EXPIRY_LOOKS))
            for block in batch:
                if block is not None:
                    self._look_at(task, block)
            if not batch:
                return self._has_passed(task)
        return False

    def _look_at(self, task: Task, block: Block) -> None:
        guards, where = self._residency.guards, block.where
        is_held_up = block in task.stays
        task.stays.discard(block)
        if where & IN_ANY:
            if task.passes_until_s is None:
                task.blocks += 1
                for bit in task.held_bytes:
                    if where & bit:
                        task.held_bytes[bit] += self._residency.slot_bytes(block.namespace, bit)
            if guards.guards(block, IN_DRAM) or guards.guards(block, IN_NVME):
                task.pinned += 1
            elif is_held_up or block.pins:
                task.used += 1
            elif task.dry or self._residency.drop(block, outcomes.CLEARED):
                task.dropped += not task.dry
                return
        elif not is_held_up:
            return
        if block.parent is not None:
            task.stays.add(block.parent)

    def _has_passed(self, task: Task) -> bool:
        """A pass is over. Returns whether that is all."""
        if task.dry:
            return True
        now_s = self._clock()
        task.cleared += task.dropped
        if task.passes_until_s is None:
            task.passes_until_s = now_s + CLEAR_USED_S
        if (task.used or task.dropped) and now_s < task.passes_until_s:
            task.begin_pass()
            task.next_s = now_s + CLEAR_PAUSE_S
            return False
        task.forgotten += sum(map(self._namespaces.forget, task.spaces))
        task.rows_until_s = now_s + CLEAR_ROWS_S
        return self._has_cleared_rows(task.rows_until_s)

    def _has_cleared_rows(self, until_s: float) -> bool:
        """Whether a restart finds nothing of it: what a device takes too long for, or cannot do, is written down."""
        uncleared = self._sweeps.uncleared
        working = [member for member in self._residency.nvme.members if member.writable]
        is_gone = self._namespaces.is_saved and not any(
            member.dropped or uncleared.of(member.device.disk) for member in working
        )
        return (is_gone or self._clock() >= until_s) and uncleared.is_kept(self._io)


def cleared_spaces(
    namespaces: NamespaceRegistry,
    book: Book,
    selector: str,
    block_hash: bytes,
    tenant: str | None,
    everything: bool,
) -> list[Namespace]:
    """The namespaces that a clear is about: of a tenant, the one that is named, those that hold a prefix, or all.

    Raises BadRequest, NotFound.
    """
    if (tenant is not None) + bool(selector or block_hash) + everything != 1:
        raise BadRequest("name a tenant, a namespace, a prefix, or everything: one of them")
    if everything:
        found = list(namespaces)
    elif tenant is not None:
        found = [namespace for namespace in namespaces if tenant_of(namespace) == tenant]
        if not found:
            raise NotFound(
                f"tenant {tenant or '(none)'}: nothing of it is known here; `kvstore status` lists what is"
            )
    elif selector:
        digest = one_namespace(selector, namespaces, book)
        found = [namespace for namespace in namespaces if namespace.digest == digest]
    else:
        found = list(namespaces)
    if not block_hash:
        return found
    found = [namespace for namespace in found if block_hash in namespace.blocks]
    if not found:
        raise NotFound(f"prefix {block_hash.hex()}: nothing of it is held here")
    return found
