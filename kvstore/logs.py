"""The daemon's log: one event a line on stderr, as JSON for collectors or coloured for people.

Every module logs through the standard library (`logging.getLogger("kvstore.x")`), so that
tiers and client need nothing of ours; here, once, all of it is given one form:

    {"event": "serving", "level": "info", "logger": "kvstore.service", "time": "2025-…Z", …}

Facts travel as fields: `log.info("serving", extra={"socket": …})`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, Processor

# What a LogRecord has of its own; anything else came in through `extra`.
_OWN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(level: str, form: Literal["auto", "json", "console"]) -> None:
    """Send all logging to stderr in this form. "auto" is console on a terminal, else JSON."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                _fields,
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="timestamp" if console else "time"),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_render(console)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def _render(console: bool) -> list[Processor]:
    if console:
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    return [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
    ]


def _fields(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Copy the `extra` of a standard-library record into the event."""
    record: logging.LogRecord = event["_record"]
    event.update({name: value for name, value in record.__dict__.items() if name not in _OWN})
    return event
