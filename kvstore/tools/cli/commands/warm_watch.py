"""Watching an order: what daemons and mirrors tell of it in the region's bucket, until all are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from replication.formats.orders import Order, Progress, read_all_progress
from tiers.bucket.objects import Objects
from tiers.errors import ObjectUnavailable

LOOK_S = 1.0
SILENT_S = 90.0  # then who does not tell any more has stopped
FAILURES_MAX = 10  # looks in a row


class Watched(NamedTuple):
    """state: "done"; "failed": somebody stopped, or could not do all of it; "not taken": by no daemon. gone: ids of those that stopped."""

    state: str
    told: Sequence[Progress]
    gone: frozenset[str]

    def facts(self) -> dict[str, Any]:
        """The fields are documented in docs/cli.md."""
        rows = {True: list[dict[str, Any]](), False: list[dict[str, Any]]()}
        for one in self.told:
            rows[one.is_mirror].append(
                {
                    "who": one.who,
                    "state": state_of(one, one.who in self.gone),
                    "packs": one.packs,
                    "done_packs": one.done_packs,
                    "failed_packs": one.failed,
                    "total_bytes": one.total_bytes,
                    "done_bytes": one.done_bytes,
                    "moved_bytes": one.moved_bytes,
                    "bytes_per_s": round(one.bytes_per_s),
                    "problem": one.problem,
                }
            )
        return {"state": self.state, "daemons": rows[False], "mirrors": rows[True]}


def state_of(one: Progress, is_gone: bool) -> str:
    """How far somebody is, in a word."""
    if one.ended:
        return "failed" if one.problem else "full" if one.full else "done"
    return "stopped" if is_gone else "running"


async def watch(
    objects: Objects,
    order: Order,
    expected: Sequence[str],
    wait_s: float,
    age_s: float,
    show: Callable[[str, int, int], None],
) -> Watched:
    """Until all who took an order are done. expected: daemons that are waited for; wait_s: until the order is so old, and for the
    first one at all. age_s: of the order now. show: called with what, bytes done, bytes in all. Raises ObjectError."""
    loop = asyncio.get_running_loop()
    begun_s, failures = loop.time() - age_s, 0
    news = _News()
    while True:
        try:
            told = await read_all_progress(objects, order)
            failures = 0
        except ObjectUnavailable:
            failures += 1
            if failures == FAILURES_MAX:
                raise
            await asyncio.sleep(LOOK_S)
            continue
        gone = news.silent(told, loop.time())
        daemons = [one for one in told if not one.is_mirror]
        for what, some in (("copied", [one for one in told if one.is_mirror]), ("preloaded", daemons)):
            if some:
                show(what, sum(one.done_bytes for one in some), sum(one.total_bytes for one in some))
        is_late = loop.time() - begun_s >= wait_s
        is_taken = {one.who for one in daemons} >= set(expected) and bool(daemons)
        if all(one.ended or one.who in gone for one in told) and (is_taken or is_late):
            is_well = not gone and not any(one.problem for one in told)
            state = "not taken" if not daemons else "done" if is_well else "failed"
            return Watched(state, sorted(told, key=lambda one: one.who), gone)
        await asyncio.sleep(LOOK_S)


class _News:
    """When each was heard of last, by our own clock."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[Progress, float]] = {}

    def silent(self, told: Sequence[Progress], now_s: float) -> frozenset[str]:
        """Those that have not ended, and told nothing new for SILENT_S."""
        for one in told:
            known = self._latest.get(one.who)
            if known is None or known[0] != one:
                self._latest[one.who] = one, now_s
        return frozenset(
            one.who for one in told if not one.ended and now_s - self._latest[one.who][1] >= SILENT_S
        )
