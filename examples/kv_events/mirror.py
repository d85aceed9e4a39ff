"""A mirror of what one daemon holds, kept by the messages of its stream and of its answers.

    live n ── n is next? ─ yes ─▶ applied
                 │ no: something was missed
                 ▼
    replay from `next` ── begins with `next`? ─ yes ─▶ applied ─▶ live again
                 │ no: it is not kept any more, or this is another life of the daemon
                 ▼
    everything that is held, as of s ─▶ replay from s + 1 ─▶ live again

No sockets here: `examples.kv_events.subscriber` has them.

Invariant: while `wants` is NOTHING, `held` is what the daemon held when it published `next` - 1.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from kvstore.events.wire import (
    END,
    OWNER,
    TIERS,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockStored,
    sequence_bytes,
)

LATE_MAX = 100_000  # by so many numbers a message may come later than the answer that has it

Held = dict[tuple[str, str], set[BlockHash]]  # by (tier, namespace): "dram" or "nvme", and its digest in hex


class Wants(Enum):
    """What must be asked for before the stream makes sense again."""

    NOTHING = 0
    REPLAY = 1
    EVERYTHING = 2


class Mirror:
    """What one daemon holds. Blocks are named as they travel: by numbers, or by their whole hashes."""

    def __init__(self) -> None:
        self.held: Held = {}
        self.next: int | None = None  # the number that the next batch must have; None: nothing is known
        self.wants = Wants.EVERYTHING
        self._live: int | None = None  # the last number that came live
        self._coming: Held | None = None  # everything, as far as it has come
        self._coming_sequence = 0
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def request(self) -> bytes:
        """What to ask for, as it is asked: for a replay, or for everything."""
        self._coming = None
        return END if self.next is None else sequence_bytes(self.next)

    def live(self, sequence: int, payload: bytes) -> None:
        """A message of the stream. Raises ValueError where it is not of a kvstore daemon."""
        if self._is_of_the_past(sequence):
            self.lose()
        self._live = sequence
        if self.wants is not Wants.NOTHING:
            return  # what is asked for has it, or the next replay
        if sequence == self.next:
            self._take(self.held, payload)
            self.next += 1
        elif self.next is None or sequence > self.next:
            self.wants = Wants.REPLAY

    def answer(self, sequence: bytes, payload: bytes) -> bool:
        """A message of an answer; whether it was the last one. Raises ValueError as `live`."""
        if sequence == END:
            self._answered()
            return True
        number = int.from_bytes(sequence, "big")
        if self.wants is Wants.EVERYTHING:
            self._collect(number, payload)
        elif number == self.next:
            self._take(self.held, payload)
            self.next += 1
        elif self.next is not None and number > self.next:
            self.lose()
        return False

    def lose(self) -> None:
        """What is here is of no use any more: all of it must come anew."""
        self.next, self.wants, self._coming = None, Wants.EVERYTHING, None

    def _is_of_the_past(self, sequence: int) -> bool:
        """Whether the daemon has begun another life, with its clock put back. What an answer has said already
        comes live, too, but it is not long ago."""
        if self._live is not None and sequence <= self._live:
            return True
        return self.next is not None and sequence < self.next - LATE_MAX

    def _collect(self, number: int, payload: bytes) -> None:
        """Part of everything; what remains of a replay that led nowhere is passed over."""
        batch = self._decode(payload)
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._coming, self._coming_sequence = {}, number
        if self._coming is not None:
            self._apply(self._coming, batch)

    def _answered(self) -> None:
        if self.wants is Wants.EVERYTHING:
            if self._coming is None:
                return  # it never came
            self.held, self.next, self._coming = self._coming, self._coming_sequence + 1, None
            self.wants = Wants.REPLAY  # of what was published meanwhile
        elif self._live is None or self.next is None or self._live < self.next:
            self.wants = Wants.NOTHING

    def _take(self, held: Held, payload: bytes) -> None:
        self._apply(held, self._decode(payload))

    def _decode(self, payload: bytes) -> Batch:
        try:
            return self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a batch of KV events: {error}") from error

    def _apply(self, held: Held, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                held.clear()
                continue
            blocks = held.setdefault(tier_and_namespace(event.ownership or ""), set())
            if isinstance(event, BlockStored):
                blocks.update(event.block_hashes)
            else:
                blocks.difference_update(event.block_hashes)
                if not blocks:
                    del held[tier_and_namespace(event.ownership or "")]


def tier_and_namespace(ownership: str) -> tuple[str, str]:
    """Of an event of ours. Raises ValueError for one of another publisher."""
    owner, tier, digest, _ = [*ownership.split("/", 3), "", "", ""][:4]
    if owner != OWNER or tier not in TIERS.values() or not digest:
        raise ValueError(f"ownership {ownership!r}: not of a kvstore daemon")
    return tier, digest
