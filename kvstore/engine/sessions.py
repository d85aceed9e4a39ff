"""Sessions and leases: who holds which slots, so that a dead client leaves nothing behind.

    session (one connection) ──▶ WriteLease: slots being filled, in state WRITING
                             └─▶ ReadLease:  blocks pinned while a client copies out of them

A lease ends by commit, by release, or with its session. A pinned block is in no policy's
queue; only the lease moves it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvstore.index.block import Block, Namespace
from kvstore.index.prompts import Prompt
from kvstore.protocol import answers

NAMES_REPORTED_MAX = 16  # namespaces of a client whose model and tenant are reported
NAMES_CHARS_MAX = 200  # of its models, and of its tenants, in an answer


@dataclass(slots=True, eq=False)
class Peer:
    """Who is at the other end of a connection, and what it asked for since it came. number: of this daemon's life, 0 without a
    connection. pid: 0 where it is not known. …_blocks: of its lookups."""

    label: str = ""
    number: int = 0
    pid: int = 0
    uid: int = -1
    since_s: float = 0.0
    namespaces: dict[int, Namespace] = field(default_factory=dict)
    requests: int = 0
    asked_blocks: int = 0
    hit_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0

    def as_dict(self, now_s: float, leases: int) -> answers.Peer:
        """As it is in answers; the fields are documented in docs/cli.md."""
        named = [space.spec.fields for space in islice(self.namespaces.values(), NAMES_REPORTED_MAX)]
        return {
            "id": self.number,
            "label": self.label,
            "pid": self.pid if self.pid > 0 else None,
            "uid": self.uid,
            "model": _together(fields.get("model", "") for fields in named),
            "tenant": _together(fields.get("tenant", "") for fields in named),
            "namespaces": len(self.namespaces),
            "connected_s": round(max(0.0, now_s - self.since_s), 1),
            "requests": self.requests,
            "asked_blocks": self.asked_blocks,
            "hit_blocks": self.hit_blocks,
            "stored_bytes": self.stored_bytes,
            "loaded_bytes": self.loaded_bytes,
            "leases": leases,
        }


def _together(names: Iterable[str]) -> str:
    """Each once."""
    return ", ".join(filter(None, dict.fromkeys(names)))[:NAMES_CHARS_MAX]


@dataclass(slots=True, eq=False)
class Session:
    """One client; `owner` is its number in the arena, OWNER_ANY where others copy for it."""

    owner: int
    label: str
    peer: Peer
    leases: dict[int, WriteLease | ReadLease] = field(default_factory=dict)
    is_closing: bool = False  # its client is gone, and its leases are being given back

    def as_dict(self, now_s: float) -> answers.Session:
        """As it is in answers."""
        peer = self.peer.as_dict(now_s, len(self.leases))
        return {"owner": self.owner, **peer, "label": self.label}

    def prompt_before(self, namespace: Namespace, parent: bytes) -> Prompt | None:
        """Of the latest lease, where it is open and its run ends with this block: what follows belongs to its prompt."""
        lease = next(reversed(self.leases.values()), None)
        if isinstance(lease, WriteLease) and lease.namespace is namespace and lease.hashes[-1] == parent:
            return lease.prompt
        return None


@dataclass(slots=True, eq=False)
class WriteLease:
    """Slots that one client fills, for some positions of the run `hashes`, which follows on `parent`. columns: checksums of
    those that other clients have filled for it. erasures: how many its namespace had seen when it began."""

    number: int
    namespace: Namespace
    hashes: list[bytes]
    parent: bytes
    prompt: Prompt
    slots: dict[int, int] = field(default_factory=dict)  # position -> arena slot, until committed
    columns: dict[int, bytes] = field(default_factory=dict)
    erasures: int = field(init=False)

    def __post_init__(self) -> None:
        self.erasures = self.namespace.erasures

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
