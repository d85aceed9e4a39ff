"""Since the start: counts by model and tenant that never decrease, as a scraper of metrics needs them.

The truth does decrease: when a load brings less than its lookup promised, hits become misses, maybe minutes
later. So two of each are kept: what is true, and what was published.

    true       hit 500  miss 100      ── settle: 200 were not there ──▶      hit 300  miss 300
    published  hit 500  miss 100                                             hit 500  miss 100   until others hit

What was published too early is not taken back; as many tokens of what grew are held back instead, and come
when the outcome that is ahead has caught up. So published tokens never decrease, their sum is that of the
published tokens asked for, and both are wrong by no more than what was settled and has not caught up: at most
the hits that were promised and not settled yet at some moment. The minutes and hours are not: they are corrected.

No more than LIVE_ROWS_MAX rows are kept, one of them for all models and tenants that came when the others
were taken: a row that changed its name would decrease.
"""

from __future__ import annotations

from kvstore.ledger.sums import EVERYBODY_ELSE, Sums

LIVE_ROWS_MAX = 64  # models × tenants of a Live answer, which does not grow with anything else

Name = tuple[str, str]  # model, tenant


class SinceStart:
    """Sums since the daemon's start, by model and tenant."""

    def __init__(self) -> None:
        self._true: dict[Name, Sums] = {}
        self._published: dict[Name, Sums] = {}

    def of(self, model: str, tenant: str) -> Sums:
        """The row that counts for them; the caller changes it."""
        name = (model, tenant)
        if name not in self._true and len(self._true) >= LIVE_ROWS_MAX - 1:
            name = (EVERYBODY_ELSE, EVERYBODY_ELSE)
        return self._true.setdefault(name, Sums())

    def publish(self) -> list[tuple[Name, Sums]]:
        """The rows to report now, in the order in which they came. No count is less than it was before."""
        for name, true in self._true.items():
            _raise(self._published.setdefault(name, Sums()), true)
        return list(self._published.items())


def _raise(published: Sums, true: Sums) -> None:
    """Publish what grew, less what other outcomes are ahead of the truth."""
    grown = [now - before for now, before in zip(true.tokens, published.tokens, strict=True)]
    ahead = -sum(tokens for tokens in grown if tokens < 0)
    for outcome in sorted(range(len(grown)), key=grown.__getitem__, reverse=True):
        if grown[outcome] <= 0:
            break
        held_back = min(ahead, grown[outcome])
        ahead -= held_back
        published.tokens[outcome] += grown[outcome] - held_back
    published.tokens_asked = sum(published.tokens)
    published.lookups = max(published.lookups, true.lookups)
    published.bytes_moved = list(true.bytes_moved)  # bytes are never taken back
    published.prefill_s_saved = max(published.prefill_s_saved, true.prefill_s_saved)
