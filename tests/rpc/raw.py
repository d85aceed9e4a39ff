"""A client that says what it likes in HTTP/2, whatever the server allows."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from contextlib import suppress

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4  # kinds of frames
_END_STREAM, _END_HEADERS = 1, 4
_WINDOW = 4  # of SETTINGS


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def opened(
    count: int,
    path: str = "/grpc.health.v1.Health/Watch",
    token: str = "",
    window: int = 65_535,
    sent: bytes | None = None,
) -> bytes:
    """What a client says that calls so often on one connection. window: that it has for answers. sent: of a message whose rest
    never comes; None: an empty one, to its end."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path.encode(),
        b":authority": b"a",
        b"te": b"trailers",
    }
    fields |= {b"content-type": b"application/grpc"}
    if token:
        fields |= {b"authorization": b"Bearer " + token.encode()}
    block = b"".join(bytes([0, len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
    found = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(SETTINGS, 0, 0, struct.pack(">HI", _WINDOW, window))]
    for stream in range(1, 2 * count, 2):
        found.append(frame(HEADERS, _END_HEADERS, stream, block))
        if sent is None:
            found.append(frame(DATA, _END_STREAM, stream, bytes(5)))
        elif sent:
            found.append(frame(DATA, 0, stream, sent))
    return b"".join(found)


def kinds_of_frames(
    peer: socket.socket, until: tuple[int, int] = (HEADERS, 0), quiet_s: float = 0.0
) -> Counter[int]:
    """Of all that comes until nothing does. until: a kind, and how many of it are enough; 0: never. quiet_s: then all that still
    comes before so long a pause."""
    came, found, at = b"", Counter[int](), 0
    with suppress(TimeoutError):
        while True:
            if until[1] and found[until[0]] >= until[1]:
                if not quiet_s:
                    break
                peer.settimeout(quiet_s)
            if not (more := peer.recv(1 << 16)):
                break
            came += more
            while at + 9 <= len(came):
                found[came[at + 3]] += 1
                at += 9 + int.from_bytes(came[at : at + 3], "big")
    return found
