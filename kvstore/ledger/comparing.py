"""Compares the reports of two spans of time: what changed, most first.

    document of now, document of then ─▶ by tier, by reason: shares of what engines asked for
                                     └─▶ by model, by tenant: hit rates, and how much was asked for in an hour

Spans may be of different length, so amounts are of an hour of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.ledger.report import ratio

Document = Mapping[str, Any]

AMOUNTS = ("lookups", "tokens", "hit_tokens", "prefill_s_saved")


def changes(now: Document, then: Document) -> dict[str, list[dict[str, Any]]]:
    """By tier, reason, model and tenant: `now`, `then` and the `change` between them; docs/cli.md names the fields."""
    found = {}
    for name in ("tier", "reason"):
        rows = [_share_row(name, word, now, then) for word in _words(name, now, then)]
        found[name] = sorted(rows, key=lambda row: -abs(row["change"] or 0.0))
    for name in ("model", "tenant"):
        both = [{group[name]: group for group in document["by"][name]} for document in (now, then)]
        words = dict.fromkeys([*both[0], *both[1]])
        rows = [
            _rate_row(name, word, both[0].get(word), both[1].get(word), _hours(now), _hours(then))
            for word in words
        ]
        found[name] = sorted(rows, key=lambda row: -_weight(row))
    return found


def per_hour(document: Document) -> dict[str, float]:
    """What the totals come to in an hour."""
    totals, hours = document["totals"], _hours(document)
    amounts = {name: totals[name] for name in AMOUNTS} | {
        f"{way}_bytes": n for way, n in totals["bytes"].items()
    }
    return {name: round(amount / hours, 3) for name, amount in amounts.items()}


def _hours(document: Document) -> float:
    return float(max(60.0, document["until_s"] - document["since_s"]) / 3600)


def _words(name: str, now: Document, then: Document) -> list[str]:
    return list(dict.fromkeys(group[name] for document in (now, then) for group in document["by"][name]))


def _share_row(name: str, word: str, now: Document, then: Document) -> dict[str, Any]:
    """Of the tokens that engines asked for, how many had this outcome."""
    shares = []
    for document in (now, then):
        totals = document["totals"]
        shares.append(ratio(totals["outcomes"].get(word, 0), totals["tokens"] - totals["engine_tokens"]))
    return {name: word, "now": shares[0], "then": shares[1], "change": _less(*shares)}


def _rate_row(
    name: str, word: str, now: Document | None, then: Document | None, hours_now: float, hours_then: float
) -> dict[str, Any]:
    rates = [group["hit_ratio"] if group is not None else None for group in (now, then)]
    asked = [
        round((group["tokens"] - group["engine_tokens"]) / hours, 3) if group is not None else 0.0
        for group, hours in ((now, hours_now), (then, hours_then))
    ]
    return {
        name: word,
        "now": rates[0],
        "then": rates[1],
        "change": _less(*rates),
        "asked_per_hour_now": asked[0],
        "asked_per_hour_then": asked[1],
    }


def _less(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else round(now - then, 6)


def _weight(row: Document) -> float:
    """Tokens that hit, or did not, because of the change; who is new or gone by what was asked for."""
    asked: float = max(row["asked_per_hour_now"], row["asked_per_hour_then"])
    return asked if row["change"] is None else asked * float(abs(row["change"]))
