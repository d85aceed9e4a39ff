"""Sealed content: how small objects of a region are written, so that whoever reads them sees what is damaged.

    │ magic (8) │ bytes of the body (4) │ zeros (4) │ xxh3_128 of the body (16) │ body (msgpack) │ padding │

The magic says what it is and in which format. Padding is not covered, and carries nothing.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
import xxhash

from replication.errors import Damaged

T = TypeVar("T")
_PRELUDE = struct.Struct("<8sII16s")
PRELUDE_BYTES = _PRELUDE.size


def seal(magic: bytes, value: object) -> bytes:
    """The content of an object that says this."""
    body = msgspec.msgpack.encode(value)
    return _PRELUDE.pack(magic, len(body), 0, xxhash.xxh3_128_digest(body)) + body


def unseal(magic: bytes, content: bytes | memoryview, kind: type[T], where: str, size_bytes_max: int) -> T:
    """What an object says. where: its name, for people. Raises Damaged."""
    if not PRELUDE_BYTES <= len(content) <= size_bytes_max:
        raise Damaged(f"{where}: {len(content)} bytes: allowed are {PRELUDE_BYTES} to {size_bytes_max}")
    found, body_bytes, zeros, checksum = _PRELUDE.unpack_from(content)
    if found != magic:
        raise Damaged(f"{where}: begins with {bytes(found)!r}, not with {magic!r}")
    body = content[PRELUDE_BYTES : PRELUDE_BYTES + body_bytes]
    if zeros or len(body) != body_bytes or xxhash.xxh3_128_digest(body) != checksum:
        raise Damaged(f"{where}: its checksum does not match")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise Damaged(f"{where}: not understood: {error}") from error
