"""Every queue of the engine: how long it is, and how long it may be.

What happens at each limit is written down in docs/operations.md; a test holds both together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import constants as limits

if TYPE_CHECKING:
    from kvstore.engine import Engine


def queues(engine: Engine) -> list[dict[str, object]]:
    """name, length now and limit of each; 0 lengths where there is nothing to wait for."""
    room, promoter, unsaved = engine.room, engine.promoter, engine.room.expiry.unsaved
    urgent, ordinary = engine.io_lengths()
    rows = [
        ("io_urgent", urgent, limits.IO_URGENT_MAX),
        ("io_ordinary", ordinary, limits.IO_ORDINARY_MAX),
        ("loads", promoter.underway, limits.LOADS_WAITING_MAX),
        ("load_waiters", promoter.waiting, limits.LOAD_WAITERS_MAX),
        ("loads_starved", promoter.starved, limits.LOADS_WAITING_MAX),
        ("suspects", promoter.suspects, limits.SUSPECTS_MAX),
        ("demoting", len(room.demoting), limits.DEMOTING_MAX),
        ("undemoted", len(room.undemoted), limits.UNDEMOTED_MAX),
        ("doomed", len(room.doomed), limits.DOOMED_MAX),
        ("deleting", len(room.deleting), limits.DELETING_MAX),
        ("gone", len(room.gone), limits.GONE_MAX),
        ("probe_targets", engine.watch.targets, limits.PROBE_TARGETS_MAX),
        ("tickets", engine.accounts.tickets, limits.TICKETS_OPEN_MAX),
        ("rule_commands", engine.retention.commands_waiting, limits.RULE_COMMANDS_MAX),
        ("unsaved_times", len(unsaved), limits.EXPIRY_UNSAVED_MAX),
        ("forgotten_times", len(unsaved.forgotten), limits.EXPIRY_FORGOTTEN_MAX),
        ("prompts", len(engine.prompts), limits.PROMPTS_REMEMBERED_MAX),
    ]
    return [{"name": name, "length": length, "limit": limit} for name, length, limit in rows]
