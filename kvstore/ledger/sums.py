"""Sums: what lookups and bytes came to, of whatever stretch of time, model and tenant they are kept for.

One lookup is booked into several sums at once (its hour, its minute, all since the start), and taken out of
the same ones when its account changes: see `kvstore.ledger.accounts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.protocol import answers, outcomes

MOVES = ("stored", "loaded", "promoted", "demoted")  # by clients, by clients, from NVMe, to NVMe
STORED, LOADED, PROMOTED, DEMOTED = range(len(MOVES))
EVERYBODY_ELSE = "(others)"  # model and tenant of what is beyond a limit


@dataclass(slots=True, kw_only=True)
class Sums:
    """tokens: by outcome, their sum is tokens_asked. bytes_moved: by MOVES."""

    lookups: int = 0
    tokens_asked: int = 0
    tokens: list[int] = field(default_factory=lambda: [0] * outcomes.OUTCOMES)
    bytes_moved: list[int] = field(default_factory=lambda: [0] * len(MOVES))
    prefill_s_saved: float = 0.0

    def add(self, other: Sums) -> None:
        """All that is in another one."""
        self.lookups += other.lookups
        self.tokens_asked += other.tokens_asked
        self.tokens = [mine + more for mine, more in zip(self.tokens, other.tokens, strict=True)]
        self.bytes_moved = [
            mine + more for mine, more in zip(self.bytes_moved, other.bytes_moved, strict=True)
        ]
        self.prefill_s_saved += other.prefill_s_saved

    def sums_as_dict(self) -> answers.Sums:
        """As they are in answers; the fields are documented in docs/cli.md."""
        return {
            "lookups": self.lookups,
            "tokens_asked": self.tokens_asked,
            "tokens": dict(zip(outcomes.NAMES, self.tokens, strict=True)),
            "bytes": dict(zip(MOVES, self.bytes_moved, strict=True)),
            "prefill_s_saved": max(0.0, round(self.prefill_s_saved, 3)),
        }
