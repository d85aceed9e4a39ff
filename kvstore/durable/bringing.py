"""Bringing blocks into a tier because an operator wants them there, who wants to know what becomes of them.

    hashes ─▶ held: skipped ─▶ a batch ─▶ prefetched ─▶ looked at until nothing of it is on its way ─┬▶ all came: the next batch
                                                                                                    ╰▶ not: it ends, and says why

Called from the engine's thread only; nothing here blocks, and nothing is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import itemgetter

from kvstore.constants import WARM_BYTES_MAX, WARM_RECORDS_MAX
from kvstore.index.block import Block, Namespace
from kvstore.movement.loading import Loader
from kvstore.movement.prefetching import prefetch_steps
from kvstore.movement.waiting import Prefetch
from kvstore.protocol.residency_bits import IN_ANY, IN_DRAM
from kvstore.steps import Steps


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
