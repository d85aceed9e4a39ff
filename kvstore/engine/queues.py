"""Every queue of the engine: how long it is, and how long it may be.

What happens at each limit is written down in docs/operations.md; a test holds both together.
"""

from __future__ import annotations

from kvstore.constants import (
    CLEARS_MAX,
    DEMOTING_MAX,
    IO_ORDINARY_MAX,
    IO_URGENT_MAX,
    LOAD_WAITERS_MAX,
    LOADS_WAITING_MAX,
    PERSIST_ASKS_BYTES_MAX,
    PERSIST_CANDIDATES_MAX,
    PERSIST_JOBS_MAX,
    PROBE_TARGETS_MAX,
    PROMPTS_REMEMBERED_MAX,
    RULE_COMMANDS_MAX,
    SUSPECTS_MAX,
    TICKETS_OPEN_MAX,
    UNDEMOTED_MAX,
)
from kvstore.engine.parts import Parts
from kvstore.protocol import answers


def queues(engine: Parts) -> list[answers.Queue]:
    """name, length now and limit of each; 0 lengths where there is nothing to wait for."""
    writes, loader = engine.blocks.writes, engine.loader
    urgent, ordinary = engine.io.lengths()
    rows = [
        ("io_urgent", urgent, IO_URGENT_MAX),
        ("io_ordinary", ordinary, IO_ORDINARY_MAX),
        ("loads", loader.underway, LOADS_WAITING_MAX),
        ("load_waiters", loader.waiting.count, LOAD_WAITERS_MAX),
        ("loads_starved", loader.starved, LOADS_WAITING_MAX),
        ("suspects", loader.suspects, SUSPECTS_MAX),
        ("demoting", len(writes.waiting), DEMOTING_MAX),
        ("undemoted", len(writes.refused), UNDEMOTED_MAX),
        ("probe_targets", sum(len(source.targets) for source in loader.devices), PROBE_TARGETS_MAX),
        ("tickets", engine.accounts.tickets, TICKETS_OPEN_MAX),
        ("rule_commands", engine.retention.commands_waiting, RULE_COMMANDS_MAX),
        ("clears", engine.clearing.underway, CLEARS_MAX),
        ("prompts", len(engine.prompts), PROMPTS_REMEMBERED_MAX),
    ]
    if engine.persister is not None:
        rows += [
            ("persisting", engine.persister.candidates, PERSIST_CANDIDATES_MAX + PERSIST_JOBS_MAX),
            ("asks_bytes", engine.persister.asks.size_bytes, PERSIST_ASKS_BYTES_MAX),
        ]
    return [{"name": name, "length": length, "limit": limit} for name, length, limit in rows]
