"""How the connector reaches the daemon: one function, which tests replace, and a line for each thread.

Lines of one process share one mapping of the arena (`kvstore.client.arena_view.mapped`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from connectors.transfer.orders import SpaceSpec
from connectors.transfer.settlements import Debts


def _open(
    socket_path: str, timeout_s: float, label: str, *, attach: bool = True, writable: bool = True
) -> Any:
    from kvstore.client import Client

    return Client(socket_path, timeout_s=timeout_s, label=label, attach=attach, writable=writable)


open_client: Callable[..., Any] = _open  # a kvstore.client.Client; connects at its first call


class Line:
    """One connection to the daemon with its handles of namespaces, for one thread."""

    def __init__(self, socket_path: str, timeout_s: float, label: str, writable: bool) -> None:
        self._client = open_client(socket_path, timeout_s, label, writable=writable)
        self._debts = Debts(self._client)
        self._handles: dict[bytes, Any] = {}

    def acquire(self, spec: SpaceSpec, hashes: Sequence[bytes], wait_s: float, ticket: int) -> Any:
        self._debts.pay()
        return self._client.acquire(self._handle(spec), hashes, wait_s, ticket)

    def reserve(self, spec: SpaceSpec, hashes: Sequence[bytes], parent: bytes, ticket: int) -> Any:
        return self._client.reserve(self._handle(spec), hashes, parent, ticket)

    def prefetch(self, spec: SpaceSpec, hashes: Sequence[bytes]) -> None:
        self._client.prefetch(self._handle(spec), hashes)

    def settle(self, ticket: int, tokens: int, spec: SpaceSpec, missing: bytes) -> None:
        self._debts.owe(ticket, tokens, self._handle(spec), missing)
        self._debts.pay()

    def refresh(self) -> Any:
        """The arena that the daemon serves now. Any thread may call. Raises what the client raises.

        Asking is how an idle connection learns that its daemon is gone, and lets go of an arena
        that was replaced.
        """
        self._client.ping()
        return self._client.arena

    def close(self) -> None:
        self._client.close()

    def _handle(self, spec: SpaceSpec) -> Any:
        handle = self._handles.get(spec.digest)
        if handle is None:
            handle = self._client.namespace(
                spec.digest, spec.record_bytes, spec.hash_bytes, spec.block_tokens, spec.fields
            )
            self._handles[spec.digest] = handle
        return handle
