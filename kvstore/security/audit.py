"""The audit: a line of JSON for each action of an admin or a publisher, whichever door it came through.

    {"logger": "kvstore.audit", "time": "…Z", "door": "grpc", "who": "spiffe://…", "access": "admin",
     "action": "Erase", "subject": "tenant=acme", "outcome": "OK"}

    local socket ─▶ the daemon ───────╮
    gRPC ────────▶ kvstore grpc ──────┼──▶ stderr, beside the log, at whatever level that is
    kvstore region erase, … ──────────╯──▶ syslog of the machine where it ran

Each action has one line, from the process that the caller came to: the daemon writes none for a connection of a door, which
has written its own. A line has names of tenants and models, and no token, key or prompt. Attempts of callers that nobody knows,
who could fill a disk with them, share one line a second: it says how many were left out before it.
"""

from __future__ import annotations

import json
import logging
import time
from datetime import UTC, datetime
from logging.handlers import SysLogHandler
from typing import Any, Final, TextIO

from kvstore.security.principals import Access, Principal

AUDITED: Final = frozenset[Access]({"admin", "publisher"})
SUBJECT_CHARS_MAX = 1024
SYSLOG: Final = "/dev/log"
UNKNOWN_S: Final = 1.0  # between two lines of callers that nobody knows

log = logging.getLogger("kvstore.audit")

_FACTS: Final = ("door", "who", "access", "action", "subject", "outcome")


def note(door: str, who: Principal | str, access: str, action: str, subject: str, outcome: str) -> None:
    """who: "" of a caller that nobody knows. outcome: in a word, as who asked was answered."""
    if not str(who):
        left_out = _unknown.left_out()
        if left_out is None:
            return
        subject = f"{left_out} more were left out before" if left_out else subject
    facts = (door, str(who), access, action, subject[:SUBJECT_CHARS_MAX], outcome)
    log.info("%s", action, extra=dict(zip(_FACTS, facts, strict=True)))


class _Unknown:
    """Callers that nobody knows."""

    def __init__(self) -> None:
        self._next_s, self._count = 0.0, 0

    def left_out(self) -> int | None:
        """How many had no line since the last one that had; None: this one has none."""
        if (now_s := time.monotonic()) < self._next_s:
            self._count += 1
            return None
        self._next_s, count, self._count = now_s + UNKNOWN_S, self._count, 0
        return count


_unknown = _Unknown()


def to_stream(stream: TextIO) -> None:
    """From now on to this one, and not into the log."""
    _to(logging.StreamHandler(stream))


def to_syslog(path: str = SYSLOG) -> None:
    """From now on to the machine's; where there is none, or it goes away, nowhere."""
    _to(_Syslog(path, SysLogHandler.LOG_AUTHPRIV))


def _to(handler: logging.Handler) -> None:
    handler.setFormatter(_Json())
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


class _Syslog(SysLogHandler):
    """It connects with each line: what fails then is not said among the words of a command."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - as logging calls it
        pass


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts: dict[str, Any] = {"logger": record.name, "time": time.replace("+00:00", "Z")}
        return json.dumps(facts | {name: getattr(record, name) for name in _FACTS})
