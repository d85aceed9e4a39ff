"""Who asks, and what a stranger may read: how the node is, and no name of what it holds.

    a connection ──▶ /proc/net/tcp: whose is the other end? ──┬─▶ this user's, root's ──▶ the answer, as it is
                                                              ╰─▶ anybody else's      ──▶ `without_names`

The kernel says which user made a connection of this machine; of one from elsewhere (another host, another network
namespace) it says nothing, and whoever made it is a stranger. Figures, states, names of levels and of regions stay. Names of models and
tenants become `model-3f2a…`, the same as long as this process lives; all other text is not shown: directories, hashes,
labels, what an error said.

With `web.names = "all"` there are no strangers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

Names = Literal["user", "all"]
Transport = Any  # of asyncio, as aiohttp has it: may be None

_OPEN: Final = frozenset(
    {"name", "state", "version", "instance", "region", "tiers"}
)  # text under these stays
_NAMED: Final = frozenset({"model", "tenant"})
HIDDEN: Final = "(for the daemon's user only)"
_ESTABLISHED: Final = "01"  # others may have lost their user: the kernel says 0, which is root's


class Askers:
    """Tells friends from strangers, a connection at a time."""

    def __init__(self, names: Names, proc: Path = Path("/proc/self/net")) -> None:
        self._is_open = names == "all"
        self._proc = proc
        self._seed = os.urandom(16)
        self._known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def may_read_names(self, transport: Transport) -> bool:
        """Whether who made this connection is this process's user or root. Looks once a connection."""
        if self._is_open:
            return True
        if transport is None:
            return False
        if transport not in self._known:
            ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
            uid = _uid_of(self._proc, theirs, ours) if ours and theirs else None
            self._known[transport] = uid in (os.geteuid(), 0)
        return self._known[transport]

    def without_names(self, value: Any, key: str = "") -> Any:
        """An answer of the daemon, or a part of one, for a stranger. key: what it stands under."""
        if isinstance(value, dict):
            return {name: self.without_names(inner, str(name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.without_names(inner, key) for inner in value]
        if not isinstance(value, str) or not value or key in _OPEN:
            return value
        if key in _NAMED:
            return f"{key}-{hashlib.blake2b(value.encode(), key=self._seed, digest_size=4).hexdigest()}"
        return HIDDEN


def _uid_of(proc: Path, theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> int | None:
    """Of the socket at the other end; None where it is not in our network namespace."""
    wanted = (_end(theirs), _end(ours))
    for local, remote, uid in _sockets(proc):
        if (local, remote) == wanted:
            return uid
    return None


def _sockets(proc: Path) -> Iterator[tuple[tuple[object, int], tuple[object, int], int]]:
    for name in ("tcp", "tcp6"):
        try:
            rows = (proc / name).read_text().splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == _ESTABLISHED:
                yield _parsed(fields[1]), _parsed(fields[2]), int(fields[7])


def _parsed(text: str) -> tuple[object, int]:
    """ "0100007F:1F90": words of four bytes, each as this processor has it, and the port."""
    digits, _, port = text.partition(":")
    words = (bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    return _plain(ip_address(b"".join(words))), int(port, 16)


def _end(name: tuple[Any, ...]) -> tuple[object, int]:
    return _plain(ip_address(str(name[0]).partition("%")[0])), name[1]


def _plain(address: IPv4Address | IPv6Address) -> object:
    """An IPv4 address is the same however it is written."""
    return getattr(address, "ipv4_mapped", None) or address
