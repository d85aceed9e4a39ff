"""What may be sent: a request is encoded, and read back as the daemon reads it, before a byte of it leaves.

So there is one list of what is allowed, that of kvstore.protocol.frames, on both sides.
"""

from __future__ import annotations

import msgspec

from kvstore.client.refusing import WRONG, wrong
from kvstore.errors import Refused
from kvstore.protocol import frames


def encode_sendable(request: msgspec.Struct, frame: bytearray) -> None:
    """Replace the content of `frame` by that of the request. Raises Refused unless the daemon can read it, and its
    numbers and sizes are those of the protocol."""
    try:
        frames.encode_frame_into(request, frame)
    except (*WRONG, msgspec.MsgspecError) as error:
        raise wrong(f"{_name(request)}: {error}") from error
    size = len(frame) - frames.HEADER_BYTES
    if size > frames.FRAME_BYTES_MAX:
        raise Refused(
            "frame_too_large", f"{_name(request)}: {size} bytes: at most {frames.FRAME_BYTES_MAX} are allowed"
        )
    try:
        frames.request_decoder.decode(memoryview(frame)[frames.HEADER_BYTES :])
    except msgspec.ValidationError as error:
        raise wrong(f"{_name(request)}: {frames.in_words(error, type(request))}") from error


def require_sendable(request: msgspec.Struct) -> None:
    """Raises Refused, as `encode_sendable`."""
    encode_sendable(request, bytearray())


def _name(request: msgspec.Struct) -> str:
    return type(request).__name__.lower()
