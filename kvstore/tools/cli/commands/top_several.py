"""`kvstore top --socket a,b`: several daemons side by side, a line each, for rich to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.tools.cli.commands.top_screen import bytes_per_s, line_of, share_of
from kvstore.tools.cli.commands.top_watched import Watched
from kvstore.tools.problems import how_it_is
from kvstore.units import NOTHING, format_bytes, format_duration, short_count

COLUMNS = ("node", "state", "up", "hits now", "15 min", "tokens/s", "loaded", "DRAM", "NVMe", "sessions")
DROPPED = ("up", "15 min", "loaded", "sessions")  # where it is narrow
WIDE = 110
PATH_CHARS = 28


def several(ones: Sequence[Watched], width: int, keys: str = "") -> RenderableType:
    """A line each, and below what needs attention. keys: what may be pressed."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = [n for n, name in enumerate(COLUMNS) if width >= WIDE or name not in DROPPED]
    for name in (COLUMNS[n] for n in shown):
        table.add_column(
            name, justify="left" if name in ("node", "state") else "right", no_wrap=True, overflow="ellipsis"
        )
    lines: list[Text] = []
    for one in ones:
        cells = _cells(one)
        table.add_row(*(line_of(cells[n]) for n in shown))
        name = _short(one.path)
        lines += [
            line_of(f"! {name}: {text}")
            for text in ([one.away] if one.away else one.document.get("attention", ()))
        ]
    return Group(table, *([Text(), *lines] if lines else []), *([Text(), line_of(keys)] if keys else []))


def _cells(one: Watched) -> list[str]:
    found = one.document
    if not found:
        return [_short(one.path), "AWAY" if one.away else "…", *[NOTHING] * (len(COLUMNS) - 2)]
    state = "AWAY" if one.away else how_it_is(found["problems"])
    hits = found["hits"][0]
    fills = {tier["name"]: tier for tier in found["tiers"]}
    return [
        f"{found['host']} {_short(one.path)}",
        state,
        format_duration(found["uptime_s"]),
        share_of(hits["now"]),
        share_of(hits["15_min"]),
        short_count(found["tokens_per_s"]),
        bytes_per_s(found["loaded_bytes_per_s"]),
        *(_fill(fills.get(name)) for name in ("dram", "nvme")),
        str(found["sessions_total"]),
    ]


def _short(path: str) -> str:
    """The end of a path: sockets of one machine begin alike."""
    return path if len(path) <= PATH_CHARS else f"…{path[1 - PATH_CHARS :]}"


def _fill(tier: dict[str, Any] | None) -> str:
    if tier is None or not tier["capacity_bytes"]:
        return NOTHING
    return (
        f"{share_of(tier['used_bytes'] / tier['capacity_bytes'])} of {format_bytes(tier['capacity_bytes'])}"
    )
