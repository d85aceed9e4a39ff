"""Who keeps a region, or all; what its mirrors have copied, what is left, and how far they are behind.

  kvstore region status [NAME]         by what they have written into the buckets of their regions
  kvstore region status [NAME] --now   how far they are behind by the feeds of their sources as they are now, too
  kvstore region status -o json        for programs; docs/cli.md lists the fields

Exit code 0 when all is well, 1 when a mirror has stopped, could not copy something, or is more than 15 minutes behind, or a bucket is
not the region's, 2 for a wrong file or name, 4 when a bucket does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.tools.cli import FAILED, OK, UNREACHABLE
from kvstore.tools.cli.buckets import code_of, code_said, opened
from kvstore.tools.cli.commands.region import add_region_arguments, load_deployment
from kvstore.tools.cli.options import is_of_node
from kvstore.tools.cli.output import Figure, present, print_table, say
from kvstore.units import NOTHING, format_bytes, format_duration

if TYPE_CHECKING:
    from kvstore.daemon.config.regions_file import Deployment
    from replication.formats.mirror_state import MirrorState

KEEPER_GONE_S: Final = 120.0  # without a sign of a keeper, nobody keeps it


class Told(NamedTuple):
    """Of a source and a region that copies from it, or of a region's keeper. code: the exit code that this alone would have."""

    facts: dict[str, Any]
    code: int


def add_verb_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--now", action="store_true", help="ask the sources how far their feeds are")
    add_region_arguments(parser, "?")


def run_verb(args: argparse.Namespace) -> int:
    if is_of_node(args):
        return _of_node(args)
    deployment = load_deployment(args)
    if args.region:
        deployment.place(args.region, args.called)
    regions = [args.region] if args.region else list(deployment.regions)
    pairs, keepers = asyncio.run(_asked(deployment, regions, args.now))
    document = {
        "deployment": deployment.deployment,
        "mirrors": [pair.facts for pair in pairs],
        "keepers": [keeper.facts for keeper in keepers],
        "away": sorted({told.facts["region"] for told in (*pairs, *keepers) if told.code == UNREACHABLE}),
    }
    return _presented(args, document)


def _of_node(args: argparse.Namespace) -> int:
    """Of the regions that another node knows."""
    from kvstore.tools.cli.nodes import node_of

    with node_of(args, args.called) as node:
        document = node.get_regions(args.region, args.now)
    return _presented(args, document)


def _presented(args: argparse.Namespace, document: dict[str, Any]) -> int:
    """The exit code that fits it."""
    present(args, document, _show)
    is_read = not any("problem" in keeper for keeper in document.get("keepers", ()))
    return code_said(document, is_read and all(pair["state"] == "ok" for pair in document["mirrors"]))


def _show(document: dict[str, Any]) -> None:
    for keeper in document.get("keepers", ()):
        say(_kept(keeper))
    mirrors = document["mirrors"]
    rows = [[of(facts) for of in _COLUMNS.values()] for facts in mirrors]
    print_table(f"mirrors of {document['deployment']}", list(_COLUMNS), rows, _DROP)
    for facts in mirrors:
        for failure in facts.get("failures", ()):
            tries = f"({failure['attempts']} attempts)"
            say(f"  {facts['source']} to {facts['region']}: {failure['reason']} {tries}", 4)


async def _asked(
    deployment: Deployment, regions: Sequence[str], is_live: bool
) -> tuple[list[Told], list[Told]]:
    from tiers.together import together

    found = await together(_into(deployment, region, is_live) for region in regions)
    return [pair for pairs in found for pair in pairs], await together(
        _keeper(deployment, region) for region in regions
    )


async def _keeper(deployment: Deployment, region: str) -> Told:
    """Who keeps a region, as its news say."""
    from replication.errors import ReplicationError
    from replication.formats.keeping import NEWS, NEWS_FORMAT, clock_of
    from tiers.errors import ObjectMissing, TierError

    facts: dict[str, Any] = {"region": region, "keeper": "", "mirror": False, "kept_s": None, "age_s": None}
    try:
        objects = await opened(deployment, region)
        news = await NEWS_FORMAT.fetch(objects, NEWS)
        beaten_s = (await objects.head(NEWS)).modified_s
        age_s = max(0.0, (await clock_of(objects))() - beaten_s)
    except ObjectMissing:
        return Told(facts, OK)
    except (ReplicationError, TierError) as error:
        return Told({**facts, "problem": str(error)}, code_of(error))
    if age_s < KEEPER_GONE_S:
        facts |= {"keeper": news.holder.host, "mirror": news.holder.is_mirror, "kept_s": news.kept_s + age_s}
    return Told({**facts, "age_s": age_s}, OK)


