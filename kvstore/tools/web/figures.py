"""The figures of `kvstore top`, and of ReportService.WatchFigures: what happened between two answers of the daemon, and in the last minutes.

    Live answer ── Live answer  =  rates, latencies, what each model and tenant did          now
    minutes of the newest one   =  shares of hits and misses over 1, 5 and 15 minutes        before

A share is of the tokens that engines asked for: all tokens but those in the engine's own cache, as `kvstore report` has it.
Minutes are whole ones by the clock, and the one under way counts as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvstore.ledger.sums import EVERYBODY_ELSE
from kvstore.protocol.outcomes import HITS, NAMES
from kvstore.tools.problems import in_a_line
from kvstore.tools.web.samples import counts_of, latency, sample_of

MINUTES = (1, 5, 15)
MINUTES_BACK_S = 16 * 60  # the longest of them, and the minute under way
_TIERS = [NAMES[number] for number in HITS]
_OF_NOW = (
    *("now_s", "instance", "host", "region_name", "version", "uptime_s", "health", "problems", "adopting"),
    *("prefixes", "holdings"),
)
_OF_A_TENANT = (
    *("now_s", "version", "span_s", "lookups_per_s", "tokens_per_s", "prefill_s_saved_per_s"),
    *("loaded_bytes_per_s", "stored_bytes_per_s", "promoted_bytes_per_s", "demoted_bytes_per_s"),
    *("hits", "misses", "models"),
)
_REASONS = [name for name in NAMES if name not in _TIERS and name != "engine"]

Live = Mapping[str, Any]


def is_same_life(old: Live, new: Live) -> bool:
    """Whether both answers are of one life of one daemon, so that their difference is what happened between them."""
    return bool(
        (old["instance"], old["pid"]) == (new["instance"], new["pid"]) and old["uptime_s"] < new["uptime_s"]
    )


def figures(old: Live, new: Live) -> dict[str, Any]:
    """The document of `kvstore top -o json`; docs/cli.md names its fields."""
    span_s: float = new["uptime_s"] - old["uptime_s"]
    sample = sample_of(counts_of(old), new, span_s)

    def per_s(number: float) -> float:
        return round(max(0.0, number) / span_s, 3)  # an account that was mended may have lost some

    spans = {"now": sample.tokens, **{f"{n}_min": _tokens_of(new, n) for n in MINUTES}}
    moved = ("loaded", "stored", "promoted", "demoted")
    return {
        **{name: new[name] for name in _OF_NOW},
        "span_s": round(span_s, 3),
        "sessions_total": new["sessions_total"],
        "namespaces_total": new["namespaces_total"],
        "lookups_per_s": per_s(sample.lookups),
        "tokens_per_s": per_s(sample.asked),
        "prefill_s_saved_per_s": per_s(sample.saved_s),
        **{f"{name}_bytes_per_s": per_s(sample.bytes.get(name, 0)) for name in moved},
        "hits": _shares("tier", _TIERS, spans),
        "misses": _shares("reason", _REASONS, spans),
        "tiers": new["tiers"],
        "latencies": _latencies(old, new, span_s),
        "attention": attention(new),
        "models": _models(old, new, per_s),
        "sessions": clients(old["sessions"], new["sessions"], span_s),
    }


def clients(old: Sequence[Live], new: Sequence[Live], span_s: float) -> list[dict[str, Any]]:
    """Clients as the daemon lists them, with what each did a second between two lists; who asks most first."""
    before = {one["id"]: one for one in old}
    rows = []
    for one in new:
        then = before.get(one["id"], {})
        rates = {
            f"{name}_per_s": round((one[name] - then.get(name, 0)) / span_s, 3)
            for name in ("requests", "loaded_bytes", "stored_bytes")
        }
        rows.append({**one, **rates})
    return sorted(rows, key=lambda row: (-row["requests_per_s"], row["id"]))


def tenant_figures(old: Live, new: Live, tenant: str) -> dict[str, Any]:
    """What of them is this tenant's: the fields that are made of its own rows. Minutes, tiers, latencies and what needs attention are
    of all tenants together, and left out."""

    def own(live: Live) -> Live:
        rows = [row for row in live["tokens"] if row["tenant"] == tenant != EVERYBODY_ELSE]
        return {**live, "tokens": rows, "minutes": []}

    found = figures(own(old), own(new))
    shares = {
        name: [{key: row[key] for key in (kind, "now")} for row in found[name]]
        for name, kind in (("hits", "tier"), ("misses", "reason"))
    }
    return {name: shares.get(name, found[name]) for name in _OF_A_TENANT}


def _tokens_of(live: Live, minutes: int) -> dict[str, int]:
    """Tokens by outcome of the last minutes, the one under way besides."""
    first_s = live["now_s"] // 60 * 60 - minutes * 60
    found: dict[str, int] = {}
    for minute in live["minutes"]:
        if minute["minute_s"] >= first_s:
            for name, tokens in minute["tokens"].items():
                found[name] = found.get(name, 0) + tokens
    return found


def _asked_for(tokens: Mapping[str, int]) -> int:
    """Of all tokens, those that were not in an engine's own cache."""
    return sum(tokens.values()) - tokens.get("engine", 0)


