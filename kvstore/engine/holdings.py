"""Holdings: how much each model and tenant holds, and how its kinds of engines differ.

    namespaces ─▶ (model, tenant, adapter) ─▶ kinds of engines: equal but for their KV groups
                        │                            └─ several: the fields in which they differ
                        ╰─▶ bytes by tier, blocks, what was asked for and found

Two kinds share nothing: one of them may be cold while the other is warm, because its dtype or its seed of hashes is another
one. A look at all namespaces is made every few seconds, in steps, so that an answer need not make one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvstore.index.block import Namespace
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.ledger.engines import differing, kinds_of
from kvstore.protocol import answers
from kvstore.protocol.residency_bits import IN_DRAM, IN_NVME
from kvstore.retention.quotas import Quotas
from kvstore.steps import Background, Steps

HOLDINGS_S: Final = 5.0  # between two looks
HOLDINGS_REPORTED_MAX: Final = 64  # in one answer, those that hold most
HOLDINGS_STEP: Final = 50  # namespaces between two yields
FIELDS_REPORTED_MAX: Final = 3  # of those that differ
VALUES_REPORTED_MAX: Final = 4
VALUE_CHARS_MAX: Final = 64
NOT_SAID: Final = "(default)"  # a setting that is not written out

Group = tuple[str, str, str]  # model, tenant, adapter


class Kind(NamedTuple):
    """One of several kinds of engines of a model and tenant. fields: those that tell the kinds apart; said: what this one has there."""

    model: str
    tenant: str
    adapter: str
    fields: tuple[str, ...]
    said: str


class Holdings:
    """Of one engine, as the last look found them. kinds: with their namespaces, where a model and tenant have several."""

    def __init__(self, namespaces: NamespaceRegistry, quotas: Quotas, background: Background) -> None:
        self.latest: list[answers.Holding] = []
        self.kinds: dict[Kind, list[Namespace]] = {}
        self._namespaces = namespaces
        self._quotas = quotas
        self._background = background
        self._differing: dict[Group, list[answers.Difference]] = {}
        self._look_at_s = 0.0
        self._known = 0  # namespaces at the last look
        self._is_looking = False

    def tick(self, now_s: float) -> None:
        """Look again where it is time to, or where there are others now."""
        if self._is_looking or (now_s < self._look_at_s and len(self._namespaces) == self._known):
            return
        self._look_at_s, self._known, self._is_looking = now_s + HOLDINGS_S, len(self._namespaces), True
        self._background.begin(self._look_steps())

    def namespace(self, namespace: Namespace) -> answers.Namespace:
        """As it is in answers; the fields are documented in docs/cli.md."""
        used, fields = self._quotas.holders(namespace)[0].used, namespace.spec.fields
        fields_differing = self._differing.get(_group(fields), [])
        return {
            **namespace.as_dict(),
            "users": namespace.users,
            "dram_bytes": used[IN_DRAM],
            "nvme_bytes": used[IN_NVME],
            "differs": {one["field"]: _shown(fields.get(one["field"])) for one in fields_differing},
        }

    def _look_steps(self) -> Steps[None]:
        groups: dict[Group, list[Namespace]] = {}
        for number, namespace in enumerate(list(self._namespaces), 1):
            groups.setdefault(_group(namespace.spec.fields), []).append(namespace)
            if number % HOLDINGS_STEP == 0:
                yield
        rows: dict[tuple[str, str], answers.Holding] = {}
        differing_in: dict[Group, list[answers.Difference]] = {}
        apart: dict[Kind, list[Namespace]] = {}
        looks = 0
        for group, spaces in groups.items():
            kinds, differs = 1, list[answers.Difference]()
            if len(spaces) > 1:
                found = kinds_of(map(_as_space, spaces[:HOLDINGS_STEP]))
                kinds = len(found)
                differs = differing_in[group] = _reported(differing(found)) if kinds > 1 else []
            for space in spaces if differs else ():
                apart.setdefault(_kind(group, differs, space), []).append(space)
            _add(rows, group, spaces, kinds, differs, self._quotas)
            looks += len(spaces)
            if looks >= HOLDINGS_STEP:
                looks = 0
                yield
        ordered = sorted(rows.values(), key=lambda row: -(row["dram_bytes"] + row["nvme_bytes"]))
        self.latest, self.kinds, self._differing = ordered[:HOLDINGS_REPORTED_MAX], apart, differing_in
        self._is_looking = False


def _group(fields: Mapping[str, str]) -> Group:
    return fields.get("model", ""), fields.get("tenant", ""), fields.get("adapter", "")


def _kind(group: Group, differs: Sequence[answers.Difference], space: Namespace) -> Kind:
    fields = tuple(one["field"] for one in differs)
    said = ", ".join(f"{field} {_shown(space.spec.fields.get(field))}" for field in fields)
    return Kind(*group, fields, said)


def _as_space(namespace: Namespace) -> Mapping[str, Any]:
    return {"digest": namespace.digest.hex(), "fields": namespace.spec.fields, "blocks": 0}


def _shown(value: str | None) -> str:
    return NOT_SAID if value is None else value[:VALUE_CHARS_MAX]


def _reported(rows: Iterable[Mapping[str, Any]]) -> list[answers.Difference]:
    return [
        {
            "field": row["field"],
            "values": list(dict.fromkeys(map(_shown, row["values"])))[:VALUES_REPORTED_MAX],
        }
        for row in list(rows)[:FIELDS_REPORTED_MAX]
    ]


def _add(
    rows: dict[tuple[str, str], answers.Holding],
    group: Group,
    spaces: Iterable[Namespace],
    kinds: int,
    differs: list[answers.Difference],
    quotas: Quotas,
) -> None:
    """Adapters of a model are added up, and are no kinds of it."""
    model, tenant, _ = group
    row = rows.get((model, tenant))
    if row is None:
        row = rows[model, tenant] = {
            "model": model, "tenant": tenant, "kinds": 0, "namespaces": 0, "blocks": 0, "dram_bytes": 0, "nvme_bytes": 0,
            "asked_blocks": 0, "hit_blocks": 0, "differs": [],
        }  # fmt: skip
    row["kinds"] = max(row["kinds"], kinds)
    row["differs"] = row["differs"] or differs
    for space in spaces:
        used = quotas.holders(space)[0].used
        row["namespaces"] += 1
        row["blocks"] += len(space.blocks)
        row["dram_bytes"] += used[IN_DRAM]
        row["nvme_bytes"] += used[IN_NVME]
        row["asked_blocks"] += space.asked_blocks
        row["hit_blocks"] += space.hit_blocks
