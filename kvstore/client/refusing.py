"""What the client refuses by itself: every call that cannot succeed, before a byte of it is sent.

call ─▶ arguments ─▶ request ─▶ encoded, and read back as the daemon reads it (kvstore.client.sendable) ─▶ the wire
             │            │                    │
             ╰────────────┴────────────────────┴─▶ Refused: the connection and all leases stay
"""

from __future__ import annotations

import functools
from types import FunctionType

from kvstore.errors import Refused

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

# What Python raises for a value of another type, size or kind than a call is made for.
WRONG = (ArithmeticError, AttributeError, BufferError, LookupError, RecursionError, TypeError, ValueError)


def refusing(of: type[T]) -> type[T]:
    """A class whose public methods raise Refused where an argument makes no sense. Those without arguments cost nothing."""
    for name, member in list(vars(of).items()):
        if isinstance(member, FunctionType) and not name.startswith("_") and _has_arguments(member):
            setattr(of, name, refused(member))
    return of


def _has_arguments(method: FunctionType) -> bool:
    code = method.__code__
    return code.co_argcount + code.co_kwonlyargcount > 1


def refused(method: Callable[P, T]) -> Callable[P, T]:
    """This one does so."""

    @functools.wraps(method)
    def call(*args: P.args, **named: P.kwargs) -> T:
        try:
            return method(*args, **named)
        except WRONG as error:
            raise wrong(f"{method.__name__}: {error or type(error).__name__}") from error

    return call


def wrong(what: str) -> Refused:
    """An argument that makes no sense."""
    return Refused("bad_request", what)


def require(truth: bool, what: str) -> None:
    """Raises Refused."""
    if not truth:
        raise wrong(what)


def require_number(name: str, value: float, most: float) -> None:
    """Raises Refused unless it is a number from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise wrong(f"{name} {value!r:.40}: allowed are 0 to {most:g}")


def require_hashes(hashes: Sequence[bytes], most: int) -> None:
    """Raises Refused unless there are 1 to `most` of them."""
    if not 1 <= len(hashes) <= most:
        raise Refused("limit_exceeded", f"{len(hashes)} hashes: 1 to {most} are allowed in one call")
