"""What is going on, in one small answer, for those who ask every second: metrics, the live page, `kvstore top`.

    counters that only grow │ what is so now │ latencies │ heaviest prefixes │ the last minutes

Its size follows from models and tenants (bounded) and never from namespaces or blocks, and it is put together
in steps: whoever asks costs the engines nothing. docs/cli.md names the fields.
"""

from __future__ import annotations

from typing import Any

from kvstore.engine.engine import Engine
from kvstore.ledger.latencies import BOUNDS_S
from kvstore.steps import Steps

LIVE_MINUTES_TOGETHER = 120  # of an answer, between two yields
LIVE_PREFIXES = 10
LIVE_SESSIONS_MAX = 64

_OF_TIERS = ("name", "capacity_bytes", "used_bytes", "records")
_OF_STATUS = ("counters", "namespaces_total", "adopting", "endurance", "breakers", "speeds", "queues")


def live_steps(engine: Engine, minutes_since_s: float, now_s: float) -> Steps[dict[str, Any]]:
    """All that the engine knows of it. minutes_since_s, now_s: unix seconds."""
    figures: dict[str, Any] = engine.figures()
    told = {name: figures[name] for name in _OF_STATUS}
    told["tiers"] = [{name: tier[name] for name in _OF_TIERS} for tier in figures["tiers"]]
    sessions = engine.sessions[:LIVE_SESSIONS_MAX]
    told["sessions"] = [{"label": s.label, "leases": len(s.leases)} for s in sessions]
    told["sessions_total"] = len(engine.sessions)
    yield
    totals = engine.accounts.totals
    told["tokens"] = [
        {"model": model, "tenant": tenant, "region": totals.region, **sums.sums_as_dict()}
        for (model, tenant), sums in totals.since_start.publish()
    ]
    yield
    told["prefixes"] = engine.heaviest(LIVE_PREFIXES)
    sources = (*engine.loader.devices, *engine.loader.shared)
    told["latencies"] = {
        "load": {source.name: source.loads.times.as_dict() for source in sources},
        "store": {member.name: member.stores.times.as_dict() for member in engine.nvme.members},
    }
    told["latency_bounds_s"] = BOUNDS_S
    yield
    minutes: list[dict[str, object]] = []
    rows = totals.minutes.since(minutes_since_s, now_s)
    for start in range(0, len(rows), LIVE_MINUTES_TOGETHER):
        minutes += [
            {"minute_s": minute_s, **sums.sums_as_dict()}
            for minute_s, sums in rows[start : start + LIVE_MINUTES_TOGETHER]
        ]
        yield
    told["minutes"] = minutes
    return told
