"""What `kvstore report --against` prints: two times beside each other, what changed most first."""

from __future__ import annotations

from typing import Any

from kvstore.tools.cli.output import Figure, print_table, say
from kvstore.units import NOTHING, format_bytes, format_duration, format_time, percent, short_count

GROUPINGS = ("tier", "reason", "model", "tenant")
TITLES = {"tier": "hits by tier, of what was asked for", "reason": "misses by reason, of what was asked for"}

Document = dict[str, Any]


def print_changes(document: Document, is_whole: bool) -> None:
    """is_whole: with the totals, and not groupings alone."""
    against = document["against"]
    say(f"kvstore report: {_when(document)}, against {_when(against)} UTC")
    say()
    for what, one in (("this time", document), ("the other time", against)):
        if not one["totals"]["tokens"]:
            print(f"Nothing was looked up in {what}.\n")
    if is_whole:
        _print_totals(document, against)
    for name, rows in document["changes"].items():
        cells = [
            [row[name] or "(none)", *map(Figure, _ratios(row)), *map(Figure, _asked(row))] for row in rows
        ]
        columns = [name, "now", "then", "change"]
        columns += ["asked/h now", "asked/h then"] if name in ("model", "tenant") else []
        if cells:
            print_table(
                TITLES.get(name, f"hit ratio by {name}"), columns, cells, ("asked/h then", "asked/h now")
            )


def _when(document: Document) -> str:
    return f"{format_time(document['since_s'])} to {format_time(document['until_s'])}"


def _print_totals(now: Document, then: Document) -> None:
    ratios = [document["totals"]["hit_ratio"] for document in (now, then)]
    change = None if None in ratios else ratios[0] - ratios[1]
    rows: list[list[object]] = [
        ["hit ratio", *map(Figure, _ratios({"now": ratios[0], "then": ratios[1], "change": change}))]
    ]
    for word, field, shown in (
        ("lookups an hour", "lookups", short_count),
        ("tokens an hour", "tokens", short_count),
        ("tokens hit an hour", "hit_tokens", short_count),
        ("prefill saved an hour", "prefill_s_saved", format_duration),
        ("loaded an hour", "loaded_bytes", lambda size: format_bytes(int(size))),
        ("stored an hour", "stored_bytes", lambda size: format_bytes(int(size))),
    ):
        pair = [document["per_hour"][field] for document in (now, then)]
        grown = f"{100 * (pair[0] / pair[1] - 1):+.0f} %" if pair[1] else NOTHING
        rows.append([word, *(Figure(shown(number)) for number in pair), Figure(grown)])
    print_table("what it came to", ["", "now", "then", "change"], rows)


def _ratios(row: Document) -> list[str]:
    change = NOTHING if row["change"] is None else f"{100 * row['change']:+.1f} points"
    return [percent(row["now"]), percent(row["then"]), change]


def _asked(row: Document) -> list[str]:
    return [short_count(row[name]) for name in ("asked_per_hour_now", "asked_per_hour_then") if name in row]