def _share(tokens: Mapping[str, int], names: Iterable[str]) -> float | None:
    """None where nothing was asked for."""
    asked = _asked_for(tokens)
    if asked <= 0:
        return None
    return round(min(1.0, max(0, sum(tokens.get(name, 0) for name in names)) / asked), 4)


def _shares(kind: str, names: Sequence[str], spans: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """One row for each name that occurs, the largest of the last quarter of an hour first; of all of them first for hits."""
    rows: list[dict[str, Any]] = [
        {kind: name, **{span: _share(tokens, [name]) for span, tokens in spans.items()}} for name in names
    ]
    rows = [row for row in rows if any(row[span] for span in spans)]
    if kind == "reason":
        rows.sort(key=lambda row: (-(row["15_min"] or 0), -(row["now"] or 0)))
        return rows
    return [{kind: "all", **{span: _share(tokens, names) for span, tokens in spans.items()}}, *rows]


def _latencies(old: Live, new: Live, span_s: float) -> list[dict[str, Any]]:
    """Of what an engine waits for, and of each level: those that happened between the two answers."""
    wanted = [("request", name) for name in ("lookup", "acquire", "reserve")]
    wanted += [(kind, name) for kind in ("load", "store") for name in new["latencies"][kind]]
    rows = []
    for kind, name in wanted:
        before, after = old["latencies"][kind].get(name), new["latencies"][kind].get(name)
        found = after and latency(new["latency_bounds_s"], before and before["buckets"], after["buckets"])
        if found:
            count, p50_s, p99_s = found
            what = name if kind == "request" else f"{kind} {name}"
            rows.append({"what": what, "per_s": round(count / span_s, 3), "p50_s": p50_s, "p99_s": p99_s})
    return rows


def _models(old: Live, new: Live, per_s: Any) -> list[dict[str, Any]]:
    """What each model and tenant did, who asks for most tokens first; those that only asked earlier behind them."""
    before = {(row["model"], row["tenant"]): row for row in old["tokens"]}
    rows = []
    for row in new["tokens"]:
        earlier = before.get((row["model"], row["tenant"]))

        def grown(name: str, inner: str = "", row: Any = row, earlier: Any = earlier) -> int:
            now = row[name][inner] if inner else row[name]
            return int(now - ((earlier[name][inner] if inner else earlier[name]) if earlier else 0))

        tokens = {name: grown("tokens", name) for name in row["tokens"]}
        rows.append(
            {
                "model": row["model"],
                "tenant": row["tenant"],
                "lookups_per_s": per_s(grown("lookups")),
                "tokens_per_s": per_s(grown("tokens_asked")),
                "hit_ratio": _share(tokens, _TIERS),
                "hit_ratio_since_start": _share(row["tokens"], _TIERS),
                "loaded_bytes_per_s": per_s(grown("bytes", "loaded")),
                "stored_bytes_per_s": per_s(grown("bytes", "stored")),
                "tokens_asked": row["tokens_asked"],
            }
        )
    return sorted(rows, key=lambda row: (-row["tokens_per_s"], -row["tokens_asked"]))


def attention(live: Live) -> list[str]:
    """What an operator should look at, a line each; none where all is well."""
    lines = [in_a_line(problem, live["now_s"]) for problem in live["problems"]]
    if live["adopting"]:
        lines.append("start: still reading the rows of NVMe; nothing is written there meanwhile")
    return lines
