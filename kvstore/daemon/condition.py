"""The condition of a daemon, as it is told to all of its region (`replication.formats.nodes`)."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.engine.engine import Engine
from kvstore.ledger.minutes import MINUTE_S, minute_of, together
from kvstore.protocol import answers, outcomes
from replication.constants import NODE_PROBLEMS_MAX
from replication.formats.nodes import Condition, Trouble

MINUTES_TOLD = 15
TEXT_CHARS_MAX = 300  # of a problem


def condition(engine: Engine, identity: answers.Identity, problems: Sequence[answers.Problem]) -> Condition:
    """Now. For the engine's thread."""
    now_s = identity["now_s"]
    since_s = minute_of(now_s) - MINUTES_TOLD * MINUTE_S
    lately = together(engine.accounts.totals.minutes.between(since_s, now_s + 1)).tokens
    return Condition(
        host=identity["host"],
        version=identity["version"],
        up_s=identity["uptime_s"],
        sessions=len(engine.sessions),
        dram_used_bytes=engine.arena.stats().used_bytes,
        nvme_used_bytes=engine.nvme.stats().used_bytes if engine.nvme else 0,
        asked_tokens=max(0, sum(lately) - lately[outcomes.ENGINE]),
        hit_tokens=max(0, sum(lately[outcome] for outcome in outcomes.HITS)),
        problems=[
            Trouble(
                one["kind"],
                one["subject"][:TEXT_CHARS_MAX],
                one["level"],
                one["text"][:TEXT_CHARS_MAX],
                one["since_s"],
            )
            for one in problems[:NODE_PROBLEMS_MAX]
        ],
    )
