"""Principals: who asks, and what they may.

    local socket ── uid, and pid as the kernel reports them ──▶ local() ─▶ Principal(may) ── require ──▶ a request is served
                                                                                          └─ no ──▶ NotAllowed

Each kind of request needs one access class; the table of kinds (kvstore/door/api.py) says which. On the local socket our
own user and root may everything, and nobody else comes in.
"""

from __future__ import annotations

import os
from typing import Final, Literal, NamedTuple, get_args

from kvstore.errors import NotAllowed

Access = Literal[
    "read",  # look blocks up, and read them
    "write",  # store blocks, and end a namespace
    "view",  # figures, rules and settings of the node: names of models and tenants are in them
    "admin",  # change rules and settings, drop and warm blocks, record requests
    "publisher",  # publish models, and take them out of the bucket again
    "peer",  # be another node of the region
]
EVERYTHING: Final = frozenset[Access](get_args(Access))


class Principal(NamedTuple):
    """process: its pid; of one in another pid namespace a negative number of its own, where the kernel has one; else 0,
    which all those share. Of one from a network: uid -1, and name says who. tenant: the only one that it may know of; None:
    all. Equal ones share limits."""

    uid: int
    process: int
    may: frozenset[Access]
    name: str = ""
    tenant: str | None = None

    def __str__(self) -> str:
        if self.name:
            return self.name
        pid = f"pid {self.process}" if self.process > 0 else "a process of another pid namespace"
        return f"{pid}, uid {self.uid}"

    def require(self, access: Access, what: str) -> None:
        """Raises NotAllowed. what: the request, in a word."""
        if access not in self.may:
            raise NotAllowed(f"{what.lower()}: needs the right to {access}, which {self} has not")


def local(uid: int, process: int) -> Principal:
    """Who connected to a socket of this machine."""
    return Principal(uid, process, EVERYTHING if uid in (0, os.geteuid()) else frozenset())
