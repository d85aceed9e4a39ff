"""SIGHUP: settings that are read again while serving.

    file, environment, flags ─▶ what differs? ─┬▶ can change: applied at once
                                               ╰▶ cannot: named in the log, in force after a restart

A configuration that is wrong changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from kvstore import logs
from kvstore.daemon.config import Config, keys, misfits, value_of
from kvstore.daemon.regional import rule_of
from kvstore.engine.engine import Engine

log = logging.getLogger("kvstore.daemon.reloading")

# Of [durable], what its rule is made of.
_RULE: Final = frozenset(
    f"durable.{name}"
    for name in (
        "seen_times",
        "seen_within_s",
        "keep_s",
        "half_life_s",
        "storage_gb_month_price",
        "put_million_price",
        "copy_gb_price",
        "found_nowhere_share",
    )
)
_LOG: Final = frozenset({"log.level", "log.format"})
_LEVELS: Final = ("debug", "info", "warning", "error")
_CHANGEABLE: Final = (
    _RULE
    | _LOG
    | {
        "stop_timeout_s",
        "nvme.write_bytes_per_day",
        "report.gpu_hour_price",
        "report.currency",
    }
)


async def reload(load: Callable[[], Config], old: Config, engine: Engine) -> Config:
    """Read all layers again, and change what can be changed: what is in force from now on. Never raises.

    load: blocks on the file; raises an Exception whose text says what is wrong.
    """
    try:
        wanted = await asyncio.to_thread(load)
    except Exception as error:  # noqa: BLE001 a daemon that serves goes on with what it has
        log.error("nothing was changed: %s", error)
        return old
    return apply(old, wanted, engine)


def apply(old: Config, wanted: Config, engine: Engine) -> Config:
    """Change what can be changed. For the engine's thread."""
    differing = {key for key in keys() if value_of(old, key) != value_of(wanted, key)}
    changed = differing & _CHANGEABLE
    if "nvme.write_bytes_per_day" in changed and not _may_change_budget(old, wanted):
        changed.remove("nvme.write_bytes_per_day")
    new = _with(old, {key: value_of(wanted, key) for key in changed})
    for key, problem in misfits(new):  # with what cannot change
        log.error("nothing was changed: %s = %s: %s", key, value_of(new, key), problem)
        return old
    is_quieter = _LEVELS.index(new.log.level) > _LEVELS.index(old.log.level)
    if changed & _LOG and not is_quieter:
        logs.configure(new.log.level, new.log.format)
    if "nvme.write_bytes_per_day" in changed:
        engine.endurance.set_budget(new.nvme.write_bytes_per_day)
    if engine.persister is not None and changed & (_RULE | {"report.gpu_hour_price"}):
        engine.persister.asks.rule = rule_of(new.durable, new.report.gpu_hour_price)
    for key in sorted(changed):
        log.info("%s is %s now", key, value_of(new, key))
    for key in sorted(differing - changed):
        log.warning("%s is still %s: another value needs a restart", key, value_of(old, key))
    if not differing:
        log.info("no setting has changed")
    if changed & _LOG and is_quieter:  # after what there is to say
        logs.configure(new.log.level, new.log.format)
    return new


def _may_change_budget(old: Config, wanted: Config) -> bool:
    """Whether there was a budget and is one: what was written without one was not counted."""
    return bool(old.nvme.write_bytes_per_day and wanted.nvme.write_bytes_per_day)


def _with(config: Config, values: dict[str, Any]) -> Config:
    """The same configuration, other values of some keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    nested = {name: getattr(config, name).model_copy(update=given) for name, given in sections.items()}
    return config.model_copy(update={**top, **nested})
