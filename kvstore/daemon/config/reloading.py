"""Settings that change while serving: read again (SIGHUP), or set by hand.

    file, environment, flags ─▶ what differs? ─┬▶ can change: applied at once ◀── kvstore config set
                                               ╰▶ cannot: named in the log, in force after a restart

A configuration that is wrong changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from kvstore import logs
from kvstore.daemon.config.config import Config, Durable, keys, misfits, value_of
from kvstore.daemon.config.config_sources import written
from kvstore.door.api import Api
from kvstore.door.holders import Limits
from kvstore.door.unix import Door
from kvstore.durable.worth import Cost, Prices, Seen, Worth
from kvstore.engine.engine import Engine
from kvstore.units import format_bytes

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
_DOOR: Final = frozenset({"door.connections_max", "door.leases_max", "door.lease_share_max", "door.slow_s"})
CHANGEABLE: Final = (
    _RULE
    | _LOG
    | _DOOR
    | {
        "stop_timeout_s",
        "nvme.write_bytes_per_day",
        "engine.prefill_tokens_per_s",
        "dram.verify_share",
        "models.dram_bytes",
        "report.gpu_hour_price",
        "report.currency",
        "retention.pinned_share_max",
        "events.interval_s",
        "traces.sample",
    }
)


class InForce(NamedTuple):
    """What settings are applied to."""

    engine: Engine
    api: Api
    door: Door


def tune(engine: Engine, config: Config) -> None:
    """What an engine works with of settings that may change, at its start and whenever they do."""
    engine.verifier.share = config.dram.verify_share
    engine.models.capacity_bytes = config.models.dram_bytes
    engine.lookups.break_even.configured = config.engine.prefill_tokens_per_s
    engine.retention.set_share(config.retention.pinned_share_max)


def apply(old: Config, wanted: Config, parts: InForce) -> Config:
    """Change what can be changed: what is in force from now on. For the engine's thread."""
    differing = {key for key in keys() if value_of(old, key) != value_of(wanted, key)}
    values = {key: value_of(wanted, key) for key in differing & CHANGEABLE}
    reasons = {key: _why_not(key, old, value, parts.engine) for key, value in values.items()}
    values = {key: value for key, value in values.items() if not reasons[key]}

    def say(new: Config) -> None:
        for key in sorted(values):
            log.info("%s is %s now", key, said(key, value_of(new, key)).strip('"'))
        for key in sorted(differing - values.keys()):
            why = reasons.get(key) or "another value needs a restart"
            log.warning("%s is still %s: %s", key, said(key, value_of(old, key)).strip('"'), why)
        if not differing:
            log.info("no setting has changed")

    try:
        return carry_out(old, values, parts, say)
    except ValueError as error:  # with what cannot change
        log.error("nothing was changed: %s", error)
        return old


def carry_out(
    old: Config, values: Mapping[str, Any], parts: InForce, say: Callable[[Config], None]
) -> Config:
    """Give these keys, all of them CHANGEABLE, these values: what is in force from now on. say: logs it.

    Raises ValueError where something would not fit together, with nothing changed.
    """
    new = _with(old, values)
    for key, value in values.items():
        if problem := _why_not(key, old, value, parts.engine):
            raise ValueError(f"{key} = {written(value)}: {problem}")
    for key, problem in misfits(new):
        raise ValueError(f"{key} = {written(value_of(new, key))}: {problem}")
    engine, changed = parts.engine, values.keys()
    is_quieter = _LEVELS.index(new.log.level) > _LEVELS.index(old.log.level)
    if changed & _LOG and not is_quieter:
        logs.configure(new.log.level, new.log.format)
    if "nvme.write_bytes_per_day" in changed:
        engine.write_budget.set_budget(new.nvme.write_bytes_per_day)
    tune(engine, new)
    if engine.persister is not None and changed & (_RULE | {"report.gpu_hour_price"}):
        engine.persister.asks.rule = rule_of(new.durable, new.report.gpu_hour_price)
    if changed & _DOOR:
        parts.door.limit(new.door.connections_max)
        parts.api.limits = Limits.of(
            parts.api.limits.arena_bytes, new.door.leases_max, new.door.lease_share_max, new.door.slow_s
        )
    if parts.api.tracing is not None:
        parts.api.tracing.sample = new.traces.sample
    say(new)
    if changed & _LOG and is_quieter:  # after what there is to say
        logs.configure(new.log.level, new.log.format)
    return new


def _why_not(key: str, old: Config, value: Any, engine: Engine) -> str:
    """Why a key that can change cannot take this value now; "" if it can."""
    if key == "nvme.write_bytes_per_day" and bool(value) != bool(old.nvme.write_bytes_per_day):
        return "from no limit to one, and back, needs a restart: what was written without one was not counted"
    if key == "retention.pinned_share_max" and not engine.retention.allows_share(value):
        return "pins hold more than that already: unpin some, or restart"
    return ""


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    """The same configuration, other values of some keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, {})[name] = value
    top = sections.pop("", {})
    nested = {name: getattr(config, name).model_copy(update=given) for name, given in sections.items()}
    return config.model_copy(update={**top, **nested})


def said(key: str, value: Any) -> str:
    """For people: bytes as they are written."""
    is_size = "bytes" in key and isinstance(value, int)
    return format_bytes(value) if is_size else written(value)


def rule_of(durable: Durable, gpu_hour_price: float) -> Worth:
    """Which prefixes deserve to last, by the settings."""
    if durable.rule == "seen":
        return Seen(durable.seen_times, durable.seen_within_s, durable.keep_s)
    prices = Prices(
        gpu_hour_price,
        durable.storage_gb_month_price,
        durable.put_million_price,
        durable.copy_gb_price,
        durable.found_nowhere_share,
    )
    return Cost(prices, durable.half_life_s, durable.pack_bytes)
