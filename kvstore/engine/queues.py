"""Every queue of the engine: how long it is, and how long it may be.

What happens at each limit is written down in docs/operations.md; a test holds both together.
"""

from __future__ import annotations

from kvstore import constants as limits
from kvstore.engine.parts import Parts


def queues(engine: Parts) -> list[dict[str, object]]:
    """name, length now and limit of each; 0 lengths where there is nothing to wait for."""
    writes, loader = engine.blocks.writes, engine.loader
    urgent, ordinary = engine.io.lengths()
    rows = [
        ("io_urgent", urgent, limits.IO_URGENT_MAX),
        ("io_ordinary", ordinary, limits.IO_ORDINARY_MAX),
        ("loads", loader.underway, limits.LOADS_WAITING_MAX),
        ("load_waiters", loader.waiting.count, limits.LOAD_WAITERS_MAX),
        ("loads_starved", loader.starved, limits.LOADS_WAITING_MAX),
        ("suspects", loader.suspects, limits.SUSPECTS_MAX),
        ("demoting", len(writes.waiting), limits.DEMOTING_MAX),
        ("undemoted", len(writes.refused), limits.UNDEMOTED_MAX),
        ("probe_targets", sum(len(source.targets) for source in loader.devices), limits.PROBE_TARGETS_MAX),
        ("tickets", engine.accounts.tickets, limits.TICKETS_OPEN_MAX),
        ("rule_commands", engine.retention.commands_waiting, limits.RULE_COMMANDS_MAX),
        ("clears", engine.clearing.underway, limits.CLEARS_MAX),
        ("prompts", len(engine.prompts), limits.PROMPTS_REMEMBERED_MAX),
    ]
    if engine.persister is not None:
        rows += [
            (
                "persisting",
                engine.persister.candidates,
                limits.PERSIST_CANDIDATES_MAX + limits.PERSIST_JOBS_MAX,
            ),
            ("asks_bytes", engine.persister.asks.size_bytes, limits.PERSIST_ASKS_BYTES_MAX),
        ]
    return [{"name": name, "length": length, "limit": limit} for name, length, limit in rows]
