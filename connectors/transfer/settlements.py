"""Debts: settlements that the daemon could not be told when they were due.

    a promised load failed, a lookup was not answered ─▶ owe ─▶ pay: at once, or before the next call

The daemon's accounts may have counted hits that never came (see `kvstore.ledger.accounts`). What cannot
be told now, because the daemon is away or late, is told when it answers again. A daemon that
was restarted meanwhile knows nothing of the tickets, and does nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

TICKETS_OWED_MAX = 64  # lookups that were not answered in time, and not yet settled


class Debts:
    """Of one connection, in order; beyond TICKETS_OWED_MAX the oldest are forgotten."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._owed: deque[tuple[int, int, Any, bytes]] = deque(maxlen=TICKETS_OWED_MAX)

    def owe(self, ticket: int, tokens: int, space: Any, missing: bytes) -> None:
        """Only the first `tokens` of the ticket's prompt could be used, not the block `missing`."""
        self._owed.append((ticket, tokens, space, missing))

    def pay(self) -> None:
        """Settle what is owed. Raises what the client raises; the rest stays owed."""
        while self._owed:
            self._client.settle(*self._owed[0])
            self._owed.popleft()
