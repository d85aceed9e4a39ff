"""Stores of objects, over obstore: S3 and what speaks it, Google, Azure, a directory, memory.

    open_objects(url) ──▶ StoredObjects ──▶ room for one more? ──▶ obstore (Rust, threads of its own) ──▶ store
                             ▲   deadline over all attempts │ timeout of one attempt, both by bytes
                             ╰── pause, with jitter ◀────── failed, and may work later

    s3://bucket/prefix   gs://bucket/prefix   az://container/prefix   file:///directory   memory://name

Retries are ours and not obstore's: so there is one deadline over everything, the pauses can be tested, and a pause
takes no room from others. A call that is given up is cancelled. What was sent then may still be done.

A content that could change is copied before it is sent, because a call that was given up may still read it: give
`bytes` or a read-only view of something that is not written any more, and nothing is copied.

Credentials are taken from the options, or else from where obstore looks for them: the environment, the files it
names, the machine's role. They are in no message (tiers/bucket/object_failures.py) and in no repr.

A directory: an object is a file, written under another name and renamed. Nothing is synced; after a power cut an
object may be cut off or empty, which its reader finds out by its checksum.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Final, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, InvalidPathError, NotModifiedError, PreconditionError
from obstore.store import S3Store

from tiers.bucket import plain_lists
from tiers.bucket.direct_reads import DirectReads
from tiers.bucket.directory import Root, each_object, folder_names, sweep
from tiers.bucket.object_failures import StoreErrors, failure, lacks_conditions
from tiers.bucket.object_options import ObjectOptions
from tiers.bucket.object_urls import open_store
from tiers.bucket.objects import Bytes, ObjectInfo, Objects, Range, too_large
from tiers.checksum import digest
from tiers.constants import KIB, OBJECT_REQUESTS_MAX
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.together import together

if TYPE_CHECKING:  # exist in obstore's stubs only
    from obstore import GetOptions, ListStream, ObjectMeta
    from obstore.store import ObjectStore

OBJECT_GAP_BYTES: Final = 64 * KIB  # between two ranges that are read with one request all the same
OBJECT_LIST_NAMES: Final = 1000  # in a page of a list: what S3 answers at a time
OBJECT_DELETE_NAMES: Final = 1000  # in one request: the most that S3 takes
OBJECT_NAME_BYTES_MAX: Final = 1024  # of a name and its prefix: S3's limit
# A file in a directory that is half written for so long has no writer any more.
STAGED_S_MAX: Final = 3600.0
OBJECT_EXIT_S: Final = 0.1  # the end of the process waits so long for obstore's threads

T = TypeVar("T")

_NAME = re.compile(r"(?!\.\.?(/|$))[A-Za-z0-9._=+-]+(/(?!\.\.?(/|$))[A-Za-z0-9._=+-]+)*")


def open_objects(
    url: str, options: ObjectOptions | None = None, chance: random.Random | None = None
) -> Objects:
    """The store at a URL. Sends nothing yet: whether it is there and ours shows with the first call.

    Blocks on the file system for file:// only. Two openings of the same memory:// name in one process share it.
    Raises ObjectRefused: a URL or options that are not allowed, or no such directory.
    """
    options = options or ObjectOptions()
    where, store = open_store(url, options)
    _wait_at_exit()
    return StoredObjects(where, store, options, chance or random.Random())


class StoredObjects(Objects):
    """Objects in an obstore. One event loop, asyncio's or uvloop's."""

    def __init__(self, where: str, store: ObjectStore, options: ObjectOptions, chance: random.Random) -> None:
        self.where = where
        self._store = store
        self._options = options
        self._chance = chance
        self._room = asyncio.Semaphore(OBJECT_REQUESTS_MAX)
        self._under_way_bytes = 0  # of requests whose size is known
        self._directory = where.removeprefix("file://") if where.startswith("file:") else ""
        self._root = Root(self._directory) if self._directory else None
        self._looking: asyncio.Future[str] | None = None
        self._deletes_many = where.startswith(
            ("s3:", "memory:")
        )  # and says nothing of those that are missing
        self._has_conditions = True
        self._direct = DirectReads(where, store, options.timeout_s) if isinstance(store, S3Store) else None

    def __repr__(self) -> str:
        return f"StoredObjects({self.where})"

    async def put(self, name: str, content: Bytes, only_new: bool = False) -> bool:
        kept = content if isinstance(content, bytes) or _is_read_only(content) else bytes(content)
        attempts = 0

        async def work() -> bool:
            nonlocal attempts
            attempts += 1
            if only_new and self._has_conditions:
                return await self._create(name, kept)
            if only_new and await self._is_there(name):
                return False
            await obstore.put_async(self._store, name, kept, use_multipart=False)
            return True

        if await self._call("put", self._checked(name), work, len(kept)):
            return True
        # An attempt that seemed to fail may have been done: then what is there is ours.
        return attempts > 1 and await self._is_content(name, kept)

    async def _is_content(self, name: str, content: Bytes) -> bool:
        try:
            return digest(await self.get_within(name, len(content))) == digest(content)
        except ObjectDamaged:
            return False

    async def get(self, name: str) -> memoryview:
        return await self._get(name, None)

    async def get_within(self, name: str, size_bytes_max: int) -> memoryview:
        return await self._get(name, size_bytes_max)

    async def _get(self, name: str, size_bytes_max: int | None) -> memoryview:
        async def work() -> memoryview:
            return (await self._answer(name, size_bytes_max))[0]

        return await self._call("get", self._checked(name), work, None)

    async def get_if_changed(
        self, name: str, e_tag: str, size_bytes_max: int
    ) -> tuple[memoryview, ObjectInfo] | None:
        async def work() -> tuple[memoryview, ObjectInfo] | None:
            try:
                return await self._answer(name, size_bytes_max, e_tag)
            except NotModifiedError:
                return None

        found = await self._call("get", self._checked(name), work, None)
        return found if found is None or not e_tag or found[1].e_tag != e_tag else None

    async def _answer(
        self, name: str, size_bytes_max: int | None, unless: str = ""
    ) -> tuple[memoryview, ObjectInfo]:
        """An object. unless: it has this ETag."""
        options: GetOptions | None = {"if_none_match": unless} if unless else None
        answer = await self._in_time(obstore.get_async(self._store, name, options=options), 0)
        size_bytes = answer.meta["size"]
        if size_bytes_max is not None and size_bytes > size_bytes_max:  # its bytes are not sent
            raise too_large(self.where, name, size_bytes, size_bytes_max)
        return memoryview(await self._in_time(answer.bytes_async(), size_bytes)), _info(answer.meta)

    async def get_ranges(self, name: str, ranges: Sequence[Range]) -> Sequence[memoryview]:
        self._checked(name)
        runs = list(_runs(ranges))
        parts = await together(self._get_run(name, start, end) for start, end in runs)
        found: dict[Range, memoryview] = {}
        at = 0
        for wanted in sorted(set(ranges)):
            while wanted[1] > runs[at][1]:
                at += 1
            first = runs[at][0]
            found[wanted] = parts[at][wanted[0] - first : wanted[1] - first]
        return [found[wanted] for wanted in ranges]

    async def read_into(self, name: str, start: int, views: Sequence[memoryview]) -> bool:
        if self._direct is None:
            return False
        try:
            async with self._room:
                size_bytes = sum(map(len, views))
                return await self._in_time(self._direct.read(self._checked(name), start, views), size_bytes)
        except TimeoutError:
            return False

    async def head(self, name: str) -> ObjectInfo:
        async def work() -> ObjectInfo:
            return _info(await obstore.head_async(self._store, name))

        return await self._call("head", self._checked(name), work)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        self._checked(prefix, is_prefix=True)
        if not self._directory:
            async for page in self._pages(prefix, after):
                yield page
            return
        # A directory is not in order: sort what comes, piece by piece so that nothing holds the interpreter for long.
        behind = (info for info in each_object(self._directory, prefix) if info.name > after)
        pieces = []
        while piece := await self._look("list", prefix, lambda: sorted(islice(behind, OBJECT_LIST_NAMES))):
            pieces.append(piece)
        infos = heapq.merge(*pieces)
        while page := list(islice(infos, OBJECT_LIST_NAMES)):
            yield page

    async def folders(self, prefix: str) -> Sequence[str]:
        self._checked(prefix, is_prefix=True)
        if self._directory:
            return await self._look("list", prefix, lambda: folder_names(self._directory, prefix))

        async def work() -> Sequence[str]:
            try:
                found = await obstore.list_with_delimiter_async(self._store, prefix or None)
            except InvalidPathError:
                if self._direct is None:
                    raise
                names = await asyncio.to_thread(plain_lists.folders, self.where, self._options, prefix)
                return list(filter(_NAME.fullmatch, names))
            return sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

        return await self._call("list", prefix, work)

    async def sweep(self) -> int:
        if not self._directory:
            return 0
        return await self._look("sweep", "", lambda: sweep(self._directory, STAGED_S_MAX))

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._checked(name)
        if not self._deletes_many:
            for start in range(0, len(names), OBJECT_REQUESTS_MAX):
                await together(map(self._delete_one, names[start : start + OBJECT_REQUESTS_MAX]))
            return
        for start in range(0, len(names), OBJECT_DELETE_NAMES):
            some = list(names[start : start + OBJECT_DELETE_NAMES])

            async def work(some: Sequence[str] = some) -> None:
                await obstore.delete_async(self._store, some)

            await self._call("delete", f"{some[0]} and {len(some) - 1} more", work)

    # -- one request each --

    async def _create(self, name: str, content: Bytes) -> bool:
        try:
            await obstore.put_async(self._store, name, content, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError) as error:
            if "ConditionalRequestConflict" in str(error):
                raise  # another process is at it; who wins is not decided yet
            return False
        except StoreErrors as error:
            self._has_conditions = not lacks_conditions(error)
            if self._has_conditions:
                raise
            if await self._is_there(name):
                return False
            await obstore.put_async(self._store, name, content, use_multipart=False)
        return True

    async def _is_there(self, name: str) -> bool:
        try:
            await obstore.head_async(self._store, name)
        except FileNotFoundError:
            return False
        return True

    async def _get_run(self, name: str, start: int, end: int) -> memoryview:
        if start == end:
            return memoryview(b"")

        async def work() -> memoryview:
            return memoryview(await obstore.get_range_async(self._store, name, start=start, end=end))

        asked = f"{name}, bytes {start} to {end}"
        part = await self._call("get", asked, work, end - start)
        if len(part) != end - start:
            raise ObjectDamaged(f"{self.where}: get {asked}: the object ends after {len(part)} bytes of them")
        return part

    async def _delete_one(self, name: str) -> None:
        async def work() -> None:
            await obstore.delete_async(self._store, name)

        try:
            await self._call("delete", name, work)
        except ObjectMissing:
            pass  # that is what was asked for

    async def _pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        """Pages of a bucket, in order; a page that fails is asked for anew, from where it began."""
        last = after
        stream: ListStream[Sequence[ObjectMeta]] | None = None
        is_plain = False

        async def work() -> Sequence[ObjectInfo] | None:
            nonlocal stream, is_plain
            if is_plain:
                return (
                    await asyncio.to_thread(plain_lists.listed, self.where, self._options, prefix, last)
                    or None
                )
            if stream is None:
                stream = obstore.list(
                    self._store, prefix or None, offset=last or None, chunk_size=OBJECT_LIST_NAMES
                )
            try:
                return [_info(meta) for meta in await anext(stream)]
            except StopAsyncIteration:
                return None
            except BaseException as error:
                stream, is_plain = None, self._direct is not None and isinstance(error, InvalidPathError)
                if not is_plain:
                    raise
            return await work()

        while (page := await self._call("list", prefix, work)) is not None:
            last = page[-1].name if page else last
            yield [info for info in page if info.name > after]

    # -- every request goes through here --

    async def _call(
        self, verb: str, asked: str, work: Callable[[], Awaitable[T]], size_bytes: int | None = 0
    ) -> T:
        """The result of `work`, after as many attempts as it takes and as there are. size_bytes: that an attempt moves; None:
        `work` keeps the time itself. Raises ObjectError only."""
        options, asked = self._options, f"{self.where}: {verb} {asked}"
        last: ObjectError | None = None
        deadline_s = options.deadline_s + (size_bytes or 0) / options.least_bytes_per_s
        try:
            async with asyncio.timeout(deadline_s):
                for attempt in count():
                    try:
                        async with self._room:
                            if self._root is not None:
                                await self._in_time(self._require_root(self._root, asked), 0)
                            return await (work() if size_bytes is None else self._in_time(work(), size_bytes))
                    except (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit):
                        raise
                    except ObjectError as error:
                        last = error
                    except TimeoutError:
                        last = ObjectUnavailable(f"{asked}: an attempt did not end in time")
                    except BaseException as error:  # noqa: BLE001 obstore's panics are no `Exception`
                        last = failure(error, asked)
                    if not isinstance(last, ObjectUnavailable) or attempt == options.retries_max:
                        break
                    pause_s = min(options.backoff_s_max, options.backoff_s_min * 2.0**attempt)
                    await asyncio.sleep(self._chance.random() * pause_s)
        except TimeoutError:
            before = f", and before: {str(last).removeprefix(asked + ': ')}" if last else ""
            last = ObjectUnavailable(f"{asked}: not done within {deadline_s:.3g} s{before}")
        assert last is not None
        raise last from None

    async def _in_time(self, work: Awaitable[T], size_bytes: int) -> T:
        """The result of one attempt, whose time begins now. What is under way shares the way. Raises TimeoutError."""
        self._under_way_bytes += size_bytes
        try:
            moving_s = self._under_way_bytes / self._options.least_bytes_per_s if size_bytes else 0.0
            async with asyncio.timeout(self._options.timeout_s + moving_s):
                return await work
        finally:
            self._under_way_bytes -= size_bytes

    async def _look(self, verb: str, asked: str, work: Callable[[], T]) -> T:
        """What `work` finds in our directory, in a thread. Raises ObjectError only."""
        asked = f"{self.where}: {verb} {asked}"
        try:
            async with asyncio.timeout(self._options.deadline_s):
                if self._root is not None:
                    await self._require_root(self._root, asked)
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise ObjectUnavailable(f"{asked}: not done within {self._options.deadline_s:g} s") from None
        except OSError as error:
            raise failure(error, asked) from None

    async def _require_root(self, root: Root, asked: str) -> None:
        """One look at a time, for all that come meanwhile: a file system that hangs takes one thread. Raises ObjectUnavailable."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().run_in_executor(None, root.wrong)
        if wrong := await asyncio.shield(self._looking):
            raise ObjectUnavailable(f"{asked}: {wrong}")

    def _checked(self, name: str, is_prefix: bool = False) -> str:
        """The name, if it is one. Raises ObjectRefused."""
        plain = name.removesuffix("/") if is_prefix else name
        if is_prefix and (not name or (name.endswith("/") and _NAME.fullmatch(plain))):
            return name
        if is_prefix or not _NAME.fullmatch(name) or len(name) > OBJECT_NAME_BYTES_MAX:
            raise ObjectRefused(
                f"{self.where}: {name!r} is no name of an object: allowed are a-z 0-9 . _ = + -"
            )
        return name


def _info(meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())


def _is_read_only(content: Bytes) -> bool:
    return isinstance(content, memoryview) and content.readonly


def _runs(ranges: Sequence[Range]) -> Iterator[Range]:
    """What to ask for so that all ranges are covered, in order: neighbours, and what lies close, together."""
    start = end = -1
    for low, high in sorted(ranges):
        if start >= 0 and low > end + OBJECT_GAP_BYTES:
            yield start, end
            start = -1
        if start < 0:
            start, end = low, high
        end = max(end, high)
    if start >= 0:
        yield start, end


_waits_at_exit = False


def _wait_at_exit() -> None:
    """A thread of obstore that still holds the interpreter while it ends aborts the process: 13 of 100 processes that
    ended right behind a request. With a moment to let go, none."""
    global _waits_at_exit
    if not _waits_at_exit:
        _waits_at_exit = True
        atexit.register(time.sleep, OBJECT_EXIT_S)
