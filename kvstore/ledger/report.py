"""Reports: what the daemon's totals of some hours come to.

    rows (hour × model × tenant, `kvstore.ledger.totals`) ──▶ figures: one sum
                                                 └──▶ by hour, model, tenant, region: a sum for each
                            outcomes of the sum ──▶ by tier (hits), by reason (misses)

    tokens = engine_tokens + hit_tokens + missed_tokens         hit_ratio = hit / (tokens - engine)
             the engine's own  in a tier    for a reason        overall_ratio = (engine + hit) / tokens

Pure functions: the daemon's answer in, the document of `kvstore report -o json` out. The
tables and the page are made of that document and of nothing else, so that all three say
the same. docs/cli.md is the contract for its fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kvstore.ledger.sums import EVERYBODY_ELSE, MOVES
from kvstore.protocol import outcomes
from kvstore.units import parse_duration

Document = dict[str, Any]
Row = Mapping[str, Any]

GROUPINGS = ("tier", "reason", "model", "tenant", "region", "hour")
MINUTE = "minute"  # one more, of what the daemon still has in memory
ENGINE = outcomes.NAMES[outcomes.ENGINE]
TIERS = tuple(outcomes.NAMES[number] for number in outcomes.HITS)
OWN_TIERS = TIERS[:2]  # listed even where nothing was hit in them
SINCE_S_MAX = 10 * 365 * 86_400  # longer than any total is kept


def since(text: str, now_s: float) -> float:
    """The time (unix seconds) that "24h", "30m", "7d" or an ISO time means; ISO without a zone is UTC.

    Raises ValueError saying what is allowed.
    """
    allowed = "allowed are a time span (30m, 24h, 7d, 2w) or a time (2026-11-21, 2026-11-21T15:00)"
    if re.fullmatch(r"[\d.]+\s*[A-Za-z]+", text.strip()):  # a bare number would be a year
        try:
            ago_s = parse_duration(text)
        except ValueError:
            raise ValueError(allowed) from None
        if not 60 <= ago_s <= SINCE_S_MAX:
            raise ValueError("allowed are time spans of one minute to ten years")
        return max(0.0, now_s - ago_s)
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(allowed) from None
    try:
        at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, OSError):
        raise ValueError(allowed) from None
    if at_s > now_s:
        raise ValueError("that is in the future")
    return max(0.0, at_s)


def document(
    report: Mapping[str, Any], by: Sequence[str] = GROUPINGS, minutes: Sequence[Row] | None = None
) -> Document:
    """What `kvstore report -o json` prints. report: the answer of `Client.report`. by: of GROUPINGS. minutes: those of
    `Client.live`; with them there is one more grouping."""
    rows: list[Row] = report["rows"]
    price, now_s = float(report["gpu_hour_price"]), float(report["now_s"])
    first_s, end_s = report["since_s"], report["until_s"]
    total = figures(rows, price)
    groups = {name: _grouped(name, rows, total, price) for name in GROUPINGS if name in by}
    if minutes is not None:
        groups[MINUTE] = [
            {"minute_s": minute["minute_s"], **figures([minute], price)}
            for minute in minutes
            if first_s <= minute["minute_s"] < end_s  # those that are in the totals
        ]
    return {
        "region": report["region"],
        "since_s": first_s,
        "until_s": end_s,
        "gpu_hour_price": price,
        "currency": report["currency"],
        "totals": total,
        "by": groups,
        "prefixes": [
            {**prefix, "age_s": _ago(prefix["first_s"], now_s), "idle_s": _ago(prefix["last_s"], now_s)}
            for prefix in report["prefixes"]
            if prefix["last_s"] >= first_s
        ],
        "holdings": list(report["holdings"]),
    }


def of_tenant(report: Mapping[str, Any], tenant: str) -> Row:
    """What of an answer is this tenant's: its rows and prefixes. What a prefix saved is without that which may have been
    another one's; what an hour of a GPU costs is the operator's."""
    own = [
        {**prefix, "tokens_saved": prefix["tokens_saved"] - prefix["error_tokens"], "error_tokens": 0}
        for prefix in report["prefixes"]
        if prefix["tenant"] == tenant
    ]
    return {
        "region": report["region"],
        "now_s": report["now_s"],
        "gpu_hour_price": 0.0,
        "currency": "",
        "since_s": report["since_s"],
        "until_s": report["until_s"],
        "rows": [row for row in report["rows"] if row["tenant"] == tenant != EVERYBODY_ELSE],
        "holdings": [one for one in report["holdings"] if one["tenant"] == tenant],
        "prefixes": sorted(own, key=lambda prefix: -prefix["tokens_saved"]),
    }


def figures(rows: Iterable[Row], price: float) -> Document:
    """The sum of rows. price: of a GPU hour, 0 if it is not known: then money is None."""
    by_outcome = dict.fromkeys(outcomes.NAMES, 0)
    moved = dict.fromkeys(MOVES, 0)
    lookups, prefill_s = 0, 0.0
    for row in rows:
        lookups += row["lookups"]
        prefill_s += row["prefill_s_saved"]
        for name, tokens in row["tokens"].items():  # a newer daemon may know more of them
            by_outcome[name] = by_outcome.get(name, 0) + tokens
        for name, size_bytes in row["bytes"].items():
            moved[name] = moved.get(name, 0) + size_bytes
    tokens = sum(by_outcome.values())
    engine, hit = by_outcome[ENGINE], sum(by_outcome[name] for name in TIERS)
    return {
        "lookups": lookups,
        "tokens": tokens,
        "engine_tokens": engine,
        "hit_tokens": hit,
        "missed_tokens": tokens - engine - hit,
        "hit_ratio": ratio(hit, tokens - engine),
        "overall_ratio": ratio(engine + hit, tokens),
        "prefill_s_saved": round(prefill_s, 3),
        "money_saved": round(prefill_s / 3600 * price, 6) if price else None,
        "outcomes": by_outcome,
        "bytes": moved,
    }


def ratio(part: float, whole: float) -> float | None:
    """None where there is nothing to have a part of."""
    return round(part / whole, 6) if whole else None


def misses(by_outcome: Mapping[str, int]) -> dict[str, int]:
    """The outcomes that are misses, most tokens first."""
    missed = {name: tokens for name, tokens in by_outcome.items() if name != ENGINE and name not in TIERS}
    return dict(sorted(missed.items(), key=lambda item: -item[1]))


def _grouped(name: str, rows: Sequence[Row], total: Document, price: float) -> list[Document]:
    if name == "tier":
        return _tiers(total)
    if name == "reason":
        return _reasons(total)
    if name == "hour":
        return _sums(rows, "hour_s", price, lambda group: group["hour_s"])
    return _sums(rows, name, price, lambda group: (-group["tokens"], group[name]))


def _tiers(total: Document) -> list[Document]:
    asked = total["tokens"] - total["engine_tokens"]
    return [
        {
            "tier": name,
            "tokens": total["outcomes"][name],
            "hit_ratio": ratio(total["outcomes"][name], asked),
            "meaning": outcomes.MEANINGS[name],
        }
        for name in TIERS
        if name in OWN_TIERS or total["outcomes"][name]
    ]


def _reasons(total: Document) -> list[Document]:
    return [
        {
            "reason": name,
            "tokens": tokens,
            "share": ratio(tokens, total["missed_tokens"]),
            "meaning": outcomes.MEANINGS.get(name, "a reason that this version does not know"),
        }
        for name, tokens in misses(total["outcomes"]).items()
        if tokens
    ]


def _sums(rows: Sequence[Row], field: str, price: float, order: Callable[[Document], Any]) -> list[Document]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row)
    return sorted(({field: value, **figures(group, price)} for value, group in groups.items()), key=order)


def _ago(at_s: float, now_s: float) -> float:
    return round(max(0.0, now_s - at_s), 3)
