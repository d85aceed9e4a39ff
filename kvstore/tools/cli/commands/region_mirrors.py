"""`kvstore region status` and `lag`: how far mirrors are, by what they have written into the buckets of their regions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import asdict

from kvstore.daemon.config.regions_file import Deployment
from kvstore.tools.cli import FAILED, OK
from kvstore.tools.cli.buckets import code_of, opened
from kvstore.tools.cli.output import Figure, print_json, print_table
from kvstore.units import NOTHING, format_bytes, format_duration
from replication.errors import ReplicationError
from replication.formats.mirror_state import MirrorState, judged, read_mirrors, segments_behind
from replication.formats.rules import sources_for
from tiers.errors import TierError
from tiers.together import together


class Pair(NamedTuple):
    """A source, and a region that copies from it. code: the exit code that this pair alone would have."""

    facts: dict[str, Any]
    code: int


def show_mirrors(
    deployment: Deployment, regions: Sequence[str], is_live: bool, clock: Callable[[], float], output: str
) -> int:
    """Print the mirrors into these regions; the exit code. is_live: ask the sources how far their feeds are now."""
    pairs = asyncio.run(_pairs(deployment, regions, is_live, clock))
    document = {"deployment": deployment.deployment, "mirrors": [pair.facts for pair in pairs]}
    if output == "json":
        print_json(document)
    else:
        show(document, is_live)
    return max((pair.code for pair in pairs), default=OK)


def show(document: dict[str, Any], is_live: bool = False) -> None:
    columns, mirrors = _LAG if is_live else _STATUS, document["mirrors"]
    rows = [[of(facts) for of in columns.values()] for facts in mirrors]
    drop = ("bytes", "copied", "heartbeat", "max", "p99", "within 15 min", "models left", "lost")
    print_table(f"mirrors of {document['deployment']}", list(columns), rows, drop)
    for facts in mirrors:
        for failure in facts.get("failures", ()):
            print(
                f"  {facts['source']} to {facts['region']}: {failure['reason']} ({failure['attempts']} attempts)"
            )


async def _pairs(
    deployment: Deployment, regions: Sequence[str], is_live: bool, clock: Callable[[], float]
) -> list[Pair]:
    found = await together(_into(deployment, region, is_live, clock) for region in regions)
    return [pair for pairs in found for pair in pairs]


async def _into(deployment: Deployment, region: str, is_live: bool, clock: Callable[[], float]) -> list[Pair]:
    """All mirrors into a region: those of its rules, and others that there were."""
    sources = sources_for(deployment.copy_rules(), region, deployment.regions)
    try:
        states = await read_mirrors(await opened(deployment, region), sources)
    except (ReplicationError, TierError) as error:
        code = code_of(error)
        return [Pair({"source": source, "region": region, "state": str(error)}, code) for source in sources]
    states = [state for state in states if state.source in sources]
    return await together(_pair(deployment, region, state, is_live, clock()) for state in states)


async def _pair(deployment: Deployment, region: str, state: MirrorState, is_live: bool, now_s: float) -> Pair:
    behind = state.behind(state.read)
    word: str = judged(state, now_s)
    code = OK if word == "ok" else FAILED
    if state.problem and word in ("never ran", "problem"):
        word = state.problem
    if is_live:
        try:
            behind = await segments_behind(await opened(deployment, state.source), state)
        except (ReplicationError, TierError) as error:
            word, code = str(error), code_of(error)
    return Pair(_facts(state, region, word, behind, now_s), code)


def _facts(state: MirrorState, region: str, word: str, behind: int, now_s: float) -> dict[str, Any]:
    return {
        "source": state.source,
        "region": region,
        "state": word,
        "heartbeat_age_s": max(0.0, now_s - state.at_s) if state.at_s else None,
        "segments_behind": behind,
        "sweeping": state.is_sweeping,
        "oldest_age_s": state.oldest_age_now_s(now_s),
        "pending": state.pending,
        "failed": state.failed,
        "lost": state.lost,
        "copied_packs": state.copied_packs,
        "copied_bytes": state.copied_bytes,
        "models": state.models,
        "model_left_bytes": state.model_left_bytes,
        "copied_models": state.copied_models,
        "copied_model_bytes": state.copied_model_bytes,
        "lag_p50_s": state.lag_p50_s,
        "lag_p99_s": state.lag_p99_s,
        "lag_max_s": state.lag_max_s,
        "in_time_share": state.in_time_share,
        "failures": [asdict(one) for one in state.failures],
        "lost_packs": list(state.lost_packs),
    }


Show = Callable[[dict[str, Any]], object]


def _duration(name: str) -> Show:
    return lambda facts: Figure(NOTHING if facts.get(name) is None else format_duration(facts[name]))


def _plain(name: str) -> Show:
    return lambda facts: facts.get(name, NOTHING)


def _share(facts: dict[str, Any]) -> object:
    share = facts.get("in_time_share")
    return Figure(NOTHING if share is None else f"{100 * share:.4g} %")


_PAIR: dict[str, Show] = {
    "from": _plain("source"),
    "to": _plain("region"),
    "state": _plain("state"),
    "segments behind": _plain("segments_behind"),
    "oldest age": _duration("oldest_age_s"),
    "models left": lambda facts: Figure(format_bytes(facts.get("model_left_bytes", 0))),
}
_STATUS: dict[str, Show] = _PAIR | {
    "pending": _plain("pending"),
    "failed": _plain("failed"),
    "lost": _plain("lost"),
    "copied": _plain("copied_packs"),
    "bytes": lambda facts: Figure(format_bytes(facts.get("copied_bytes", 0))),
    "within 15 min": _share,
    "heartbeat": _duration("heartbeat_age_s"),
}
_LAG: dict[str, Show] = _PAIR | {
    "lag p50": _duration("lag_p50_s"),
    "p99": _duration("lag_p99_s"),
    "max": _duration("lag_max_s"),
    "within 15 min": _share,
}
