"""Which commands act on a bucket themselves, past every door, and the line of the audit that each leaves in the machine's syslog.

What goes through the daemon's socket or over gRPC is noted there. Whoever has the credentials of a bucket needs no command of ours:
what nobody can leave out is the access log of the object store.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from kvstore.security import audit
from kvstore.security.principals import Access
from kvstore.tools.cli import child

# By command and, where it has some, verb.
_AUDITED: dict[str, Access] = {
    "warm": "admin",
    "region init": "admin",
    "region erase": "admin",
    "region reseal": "admin",
    "model publish": "publisher",
    "model rm": "publisher",
    "model gc": "publisher",
}


_ELSEWHERE = ("node", "dry_run", "ls")  # noted there, or nothing was done


def note(args: argparse.Namespace, words: Sequence[str], outcome: str) -> None:
    """After a command. Of a child its parent has noted it already."""
    name: str = args.called
    if name not in _AUDITED or child.is_one or any(getattr(args, word, None) for word in _ELSEWHERE):
        return
    audit.to_syslog()
    audit.note("cli", f"uid {os.getuid()}", _AUDITED[name], name, " ".join(words), outcome)
