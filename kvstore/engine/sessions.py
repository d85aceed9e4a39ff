"""Sessions and leases: who holds which slots, so that a dead client leaves nothing behind.

    session (one connection) ──▶ WriteLease: slots being filled, in state WRITING
                             └─▶ ReadLease:  blocks pinned while somebody copies out of them

A lease ends by commit, by release, or with its session. A pinned block is in no policy's
queue; only the lease moves it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt


@dataclass(slots=True, eq=False)
class Session:
    """One client; `owner` is its number in the arena, OWNER_ANY where others copy for it."""

    owner: int
    label: str
    leases: dict[int, WriteLease | ReadLease] = field(default_factory=dict)
    is_closing: bool = False  # its client is gone, and its leases are being given back

    def prompt_before(self, namespace: Namespace, parent: bytes) -> Prompt | None:
        """Of the latest lease, where it is open and its run ends with this block: what follows belongs to its prompt."""
        lease = next(reversed(self.leases.values()), None)
        if isinstance(lease, WriteLease) and lease.namespace is namespace and lease.hashes[-1] == parent:
            return lease.prompt
        return None


@dataclass(slots=True, eq=False)
class WriteLease:
    """Slots that one client fills: of the run `hashes`, which goes on behind `parent`, some positions. columns:
    checksums of those that other clients have filled for it."""

    number: int
    namespace: Namespace
    hashes: list[bytes]
    parent: bytes
    prompt: Prompt
    slots: dict[int, int] = field(default_factory=dict)  # position -> arena slot, until committed
    columns: dict[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Blocks that it names."""
        return len(self.hashes)


class ReadLease:
    """Blocks pinned for one client; `settle` is called once for each that was not ready."""

    __slots__ = ("_finish", "blocks", "finished", "namespace", "number", "outstanding", "sums", "tiers")

    def __init__(
        self,
        number: int,
        namespace: Namespace,
        count: int,
        finish: Callable[[ReadLease], None],
        sums: bool = False,
    ) -> None:
        """sums: whether the checksums are wanted."""
        self.sums = sums
        self.number = number
        self.namespace = namespace
        self.blocks: list[Block | None] = [None] * count
        self.tiers = bytearray(count)
        self.outstanding = 0
        self.finished = False
        self._finish = finish

    @property
    def size(self) -> int:
        """Blocks that it names."""
        return len(self.blocks)

    def settle(self, position: int, block: Block | None) -> None:
        """A block arrived, pinned for this lease, or will not come (None)."""
        self.blocks[position] = block
        self.outstanding -= 1
        if self.outstanding == 0:
            self.expire()

    def expire(self) -> None:
        """Answer now, with what is ready. Idempotent."""
        if not self.finished:
            self.finished = True
            self._finish(self)


class LeaseWaiter(NamedTuple):
    """One position of a read lease, waiting for its block."""

    lease: ReadLease
    position: int
    pin: Callable[[Block], None]

    def __call__(self, block: Block | None, /) -> None:
        if self.lease.finished:
            return
        if block is not None:
            self.pin(block)
        self.lease.settle(self.position, block)

    @property
    def asker(self) -> object:
        return self.lease

    def is_waiting(self) -> bool:
        return not self.lease.finished

    def waits_for_room(self) -> bool:
        return not self.lease.finished
