"""Who asks, and what a stranger may read: how the node is, and no name of what it holds.

    a request ──▶ Gate: who is it? ──┬─▶ may view, of no tenant ──▶ the answer, as it is
                                     ├─▶ may view, of a tenant ───▶ that tenant's names; the rest as for a stranger
                                     ╰─▶ anybody else ────────────▶ `without_names`

Figures, states, names of levels and of regions stay. Names of models and tenants become `model-3f2a…`, the same as long as
this process lives; all other text is not shown: directories, hashes, labels, what an error said.

With `web.names = "all"` there are no strangers.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Final, Literal

from aiohttp import hdrs, web

from kvstore.errors import NotKnown
from kvstore.security.identity import Gate, bearer
from kvstore.security.principals import Principal
from kvstore.security.tls import identity_of

Names = Literal["user", "all"]

_OPEN: Final = frozenset(
    {"name", "state", "version", "instance", "region", "region_name", "host", "tiers", "kind", "level", "fix"}
)  # text under these stays
_NAMED: Final = frozenset({"model", "tenant"})
_PLACE: Final = re.compile(r"(?:^|[^\w.])/")  # in what to do: the directory that it is about
HIDDEN: Final = "(for the daemon's user only)"


class Askers:
    """Tells friends from strangers, a request at a time."""

    def __init__(self, names: Names, gate: Gate) -> None:
        self._is_open = names == "all"
        self._gate = gate
        self._seed = os.urandom(16)

    def principal(self, request: web.BaseRequest) -> Principal | None:
        """Who asks; None: a stranger. Raises NotKnown where a token is shown, and is wrong."""
        transport, token = request.transport, bearer(request.headers.get(hdrs.AUTHORIZATION))
        if transport is None:
            return None
        shown = identity_of(transport.get_extra_info("ssl_object"))
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        try:
            return self._gate.principal(shown, theirs, ours, token)
        except NotKnown:
            if token is not None:
                raise
            return None

    def as_read_by(self, principal: Principal | None, value: Any) -> Any:
        """An answer of the daemon."""
        if self._is_open:
            return value
        if principal is None or "view" not in principal.may:
            return self.without_names(value)
        return value if principal.tenant is None else self.without_names(value, tenant=principal.tenant)

    def without_names(self, value: Any, key: str = "", tenant: str | None = None) -> Any:
        """An answer of the daemon, or a part of one, for a stranger. key: what it stands under. tenant: what is about it alone
        stays as it is."""
        if isinstance(value, dict):
            if tenant is not None and value.get("tenant") == tenant:
                return value
            return {name: self.without_names(inner, str(name), tenant) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.without_names(inner, key, tenant) for inner in value]
        if not isinstance(value, str) or not value or (key in _OPEN and not _PLACE.search(value)):
            return value
        if key in _NAMED:
            return f"{key}-{hashlib.blake2b(value.encode(), key=self._seed, digest_size=4).hexdigest()}"
        return HIDDEN
