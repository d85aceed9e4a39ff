"""The answer to `kvstore retention`: all rules, and what they amount to.

All rules fit into one answer (`Book.require_fitting`). Names of models and tenants are added to them as far as
there is room left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

from kvstore.constants import KIB, MIB, RULE_BYTES, STEP_BLOCKS, STEP_SLOW_BLOCKS, require
from kvstore.index.block import Namespace
from kvstore.protocol import answers
from kvstore.protocol.frames import FRAME_BYTES_MAX
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.residency.residency import Residency
from kvstore.retention.rules import RULES_BYTES_MAX, Book, Quota, Ttl, name_bytes, rule_bytes
from kvstore.steps import Steps

TENANTS_TOLD = 256  # of those that hold most, in one answer
TENANTS_TOLD_BYTES = 512 * KIB  # of their names in one answer
RETENTION_TOLD_BYTES = 4 * MIB - 64 * KIB  # of one answer, without the little that is in each
PINNED_BLOCKS_TOLD = 200_000  # blocks of pinned prefixes that one report looks at
require(
    RULES_BYTES_MAX + TENANTS_TOLD_BYTES + TENANTS_TOLD * RULE_BYTES <= RETENTION_TOLD_BYTES,
    "all rules and the tenants that hold most fit one answer",
)

require(RETENTION_TOLD_BYTES < FRAME_BYTES_MAX, "an answer fits a frame")
TIERS = ((IN_DRAM, "dram"), (IN_NVME, "nvme"))

R = TypeVar("R")
T = TypeVar("T")
Known = Callable[[bytes], Namespace | None]  # the namespace of a digest


def report_steps(book: Book, blocks: Residency, known: Known) -> Steps[answers.Retention]:
    """The fields are documented in docs/cli.md."""
    tenants = blocks.quotas.tenants(TENANTS_TOLD)
    ends = accumulate(name_bytes(name) for name, _ in tenants)
    tenants = tenants[: sum(end <= TENANTS_TOLD_BYTES for end in ends)]
    left_bytes = RETENTION_TOLD_BYTES - sum(RULE_BYTES + name_bytes(name) for name, _ in tenants)
    for some in _some(book.rules()):
        left_bytes -= sum(map(rule_bytes, some))
        yield
    names = _Names(known, left_bytes)
    guards = blocks.guards
    pins = yield from _pins(book, blocks, known, names)
    ttls = yield from _rows(book.ttls, lambda ttl: _ttl(ttl, names))
    quotas = yield from _rows(book.quotas, lambda quota: _quota(quota, names, blocks))
    return {
        "pins": pins,
        "ttls": ttls,
        "quotas": quotas,
        "pinned": [
            {"tier": name, "pinned_bytes": guards.guarded_bytes[bit], "limit_bytes": guards.limits[bit]}
            for bit, name in TIERS
            if bit == IN_DRAM or blocks.nvme
        ],
        "tenants": [{"tenant": tenant, **_used_bytes(used)} for tenant, used in tenants],
    }


def _some(rules: Sequence[R]) -> Iterator[Sequence[R]]:
    """As many as are looked at between two yields."""
    return (rules[at : at + STEP_SLOW_BLOCKS] for at in range(0, len(rules), STEP_SLOW_BLOCKS))


def _rows(rules: Sequence[R], row: Callable[[R], T]) -> Steps[list[T]]:
    rows: list[T] = []
    for some in _some(rules):
        rows += map(row, some)
        yield
    return rows


def _pins(book: Book, blocks: Residency, known: Known, names: _Names) -> Steps[list[answers.Pin]]:
    left = PINNED_BLOCKS_TOLD
    rows: list[answers.Pin] = []
    looks = 0
    for pin in book.pins:
        key = bytes.fromhex(pin.namespace), bytes.fromhex(pin.block_hash)
        facts = yield from blocks.guards.held_steps(key, known(key[0]), left)
        left -= facts["blocks"]
        about = names.about(pin.namespace)
        rows.append({**about, "block_hash": pin.block_hash, "since_s": pin.since_s, **facts})
        looks += STEP_BLOCKS // STEP_SLOW_BLOCKS + facts["blocks"] % STEP_BLOCKS
        if looks >= STEP_BLOCKS:
            looks = 0
            yield
    return rows


def _ttl(ttl: Ttl, names: _Names) -> answers.Ttl:
    return {
        **names.about(ttl.namespace, ttl.tenant),
        "block_hash": ttl.block_hash or None,
        "ttl_s": ttl.ttl_s,
        "since_s": ttl.since_s,
    }


def _quota(quota: Quota, names: _Names, blocks: Residency) -> answers.Quota:
    return {
        **names.about(quota.namespace, quota.tenant),
        "dram_bytes": quota.dram_bytes,
        "nvme_bytes": quota.nvme_bytes,
        **_used_bytes(blocks.quotas.holder(quota.namespace, quota.tenant).used),
        "since_s": quota.since_s,
    }


def _used_bytes(used: list[int]) -> answers.UsedBytes:
    return {"dram_used_bytes": used[IN_DRAM], "nvme_used_bytes": used[IN_NVME]}


class _Names:
    """The model and tenant of namespaces, until they have taken `left_bytes`."""

    def __init__(self, known: Known, left_bytes: int) -> None:
        self._known = known
        self._left_bytes = left_bytes

    def about(self, namespace: str, tenant: str | None = None) -> answers.About:
        """The fields of a rule that say what it is about."""
        known = self._known(bytes.fromhex(namespace))
        fields = known.spec.fields if known is not None else {}
        model, own = fields.get("model"), fields.get("tenant")
        size = name_bytes(model) + name_bytes(own)
        if size > self._left_bytes:
            model = own = None
        else:
            self._left_bytes -= size
        return {"namespace": namespace or None, "model": model, "tenant": own if tenant is None else tenant}
