"""How the connector reaches the daemon: one function, which tests replace, and a line for each thread.

The scheduler's lines need no arena: they lease slots for the ranks. A rank has one line, with the arena
mapped, and makes no call while it loads or saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from connectors.transfer.settlements import Debts
from kvstore.client import Namespace


def _open(socket_path: str, timeout_s: float, label: str, *, attach: bool, writable: bool) -> Any:
    from kvstore.client import Client

    return Client(socket_path, timeout_s=timeout_s, label=label, attach=attach, writable=writable)


open_client: Callable[..., Any] = _open  # a kvstore.client.Client; connects at its first call


class Line:
    """One connection to the daemon, and what could not be told on it yet."""

    def __init__(
        self, socket_path: str, timeout_s: float, label: str, attach: bool = False, writable: bool = False
    ) -> None:
        self.client = open_client(socket_path, timeout_s, label, attach=attach, writable=writable)
        self.debts = Debts(self.client)

    def acquire(
        self, space: Namespace, hashes: Sequence[bytes], wait_s: float, ticket: int, parent: bytes
    ) -> Any:
        """A kvstore.client.SlotLease. Raises what the client raises."""
        self.debts.pay()
        return self.client.acquire_slots(space, hashes, wait_s, ticket, parent)

    def settle(self, ticket: int, tokens: int, space: Namespace | None, missing: bytes) -> None:
        """See `Client.settle`; told with the next call where it cannot be told now, and then it raises."""
        self.debts.owe(ticket, tokens, space, missing)
        self.debts.pay()

    def refresh(self) -> Any:
        """The arena that the daemon serves now. Any thread may call. Raises what the client raises.

        Asking is how an idle connection learns that its daemon is gone, and lets go of an arena
        that was replaced.
        """
        self.client.ping()
        return self.client.arena

    def close(self) -> None:
        self.client.close()
