"""The region: is its bucket there and ours, does the daemon read its feed, do its mirrors keep up?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec

from coldstart.fleet.bucket_admin import Bucket, BucketError
from kvstore.daemon.config.regions_file import Deployment, Place, RegionsFileError, load_regions
from kvstore.tools.doctor.findings import Case, Finding
from kvstore.units import format_duration, plural
from replication.errors import ReplicationError
from replication.formats.keeping import clock_of
from replication.formats.mirror_state import MirrorState, judged, read_mirrors
from replication.formats.region import open_region
from replication.formats.rules import sources_for
from tiers.errors import TierError

DOCTOR_BUCKET_S = 15.0  # for all that is asked of buckets


def region(case: Case) -> Iterator[Finding]:
    """With regions_file only."""
    if case.config is None or not case.config.regions_file:
        return
    try:
        deployment = load_regions(case.config.regions_file)
        deployment.place(case.config.region, "region")
    except RegionsFileError as error:
        for problem in error.problems:
            yield Finding("regions file", "problem", problem, "deploy/regions.toml explains each key")
        return
    yield from asyncio.run(_bucket(deployment, case.config.region))


async def _bucket(deployment: Deployment, name: str) -> list[Finding]:
    action = (
        "credentials? network? its mount? a bucket of that name? Only a new one needs kvstore region init"
    )
    try:
        async with asyncio.timeout(DOCTOR_BUCKET_S):
            objects = deployment.regions[name].open()
            await open_region(objects, deployment.deployment, name)
            sources = sources_for(deployment.copy_rules(), name, deployment.regions)
            states, now_s = await read_mirrors(objects, sources), (await clock_of(objects))()
    except TimeoutError:
        return [Finding("bucket", "problem", f"{name}: no answer in {DOCTOR_BUCKET_S:g} s", action)]
    except (ReplicationError, TierError) as error:
        return [Finding("bucket", "problem", str(error), action)]
    found = [Finding("bucket", "ok", f"{deployment.regions[name].url} is region {name}")]
    found += await asyncio.to_thread(lambda: list(_upkeep(deployment.regions[name])))
    return found + [_mirror(name, state, now_s) for state in states if state.source in sources]


def _upkeep(place: Place) -> Iterator[Finding]:
    """What boto3 can say of a bucket of S3; without it, or without the right to ask, nothing."""
    if not place.url.startswith("s3://") or find_spec("boto3") is None:
        return
    try:
        state = Bucket(place.url, place.options()).state()
    except BucketError:
        return
    if state.aborts_leftovers is False:
        action = "kvstore region init NAME --create adds the rule"
        yield Finding("bucket leftovers", "note", "uploads that were cut off stay, and are paid for", action)
    if state.keeps:
        action = "kvstore region erase --wait deletes those of what it erases; a lifecycle rule that expires noncurrent versions, all"
        yield Finding("bucket versions", "warning", state.keeps, action)


def _mirror(region: str, state: MirrorState, now_s: float) -> Finding:
    check, word = f"mirror of {state.source}", judged(state, now_s)
    age_s = state.oldest_age_now_s(now_s)
    if word in ("ok", "copying what was there before"):
        return Finding(check, "ok", "keeps up" if word == "ok" else "copies what was there before")
    more = "kvstore region status says which and why"
    found, action = {
        "never ran": (
            state.problem or word,
            f"kvstore mirror --set region={region}, anywhere near the bucket",
        ),
        "stopped": (f"silent for {format_duration(now_s - state.at_s)}", "start it again: kvstore mirror"),
        "problem": (state.problem, more),
        "failed": (f"{plural(state.failed, 'pack')} could not be copied", more),
        "late": (f"{format_duration(age_s or 0.0)} behind", "its network, or bytes_per_s of the rules"),
    }[word]
    return Finding(check, "warning", found, action)
