"""What the client refuses by itself: every call that cannot succeed, before a byte of it is sent.

    call ─▶ arguments ─▶ request ─▶ encoded, and read back as the daemon reads it ─▶ connection
                 │            │                    │
                 ╰────────────┴────────────────────┴─▶ Refused: the connection and all leases stay

So there is one list of what is allowed, that of kvstore.protocol.frames, on both sides.
"""

from __future__ import annotations

import functools
from types import FunctionType

from kvstore.errors import Refused

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    import msgspec

    T = TypeVar("T")

# What Python raises for a value of another type, size or kind than a call is made for.
_WRONG = (ArithmeticError, AttributeError, BufferError, LookupError, RecursionError, TypeError, ValueError)


def refusing(of: type[T]) -> type[T]:
    """A class whose public methods, and whose making, raise Refused where an argument makes no sense."""
    for name, member in list(vars(of).items()):
        if isinstance(member, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(of, name, _refusing(member))
    return of


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return method(*args, **named)
        except _WRONG as error:
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


def require_sendable(request: msgspec.Struct) -> None:
    """Raises Refused unless the daemon can read this request, and its numbers and sizes are those of the protocol."""
    import msgspec

    from kvstore.protocol import frames

    name = type(request).__name__.lower()
    try:
        frame = frames.encode_frame(request)
    except (*_WRONG, msgspec.MsgspecError) as error:
        raise wrong(f"{name}: {error}") from error
    size = len(frame) - frames.HEADER_BYTES
    if size > frames.FRAME_BYTES_MAX:
        raise Refused(
            "frame_too_large", f"{name}: {size} bytes: at most {frames.FRAME_BYTES_MAX} are allowed"
        )
    try:
        frames.request_decoder.decode(memoryview(frame)[frames.HEADER_BYTES :])
    except msgspec.ValidationError as error:
        raise wrong(f"{name}: {frames.in_words(error, type(request))}") from error
