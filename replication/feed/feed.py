"""The feed of a region: what became durable, as each writer tells it and everybody reads it.

    FeedWriter ──▶ segment n ──▶ head                FeedReader ──▶ LIST heads/ ──▶ GET n + 1, n + 2, … until missing

What must always hold:

* A pack or a model is in the store before it is announced, and an announcement is durable before `announce` returns; a removal is
  announced before it is done.
* A writer is new in each life of its process. Its numbers have no gaps, and no number has two contents. A number that may
  have been written is tried again with the same bytes until they are read back from the store; nothing else gets that number.
* A position says: everything up to here was handed out. It never passes what is missing, damaged or not readable now.

Heads are hints: a LIST of them tells who has something new, and their lengths how much. Every FULL_LOOK_EVERY lists
all writers are asked, whatever their heads say; those that are silent, which may be thousands of lives that are over, in turn.
Where a keeper is, its news tell who has written what, and nobody else lists heads. Whoever is silent for a day and covered by
snapshots is retired (snapshots.py). Clocks are never compared.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final, NamedTuple

from msgspec.structs import replace

from replication.constants import (
    HEAD_NUMBERS,
    RETENTION_S,
    ROTTEN_LOOKS,
    SEGMENT_BYTES_MAX,
    SEGMENT_MODELS_MAX,
    SEGMENT_REMOVED_MAX,
)
from replication.errors import Damaged, FormatUnknown, WriterConflict
from replication.formats.announced import Announced
from replication.formats.announced_models import AnnouncedModel
from replication.formats.keeping import ring
from replication.formats.region import require_place
from replication.formats.removed import Removed
from replication.formats.segment import (
    FEED,
    HEAD_FORMAT,
    HEADS,
    WRITER_NAME,
    Head,
    Segment,
    ahead,
    cut,
    decode,
    encode,
    encode_head,
    head_name,
    segment_name,
    segment_number,
)
from replication.keeper.news_reader import Source
from replication.waits import passed_s
from tiers.bucket.objects import Objects
from tiers.errors import ObjectDamaged, ObjectError, ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.together import together

SEGMENT_STORE_ATTEMPTS_MAX: Final = 4  # of one announcement: put, read back, repair what was stored damaged
LATER_S: Final = 0.001  # than it was removed: what is announced again
WRITER_IDS_MAX: Final = 3  # tried in one announcement, if others write under the same id
HEAD_TRUST_S: Final = 300.0  # since the last look; by then a writer may have gone round once
ALIVE_S: Final = 3600.0  # who wrote a head so long before the latest one, or later, writes
LISTED_S: Final = 1800.0  # since heads were listed; then they are, whatever the news say
LISTED_CLOSELY_S: Final = 120.0  # the same of who has to know how old all is that is known
assert LISTED_CLOSELY_S < LISTED_S < ALIVE_S
HEADS_PROVED: Final = 4  # asked for where none is listed
FEED_PAGE_SEGMENTS: Final = 64  # read ahead of the catalogue at most: of all writers together, and of one
FEED_REQUESTS_MAX: Final = 32  # under way at a time
FULL_LOOK_EVERY: Final = 64  # looks; heads alone are not trusted
WRITER_ALIVE_S: Final = 600.0  # who has said nothing for so long is silent
SILENT_ASKED: Final = (
    64  # silent writers in one full look, in turn: who cannot write a head may go on writing
)
WRITER_SILENT_S: Final = RETENTION_S / 2  # who says something again after so long does so as a new writer
assert FEED_PAGE_SEGMENTS < HEAD_NUMBERS

log = logging.getLogger("replication.feed")


def fresh_writer(chance: random.Random) -> str:
    """An id that nobody has had. Each life of a process is a writer of its own: so no number is ever given twice, though data
    directories are copied, and buckets are restored to what they were an hour ago."""
    return f"{chance.getrandbits(64):016x}"


class FeedWriter:
    """One life of a writer. `id` changes where somebody else writes under it, too, and after a long silence. number: of the last
    segment that is durable. conflicts: how often the id was somebody else's."""

    def __init__(
        self,
        objects: Objects,
        writer_id: str,
        clock: Callable[[], float],
        chance: random.Random,
        needs_bell: Callable[[], bool] = lambda: True,
    ) -> None:
        """writer_id: a fresh one. clock: unix seconds. chance: draws further ids. needs_bell: whether heads are looked at by nobody
        who does not hear it."""
        assert WRITER_NAME.fullmatch(writer_id)
        self.id = writer_id
        self.number = 0
        self.conflicts = 0
        self._objects = objects
        self._clock = clock
        self._chance = chance
        self._needs_bell = needs_bell
        self._pending: Segment | None = None  # may be in the store already
        self._said_at_s = 0.0  # loop's time of the last announcement
        self._head_number = 0  # of the head as it is known to be stored
        self._turn = asyncio.Lock()

    async def announce(
        self,
        entries: Sequence[Announced],
        models: Sequence[AnnouncedModel] = (),
        removed: Sequence[Removed] = (),
        after_s: float = 0.0,
    ) -> list[Segment]:
        """Say that these packs, and these models with all of their chunks, are in the store, and that others are there no more. When this
        returns, it is durable. after_s: they were removed until then. Returns the segments that say it.

        Raises ObjectError: not known, or only in part, to be durable. Announcing the same entries again is the
        right answer to that, and says none of them twice.
        """
        async with self._turn:
            said = await self._settle()
            known = {one.pack.id for segment in said for one in segment.entries}
            known |= {model.id for segment in said for model in segment.models}
            now_s = asyncio.get_running_loop().time()
            if self.number and now_s - self._said_at_s > WRITER_SILENT_S:
                self._take_fresh_id()  # it may be retired by now
            self._said_at_s = now_s
            for segment in self._segments(
                [entry for entry in entries if entry.pack.id not in known],
                [model for model in models if model.id not in known],
                removed,
            ):
                written_s = max(self._clock(), after_s + LATER_S)
                self._pending = replace(segment, writer=self.id, number=self.number + 1, written_s=written_s)
                said += await self._settle()
            await self._put_head()
            return said

    def _segments(
        self, entries: Sequence[Announced], models: Sequence[AnnouncedModel], removed: Sequence[Removed]
    ) -> Iterator[Segment]:
        """What is said, by nobody yet."""
        blank = Segment("", 0, 0.0, ())
        for at in range(0, len(removed), SEGMENT_REMOVED_MAX):
            yield replace(blank, removed=removed[at : at + SEGMENT_REMOVED_MAX])
        for piece in cut(entries):
            yield replace(blank, entries=piece)
        for at in range(0, len(models), SEGMENT_MODELS_MAX):
            yield replace(blank, models=models[at : at + SEGMENT_MODELS_MAX])

    async def _settle(self) -> list[Segment]:
        """Have what is pending in the store, and return it."""
        if self._pending is None:
            return []
        for _ in range(WRITER_IDS_MAX):
            try:
                await self._store(self._pending)
                break
            except WriterConflict as conflict:
                self.conflicts += 1
                self._take_fresh_id()
                log.warning("%s; going on as writer %s", conflict, self.id)
        else:
            raise ObjectUnavailable(f"{self._objects.where}: {WRITER_IDS_MAX} ids of writers were taken")
        settled, self._pending = self._pending, None
        self.number = settled.number
        return [settled]

    def _take_fresh_id(self) -> None:
        self.id = fresh_writer(self._chance)
        self.number = self._head_number = 0
        if self._pending is not None:
            self._pending = replace(self._pending, writer=self.id, number=1)

    async def _store(self, segment: Segment) -> None:
        """Put these bytes and read them back. An answer of the store is not believed: it may be lost, come
        twice, or come from a store without conditional writes. Raises WriterConflict, ObjectError."""
        name, content = segment_name(segment.writer, segment.number), encode(segment)
        failure = f"{self._objects.where}: {name}: read back, it is not what was put"
        is_known_damaged = False
        for _ in range(SEGMENT_STORE_ATTEMPTS_MAX):
            try:
                await self._objects.put(name, content, only_new=not is_known_damaged)
            except ObjectRefused:
                raise
            except ObjectError as error:
                failure = str(error)
            there = await self._read(name)
            if there == content:
                return
            if there is not None and self._is_segment(there, segment.writer, segment.number):
                raise WriterConflict(
                    f"{self._objects.where}: {name}: somebody else's segment is there: was a running machine copied?"
                )
            # What is damaged the same way twice is damaged in the store, and nobody has read it yet.
            is_known_damaged = there is not None and there == await self._read(name)
        raise ObjectUnavailable(failure)

    async def _read(self, name: str) -> bytes | None:
        """None: there is none. b"": what is there is too large to be a segment, or cannot be read to its end."""
        try:
            return bytes(await self._objects.get_within(name, SEGMENT_BYTES_MAX))
        except ObjectMissing:
            return None
        except ObjectDamaged:
            return b""

    def _is_segment(self, content: bytes | memoryview, writer: str, number: int) -> bool:
        try:
            decode(content, writer, number)
        except Damaged:
            return False
        return True

    async def _put_head(self) -> None:
        """A head that cannot be written is no failure: readers look without it, a little later."""
        if self._head_number == self.number:
            return
        try:
            await self._objects.put(head_name(self.id), encode_head(Head(self.number, self._clock())))
        except ObjectError as error:
            log.debug("head of writer %s: %s", self.id, error)
            return
        self._head_number = self.number
        if self._needs_bell():
            await ring(self._objects)


