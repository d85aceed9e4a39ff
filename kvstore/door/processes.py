"""Processes: what all connections of one process hold together, and what they may.

    peer ── pid, as the kernel reports it ─────────────────────────▶ one Process
         ── no pid (another pid namespace): its pidfd, Linux 6.9 ──▶ one Process
         ── neither ───────────────────────────────────────────────▶ the one Process of all such peers

So a limit of a process holds wherever its peers come from: whoever cannot be told apart shares one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import NamedTuple

from kvstore.constants import DOOR_PROCESS_LEASE_SHARE_MAX
from kvstore.errors import TooManyConnections
from kvstore.units import format_bytes
from tiers.checksum import column_sizes
from tiers.namespace_spec import NamespaceSpec

DOOR_PROCESS_CONNECTIONS_MAX = 128  # of one process: an engine that leaks them must not lock others out
DOOR_LEASE_S_MAX = 600.0  # whoever holds a lease for longer hangs: its connection is closed


log = logging.getLogger("kvstore.door")


class Limits(NamedTuple):
    """What one connection may do, and what all connections of one process may.

    lease_bytes_max: of the arena, over all leases of a connection; process_lease_bytes_max: of a
    process. lease_s_max: a lease that is held longer is taken back.
    """

    arena_bytes: int
    leases_max: int
    lease_bytes_max: int
    process_lease_bytes_max: int
    process_connections_max: int = DOOR_PROCESS_CONNECTIONS_MAX
    lease_s_max: float = DOOR_LEASE_S_MAX

    @classmethod
    def of(cls, arena_bytes: int, leases_max: int, lease_share_max: float) -> Limits:
        """lease_share_max: of the arena, what one connection may hold."""
        process_share = max(lease_share_max, DOOR_PROCESS_LEASE_SHARE_MAX)
        return cls(
            arena_bytes, leases_max, int(arena_bytes * lease_share_max), int(arena_bytes * process_share)
        )


class Process:
    """What all connections of one process hold together. An engine is one that registered a namespace: one line in
    the log when it comes, and one when it leaves, however many connections and namespaces it has."""

    def __init__(self, key: int, salt: int) -> None:
        """key: its pid, or another number that the transport tells it by; 0: one that cannot be told from others. salt: what makes numbers of its own, such as tickets, others than those of other
        processes."""
        self.key = key
        self.salt = salt
        self.connections = 0
        self.namespaces = 0
        self.namespace_bytes = 0  # of what it said of them
        self.lease_bytes = 0
        self.requests = 0
        self._engine = ""  # the caller that registered its first namespace
        self._since_s = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"pid {self.key}" if self.key > 0 else "a process of another pid namespace"

    def registered(self, name: str, spec: NamespaceSpec, now_s: float) -> None:
        """A namespace of one of its callers, `name`, is known now."""
        if self._engine:
            return
        self._engine, self._since_s = name, now_s
        log.info(
            "an engine is here",
            extra={
                "engine": name,
                "model": spec.fields.get("model", ""),
                "tenant": spec.fields.get("tenant", ""),
                "record": format_bytes(spec.record_bytes),
                "block_tokens": spec.block_tokens,
                "columns": len(column_sizes(spec.columns, spec.record_bytes)),
            },
        )

    def left(self, now_s: float) -> None:
        """Its last connection is gone."""
        if self._engine:
            facts = {"requests": self.requests, "seconds": round(now_s - self._since_s, 1)}
            log.info("an engine is gone", extra={"engine": self._engine, **facts})


class Processes:
    """Those that are connected."""

    def __init__(self) -> None:
        self._by_key: dict[int, Process] = {}
        self._secret = os.urandom(16)

    def enter(self, key: int, connections_max: int) -> Process:
        """One more connection of it. Raises TooManyConnections."""
        process = self._by_key.get(key) or Process(key, self._salt(key))
        if process.connections >= connections_max:
            raise TooManyConnections(
                f"{process.connections} connections of {process.name} are served already"
            )
        process.connections += 1
        self._by_key[key] = process
        return process

    def leave(self, process: Process, now_s: float) -> None:
        """One of its connections is gone."""
        process.connections -= 1
        if not process.connections:
            del self._by_key[process.key]
            process.left(now_s)

    def _salt(self, key: int) -> int:
        """Of 62 bits, always the same for one process, and known to none of them."""
        digest = hashlib.blake2b(str(key).encode(), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little") >> 2
