"""The daemon's log: one event a line on stderr, as JSON for collectors or coloured for people.

Every module logs through the standard library (`logging.getLogger("kvstore.x")`), so that
tiers and client need nothing of ours; here, once, all of it is given one form:

    {"event": "serving", "level": "info", "logger": "kvstore.service", "time": "2025-…Z", …}

Facts travel as fields: `log.info("serving", extra={"socket": …})`. Who writes them is in kvstore/output.py.

A warning that comes again and again is written a few times and then now and then, with how many were left out: a fault that meets
every pack, request or block fills no disk, and hides no other line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from kvstore.output import HandedOver, handed_over
from kvstore.units import harmless

REPEATS_MAX: Final = 10.0  # lines of one wording at once
REPEAT_S: Final = 300.0  # … and one more each
WORDINGS_MAX: Final = 1024  # remembered

# What a LogRecord has of its own; anything else came in through `extra`.
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class Guard(logging.Filter):
    """Lets REPEATS_MAX lines of one wording through at once, and one more each REPEAT_S. Problems have a wording of each kind."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._rooms: dict[tuple[str, str, object], _Room] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = record.__dict__.get("kind")
        if record.levelno < logging.WARNING and kind is None:
            return True
        key, now_s = (record.name, str(record.msg), kind), self._clock()
        room = self._rooms.pop(key, None) or _Room(now_s)
        self._rooms[key] = room
        if len(self._rooms) > WORDINGS_MAX:
            del self._rooms[next(iter(self._rooms))]
        room.left = min(REPEATS_MAX, room.left + (now_s - room.at_s) / REPEAT_S)
        room.at_s = now_s
        if room.left < 1:
            room.left_out += 1
            return False
        room.left -= 1
        if room.left_out:
            record.left_out, room.left_out = room.left_out, 0
        return True


@dataclass(slots=True)
class _Room:
    """For lines of one wording."""

    at_s: float
    left: float = REPEATS_MAX
    left_out: int = 0  # since the last one that was written


def configure(level: str, form: Literal["auto", "json", "console"]) -> None:
    """Send all logging to stderr in this form. "auto" is console on a terminal, else JSON."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(
        getattr(sys.stderr, "below", sys.stderr)
    )  # colours are drawn: cli/streams.py
    handler.setFormatter(_Console(sys.stderr.isatty()) if console else _Json())
    handler.addFilter(Guard())
    if isinstance(stream := handed_over(sys.stderr), HandedOver):
        stream.note = lambda lost: handler.format(_missing(lost))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def _missing(lines: int) -> logging.LogRecord:
    facts = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "lines": lines}
    return logging.makeLogRecord({**facts, "msg": "lines of the log were lost here: nobody took them"})


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _facts(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in record.__dict__.items() if name not in _OWN}


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {"event": record.getMessage(), **_facts(record)}
        event |= {"level": record.levelname.lower(), "logger": record.name, "time": _when(record)}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        text = json.dumps(event, default=str, ensure_ascii=False)
        # In characters as people write them, unless one of them could steer a terminal: then all as \u…, and as exact.
        return text if text == harmless(text) else json.dumps(event, default=str)


class _Console(logging.Formatter):
    """TIME [level] event [logger] name='value' …; what a bucket or a client wrote into a line moves no cursor."""

    def __init__(self, coloured: bool) -> None:
        super().__init__()
        self._bold, self._plain = ("\x1b[1m", "\x1b[0m") if coloured else ("", "")
        self._colours = (
            {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"} if coloured else {}
        )

    def format(self, record: logging.LogRecord) -> str:
        level, event = record.levelname.lower(), harmless(record.getMessage())
        facts = "".join(f" {name}={harmless(repr(value))}" for name, value in _facts(record).items())
        trace = "\n" + harmless(self.formatException(record.exc_info)) if record.exc_info else ""
        return f"{_when(record)} [{self._colours.get(record.levelname, '')}{level:8}{self._plain}] {self._bold}{event:40}{self._plain} [{record.name}]{facts}{trace}"
