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

# By command and, where it has some, action or verb.
_AUDITED: dict[str, Access] = {
    "erase": "admin",
    "warm": "admin",
    "region init": "admin",
    "region reseal": "admin",
    "model publish": "publisher",
    "model rm": "publisher",
    "model gc": "publisher",
}


def note(command: str, args: argparse.Namespace, words: Sequence[str], outcome: str) -> None:
    """After a command. Of a child its parent has noted it already."""
    of_command = getattr(args, "action", None) or getattr(args, "verb", None)
    name = f"{command} {of_command}" if of_command else command
    if name not in _AUDITED or child.is_one or getattr(args, "node", None) or getattr(args, "prefix", None):
        return
    audit.to_syslog()
    audit.note("cli", f"uid {os.getuid()}", _AUDITED[name], name, " ".join(words), outcome)
