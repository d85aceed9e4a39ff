"""A sample: what happened between two answers of the daemon, small enough to keep thousands.

    Live answer ── Live answer  =  one sample        minute of the daemon = one, too

Its JSON is what /history.json tells; kvstore/tools/web/server.py says what its fields mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

Latency = tuple[int, float, float]  # how many, p50, p99, in seconds
_REQUESTS = ("lookup", "acquire")  # those that an engine waits for


class Sample(msgspec.Struct, kw_only=True):
    t: float
    s: float
    gap: bool = False
    minute: bool = False
    lookups: int = 0
    asked: int = 0
    tokens: dict[str, int] = {}
    bytes: dict[str, int] = {}
    saved_s: float = 0.0
    used: dict[str, int] = {}
    requests: dict[str, Latency] = {}
    loads: dict[str, Latency] = {}
    stores: dict[str, Latency] = {}
    loop_delay: Latency | None = None


class Counts(msgspec.Struct):
    """What a Live answer has counted since the daemon's start, without who it was for."""

    lookups: int
    asked: int
    tokens: dict[str, int]
    bytes: dict[str, int]
    saved_s: float
    latencies: dict[str, dict[str, list[int]]]  # kind, name: buckets


def counts_of(live: Mapping[str, Any]) -> Counts:
    """All models and tenants together."""
    rows = live["tokens"]
    return Counts(
        sum(row["lookups"] for row in rows),
        sum(row["tokens_asked"] for row in rows),
        _summed(row["tokens"] for row in rows),
        _summed(row["bytes"] for row in rows),
        sum(row["prefill_s_saved"] for row in rows),
        {
            kind: {name: histogram["buckets"] for name, histogram in of_kind.items()}
            for kind, of_kind in live["latencies"].items()
        },
    )


def sample_of(old: Counts, live: Mapping[str, Any], span_s: float) -> Sample:
    """What came since `old`, `span_s` ago."""
    new, bounds_s = counts_of(live), live["latency_bounds_s"]

    def latencies(kind: str) -> dict[str, Latency]:
        before = old.latencies.get(kind, {})
        grown = {
            name: latency(bounds_s, before.get(name), buckets)
            for name, buckets in new.latencies.get(kind, {}).items()
        }
        return {name: found for name, found in grown.items() if found is not None}

    requests = latencies("request")
    return Sample(
        t=live["now_s"],
        s=round(span_s, 3),
        lookups=new.lookups - old.lookups,
        asked=new.asked - old.asked,
        tokens=_grown(old.tokens, new.tokens),
        bytes=_grown(old.bytes, new.bytes),
        saved_s=round(new.saved_s - old.saved_s, 3),
        used={tier["name"]: tier["used_bytes"] for tier in live["tiers"]},
        requests={name: requests[name] for name in _REQUESTS if name in requests},
        loads=latencies("load"),
        stores=latencies("store"),
        loop_delay=latencies("loop_delay").get(""),
    )


def minute_samples(live: Mapping[str, Any], since_s: float) -> list[Sample]:
    """One for each minute of an answer from `since_s` on, with those in which nothing happened."""
    now_s = live["now_s"]
    by_start = {int(minute["minute_s"]): minute for minute in live["minutes"]}
    first_s = int(max(since_s, min(by_start, default=now_s))) // 60 * 60
    found = []
    for start_s in range(first_s, int(now_s) + 1, 60):
        begun_s, end_s = max(float(start_s), since_s), min(start_s + 60.0, now_s)
        if end_s <= begun_s:
            continue
        sample = Sample(t=end_s, s=round(end_s - begun_s, 3), minute=True)
        minute = by_start.get(start_s)
        if minute is not None:
            sample.lookups, sample.asked = minute["lookups"], sum(minute["tokens"].values())
            sample.tokens, sample.bytes = _grown({}, minute["tokens"]), _grown({}, minute["bytes"])
            sample.saved_s = minute["prefill_s_saved"]
        found.append(sample)
    return found


def latency(bounds_s: Sequence[float], old: Sequence[int] | None, new: Sequence[int]) -> Latency | None:
    """Of what came between two histograms' buckets; None where nothing did."""
    grown = [now - before for now, before in zip(new, old or [0] * len(new), strict=True)]
    count = sum(grown)
    if count <= 0:
        return None
    return count, _quantile(bounds_s, grown, count * 0.5), _quantile(bounds_s, grown, count * 0.99)


def _quantile(bounds_s: Sequence[float], buckets: Sequence[int], rank: float) -> float:
    """As PromQL has it: evenly spread within its bucket, and the highest bound for what is beyond it."""
    low_s, before = 0.0, 0
    for bound_s, count in zip(bounds_s, buckets, strict=False):
        if count and before + count >= rank:
            return float(f"{low_s + (bound_s - low_s) * (rank - before) / count:.4g}")
        low_s, before = bound_s, before + count
    return low_s


def _summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            found[name] = found.get(name, 0) + count
    return found


def _grown(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    """Those that are not 0."""
    return {name: count - old.get(name, 0) for name, count in new.items() if count != old.get(name, 0)}