def _kept(facts: dict[str, Any]) -> str:
    if facts["keeper"]:
        who = f"a mirror on {facts['keeper']}" if facts["mirror"] else facts["keeper"]
        return f"{facts['region']}: kept by {who} for {format_duration(facts['kept_s'])}"
    since = f" for {format_duration(facts['age_s'])}" if facts["age_s"] is not None else ""
    return f"{facts['region']}: {facts.get('problem') or f'kept by nobody{since}'}"


async def _into(deployment: Deployment, region: str, is_live: bool) -> list[Told]:
    """All mirrors into a region: those of its rules, and others that there were."""
    from replication.errors import ReplicationError
    from replication.formats.keeping import clock_of
    from replication.formats.mirror_state import read_mirrors
    from replication.formats.rules import sources_for
    from tiers.errors import TierError
    from tiers.together import together

    sources = sources_for(deployment.copy_rules(), region, deployment.regions)
    try:
        objects = await opened(deployment, region)
        states, now_s = await read_mirrors(objects, sources), (await clock_of(objects))()
    except (ReplicationError, TierError) as error:
        code = code_of(error)
        return [Told({"source": source, "region": region, "state": str(error)}, code) for source in sources]
    states = [state for state in states if state.source in sources]
    return await together(_pair(deployment, region, state, is_live, now_s) for state in states)


async def _pair(deployment: Deployment, region: str, state: MirrorState, is_live: bool, now_s: float) -> Told:
    from replication.errors import ReplicationError
    from replication.formats.mirror_state import judged, segments_behind
    from tiers.errors import TierError

    behind = state.behind(state.read) if state.at_s else None
    word: str = judged(state, now_s)
    code = OK if word == "ok" else FAILED
    if state.problem and word in ("never ran", "problem"):
        word = state.problem
    if is_live:
        try:
            behind = await segments_behind(await opened(deployment, state.source), state)
        except (ReplicationError, TierError) as error:
            word, code = str(error), code_of(error)
    return Told(_facts(state, region, word, behind, now_s), code)


_OF_STATE: Final = (
    *("pending", "failed", "lost", "copied_packs", "copied_bytes"),
    *("models", "model_left_bytes", "copied_models", "copied_model_bytes"),
    *("lag_p50_s", "lag_p99_s", "lag_max_s", "in_time_share"),
)


def _facts(state: MirrorState, region: str, word: str, behind: int | None, now_s: float) -> dict[str, Any]:
    from msgspec.structs import asdict

    facts = {"source": state.source, "region": region, "state": word}
    if not state.at_s:  # nothing is known of one that never wrote, or cannot be read
        return facts | {"heartbeat_age_s": None, "segments_behind": behind}
    return {
        **facts,
        "heartbeat_age_s": max(0.0, now_s - state.at_s),
        "segments_behind": behind,
        "sweeping": state.is_sweeping,
        "oldest_age_s": state.oldest_age_now_s(now_s),
        **{name: getattr(state, name) for name in _OF_STATE},
        "failures": [asdict(one) for one in state.failures],
        "lost_packs": list(state.lost_packs),
    }


Show = Callable[[dict[str, Any]], object]


def _duration(name: str) -> Show:
    return lambda facts: Figure(NOTHING if facts.get(name) is None else format_duration(facts[name]))


def _plain(name: str) -> Show:
    return lambda facts: Figure(NOTHING) if facts.get(name) is None else facts[name]


def _bytes(name: str) -> Show:
    return lambda facts: Figure(NOTHING if facts.get(name) is None else format_bytes(facts[name]))


def _share(facts: dict[str, Any]) -> object:
    share = facts.get("in_time_share")
    return Figure(NOTHING if share is None else f"{100 * share:.4g} %")


_COLUMNS: dict[str, Show] = {
    "from": _plain("source"),
    "to": _plain("region"),
    "state": _plain("state"),
    "segments behind": _plain("segments_behind"),
    "oldest age": _duration("oldest_age_s"),
    "models left": _bytes("model_left_bytes"),
    "pending": _plain("pending"),
    "failed": _plain("failed"),
    "lost": _plain("lost"),
    "copied": _plain("copied_packs"),
    "bytes": _bytes("copied_bytes"),
    "lag p50": _duration("lag_p50_s"),
    "p99": _duration("lag_p99_s"),
    "max": _duration("lag_max_s"),
    "within 15 min": _share,
    "heartbeat": _duration("heartbeat_age_s"),
}
_DROP = ("bytes", "copied", "max", "lag p50", "heartbeat", "p99", "within 15 min", "models left", "lost")
