"""Writes to the audit log what one caller of the local socket asked for."""

from __future__ import annotations

from typing import Any

import msgspec

from kvstore.protocol import frames
from kvstore.security import audit
from kvstore.security.principals import Access, Principal

_GO_ON = (frames.Record, frames.WarmPrefix)  # asked again, the same goes on


class Auditing:
    """One line for each action, once it is answered; none of a caller that is a door, which has written its own."""

    def __init__(self, principal: Principal, door: str) -> None:
        self._principal, self._is_door = principal, bool(door)
        self._pending: tuple[msgspec.Struct, Access] | None = None
        self._last: msgspec.Struct | None = None

    def asked(self, request: Any, access: Access) -> None:
        if access in audit.AUDITED and not self._is_door:
            goes_on = isinstance(request, _GO_ON) and request == self._last
            self._pending, self._last = None if goes_on else (request, access), request

    def answered(self, answer: frames.Answer | None) -> None:
        """None: who asked is gone."""
        if self._pending is not None:
            (request, access), self._pending = self._pending, None
            outcome = "gone" if answer is None else getattr(answer, "code", "ok")
            action = type(request).__name__.lower()
            audit.note("socket", self._principal, access, action, _in_words(request), outcome)


def _in_words(request: msgspec.Struct) -> str:
    """Its fields that say something."""
    facts = ((name, getattr(request, name)) for name in request.__struct_fields__)
    return " ".join(
        f"{name}={value.hex() if isinstance(value, bytes) else value}"
        for name, value in facts
        if value not in (None, "", b"") and value is not False
    )
