"""Explanations: which namespaces a prompt belongs to, the outcome of each block, and runs of equal outcomes.

    namespaces of the daemon ─▶ of one engine: equal but for rank and group (`engine_of`)
    outcomes by block ─▶ runs of equal outcome: blocks 0-11, tokens 0-383, hit in DRAM

A prompt is served from *all* namespaces of its engine together: every rank and every KV group has
its own part of each block, and a block counts only if all of them have theirs. Sliding windows and
recurrent states need only the end of a prefix; their blocks are listed, and decide nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvstore.protocol import outcomes

# Fields of a namespace that differ between the KV groups of one engine.
OF_A_GROUP = frozenset(
    [
        "group",
        "shards",
        "attention",
        "layout",
        "pieces",
        "layers",
        "layer count",
        "spec",
        "record bytes",
        "column bytes",
        "block tokens",
    ]
)

# What the first engine called the model: the same KV may have other names elsewhere.
LABELS = frozenset(["model", "revision"])

Space = Mapping[str, Any]  # a namespace as `kvstore status -o json` has it


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks with one outcome. first, last: both are of it; tokens likewise."""

    outcome: str
    first_block: int
    last_block: int
    first_token: int
    last_token: int

    @property
    def tokens(self) -> int:
        return self.last_token - self.first_token + 1


class Unclear(Exception):
    """It is not clear which namespace is meant; the message says what there is to choose from."""


class NoneSuch(Unclear):
    """No namespace is like that."""


def choose(spaces: Sequence[Space], digest: str, model: str, tenant: str | None) -> list[Space]:
    """The namespaces of the one engine that is meant. digest: begin of one, in hex; model: of its name. Those of its
    adapters are meant only where there are no others.

    Raises Unclear.
    """
    found = [
        space
        for space in spaces
        if space["digest"].startswith(digest)
        and model.lower() in space["fields"].get("model", "").lower()
        and (tenant is None or space["fields"].get("tenant", "") == tenant)
    ]
    exact = [space for space in found if space["fields"].get("model", "").lower() == model.lower()]
    found = exact if model and exact else found
    found = found if digest else [space for space in found if not space["fields"].get("adapter")] or found
    if not found:
        raise NoneSuch(f"no namespace like that; known: {_listed(spaces)}")
    engines = [engine_of(space, spaces) for space in found]
    different = {frozenset(space["digest"] for space in engine) for engine in engines}
    if len(different) > 1:
        raise Unclear(f"which namespace? choose one by --namespace, --model or --tenant: {_listed(found)}")
    return engines[0]


def engine_of(chosen: Space, spaces: Iterable[Space]) -> list[Space]:
    """This namespace and its peers: one for each KV group of its engine, in order.

    Where two engines differ in how they keep a group (another attention backend), the peer that is
    most like the chosen one is taken.
    """
    if not chosen["fields"]:
        return [chosen]
    identity = identity_of(chosen)
    groups: dict[str, Space] = {}
    for space in spaces:
        if not space["fields"] or identity_of(space) != identity:
            continue
        group = space["fields"].get("group", "")
        if group not in groups or _likeness(space, chosen) > _likeness(groups[group], chosen):
            groups[group] = space
    return [groups[group] for group in sorted(groups, key=lambda group: (len(group), group))]


def needs_end_only(fields: Mapping[str, str]) -> bool:
    """Whether a namespace is of sliding windows or recurrent states, which need only the end of a prefix."""
    return any(kind in fields.get("spec", "") for kind in ("SlidingWindow", "MambaSpec"))


def judged(answers: Sequence[Sequence[int]]) -> list[int]:
    """The outcome of each block, from those that several questions about the same blocks gave.

    A block hits if it hits everywhere, in the slowest tier; else the first that misses says why.
    """
    judged: list[int] = []
    for column in zip(*answers, strict=True):
        missed = [outcome for outcome in column if outcome not in outcomes.HITS]
        judged.append(missed[0] if missed else max(column))
    broken = next((n for n, outcome in enumerate(judged) if outcome not in outcomes.HITS), len(judged))
    for number in range(broken, len(judged)):
        if judged[number] in outcomes.HITS:  # behind a gap
            judged[number] = judged[broken]
    return judged


def runs(by_block: Sequence[int], block_tokens: int, tokens: int) -> list[Run]:
    """Runs of equal outcome, and the tail of the prompt that is no whole block."""
    found: list[Run] = []
    for outcome, group in groupby(enumerate(by_block), key=lambda item: item[1]):
        numbers = [number for number, _ in group]
        first, last = numbers[0], numbers[-1]
        found.append(
            Run(outcomes.NAMES[outcome], first, last, first * block_tokens, (last + 1) * block_tokens - 1)
        )
    whole = len(by_block) * block_tokens
    if whole < tokens:
        name = outcomes.NAMES[outcomes.PARTIAL_BLOCK]
        found.append(Run(name, len(by_block), len(by_block), whole, tokens - 1))
    return found


def identity_of(space: Space) -> frozenset[tuple[str, str]]:
    """What all namespaces of one engine have in common."""
    apart = OF_A_GROUP | LABELS
    return frozenset((name, value) for name, value in space["fields"].items() if name not in apart)


def _likeness(space: Space, other: Space) -> tuple[int, int]:
    same = sum(space["fields"].get(name) == other["fields"].get(name) for name in OF_A_GROUP)
    return same, space["blocks"]


def _listed(spaces: Sequence[Space], most: int = 5) -> str:
    """What there is to choose from, in a line: one namespace for each engine, and how they differ."""
    engines: dict[frozenset[str], Space] = {}
    for space in spaces:
        engines.setdefault(frozenset(peer["digest"] for peer in engine_of(space, spaces)), space)
    shown = list(engines.values())
    names = sorted({name for space in shown for name in space["fields"]} - OF_A_GROUP - {"model", "tenant"})
    differing = [name for name in names if len({space["fields"].get(name) for space in shown}) > 1]
    lines = []
    for space in shown[:most]:
        fields = space["fields"]
        words = [f"model {fields.get('model') or 'without name'}", f"tenant {fields.get('tenant') or 'none'}"]
        words += [f"{name} {fields.get(name, '')[:16] or 'none'}" for name in differing[:2]]
        lines.append(f"{space['digest'][:8]} ({', '.join(words)}, {space['blocks']} blocks)")
    rest = f", and {len(shown) - most} more: `kvstore status`" if len(shown) > most else ""
    return (", ".join(lines) or "the daemon knows none") + rest
