"""Where the daemon's web listens: "ADDRESS:PORT" as a setting and on the command line.

Without pydantic: the process that serves it reads no configuration, and is smaller for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

ALLOWED = "allowed are ADDRESS:PORT, [ADDRESS]:PORT and localhost:PORT, with ports 0 (any free one) to 65535"
_FORM = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<four>[0-9.]+|localhost)):(?P<port>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Listen:
    """host: an address, or "localhost"."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        address = ip_address(self.host)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Listen:
    """Raises ValueError that says what is allowed."""
    found = _FORM.fullmatch(text)
    if found is None or int(found["port"]) > 65_535:
        raise ValueError(ALLOWED)
    host = found["six"] or found["four"]
    if host != "localhost":
        try:
            address = ip_address(host)
        except ValueError as error:
            raise ValueError(ALLOWED) from error
        if (address.version == 6) != bool(found["six"]):
            raise ValueError(ALLOWED)
    return Listen(host, int(found["port"]))
