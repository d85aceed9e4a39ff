"""Pages of long answers: as much of a list as fits one frame; the client asks for the next page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

from kvstore.engine.sessions import Session
from kvstore.index.block import Namespace
from kvstore.ledger.totals import Total
from kvstore.protocol.frames import fields_bytes

# Of a namespace, and of a session, in an answer, without its words.
NAMESPACE_ANSWER_BYTES, SESSION_ANSWER_BYTES = 1536, 1024
TOTALS_ROW_BYTES = 500  # of a row without its names

T = TypeVar("T")


def fitting(items: Sequence[T], size_bytes: Callable[[T], int], bytes_max: int) -> Sequence[T]:
    """As many of these as fit into so many bytes, one at least."""
    ends = accumulate(map(size_bytes, items))
    return items[: max(1, sum(end <= bytes_max for end in ends))]


def total_bytes(row: Total) -> int:
    """At most, in an answer."""
    return TOTALS_ROW_BYTES + 4 * (len(row.model) + len(row.tenant))


def namespace_bytes(namespace: Namespace) -> int:
    """In an answer."""
    return NAMESPACE_ANSWER_BYTES + fields_bytes(namespace.spec.fields)


def session_bytes(session: Session) -> int:
    """At most, in an answer."""
    return SESSION_ANSWER_BYTES + 4 * len(session.label)
