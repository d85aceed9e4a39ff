"""The state of a mirror, in the bucket of the region that it copies into: for people, and for its next start.

    mirrors/<source>     MirrorState, sealed; replaced when there is news, and every minute as a heartbeat

A start takes over the watermark and the totals; nothing has to be right for its sake: what is missing is found by a sweep.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from replication.constants import HEAD_NUMBERS, HEARTBEAT_LATE_S, MIB
from replication.errors import Damaged
from replication.formats.ranges import NAME, AgeS, Count, Positions, RegionName, Share, Size, UnixS, Word
from replication.formats.sealed import Sealed
from replication.formats.segment import HEADS, WRITER_NAME, ahead
from tiers.bucket.objects import Objects
from tiers.errors import ObjectError, ObjectMissing, ObjectUnavailable
from tiers.together import together

LAGS_KEPT: Final = 4096  # of the latest copies
IN_TIME_S: Final = 900.0  # how soon a copy should be there

MIRRORS = "mirrors/"
NOT_REACHED = "not reached yet"  # the problem of a mirror that has just begun

Judgement = Literal[
    "never ran", "stopped", "problem", "failed", "copying what was there before", "late", "ok"
]


class Failure(msgspec.Struct, frozen=True):
    """A pack that could not be copied when it was tried last. since_s: not announced before, unix seconds."""

    pack: Word
    reason: str
    attempts: Count
    since_s: UnixS


class MirrorState(msgspec.Struct, frozen=True, kw_only=True):
    """identity: of the source, "" while it was not reached. at_s: unix seconds, when this was written. problem: why the
    source is not followed, "" if it is.

    watermark: by writer, up to which segment everything is at home, or not for it by the rules, lost, or past its life.
    read: up to which the feed was read. is_sweeping: the watermark waits for a sweep.
    pending: packs and models to copy, failed ones included. failed: at their last attempt; failures: the oldest of them. lost: announced,
    and no longer in the source; lost_packs: the latest of them. copied: since there is a mirror. models: to copy, of which
    model_left_bytes are left.

    looked_s: up to which moment, by the clock at home, it is known what the source says of what is here; unix seconds, 0: never.
    oldest_age_s: what was announced so long ago is at home (the RPO at at_s); None before all was, once. lag_…: from the announcement in the source to the
    one at home, of the latest few thousand copies, what was there before the mirror apart, None without any; in_time_share: of those, within IN_TIME_S.
    """

    source: RegionName
    identity: str = ""
    rules: Word = ""
    at_s: UnixS = 0.0
    problem: str = ""
    looked_s: UnixS = 0.0
    watermark: Positions = {}
    read: Positions = {}
    is_sweeping: bool = True
    pending: Count = 0
    failed: Count = 0
    failures: Annotated[Sequence[Failure], Meta(max_length=1024)] = ()
    lost: Count = 0
    lost_packs: Annotated[Sequence[Word], Meta(max_length=1024)] = ()
    copied_packs: Count = 0
    copied_bytes: Size = 0
    oldest_age_s: AgeS | None = None
    lag_p50_s: AgeS | None = None
    lag_p99_s: AgeS | None = None
    lag_max_s: AgeS | None = None
    in_time_share: Share | None = None
    models: Count = 0
    model_left_bytes: Size = 0
    copied_models: Count = 0
    copied_model_bytes: Size = 0

    def oldest_age_now_s(self, now_s: float) -> float | None:
        """The same at another time, as far as this state tells."""
        return None if self.oldest_age_s is None else self.oldest_age_s + max(0.0, now_s - self.at_s)

    def behind(self, read: Mapping[str, int]) -> int:
        """How many segments the watermark is behind these positions."""
        return sum(max(0, number - self.watermark.get(writer, 0)) for writer, number in read.items())


async def segments_behind(source: Objects, state: MirrorState) -> int:
    """How many segments the watermark is behind the feed of the source as it is now. Raises ObjectError."""
    heads = dict(state.read)
    async for page in source.list(HEADS):
        for info in page:
            writer = info.name[len(HEADS) :]
            if WRITER_NAME.fullmatch(writer):
                read = state.read.get(writer, 0)
                new = ahead(info.size_bytes, read)
                heads[writer] = read + (new if new < HEAD_NUMBERS // 2 else 0)  # else the head is an old one
    return state.behind(heads)


def judged(state: MirrorState, now_s: float) -> Judgement:
    """How a mirror is: the worst that is to be said. "problem": state.problem says it."""
    age_s = state.oldest_age_now_s(now_s)
    if not state.at_s:
        return "never ran"
    if now_s - state.at_s > HEARTBEAT_LATE_S:
        return "stopped"
    if state.problem:
        return "problem"
    if state.failed:
        return "failed"
    if age_s is None:
        return "copying what was there before"
    return "late" if age_s > IN_TIME_S else "ok"


class Lags:
    """Of the latest LAGS_KEPT copies."""

    def __init__(self) -> None:
        self._lags_s: deque[float] = deque(maxlen=LAGS_KEPT)

    def add(self, lag_s: float) -> None:
        self._lags_s.append(lag_s)

    def figures(self) -> dict[str, float]:
        """The fields of a state that say this; none before the first copy."""
        if not self._lags_s:
            return {}
        ordered = sorted(self._lags_s)

        def at(share: float) -> float:
            return round(ordered[math.ceil(share * len(ordered)) - 1], 3)

        in_time = sum(lag_s <= IN_TIME_S for lag_s in ordered)
        return {
            "lag_p50_s": at(0.5),
            "lag_p99_s": at(0.99),
            "lag_max_s": at(1.0),
            "in_time_share": in_time / len(ordered),
        }


MIRROR_STATE_FORMAT: Final = Sealed(  # of 100,000 writers
    b"KVMIRR1\n", MirrorState, 16 * MIB, lambda state: MIRRORS + state.source
)


async def read_state(objects: Objects, source: str) -> MirrorState:
    """What the mirror of this source has written down; an empty state if it has not. Raises Damaged, ObjectError."""
    try:
        return await MIRROR_STATE_FORMAT.fetch(objects, MIRRORS + source)
    except ObjectMissing:
        return MirrorState(source=source)


async def read_mirrors(objects: Objects, sources: Iterable[str] = ()) -> list[MirrorState]:
    """The states of all mirrors into a region, and of these sources in any case. Raises ObjectError.

    One that cannot be understood, or is not handed out, is an empty state with that problem.
    """
    names = set(sources)
    async for page in objects.list(MIRRORS):
        names.update(name for info in page if (name := source_of(info.name)))

    async def state(source: str) -> MirrorState:
        try:
            return await read_state(objects, source)
        except ObjectUnavailable:
            raise
        except (Damaged, ObjectError) as error:
            return MirrorState(source=source, problem=str(error))

    return await together(map(state, sorted(names)))


def source_of(name: str) -> str:
    """The source of the mirror whose state has this name; "" if it is no such name."""
    source = name.removeprefix(MIRRORS)
    return source if re.match(NAME, source) else ""
