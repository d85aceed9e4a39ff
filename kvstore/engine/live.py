"""What is going on, in one small answer, for those who ask every second: metrics, the live page, `kvstore top`.

    counters that only grow │ what is so now │ latencies │ heaviest prefixes │ the last minutes

Its size follows from models and tenants (bounded) and never from namespaces or blocks, and it is put together
in steps, so that engines do not wait for it. docs/cli.md names the fields.
"""

from __future__ import annotations

from kvstore.engine.engine import Engine
from kvstore.ledger.latencies import BOUNDS_S
from kvstore.ledger.minutes import together
from kvstore.protocol import answers
from kvstore.steps import Steps

LIVE_MINUTES_TOGETHER = 120  # rows of them, between two yields
LIVE_PREFIXES = 10
LIVE_SESSIONS_MAX = 64


def live_steps(engine: Engine, minutes_since_s: float, now_s: float) -> Steps[answers.EngineLive]:
    """All that the engine knows of it. minutes_since_s, now_s: unix seconds."""
    figures, sessions = engine.figures(), list(engine.sessions)
    yield
    totals = engine.accounts.totals
    tokens: list[answers.SinceStart] = [
        {"model": model, "tenant": tenant, "region": totals.region, **sums.sums_as_dict()}
        for (model, tenant), sums in totals.since_start.publish()
    ]
    yield
    prefixes = engine.heaviest(LIVE_PREFIXES)
    yield
    minutes: list[answers.Minute] = []
    looks = 0
    for minute_s, rows in totals.minutes.since(minutes_since_s, now_s):
        minutes.append({"minute_s": minute_s, **together(rows).sums_as_dict()})
        looks += len(rows)
        if looks >= LIVE_MINUTES_TOGETHER:
            looks = 0
            yield
    sources = (*engine.loader.devices, *engine.loader.shared)
    return {
        **figures,
        "sessions": [session.as_dict(engine.clock()) for session in sessions[:LIVE_SESSIONS_MAX]],
        "sessions_total": len(sessions),
        "model_loads": engine.models.loads.as_dict(),
        "tokens": tokens,
        "prefixes": prefixes,
        "latencies": {
            "load": {source.name: source.loads.times.as_dict() for source in sources},
            "store": {member.name: member.stores.times.as_dict() for member in engine.nvme.members},
        },
        "latency_bounds_s": BOUNDS_S,
        "holdings": engine.holdings.latest,
        "minutes": minutes,
    }
