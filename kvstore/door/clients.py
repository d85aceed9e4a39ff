"""Who is connected, one line each, and whose requests were slow, and why.

    connection ─▶ Peer (counts) ─▶ `kvstore clients`, one of which can be cut off
    request ─▶ longer than door.slow_s from its last byte to its answer? ─▶ the last SLOW_KEPT, `kvstore slow`

Why a request was slow is what most of its time went to:

    turn   others' work: between its last byte and its answer the loop did other pieces
    work   its own pieces: a long prompt, a large answer
    disk   reads from NVMe, or a rule that had to be on disk
    bucket reads from a region's bucket, or another region's
    room   DRAM was full of what is in use: its loads waited until something left
    proof  checksums of blocks that an earlier daemon left
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

from kvstore.engine.sessions import Peer
from kvstore.errors import ConnectionRefused, CutOff, NotFound
from kvstore.protocol import answers
from kvstore.protocol.residency_bits import IN_NVME, IN_SHARED

SLOW_KEPT = 128
CLIENTS_REPORTED_MAX = 256  # in one answer
WHY = ("turn", "work", "disk", "bucket", "room", "proof")


class Connected(Protocol):
    """One that is connected, as far as it is listed here."""

    peer: Peer

    def listed(self, now_s: float) -> answers.Client:
        """Its line."""

    def cut_off(self, refusal: ConnectionRefused) -> None:
        """Say why, take everything back, and hang up."""


class Clients:
    """Those that are connected, in the order in which they came."""

    def __init__(self) -> None:
        self._by_number: dict[int, Connected] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Connected]:
        return iter(self._by_number.values())

    def enter(self, client: Connected) -> None:
        """From now on it is listed, under a number of its own."""
        self._number += 1
        client.peer.number = self._number
        self._by_number[self._number] = client

    def leave(self, client: Connected) -> None:
        """Idempotent."""
        self._by_number.pop(client.peer.number, None)

    def page(self, now_s: float, skip: int) -> answers.Clients:
        """A page of them, behind the first `skip`."""
        shown = [client.listed(now_s) for client in islice(self, skip, skip + CLIENTS_REPORTED_MAX)]
        return {"clients": shown, "clients_left": max(0, len(self._by_number) - skip - len(shown))}

    def cut_off(self, number: int, by: str, now_s: float) -> answers.Client:
        """Hang up on one: who it was. Raises NotFound."""
        client = self._by_number.get(number)
        if client is None:
            raise NotFound(f"client {number}: not connected; `kvstore clients` lists those that are")
        line = client.listed(now_s)
        client.cut_off(CutOff(f"ended by {by}"))
        return line


class Slow(NamedTuple):
    """A request that was slow."""

    at_s: float  # when it was answered, monotonic
    took_s: float
    waited_s: float  # of that, for its turn
    request: str
    blocks: int
    why: str
    who: answers.Peer  # as it was then

    def as_dict(self, now_s: float) -> answers.SlowRequest:
        """As it is in answers; the fields are documented in docs/cli.md."""
        who = self.who
        return {
            "ago_s": round(now_s - self.at_s, 1),
            "took_s": round(self.took_s, 4),
            "waited_s": round(self.waited_s, 4),
            "request": self.request,
            "blocks": self.blocks,
            "why": self.why,
            "id": who["id"],
            "label": who["label"],
            "pid": who["pid"],
            "model": who["model"],
            "tenant": who["tenant"],
        }


class SlowRequests:
    """The last ones, and how many there were by why."""

    def __init__(self) -> None:
        self.by_why: Counter[str] = Counter()
        self._last: deque[Slow] = deque(maxlen=SLOW_KEPT)

    def note(self, slow: Slow) -> None:
        """One more."""
        self.by_why[slow.why] += 1
        self._last.append(slow)

    def report(self, now_s: float, slow_s: float) -> answers.SlowRequests:
        """The latest first."""
        return {
            "slow_s": slow_s,
            "total": self.by_why.total(),
            "slow": [one.as_dict(now_s) for one in reversed(self._last)],
        }


def blocks_of(request: Any, hash_bytes: int) -> int:
    """How many blocks it is about, as far as it says so."""
    if hashes := getattr(request, "hashes", b""):
        return len(hashes) // hash_bytes
    return len(getattr(request, "indexes", ()))


def why_waited(tiers: Sequence[int], starved: bool) -> str:
    """What blocks of these tiers were waited for."""
    if starved:
        return "room"
    if any(tier & IN_SHARED for tier in tiers):
        return "bucket"
    return "disk" if any(tier & IN_NVME for tier in tiers) else "proof"