class Gap(NamedTuple):
    """Of a writer's segments, next_number is missing, and one behind it is there: first_there. Or it is damaged or refused, for
    ROTTEN_LOOKS looks, and first_there is the next number."""

    writer: str
    next_number: int
    first_there: int


class Page(NamedTuple):
    """Segments in order of their numbers, writer by writer. more: there is more to read right now."""

    segments: list[Segment]
    more: bool


class _Window(NamedTuple):
    """What a writer is asked for next. exact: there is nothing behind it, said a head that can be trusted."""

    writer: str
    width: int
    exact: bool


class _Answer(NamedTuple):
    """segments: in order, without a gap. end: there is no more now, or why it was not found out."""

    segments: list[Segment]
    end: bool | Gap | Exception


class FeedReader:
    """Reads the feeds of all writers. Not for several tasks at a time.

    positions: by writer, the number up to which segments were handed out. writers: how many have said something lately. listed: those of whom
    something is there, when all were looked for last. gaps: by writer, what is missing now. damaged: segments that could not be read, counted each time; failed: writers that could not be read to their
    end. Memory: FEED_PAGE_SEGMENTS segments.
    """

    def __init__(
        self,
        objects: Objects,
        positions: Mapping[str, int],
        news: Source | None = None,
        closely: bool = False,
    ) -> None:
        """news: says who has something new, if anybody does. closely: heads are listed then, too, and every two minutes: news are older
        than they are read."""
        self.positions = dict(positions)
        self.gaps: dict[str, Gap] = {}
        self.reasons: dict[str, str] = {}  # by writer, why there is a gap, or was
        self.listed: frozenset[str] = frozenset()
        self.damaged = 0
        self.failed = 0
        self.last_failure = ""
        self.all_read = False  # what the last look found was read, and all that it found
        self.is_full = (
            False  # the last look asked all writers: no head that was not written could hide anything
        )
        self.ours: Callable[[], str] = lambda: ""  # the writer of this process, once it has put a head
        self.now_s: Callable[[], float] = lambda: float("inf")  # by the store's clock, where it is known
        self._objects = objects
        self._news = news
        self._closely = closely
        self.has_listed = False  # heads, for the last look
        self._lists = True  # heads, for the next one
        self._listed_s = 0.0  # as `passed_s`
        self._unread: set[str] = set()  # of these writers something is left
        self._alive: dict[str, int] = {}  # what heads say of those that write
        self._asks_all = False
        self._looks = 0
        self._looked_at_s = -HEAD_TRUST_S
        self._heads: dict[str, tuple[str, int]] = {}  # of the last look: ETag and bytes
        self._sound_heads: set[str] = (
            set()
        )  # of these writers one was read: one that is cut off has another length
        self._rotten: dict[str, int] = {}  # by writer, looks in a row that found its next segment damaged
        self._read_up_to: dict[str, str] = {}  # the ETag of the head when all that it tells was read
        self._waiting: deque[_Window] = deque()
        self._follows = False  # what was there before was read
        self._heard_s: dict[str, float] = {}  # loop's time, by writer that has said something lately
        self._silent: deque[str] = deque()  # writers that are not asked yet in this round
        self._requests = asyncio.Semaphore(FEED_REQUESTS_MAX)

    async def poll(self) -> Page:
        """What is new, one page of it. Looks for news when everything that the last look found was read.

        Raises ObjectError when it could not look. What fails afterwards is left for the next look.
        """
        if not self._waiting:
            self._follows = self.all_read or self._follows
            await self._look()
        windows, budget = [], FEED_PAGE_SEGMENTS
        while self._waiting and budget > 0:
            window = self._waiting.popleft()
            windows.append(window if window.width <= budget else _Window(window.writer, budget, False))
            budget -= window.width
        answers = await together(map(self._ask, windows))
        # From here to the return nothing is waited for: a poll that is cancelled has read nothing.
        for window, answer in zip(windows, answers, strict=True):
            self._note(window, answer)
        return Page([segment for answer in answers for segment in answer.segments], bool(self._waiting))

    def jump(self, positions: Mapping[str, int]) -> None:
        """Everything up to these positions is known from elsewhere. Never goes back."""
        for writer, number in positions.items():
            if number > self.positions.get(writer, 0):
                self.positions[writer] = number
                if writer in self.gaps and self.gaps[writer].next_number <= number:
                    del self.gaps[writer]

    def drop(self, writers: Iterable[str]) -> None:
        """They are retired, and all that they said is known."""
        for writer in writers:
            self.positions.pop(writer, None)
            self.gaps.pop(writer, None)

    def ask_all(self) -> None:
        """The next look asks all writers."""
        self._asks_all = self._lists = True

    def list_heads(self) -> None:
        """The next look believes no news."""
        self._lists = True

    @property
    def writers(self) -> int:
        """How many have said something lately."""
        return len(self._heard_from(asyncio.get_running_loop().time()))

    def _heard_from(self, now_s: float) -> Set[str]:
        """Since we began to follow: thousands of dead ones slow nobody down."""
        self._heard_s = {one: at_s for one, at_s in self._heard_s.items() if now_s - at_s < WRITER_ALIVE_S}
        return self._heard_s.keys()

    @property
    def numbers(self) -> dict[str, int]:
        """Of those that write, up to which number each has written."""
        return {writer: max(number, self.positions.get(writer, 0)) for writer, number in self._alive.items()}

    async def _look(self) -> None:
        """Who has something new."""
        now_s = asyncio.get_running_loop().time()
        told = None if self._lists else self._told()
        if told is not None:
            self._believe(told)
            return
        listed_s = passed_s()
        heads = dict[str, tuple[str, int]]()
        modified_s: dict[str, float] = {}
        async for page in self._objects.list(HEADS):
            for info in page:
                writer = info.name[len(HEADS) :]
                if WRITER_NAME.fullmatch(writer):
                    heads[writer] = (info.e_tag, info.size_bytes)
                    modified_s[writer] = info.modified_s
        is_full = self._asks_all or self._looks % FULL_LOOK_EVERY == 0
        if is_full:
            for writer in filter(WRITER_NAME.fullmatch, await self._objects.folders(FEED)):
                heads.setdefault(writer, ("", 0))
            self.listed = frozenset(heads)
            self._asks_all = False
        if not heads:
            await self._require_nothing()
        self.listed |= heads.keys()
        self.is_full, self.has_listed, self._lists, self._listed_s = is_full, True, False, listed_s
        trusted = not is_full and now_s - self._looked_at_s < HEAD_TRUST_S
        silent = heads.keys() - self._heard_from(now_s)
        asked = heads.keys() - silent | self._next_silent(silent) if is_full else set[str]()
        self._looks += 1
        self._looked_at_s = now_s
        self._heads = heads
        self._note_alive(heads, modified_s)
        self.all_read = True
        for writer, (e_tag, size_bytes) in heads.items():
            known = self._read_up_to.get(writer)
            if writer in asked or known != e_tag:
                new = ahead(size_bytes, self.positions.get(writer, 0))
                exact = trusted and known is not None and 0 < new <= FEED_PAGE_SEGMENTS
                self._waiting.append(_Window(writer, new if exact else 1, exact))

    def _told(self) -> Mapping[str, int] | None:
        """Who has written what, as the news say; None: heads are to be listed."""
        listed_s = LISTED_CLOSELY_S if self._closely else LISTED_S
        told = self._news.heads() if self._news is not None else None
        if told is None or passed_s() - self._listed_s >= listed_s:
            return None
        is_new = any(number > self.positions.get(writer, 0) for writer, number in told.items())
        return None if self._closely and is_new else told

    async def _require_nothing(self) -> None:
        """No head was listed: that is a failed look where the place is away, or a head that should be there is. Raises ObjectError."""
        await require_place(self._objects)
        told = self._news.heads() if self._news is not None else None
        for writer in [self.ours(), *(told or self._alive)][:HEADS_PROVED]:
            try:
                if writer:
                    await self._objects.head(head_name(writer))
                    raise ObjectUnavailable(
                        f"{self._objects.where}: {head_name(writer)} is there, and not listed"
                    )
            except ObjectMissing:
                continue

    def _believe(self, told: Mapping[str, int]) -> None:
        """Ask those for something new that have it, and those of which something is left."""
        self.is_full, self.has_listed, self.all_read = False, False, True
        self._alive = dict(told)
        for writer, number in told.items():
            new = number - self.positions.get(writer, 0)
            if new > 0:
                width = min(new, FEED_PAGE_SEGMENTS)
                self._waiting.append(_Window(writer, width, width == new))
        for writer in self._unread - told.keys():
            self._waiting.append(_Window(writer, 1, False))

    def _note_alive(self, heads: Mapping[str, tuple[str, int]], modified_s: Mapping[str, float]) -> None:
        since_s = (
            min(max(modified_s.values(), default=0.0), self.now_s()) - ALIVE_S
        )  # one may be of the future
        self._alive = {}
        for writer, (_, size_bytes) in heads.items():
            position = self.positions.get(writer, 0)
            if modified_s.get(writer, since_s) >= since_s:  # who has no head may write
                new = ahead(size_bytes, position) if size_bytes else 0
                self._alive[writer] = position + (new if new < HEAD_NUMBERS // 2 else 0)

    def _next_silent(self, silent: Set[str]) -> set[str]:
        """Those of them whose turn it is."""
        if not self._silent:
            self._silent.extend(silent)
        return {self._silent.popleft() for _ in range(min(SILENT_ASKED, len(self._silent)))}

    async def _ask(self, window: _Window) -> _Answer:
        """The next segments of a writer, as far as they are there and can be read."""
        writer, position = window.writer, self.positions.get(window.writer, 0)
        numbers = range(position + 1, position + 1 + window.width)
        segments: list[Segment] = []
        for answer in await together(self._get(writer, number) for number in numbers):
            if isinstance(answer, Segment):
                segments.append(answer)
                continue
            if not isinstance(answer, ObjectMissing):
                return _Answer(segments, answer)
            try:
                return _Answer(segments, await self._end(writer, position + len(segments)))
            except ObjectError as error:
                return _Answer(segments, error)
        return _Answer(segments, window.exact)

    def _note(self, window: _Window, answer: _Answer) -> None:
        writer, (segments, end) = window.writer, answer
        if segments:
            self.positions[writer] = segments[-1].number
            self.gaps.pop(writer, None)
            if self._follows:
                self._heard_s[writer] = asyncio.get_running_loop().time()
        self._note_rot(writer, bool(segments), end)
        if end is True:
            self._unread.discard(writer)
        else:
            self._unread.add(writer)
        if isinstance(end, Gap):
            self.gaps[writer] = end
            self.all_read = False
        elif isinstance(end, Exception):
            self.failed += 1
            self.last_failure = str(end)
            self.all_read = False
        elif end:
            if writer in self._heads:
                self._read_up_to[writer] = self._heads[writer][0]
        else:
            width = min(2 * window.width, FEED_PAGE_SEGMENTS) if segments else 1
            self._waiting.append(_Window(writer, width, False))

    def _note_rot(self, writer: str, has_moved: bool, end: bool | Gap | Exception) -> None:
        """A segment of a later version, or one that stays damaged, or that the store keeps to itself while it hands out the list of heads, is as good as
        gone. It is a gap only, and no longer once it can be read: an audit goes on behind it where the place proves to be
        the place."""
        if not isinstance(end, Damaged | ObjectRefused):
            self._rotten.pop(writer, None)
            return
        self._rotten[writer] = looks = 1 if has_moved else self._rotten.get(writer, 0) + 1
        if looks >= ROTTEN_LOOKS or isinstance(end, FormatUnknown):
            number = self.positions.get(writer, 0) + 1
            self.gaps[writer] = Gap(writer, number, number + 1)
            self.reasons[writer] = str(end)

    async def _get(self, writer: str, number: int) -> Segment | Exception:
        async with self._requests:
            try:
                name = segment_name(writer, number)
                content = await self._objects.get_within(name, SEGMENT_BYTES_MAX)
                return decode(content, writer, number)
            except FormatUnknown as error:
                return error
            except Damaged as error:
                self.damaged += 1
                return error
            except ObjectDamaged as error:
                self.damaged += 1
                return Damaged(str(error))
            except ObjectError as error:
                return error

    async def _end(self, writer: str, position: int) -> bool | Gap:
        """The segment behind this position is missing: True, there is none yet; False, there is by now; a gap."""
        _, head_bytes = self._heads.get(writer, ("", 0))
        if head_bytes and writer in self._sound_heads and ahead(head_bytes, position) == 0:
            return True  # the head says so, too
        first = await self._first_behind(writer, position)
        if first == 0:
            return True
        # What is there now was put behind the missing one: if that is still not there, it is not going to be.
        if first == position + 1 or not isinstance(await self._get(writer, position + 1), ObjectMissing):
            return False
        self.reasons[writer] = f"segments {position + 1} to {first - 1} are gone"
        return Gap(writer, position + 1, first)

    async def _first_behind(self, writer: str, position: int) -> int:
        """The number of the first segment there is behind a position, if the head tells of any; 0 if none."""
        try:
            number = (await HEAD_FORMAT.fetch(self._objects, head_name(writer))).number
            self._sound_heads.add(writer)
            if number <= position:
                return 0
        except (Damaged, ObjectMissing, ObjectRefused):
            pass  # it tells nothing: look
        async for page in self._objects.list(f"{FEED}{writer}/", segment_name(writer, position)):
            for info in page:
                if segment_number(info.name) > position:
                    return segment_number(info.name)
        return 0
