"""Objects: immutable bytes under names, in a bucket, a directory or memory.

    put ──▶ name ──▶ get, get_ranges, head        list: names in order, page by page

What a store of objects does for us, whatever it is: strongly consistent (what was put is found, listed and read
at once), objects whole or not there at all. Names are ASCII with "/" between folders; the prefix that the
store was opened with is before them and never seen.

Every call is a coroutine, may take as long as its deadline, and raises `ObjectError` and nothing else:
`ObjectMissing`, `ObjectDamaged` (what is there is not the object: cut off, too large, on a bad sector), `ObjectRefused` (not
allowed or not configured: trying again is no use), `ObjectUnavailable` (everything else, after the retries of the
implementation). Missing and damaged are said of one object, unavailable of the place; refused may be either. Credentials
are in no message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from tiers.bucket.seals import Seals
from tiers.errors import ObjectDamaged

Bytes = bytes | bytearray | memoryview
Range = tuple[int, int]  # from, up to and without, in bytes


class ObjectInfo(NamedTuple):
    """e_tag changes when an object is replaced. modified_s: unix seconds, by the store's clock."""

    name: str
    size_bytes: int
    e_tag: str
    modified_s: float


class Objects(ABC):
    """One place for objects. `where` names it for people: "s3://bucket/prefix". seals: what is read there is believed only where
    these seal it; None: a deployment without a key. untrusted: how often something was not believed."""

    where: str
    seals: Seals | None = None
    untrusted: int = 0

    @abstractmethod
    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        """Store an object; the content must not change until this returns.

        only_new: False, and nothing changed, where an object of that name is there already. Stores without
        conditional writes may replace it then: never rely on this alone.
        """

    @abstractmethod
    async def get(self, name: str) -> memoryview:
        """All of it, however large: only where its size is known from elsewhere."""

    async def get_within(self, name: str, size_bytes_max: int) -> memoryview:
        """All of it, unless it is larger: then ObjectDamaged, and no store that says the size first has its bytes sent."""
        content = await self.get(name)
        if len(content) > size_bytes_max:
            raise too_large(self.where, name, len(content), size_bytes_max)
        return content

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        """As `get_within`, with what is known of it; None while it is the one with this ETag ("" for none). One small request where the store
        knows such a thing."""
        info = await self.head(name)
        if e_tag and info.e_tag == e_tag:
            return None
        return await self.get_within(name, size_bytes_max), info

    @abstractmethod
    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        """Parts of it, each exactly as long as asked; neighbours are read with one request.

        ObjectDamaged where the object ends before a range does.
        """

    async def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> bool:
        """Fill the views, one after the other, with its bytes from `start` on, where there is a way that saves a copy.

        False where there is none: ask `get_ranges`, which says why. Returns only when the views are not written any more.
        """
        return False

    @abstractmethod
    async def head(self, name: str) -> ObjectInfo:
        """What is known of it."""

    @abstractmethod
    def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        """Pages of the objects whose names begin with `prefix` ("a/b/"), ordered by name, behind the name `after`."""

    @abstractmethod
    async def folders(self, prefix: str) -> Sequence[str]:
        """Names of the folders right below `prefix` ("" or "a/"), in order, without it and without "/"."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""

    async def sweep(self) -> int:
        """Remove what killed processes left half written, where a store keeps such things; returns how many."""
        return 0


def too_large(where: str, name: str, size_bytes: int, size_bytes_max: int) -> ObjectDamaged:
    return ObjectDamaged(f"{where}: {name}: {size_bytes} bytes: at most {size_bytes_max} are allowed")
