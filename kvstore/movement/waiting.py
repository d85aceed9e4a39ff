"""The waiters of each block that is on its way. Each waiter is called exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvstore.constants import LOAD_WAITERS_MAX, LOADS_WAITING_MAX
from kvstore.index.block import Block


class Waiter(Protocol):
    """A request, or a part of one, that wants a block."""

    def __call__(self, block: Block | None, /) -> None:
        """Called once: with the block, which is in DRAM and true, or with None if it will not come."""

    @property
    def asker(self) -> object:
        """Who takes turns with others: the same for all blocks of a request."""

    def is_waiting(self) -> bool:
        """Whether the answer still matters; if not, the block is not loaded."""

    def waits_for_room(self) -> bool:
        """Whether it goes on waiting while DRAM is full."""


class Waiting:
    """Blocks on their way into DRAM, or being verified, and their waiters."""

    def __init__(self) -> None:
        self._waiters: dict[Block, list[Waiter]] = {}
        self.count = 0  # waiters, of all blocks

    def __contains__(self, block: Block) -> bool:
        return block in self._waiters

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._waiters)

    @property
    def full(self) -> bool:
        """Whether one more would be beyond a limit."""
        return len(self._waiters) >= LOADS_WAITING_MAX or self.count >= LOAD_WAITERS_MAX

    def add(self, block: Block, waiter: Waiter) -> None:
        self._waiters.setdefault(block, []).append(waiter)
        self.count += 1

    def is_wanted(self, block: Block) -> bool:
        """Whether a waiter still wants it."""
        return any(waiter.is_waiting() for waiter in self._waiters[block])

    def waits_for_room(self, block: Block) -> bool:
        return any(waiter.waits_for_room() for waiter in self._waiters[block])

    def displaces(self, block: Block) -> bool:
        """Whether others may leave DRAM for it."""
        return any(not isinstance(waiter, Prefetch) or waiter.displaces for waiter in self._waiters[block])

    def pop(self, block: Block) -> list[Waiter]:
        """Its waiters, who are to be called now. The block is not on its way any more."""
        waiters = self._waiters.pop(block)
        self.count -= len(waiters)
        return waiters

    def drain(self, block: Block) -> list[Waiter]:
        """The same of a block that hangs: it stays on its way."""
        waiters, self._waiters[block] = self._waiters[block], []
        self.count -= len(waiters)
        return waiters


class Prefetch:
    """A block that no request waits for yet. It does not wait for room. done: called with the block, or with None. displaces:
    whether others may leave DRAM for it."""

    displaces = True

    def __init__(self, done: Callable[[Block | None], None] = lambda block: None) -> None:
        self._done = done

    def __call__(self, block: Block | None, /) -> None:
        self._done(block)

    @property
    def asker(self) -> object:
        return self

    def is_waiting(self) -> bool:
        return True

    def waits_for_room(self) -> bool:
        return False
