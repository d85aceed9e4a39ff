"""How the connector reaches the daemon: one function, which tests replace, and a line for each thread.

The scheduler's lines need no arena: they lease slots for the ranks. A rank has one line, with the arena mapped, and
makes no call while it loads or saves, but for what it has filled.

The daemon's accounts may have counted hits that never came: a promised load failed, a lookup was not answered (see
`kvstore.ledger.accounts`). Where the daemon cannot be asked now, because it is away or late, that is said before the
next call. One that was restarted meanwhile knows nothing of the tickets, and does nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from connectors.constants import THREAD_JOIN_S
from kvstore.client import Client, Namespace, Refused

SETTLEMENTS_MAX = 64  # that wait for a daemon that answers; beyond it the oldest are forgotten

Count = Callable[[str, float], None]  # a name of `MEANINGS`, and how much more
Note = Callable[[str, BaseException], None]  # where an error happened, and which


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Wait for threads that were asked to end, for THREAD_JOIN_S at most."""
    deadline_s = time.monotonic() + THREAD_JOIN_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


open_client: Callable[..., Any] = Client  # connects at its first call


class Line:
    """One connection to the daemon, and the settlements that are due on it."""

    def __init__(
        self, socket_path: str, timeout_s: float, label: str, attach: bool = False, writable: bool = False
    ) -> None:
        self.client = open_client(socket_path, timeout_s, label, attach=attach, writable=writable)
        self._due: deque[tuple[int, int, Namespace | None, bytes]] = deque(maxlen=SETTLEMENTS_MAX)

    def owe(self, ticket: int, tokens: int, space: Namespace | None, missing: bytes) -> None:
        """Only the first `tokens` of the ticket's prompt could be used, not the block `missing`: to be settled before
        the next call."""
        self._due.append((ticket, tokens, space, missing))

    def settle(self) -> None:
        """Settle what is due. Raises Unavailable; the rest stays due. What the daemon refuses it would refuse again, and
        every call behind it would fail: it is forgotten."""
        while self._due:
            with suppress(Refused):
                self.client.settle(*self._due[0])
            self._due.popleft()

    def acquire(
        self, space: Namespace, hashes: Sequence[bytes], wait_s: float, ticket: int, parent: bytes
    ) -> Any:
        """A kvstore.client.SlotLease. Raises what the client raises."""
        self.settle()
        return self.client.acquire_slots(space, hashes, wait_s, ticket, parent)

    def refresh(self) -> Any:
        """The arena that the daemon serves now. Any thread may call. Raises what the client raises.

        Asking is how an idle connection learns that its daemon is gone, and lets go of an arena that was replaced.
        """
        self.client.ping()
        return self.client.arena

    def close(self) -> None:
        """Hang up."""
        self.client.close()
