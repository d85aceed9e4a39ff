"""Lookups of KV groups that need only the end of a prefix, as a caller may ask for them; what every lookup says of its request."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.constants import PREFILL_TOKENS_PER_S_MIN
from kvstore.engine import windows
from kvstore.engine.engine import Engine
from kvstore.ledger.accounts import Asking
from kvstore.protocol import frames
from kvstore.steps import Steps


def asking_of(r: frames.Lookup | frames.Windows) -> Asking:
    """What a request says of the engine's own; a rate that nothing computes at is none."""
    rate = r.prefill_tokens_per_s if r.prefill_tokens_per_s >= PREFILL_TOKENS_PER_S_MIN else 0.0
    if isinstance(r, frames.Windows):
        return Asking(r.ticket, True, 0, r.local_tokens, rate, r.lasting)
    return Asking(r.ticket, r.more, r.tokens, r.local_tokens, rate, r.lasting)


def find_windows(
    engine: Engine, r: frames.Windows, count: Callable[[int, frames.Windows], int]
) -> Steps[frames.Answer]:
    """count: raises for a namespace that the caller has not, and hashes that are none. Raises BadRequest."""
    for number, _ in r.groups:
        count(number, r)
    groups = [(engine.namespaces.get(number), tokens) for number, tokens in r.groups]
    asked = windows.Asked(
        groups, r.hashes, r.hash_tokens, r.align_tokens, r.held_tokens, r.reach_tokens, asking_of(r)
    )
    held, reach = yield from windows.find_steps(engine, asked)
    return frames.Count(held, reach - held)
