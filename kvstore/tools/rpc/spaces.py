"""Which namespaces a call means, and may know of.

    daemon ── all namespaces, asked for when they may have changed ─▶ those of the caller's tenant ─▶ chosen by a selector

Who asks as a tenant sees that tenant's, whatever the request says; others are as if they did not exist.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Container, Sequence

from kvstore.errors import BadRequest, NotFound, NotReady
from kvstore.ledger.explain import NoneSuch, Space, Unclear, choose
from kvstore.protocol import frames
from kvstore.tools.rpc.calls import Call
from kvstore.tools.rpc.node import Node
from kvstore.v1 import types_pb2

SPACES_S = 5.0  # for which the list is good
SPACES_S_MIN = 0.1  # between two times it is asked for, where something is not in it
CHOICES_MAX = 4096

_Choice = tuple[str, str, str | None, str | None]


class Spaces:
    """Of one daemon."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._asking = asyncio.Lock()
        self._known: list[Space] = []
        self._known_s = -SPACES_S
        self._chosen: dict[_Choice, list[Space]] = {}

    async def of(self, call: Call, age_s: float = SPACES_S) -> list[Space]:
        """All that the caller may know of. age_s: of the list, at most. Raises KvstoreError."""
        if time.monotonic() - self._known_s >= age_s:
            async with self._asking:
                if time.monotonic() - self._known_s >= age_s:
                    began_s = time.monotonic()
                    page = await self._node.pages("namespaces", frames.Namespaces, call.until)
                    self._known, self._known_s = page["namespaces"], began_s
                    self._chosen.clear()
        tenant = call.principal.tenant
        return [s for s in self._known if tenant is None or s["fields"].get("tenant", "") == tenant]

    async def chosen(
        self, call: Call, selector: types_pb2.NamespaceSelector, among: Container[str] | None = None
    ) -> list[Space]:
        """Those of the one engine that is meant. among: only these digests. Raises KvstoreError."""
        tenant = selector.tenant if selector.HasField("tenant") and call.principal.tenant is None else None
        wanted = selector.digest.lower(), selector.model, tenant, call.principal.tenant
        if selector.digest and not re.fullmatch("[0-9a-fA-F]{1,32}", selector.digest):
            raise BadRequest("namespace.digest: 1 to 32 digits in hex are required")
        for age_s in (SPACES_S, SPACES_S_MIN):  # it may have come since
            spaces = await self.of(call, age_s)
            if among is not None:
                spaces = [space for space in spaces if space["digest"] in among]
            elif (known := self._chosen.get(wanted)) is not None:
                return known
            try:
                found = choose(spaces, wanted[0], selector.model, tenant)
            except NoneSuch as error:
                missing = NotFound(str(error))
            except Unclear as error:
                raise BadRequest(str(error)) from error
            else:
                if among is None and len(self._chosen) < CHOICES_MAX:
                    self._chosen[wanted] = found
                return found
        raise missing

    async def one(self, call: Call, selector: types_pb2.NamespaceSelector) -> Space:
        """The one namespace that is meant, of those of its engine's KV groups. Raises KvstoreError."""
        found = await self.chosen(call, selector)
        if selector.digest:
            known = await self.of(call)
            found = [space for space in known if space["digest"].startswith(selector.digest.lower())]
        if len(found) > 1:
            digests = ", ".join(space["digest"] for space in found)
            raise BadRequest(f"which KV group of the engine? choose one by its namespace's digest: {digests}")
        if not found[0]["block_tokens"]:
            raise NotReady(
                f"namespace {found[0]['digest']}: its engine did not attach since the daemon started"
            )
        return found[0]

    def forget(self) -> None:
        """The daemon says that the list is old."""
        self._known_s = -SPACES_S


def column_sizes(space: Space) -> Sequence[int]:
    """Bytes of each column of a record, in order."""
    return [size for count, size in space["column_runs"] for _ in range(count)] or [space["record_bytes"]]
