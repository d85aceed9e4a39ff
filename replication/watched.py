"""A place for objects of which somebody watches whether it works: what fails there is one problem, whoever asked for what.

    packs ──╮
    feed ───┼─▶ Watched ─▶ bucket          fails FAILURES_MIN times in a row ─▶ a problem of the region: why, how often, what to do
    orders ─╯                              answers again, and for SETTLED_S ──▶ over

Reads and writes are watched apart, for credentials may allow one of them only. What is wrong with one object (missing, damaged, of
another key) says nothing of the place. While reads fail, the failures of writes are theirs, and end with them: a node that
persists little would not learn for long that it could. An object that the place has failed for as long as ALONE_S, while it hands out
its marker, is refused: whoever needs it goes on without it. Nothing is written where the marker is gone, or another one than it was
when this process joined, and a mirror reads nothing there: a mount or an endpoint was swapped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeVar

import msgspec

from replication.constants import MARKER_BYTES_MAX, MARKER_NAME
from replication.problems import Problems
from tiers.bucket.objects import Bytes, ObjectInfo, Objects, Range
from tiers.errors import ObjectError, ObjectKeyUnknown, ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.parsing import ParserErrors

FAILURES_MIN: Final = 2  # in a row, of reads or of writes, and not all of one object
SETTLED_S: Final = 10.0  # without a failure: it is over
WRITES_DOUBT_S: Final = 300.0  # writes that failed, with none since: nobody knows
UNTRUSTED_DOUBT_S: Final = 300.0  # since an object was read that nobody believes

ALONE_S: Final = 300.0  # in which an object was asked for ALONE_TRIES times, and never had
ALONE_TRIES: Final = 3
ALONE_NAMES_MAX: Final = 256  # the latest ones
PLACE_S: Final = 60.0  # between looks whether it is the place still, while something is asked

KINDS: Final = ("credentials", "clock", "bucket", "untrusted")
_FIXES: Final = {
    "credentials": "give the process credentials that the store takes, and restart it where they are in its environment",
    "clock": "set this machine's clock: chrony or systemd-timesyncd",
    "bucket": "look at the network, the endpoint, the store or its mount; kvstore region ls tries the same from a shell; it is tried again",
}
_CLOCK: Final = ("RequestTimeTooSkewed", "RequestExpired")
_CREDENTIALS: Final = (
    *("no credentials", "answers 401", "answers 403", "ExpiredToken", "TokenRefreshRequired"),
    *("InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "AccessDenied", "PermissionDenied"),
)

T = TypeVar("T")


def kind_of(error: ObjectError) -> str:
    """Of a failure of a place."""
    text = str(error)
    if any(word in text for word in _CLOCK):
        return "clock"
    return "credentials" if any(word in text for word in _CREDENTIALS) else "bucket"


class Watched(Objects):
    """The same place. when_it_works_again: called when a problem of it is over, for who waits longer and longer meanwhile."""

    def __init__(self, objects: Objects, region: str, problems: Problems, proves_reads: bool = False) -> None:
        """region: what its problems are called by. proves_reads: nothing is read of another place, either."""
        self.where, self.seals = objects.where, objects.seals
        self.when_it_works_again: Callable[[], None] = lambda: None
        self._objects = objects
        self._region = region
        self._problems = problems
        self._failures: dict[str, set[str]] = {"read": set(), "write": set()}  # in a row, by name
        self._failed_s = float("-inf")
        self._noted: set[str] = set()  # directions of its problem
        # By direction and name: failing since, tries.
        self._alone: dict[tuple[str, str], tuple[float, int]] = {}
        self._kind = ""  # of it
        self._proves_reads = proves_reads
        self._marker = b""  # as this process has found it when it joined
        self._proved_s = float("-inf")

    @property
    def is_failing(self) -> bool:
        """Whether the place is a problem: what fails there is no fault of an object."""
        return bool(self._noted)

    @property
    def untrusted(self) -> int:  # type: ignore[override]
        return self._objects.untrusted

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        return await self._watch("write", name, lambda: self._objects.put(name, content, only_new))

    async def get(self, name: str) -> memoryview:
        return await self._watch("read", name, lambda: self._objects.get(name))

    async def get_within(self, name: str, size_bytes_max: int) -> memoryview:
        content = await self._watch("read", name, lambda: self._objects.get_within(name, size_bytes_max))
        if name == MARKER_NAME:
            self._marker = self._marker or bytes(content)
        return content

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        return await self._watch(
            "read", name, lambda: self._objects.get_if_changed(name, e_tag, size_bytes_max)
        )

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        return await self._watch("read", name, lambda: self._objects.get_ranges(name, ranges))

    async def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> bool:
        return await self._objects.read_into(name, start, views)  # where it fails, `get_ranges` says why

    async def head(self, name: str) -> ObjectInfo:
        return await self._watch("read", name, lambda: self._objects.head(name))

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        pages = self._objects.list(prefix, after)
        while (page := await self._watch("read", "", lambda: anext(pages, None))) is not None:
            yield page

    async def folders(self, prefix: str) -> Sequence[str]:
        return await self._watch("read", "", lambda: self._objects.folders(prefix))

    async def delete(self, names: Sequence[str]) -> None:
        await self._watch("write", names[0] if names else "", lambda: self._objects.delete(names))

    async def sweep(self) -> int:
        return await self._watch("write", "", self._objects.sweep)

    # -- watching --

    async def _watch(self, direction: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """name: of the object; "" where it is about the place."""
        untrusted = self._objects.untrusted
        try:
            if direction == "write" or self._proves_reads:
                await self._require_place()
            answer = await call()
        except ObjectKeyUnknown:
            self._doubt()
            raise
        except (ObjectUnavailable, ObjectRefused) as error:
            self._failed(direction, name, error)
            if isinstance(error, ObjectUnavailable) and name and await self._is_alone(direction, name):
                raise ObjectRefused(f"{error}, for minutes, and its place works") from None
            raise
        except ObjectError:
            if self._objects.untrusted != untrusted:
                self._doubt()
            raise
        self._alone.pop((direction, name), None)
        self._works(direction)
        return answer

    async def _is_alone(self, direction: str, name: str) -> bool:
        """Whether this object, which failed just now, has for long, and its place proves to be the place."""
        now_s = asyncio.get_running_loop().time()
        begun_s, tries = self._alone.pop((direction, name), (now_s, 0))
        self._alone[direction, name] = begun_s, tries + 1
        if len(self._alone) > ALONE_NAMES_MAX:
            del self._alone[next(iter(self._alone))]
        if tries + 1 < ALONE_TRIES or now_s - begun_s < ALONE_S or name == MARKER_NAME:
            return False
        return await self._is_the_place() is True

    async def _require_place(self) -> None:
        """Raises ObjectUnavailable where this is another place by now."""
        now_s = asyncio.get_running_loop().time()
        if not self._marker or now_s - self._proved_s < PLACE_S:
            return
        if await self._is_the_place() is False:
            text = f"{self.where}: its {MARKER_NAME} is gone, or of another region: it is left alone"
            raise ObjectUnavailable(text)
        self._proved_s = now_s

    async def _is_the_place(self) -> bool | None:
        """Whether its marker is as it was found; None: it cannot be read, or is damaged, which says nothing."""
        try:
            content = await self._objects.get_within(MARKER_NAME, MARKER_BYTES_MAX)
            msgspec.json.decode(content)
        except ObjectMissing:
            return False
        except (ObjectError, *ParserErrors):
            return None
        return self._marker in (b"", content)

    def _failed(self, direction: str, name: str, error: ObjectError) -> None:
        failures = self._failures[direction]
        if len(failures) < FAILURES_MIN:
            failures.add(name or f"#{len(failures)}")
        self._failed_s = asyncio.get_running_loop().time()
        if len(failures) < FAILURES_MIN and direction not in self._noted:
            return
        kind = kind_of(error)
        if self._kind not in ("", kind):
            self._end()
        self._kind = kind
        self._noted.add(direction)
        is_all = "read" in self._noted
        text = str(error) if is_all else f"writes only: {error}"
        lasts_s = float("inf") if is_all else WRITES_DOUBT_S
        self._problems.note(self._region, text, kind, _FIXES[kind], lasts_s=lasts_s)

    def _works(self, direction: str) -> None:
        self._failures[direction].clear()
        if direction not in self._noted or asyncio.get_running_loop().time() - self._failed_s < SETTLED_S:
            return
        if direction == "read" or self._noted == {"write"}:
            self._end()

    def _end(self) -> None:
        self._problems.over(self._region, self._kind)
        self._noted.clear()
        self._kind = ""
        self.when_it_works_again()

    def _doubt(self) -> None:
        self._problems.note(
            self._region,
            f"{self.where}: objects that have no seal of the deployment's key are left out; "
            f"{self._objects.untrusted} times so far",
            "untrusted",
            "somebody else writes there, or the key file lacks a key: docs/regions.md",
            lasts_s=UNTRUSTED_DOUBT_S,
        )
