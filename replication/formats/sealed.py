"""Sealed content: how small objects of a region are written, so that whoever reads them sees what is damaged.

    │ magic (8) │ bytes of the body (4) │ zeros (4) │ xxh3_128 of the body (16) │ body (msgpack) │ padding │

The magic says what it is, and ends with the number of its format: what has a higher one is of a later version, and is left alone. Padding is not covered, and carries nothing.

A checksum says that bytes are as somebody wrote them, not that they can be true: the types that are read say in which range
each number is (replication/formats/ranges.py), and whatever does not fit is `Damaged`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

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


class Sealed(Generic[T]):
    """One kind of object."""

    def __init__(
        self, magic: bytes, kind: type[T], size_bytes_max: int, name_of: Callable[[T], str] | None = None
    ) -> None:
        """size_bytes_max: of an object; what is larger is not read. name_of: where it lies that says this: under any other name it is
        damaged."""
        self.size_bytes_max = size_bytes_max
        self._magic = magic
        self._name_of = name_of
        self._decoder = msgspec.msgpack.Decoder(kind)

    def seal(self, value: object) -> bytes:
        return seal(self._magic, value)

    def unseal(self, content: bytes | memoryview, where: str) -> T:
        """What an object says. where: its name. Raises Damaged, FormatUnknown."""
        if not PRELUDE_BYTES <= len(content) <= self.size_bytes_max:
            allowed = f"{PRELUDE_BYTES} to {self.size_bytes_max}"
            raise Damaged(f"{where}: {len(content)} bytes: allowed are {allowed}")
        magic = self._magic
        found, body_bytes, zeros, checksum = _PRELUDE.unpack_from(content)
        if is_later(content, magic):
            raise FormatUnknown(
                f"{where}: of a later version: begins with {found!r}, known here is {magic!r}"
            )
        if found != magic:
            raise Damaged(f"{where}: begins with {bytes(found)!r}, not with {magic!r}")
        body = content[PRELUDE_BYTES : PRELUDE_BYTES + body_bytes]
        if zeros or len(body) != body_bytes or xxhash.xxh3_128_digest(body) != checksum:
            raise Damaged(f"{where}: its checksum does not match")
        try:
            value = self._decoder.decode(body)
        except ParserErrors as error:
            raise Damaged(f"{where}: not understood: {parser_failure(error)}") from error
        if self._name_of is not None and (name := self._name_of(value)) != where:
            raise Damaged(f"{where}: says it is {name}")
        return value

    async def put(self, objects: Objects, value: T) -> None:
        """Under its name. Raises ObjectError."""
        assert self._name_of is not None
        await objects.put(self._name_of(value), self.seal(value))

    async def fetch(self, objects: Objects, name: str) -> T:
        """None of it is fetched if it is too large. Raises Damaged, FormatUnknown, ObjectError."""
        try:
            content = await objects.get_within(name, self.size_bytes_max)
        except ObjectDamaged as error:
            raise Damaged(str(error)) from error
        return self.unseal(content, name)

    async def there(self, objects: Objects, name: str) -> T | None:
        """The same; None where there is none that can be understood. Raises FormatUnknown: nobody here may replace it; ObjectError."""
        try:
            return await self.fetch(objects, name)
        except FormatUnknown:
            raise
        except (ObjectMissing, ObjectRefused, Damaged):
            return None

    async def hint(self, objects: Objects, name: str) -> T | None:
        """The same of what nothing is decided by: None also for a later version. Raises ObjectError."""
        try:
            return await self.there(objects, name)
        except FormatUnknown:
            return None

    async def is_later(self, objects: Objects, name: str) -> bool:
        """Whether it is of a later version; False where it cannot be read. Raises ObjectUnavailable."""
        try:
            return is_later(await objects.get_within(name, self.size_bytes_max), self._magic)
        except (ObjectDamaged, ObjectMissing, ObjectRefused):
            return False


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
