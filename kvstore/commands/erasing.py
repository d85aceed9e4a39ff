"""Erasing: blocks that a tombstone names leave the tiers of this node, for good.

    tombstone ─▶ each namespace that it names: hidden at once ─▶ all blocks, or those behind one ─▶ dropped, leaves first, in slices
                                                                   └▶ in use: hidden, and dropped when it is given back

Nothing that is named is handed out from the first moment on, however long dropping it takes (of a tenant with thousands of namespaces,
from some milliseconds later on: they are marked in steps): the mark of a task hides the prefix, or the namespace, until all of it was looked at; after that each block that is in use is hidden by itself. What is computed anew
meanwhile may be dropped, too. What comes later is asked at the doors: rows of a namespace that is erased are not adopted
(`NamespaceRegistry.found`), and what was asked of a shared level before is not let in (`Namespace.erasures`).

Behind an erased prefix there may be blocks of which nobody knows that they are: a block between them is not here. So blocks are
dropped, too, that hang on one whose parent is not known: they are of no use as they are. Rows of devices come in any order, so for a
prefix all is looked at once more when all of them were read, and when a disk comes back later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvstore.constants import EXPIRY_LOOKS
from kvstore.index.block import Block, Namespace
from kvstore.index.forest import all_leaves_first, leaves_first
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.protocol import outcomes
from kvstore.protocol.residency_bits import IN_ANY
from kvstore.residency.residency import Residency
from kvstore.steps import Steps
from replication.formats.tombstones import Tombstone
from tiers.namespace_spec import NamespaceSpec

ERASE_STEP_BLOCKS = 100  # dropped between two yields
ERASE_STEP_LOOKS = 1600  # … or looked at
ERASE_SPACE_LOOKS = 5  # for which a namespace counts


class Left(NamedTuple):
    """What a tombstone names and this node has still. in_use: blocks that will be dropped when they are given back. is_looking: not all
    was looked at."""

    in_use: int
    is_looking: bool


@dataclass(slots=True, eq=False)
class _Task:
    """One tombstone in one namespace. walk: of what is to be looked at, None when all was, or waits for rows that are not adopted
    (`waits`). held: in use, and hidden. is_new: told when all rows were in the index."""

    namespace: Namespace
    tombstone: Tombstone
    walk: Iterator[Block | None] | None = None
    waits: bool = False
    is_marked: bool = False
    is_new: bool = False
    held: dict[Block, None] = field(default_factory=dict)

    @property
    def is_looking(self) -> bool:
        return self.walk is not None or self.waits

    def mark(self) -> None:
        """Nothing that is named is handed out."""
        if not self.is_marked:
            self.is_marked = True
            self.namespace.hide(self.tombstone.block_hash)

    def unmark(self) -> None:
        self.is_marked = False
        self.namespace.show(self.tombstone.block_hash)

    def begin(self, is_adopted: bool) -> None:
        """Look at everything."""
        self.mark()
        self.waits = bool(self.tombstone.block_hash) and not is_adopted
        self.walk = _named(self.namespace, self.tombstone.block_hash, is_adopted)

    def hold(self, block: Block) -> None:
        if block not in self.held:
            self.held[block] = None
            self.namespace.hide(block.hash)

    def let_go(self, block: Block) -> None:
        del self.held[block]
        self.namespace.show(block.hash)


class Erasing:
    """Called from the engine's thread only."""

    def __init__(
        self, residency: Residency, namespaces: NamespaceRegistry, is_adopted: Callable[[], bool]
    ) -> None:
        """is_adopted: whether all rows of earlier daemons are in the index."""
        self._residency = residency
        self._namespaces = namespaces
        self._is_adopted = is_adopted
        self._known: dict[str, Tombstone] = {}
        self._was_adopted = False  # at the last step
        self._tasks: deque[_Task] = deque()
        self.erased: Callable[[Namespace], None] = lambda namespace: None  # all of it
        self._task_of: dict[tuple[Namespace, str], _Task] = {}  # the same by namespace and tombstone
        self._marking = Counter[str]()  # tombstones for which namespaces are still looked through
        namespaces.is_erased = self._is_erased
        namespaces.named = self._named

    def erase(self, tombstone: Tombstone) -> None:
        """Drop what it names, in the steps that follow; none of it is handed out any more. One that was taken back: what is left stays."""
        if tombstone.is_taken_back:
            self._take_back(tombstone.id)
            return
        is_new = tombstone.id not in self._known and self._is_adopted()
        self._known[tombstone.id] = tombstone
        self._residency.background.begin(self._mark_steps(tombstone, is_new))

    def _mark_steps(self, tombstone: Tombstone, is_new: bool) -> Steps[None]:
        """Begin with each namespace that it names: of a tenant, there may be thousands."""
        self._marking[tombstone.id] += 1
        looks = 0
        for namespace in list(self._namespaces):
            if self._known.get(tombstone.id) is not tombstone:
                break
            if tombstone.names(namespace.spec):
                before = len(namespace.blocks)
                self._begin(namespace, tombstone, is_new)
                looks += ERASE_SPACE_LOOKS + before - len(namespace.blocks)
            if looks >= ERASE_STEP_BLOCKS:
                looks = 0
                yield
        self._marking[tombstone.id] -= 1

    def _take_back(self, tombstone_id: str) -> None:
        self._known.pop(tombstone_id, None)
        for task in [task for task in self._tasks if task.tombstone.id == tombstone_id]:
            self._end(task)
            for block in list(task.held):
                task.let_go(block)
            if task.is_marked:
                task.unmark()
        self._tasks = deque(task for task in self._tasks if task.tombstone.id != tombstone_id)

    def _end(self, task: _Task) -> None:
        del self._task_of[task.namespace, task.tombstone.id]

    def left(self, tombstone: Tombstone) -> Left | None:
        """None where it was not heard of, or not of its serial."""
        known = self._known.get(tombstone.id)
        if known is None or known.serial < tombstone.serial:
            return None
        tasks = [task for task in self._tasks if task.tombstone.id == tombstone.id]
        is_looking = self._marking[tombstone.id] > 0 or any(task.is_looking for task in tasks)
        return Left(sum(len(task.held) for task in tasks), is_looking)

    def _is_erased(self, spec: NamespaceSpec) -> bool:
        """All of it, so that no row of it is adopted: whatever an earlier life has left here was stored before this one."""
        return any(not known.block_hash and known.names(spec) for known in self._known.values())

    def _named(self, namespace: Namespace) -> None:
        """It became known, or whose it is: what of it was here before is erased."""
        if namespace.blocks or not self._is_adopted():
            for tombstone in self._known.values():
                if tombstone.names(namespace.spec):
                    self._begin(namespace, tombstone)

    def _begin(self, namespace: Namespace, tombstone: Tombstone, is_new: bool = False) -> None:
        namespace.erasures += 1
        task = self._task_of.get((namespace, tombstone.id))
        if task is None:
            task = self._task_of[namespace, tombstone.id] = _Task(namespace, tombstone)
            self._tasks.append(task)
        task.is_new |= is_new
        task.begin(self._is_adopted())
        self._look(
            task
        )  # a little at once: most erasings are over with it, and what is computed anew next stays
        if not (task.is_looking or task.held):
            self._tasks.remove(task)
            self._is_over(task)

    def _is_over(self, task: _Task) -> None:
        """Rows of slots that were free before are not found again either, when the tombstone is forgotten."""
        self._end(task)
        if task.is_new:
            self.erased(task.namespace)

    # -- work --

    def step(self) -> bool:
        """Drop some blocks, for about a millisecond; whether there is more to do at once."""
        is_adopted = self._is_adopted()
        if self._was_adopted and not is_adopted:  # a disk is back
            for known in [known for known in self._known.values() if known.block_hash]:
                self.erase(known)
        self._was_adopted = is_adopted
        if not self._tasks:
            return False
        task = self._tasks.popleft()
        if task.walk is None and task.waits and self._is_adopted():
            task.begin(is_adopted=True)
        is_late = self._look(task) if task.walk is not None else self._try_again(task)
        if task.is_looking or task.held:
            self._tasks.append(task)
        else:
            self._is_over(task)
        return is_late

    def _look(self, task: _Task) -> bool:
        """At some of what is named."""
        assert task.walk is not None
        looks = ERASE_STEP_LOOKS
        for block in task.walk:
            looks -= EXPIRY_LOOKS if block is None else 1
            if block is not None and block.where & IN_ANY:
                looks -= ERASE_STEP_LOOKS // ERASE_STEP_BLOCKS
                if not self._drop(block):
                    task.hold(block)
            if looks <= 0:
                return True
        task.walk = None
        if not task.waits:
            task.unmark()
        return False

    def _try_again(self, task: _Task) -> bool:
        """Some of what was in use. Returns whether any of it is not any more."""
        some = list(islice(task.held, ERASE_STEP_BLOCKS))
        for block in some:
            task.let_go(block)
            is_here = task.namespace.blocks.get(block.hash) is block and block.where & IN_ANY
            if is_here and not self._drop(block):
                task.hold(block)  # last
        return not all(block in task.held for block in some)

    def _drop(self, block: Block) -> bool:
        return self._residency.drop(block, outcomes.EXPIRED)


def _named(namespace: Namespace, block_hash: bytes, is_adopted: bool) -> Iterator[Block | None]:
    """The blocks of a namespace, or those that hang on one; those that hang on others go first, as that is cheap. None now and then."""
    blocks = namespace.blocks
    if not block_hash:
        yield from all_leaves_first(namespace)
        yield from blocks.walk()  # what got another place meanwhile
        return
    yield from leaves_first([blocks.get(block_hash)])
    if is_adopted:
        yield from leaves_first(
            block if block.parent is None and not block.where & IN_ANY else None for block in blocks.walk()
        )
