"""Holders: what all connections of one principal hold together, and how much that may be.

    connection, connection, … ── of equal principals ──▶ one Holder ── Limits

On the local socket a principal is a process (kvstore.security.principals), so a limit of a process holds wherever its
connections come from: connections that cannot be distinguished share one.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import NamedTuple

from kvstore.constants import DOOR_PROCESS_LEASE_SHARE_MAX, DOOR_SLOW_S, MIB, NAMESPACES_MAX, require
from kvstore.errors import LimitExceeded, TooManyConnections
from kvstore.security.principals import Principal
from kvstore.units import format_bytes
from tiers.checksum import column_sizes
from tiers.namespace_spec import NamespaceSpec

DOOR_PROCESS_CONNECTIONS_MAX = 128  # of one process: an engine that leaks them must not lock others out
DOOR_NAMESPACES_MAX = 1024  # of one process
DOOR_NAMESPACE_BYTES_MAX = 4 * MIB  # of the fields of a process's namespaces
DOOR_LEASE_S_MAX = 600.0  # a client that holds a lease for longer hangs: the lease is taken back

require(DOOR_NAMESPACES_MAX <= NAMESPACES_MAX, "one process cannot register more than there may be")

log = logging.getLogger("kvstore.door")


class Limits(NamedTuple):
    """What one connection may do, and what all connections of one process may.

    lease_bytes_max: of the arena, over all leases of a connection; process_lease_bytes_max: of a
    process. lease_s_max: a lease that is held longer is taken back. slow_s: a request that takes longer is noted.
    """

    arena_bytes: int
    leases_max: int
    lease_bytes_max: int
    process_lease_bytes_max: int
    process_connections_max: int = DOOR_PROCESS_CONNECTIONS_MAX
    lease_s_max: float = DOOR_LEASE_S_MAX
    slow_s: float = DOOR_SLOW_S

    @classmethod
    def of(
        cls, arena_bytes: int, leases_max: int, lease_share_max: float, slow_s: float = DOOR_SLOW_S
    ) -> Limits:
        """lease_share_max: of the arena, what one connection may hold."""
        process_share = max(lease_share_max, DOOR_PROCESS_LEASE_SHARE_MAX)
        return cls(
            arena_bytes,
            leases_max,
            int(arena_bytes * lease_share_max),
            int(arena_bytes * process_share),
            slow_s=slow_s,
        )


class Holder:
    """What all connections of one principal hold together. An engine is one that registered a namespace: one line in
    the log when it comes, and one when it leaves, however many connections and namespaces it has."""

    def __init__(self, principal: Principal, salt: int) -> None:
        """salt: what makes numbers of its own, such as tickets, others than those of other holders."""
        self.principal = principal
        self.salt = salt
        self.connections = 0
        self._namespaces: dict[
            bytes, list[int]
        ] = {}  # by digest: connections, and bytes of what was said of it
        self.lease_bytes = 0
        self.requests = 0
        self._engine = ""  # the caller that registered its first namespace
        self._since_s = 0.0

    def require_room(self, digest: bytes, size_bytes: int) -> None:
        """Raises LimitExceeded where it may not register this namespace, of so many bytes of fields, beside those that
        it has. One that another connection of it has costs nothing."""
        if digest in self._namespaces:
            return
        if len(self._namespaces) >= DOOR_NAMESPACES_MAX:
            raise LimitExceeded(f"{DOOR_NAMESPACES_MAX} namespaces of one process are allowed")
        if sum(held for _, held in self._namespaces.values()) + size_bytes > DOOR_NAMESPACE_BYTES_MAX:
            raise LimitExceeded(
                f"fields of one process's namespaces: {DOOR_NAMESPACE_BYTES_MAX} bytes are allowed together"
            )

    def hold(self, spec: NamespaceSpec, size_bytes: int, name: str, now_s: float) -> None:
        """A connection of it, of the caller `name`, has registered this namespace."""
        self._namespaces.setdefault(spec.digest, [0, size_bytes])[0] += 1
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

    def let_go(self, digest: bytes) -> None:
        """A connection of it has this namespace no more."""
        held = self._namespaces[digest]
        held[0] -= 1
        if not held[0]:
            del self._namespaces[digest]

    def left(self, now_s: float) -> None:
        """Its last connection is gone."""
        if self._engine:
            facts = {"requests": self.requests, "seconds": round(now_s - self._since_s, 1)}
            log.info("an engine is gone", extra={"engine": self._engine, **facts})


class Holders:
    """Those that are connected."""

    def __init__(self) -> None:
        self._by_principal: dict[Principal, Holder] = {}
        self._secret = os.urandom(16)

    def enter(self, principal: Principal, connections_max: int) -> Holder:
        """One more connection of it. Raises TooManyConnections."""
        holder = self._by_principal.get(principal) or Holder(principal, self._salt(principal))
        if holder.connections >= connections_max:
            raise TooManyConnections(f"{holder.connections} connections of {principal} are served already")
        holder.connections += 1
        self._by_principal[principal] = holder
        return holder

    def leave(self, holder: Holder, now_s: float) -> None:
        """One of its connections is gone."""
        holder.connections -= 1
        if not holder.connections:
            del self._by_principal[holder.principal]
            holder.left(now_s)

    def _salt(self, principal: Principal) -> int:
        """Of 62 bits, always the same for one principal, and known to none of them."""
        digest = hashlib.blake2b(str(principal).encode(), digest_size=8, key=self._secret).digest()
        return int.from_bytes(digest, "little") >> 2
