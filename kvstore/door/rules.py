"""What is kept, dropped and limited, as callers ask for it. A rule is answered when it is on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.door.later import Later
from kvstore.engine.engine import Engine
from kvstore.errors import RequestError
from kvstore.protocol import frames
from kvstore.retention.rules import Rule
from kvstore.steps import Steps


def set_pin(engine: Engine, r: frames.SetPin) -> Later:
    return _rule(engine.retention.pin, r.namespace, r.hash, r.pinned)


def set_ttl(engine: Engine, r: frames.SetTtl) -> Later:
    return _rule(engine.retention.ttl, r.namespace, r.hash, r.tenant, r.ttl_s, r.is_set)


def set_quota(engine: Engine, r: frames.SetQuota) -> Later:
    return _rule(engine.retention.quota, r.namespace, r.tenant, r.dram_bytes, r.nvme_bytes)


def _rule(command: Callable[..., None], *rule: object) -> Later:
    later = Later()

    def done(error: RequestError | None, rules: Sequence[Rule]) -> None:
        if error is not None:
            later.set(frames.Error(error.code, str(error)))
        else:
            namespaces = [rule.namespace for rule in rules if rule.namespace]
            later.set(frames.StatusReport({"namespaces": namespaces}))

    command(*rule, done)
    return later


def list_rules(engine: Engine) -> Steps[frames.Answer]:
    return frames.StatusReport((yield from engine.retention.report_steps()))


def clear(engine: Engine, r: frames.Clear) -> Later:
    later = Later()

    def answer(cleared: dict[str, object]) -> None:
        later.set(frames.StatusReport(cleared))

    engine.clear(r.namespace, r.hash, r.tenant, r.everything, r.dry, answer)
    return later
