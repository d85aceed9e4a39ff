"""Sealed content: how small objects of a region are written, so that whoever reads them sees what is damaged.

    │ magic (8) │ bytes of the body (4) │ zeros (4) │ xxh3_128 of the body (16) │ body (msgpack) │ padding │

The magic says what it is, and ends with the number of its format: what has a higher one is of a later version, and is left alone. Padding is not covered, and carries nothing.

A checksum says that bytes are as somebody wrote them, not that they can be true: the types that are read say in which range
each number is (replication/formats/ranges.py), and whatever does not fit is `Damaged`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec
import xxhash

from replication.errors import Damaged, FormatUnknown
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused
from tiers.parsing import ParserErrors, is_later, parser_failure

T = TypeVar("T")
_PRELUDE = struct.Struct("<8sII16s")
PRELUDE_BYTES = _PRELUDE.size


def seal(magic: bytes, value: object) -> bytes:
    """The content of an object that says this."""
    body = msgspec.msgpack.encode(value)
    return _PRELUDE.pack(magic, len(body), 0, xxhash.xxh3_128_digest(body)) + body


async def is_of_later_version(objects: Objects, magic: bytes, name: str, size_bytes_max: int) -> bool:
    """See `is_later`; False where it cannot be read. Raises ObjectUnavailable."""
    try:
        return is_later(await objects.get_within(name, size_bytes_max), magic)
    except (ObjectDamaged, ObjectMissing, ObjectRefused):
        return False


async def fetch(objects: Objects, magic: bytes, kind: type[T], name: str, size_bytes_max: int) -> T:
    """What an object says, none of which is fetched if it is too large. Raises Damaged, FormatUnknown, ObjectError."""
    try:
        content = await objects.get_within(name, size_bytes_max)
    except ObjectDamaged as error:
        raise Damaged(str(error)) from error
    return unseal(magic, content, kind, name, size_bytes_max)


def unseal(magic: bytes, content: bytes | memoryview, kind: type[T], where: str, size_bytes_max: int) -> T:
    """What an object says. where: its name, for people. Raises Damaged, FormatUnknown."""
    if not PRELUDE_BYTES <= len(content) <= size_bytes_max:
        raise Damaged(f"{where}: {len(content)} bytes: allowed are {PRELUDE_BYTES} to {size_bytes_max}")
    found, body_bytes, zeros, checksum = _PRELUDE.unpack_from(content)
    if is_later(content, magic):
        raise FormatUnknown(f"{where}: of a later version: begins with {found!r}, known here is {magic!r}")
    if found != magic:
        raise Damaged(f"{where}: begins with {bytes(found)!r}, not with {magic!r}")
    body = content[PRELUDE_BYTES : PRELUDE_BYTES + body_bytes]
    if zeros or len(body) != body_bytes or xxhash.xxh3_128_digest(body) != checksum:
        raise Damaged(f"{where}: its checksum does not match")
    decoder = _decoder(
        cast("Hashable", kind)
    )  # not below: a type that msgspec does not take is a bug of ours
    try:
        return cast("T", decoder.decode(body))
    except ParserErrors as error:
        raise Damaged(f"{where}: not understood: {parser_failure(error)}") from error


class Heard(NamedTuple, Generic[T]):
    """What several members of an object say. unsound: how many others cannot be true; reason: what is wrong with the first of them."""

    found: list[T]
    unsound: int
    reason: str


def heard(raws: Sequence[msgspec.Raw], understood: Callable[[msgspec.Raw], T], where: str) -> Heard[T]:
    """All that can be true: one that cannot takes no other one with it. understood: may raise `ParserErrors`."""
    found: list[T] = []
    unsound, reason = 0, ""
    for raw in raws:
        try:
            found.append(understood(raw))
        except ParserErrors as error:
            unsound += 1
            reason = reason or f"{where}: {parser_failure(error)}"
    return Heard(found, unsound, reason)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
