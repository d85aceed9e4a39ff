"""Prefetching: blocks are brought into DRAM ahead of any request, from wherever they are.

    hashes │ held by owned levels: loaded where they are on NVMe │ shared levels go on: fetched │ missing

`prefetch_steps` is for a prompt whose request still waits in an engine's queue. It is only a hint: nobody waits for it, it
comes behind what somebody waits for and leaves room for that, and it takes turns with others.

`Bringing` is for an operator who wants to know what becomes of it: one prefetch after the other, each looked at until
nothing of it is on its way any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import itemgetter

from kvstore.constants import STEP_SLOW_BLOCKS, WARM_BYTES_MAX, WARM_RECORDS_MAX
from kvstore.index import forest
from kvstore.index.block import Block, Namespace
from kvstore.movement.loading import Loader
from kvstore.movement.sources import SharedSource
from kvstore.movement.waiting import Prefetch
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM
from kvstore.steps import Steps


def prefetch_steps(
    loader: Loader, namespace: Namespace, hashes: bytes, parent: bytes, waiter: Prefetch
) -> Steps[int]:
    """Start bringing these blocks into DRAM; returns how many are on the way. Evicts nothing before it reads. waiter: called
    for each of them that is not there already."""
    size = namespace.hash_bytes
    owned, coming = len(hashes) // size, 0
    for start in range(0, len(hashes), STEP_SLOW_BLOCKS * size):
        before = loader.underway
        asked = forest.split_hashes(hashes[start : start + STEP_SLOW_BLOCKS * size], size)
        for position, block in enumerate(namespace.blocks.get_run(asked), start // size):
            if block is not None and block.where & IN_ANY:
                loader.prefetch(block, waiter)
            else:
                owned = min(owned, position)
        loader.pump()
        coming += loader.underway - before
        yield
    for source in loader.shared:
        end = source.level.held(namespace, hashes, owned) if source.loads.closed else owned
        coming += yield from _fetch_steps(loader, source, namespace, hashes, (owned, end), parent, waiter)
        owned = max(owned, end)
    return coming


def _fetch_steps(
    loader: Loader,
    source: SharedSource,
    namespace: Namespace,
    hashes: bytes,
    span: tuple[int, int],
    parent: bytes,
    waiter: Prefetch,
) -> Steps[int]:
    """The same of the blocks from one position to another that a shared level has."""
    size, coming = namespace.hash_bytes, 0
    for start in range(*span, STEP_SLOW_BLOCKS):
        if not loader.may_come(namespace):
            break
        before = loader.underway
        for at in range(start * size, min(span[1], start + STEP_SLOW_BLOCKS) * size, size):
            block_hash = hashes[at : at + size]
            block = namespace.blocks.get(block_hash)
            if block is None or not block.where & IN_ANY:
                loader.fetch(namespace, block_hash, hashes[at - size : at] if at else parent, source, waiter)
        loader.pump()
        coming += loader.underway - before
        yield
    return coming


class Bringing(Prefetch):
    """Consecutive blocks of one namespace that are brought into DRAM batch by batch; the first one follows `parent`. held: were
    there. loaded: came. under_way: of the batch. why: it ended before all were there, `gone`, `failed` or `refused`."""

    def __init__(
        self,
        loader: Loader,
        namespace: Namespace,
        hashes: Sequence[bytes],
        parent: bytes = b"",
        used: Callable[[Block], object] = lambda block: None,
    ) -> None:
        """used: called with each block that came, in DRAM."""
        super().__init__()
        self.namespace = namespace
        self.hashes = hashes
        self.held = self.loaded = self.under_way = 0
        self.why = ""
        self._loader = loader
        self._parent = parent
        self._used = used
        self._next = 0  # to be asked for
        self._batch: Sequence[bytes] = ()
        self._before = 0  # came before the batch
        self._trouble = ""  # what some of the batch met

    def __call__(self, block: Block | None, /) -> None:
        if block is None:
            self._trouble = self._trouble or "failed"
        elif block.where & IN_DRAM:
            self._used(block)

    def waits_for_room(self) -> bool:
        self._trouble = "refused"  # asked only where there was none
        return False

    # -- the tier --

    def is_held(self, block: Block) -> bool:
        """Whether a block need not be brought."""
        return block.where & IN_DRAM != 0

    def has_come(self, block: Block) -> bool:
        return block.where & IN_DRAM != 0

    def goes_on(self, block: Block) -> bool:
        """Whether a block that came into DRAM is on its way to another tier still."""
        return False

    def has_room(self) -> bool:
        """Whether the tier takes more. DRAM says so when a block is to get its slot."""
        return True

    # -- how far --

    @property
    def left(self) -> int:
        """Blocks that are still to be asked for."""
        return 0 if self.why else len(self.hashes) - self._next

    def missing(self, why: str) -> int:
        """Blocks that do not come because of this."""
        return len(self.hashes) - self.held - self.loaded if self.why == why else 0

    def go_on(self, records_max: int = WARM_RECORDS_MAX, bytes_max: int = WARM_BYTES_MAX) -> Steps[None]:
        """Look at the batch that was asked for; ask for the next one where nothing of it is on its way any more, and no
        engine waits for its turn. …_max: of that one; a single record may have more bytes."""
        size = min(records_max, max(1, bytes_max // self.namespace.record_bytes))
        self._look()
        while size > 0 and self.left and not self.under_way and not self._loader.is_urgent:
            self._next_batch(size)
            if self._batch and not self.has_room():
                self._batch, self.why = (), "refused"
                return
            at = self._next - len(self._batch)
            parent = self.hashes[at - 1] if at else self._parent
            yield from prefetch_steps(self._loader, self.namespace, b"".join(self._batch), parent, self)
            self._look()

    def _next_batch(self, size: int) -> None:
        """Behind what is there: blocks that are not."""
        hashes = self.hashes[self._next : self._next + size]
        known = self.namespace.blocks.get_run(hashes)
        lacks = [block is None or not self.is_held(block) for block in known]
        held = lacks.index(True) if True in lacks else len(lacks)
        self._batch = [
            name for name, _ in takewhile(itemgetter(1), zip(hashes[held:], lacks[held:], strict=True))
        ]
        self._next += held + len(self._batch)
        self.held += held
        self._before, self._trouble = self.loaded, ""

    def _look(self) -> None:
        known = [block for block in self.namespace.blocks.get_run(self._batch) if block is not None]
        came = sum(map(self.has_come, known))
        self.loaded = self._before + came
        self.under_way = self._loader.coming(self.namespace, self._batch) + sum(map(self.goes_on, known))
        if not self.under_way and (came < len(self._batch) or not self._loader.may_come(self.namespace)):
            was_displaced = any(block.where & IN_ANY and not self.has_come(block) for block in known)
            self.why = self._trouble or ("refused" if was_displaced else "gone")
