"""Says why two engines of one model share no blocks: the fields in which their namespaces differ.

    namespaces ─▶ engines (a namespace for each KV group) ─▶ fields that are not the same in all of them

A connector writes out the settings that are not vLLM's own defaults, and a digest of all. So a setting that one engine
has and another has not is the default there; and where only the digest differs, it is one that was not written out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.ledger.explain import LABELS, OF_A_GROUP, NoneSuch, Space, engine_of, identity_of

CONFIGURATION = "configuration"  # the field with the digest of all settings


def compared(spaces: Sequence[Space], digest: str, model: str, tenant: str | None) -> dict[str, Any]:
    """The document of `kvstore explain --engines -o json`. digest: begin of a namespace's; model: part of a name.

    Raises NoneSuch.
    """
    found = [
        space
        for space in spaces
        if space["fields"]
        and space["digest"].startswith(digest)
        and model.lower() in space["fields"].get("model", "").lower()
        and tenant in (None, space["fields"].get("tenant", ""))
    ]
    if not found:
        raise NoneSuch("no namespace like that")
    engines = {tuple(space["digest"] for space in engine_of(space, spaces)): space for space in found}
    groups = [engine_of(space, spaces) for space in engines.values()]
    groups.sort(key=lambda group: -sum(space["blocks"] for space in group))
    return {
        "engines": [
            {
                "engine": number,
                "namespaces": [space["digest"] for space in group],
                "model": group[0]["fields"].get("model", ""),
                "tenant": group[0]["fields"].get("tenant", ""),
                "blocks": sum(space["blocks"] for space in group),
            }
            for number, group in enumerate(groups, 1)
        ],
        "differences": _differences([_fields(group) for group in groups]),
    }


def kinds_of(spaces: Iterable[Space]) -> list[list[Space]]:
    """These namespaces by the kinds of engines that they are of: one for each KV group in each."""
    kinds: dict[tuple[frozenset[tuple[str, str]], int], list[Space]] = {}
    seen: dict[tuple[frozenset[tuple[str, str]], str], int] = {}
    for space in spaces:
        identity, group = identity_of(space), space["fields"].get("group", "")
        number = seen[identity, group] = seen.get((identity, group), 0) + 1
        kinds.setdefault((identity, number), []).append(space)
    return list(kinds.values())


def differing(kinds: Sequence[Sequence[Space]]) -> list[dict[str, Any]]:
    """The fields in which kinds of engines differ, `field` and `values` of each, those that count first; the digest of all settings
    only where nothing else says it."""
    rows = _differences([_fields(kind) for kind in kinds])
    said = [row for row in rows if row["counts"] and row["field"] != CONFIGURATION]
    return said or [row for row in rows if row["counts"]]


def in_words(differs: Iterable[Space]) -> str:
    """The fields in which kinds differ, as answers have them: "dtype: bfloat16 / float8_e4m3"."""
    return "; ".join(f"{one['field']}: {' / '.join(one['values'])}" for one in differs)


def _fields(group: Sequence[Space]) -> dict[str, str]:
    """Of an engine; those of its KV groups by their numbers, where there are several."""
    fields: dict[str, str] = {}
    for space in group:
        ahead = f"group {space['fields'].get('group', '')}: " if len(group) > 1 else ""
        for name, value in space["fields"].items():
            if name in OF_A_GROUP:
                fields[f"{ahead}{name}"] = value
            else:
                fields |= _settings(name, value)
    return fields


def _settings(name: str, value: str) -> dict[str, str]:
    """A field by the settings in it, where it is one of the engine's configuration objects."""
    try:
        found = json.loads(value) if value.startswith("{") else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return {name: value}
    return {
        ".".join(filter(None, (name, key))): each if isinstance(each, str) else json.dumps(each)
        for key, each in found.items()
    }


def _differences(engines: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The fields that are not the same in all, those that count first."""
    rows: list[dict[str, Any]] = [
        {"field": name, "counts": name not in LABELS, "values": [fields.get(name) for fields in engines]}
        for name in sorted({name for fields in engines for name in fields})
    ]
    rows = [row for row in rows if len(set(row["values"])) > 1]
    return sorted(rows, key=lambda row: (not row["counts"], row["field"] == CONFIGURATION))
