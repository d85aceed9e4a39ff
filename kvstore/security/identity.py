"""Who asks over a network: so far this machine's callers only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvstore.errors import NotKnown
from kvstore.security.principals import Principal, local


class Gate:
    """Lets in who calls from this machine."""

    def __init__(self, access_file: Path | None) -> None:
        self._path = access_file

    def principal(
        self,
        auth_context: Mapping[str, Iterable[bytes]],
        peer: str,
        sockname: tuple[str, int] | None,
        token: str | None,
    ) -> Principal:
        """Raises NotKnown."""
        if not peer.startswith(("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D")):
            raise NotKnown(f"{peer} is not of this machine")
        return local(os.geteuid(), 0)._replace(name=f"uid {os.geteuid()}")


def bearer(authorization: str | None) -> str | None:
    """The token in an Authorization header."""
    return authorization[7:] if authorization else None
