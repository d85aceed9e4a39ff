"""What `kvstore top` shows, for rich to draw: figures in, a page out that fits the terminal.

    who it is, how it is             a line          (two where it is not well)
    rates                            a line
    hits by tier │ why not           side by side, one above the other where it is narrow
    tiers        │ latencies         likewise
    what needs attention             and what to do, as far as there is room
    models and tenants               these as far as there is room: a few of each,
    clients                          and more of the first
    prefixes that saved most
    what needed attention before     since this began
    keys                             the last line

Names were chosen by clients: what could steer a terminal is taken out of every text, and what is too wide is cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvstore.tools.problems import how_it_is
from kvstore.units import NOTHING, format_bytes, format_duration, format_time, plural, printable, short_count

NARROW = 60  # columns; below it the least important ones are left out
WIDE = 100  # columns; from here on clients have their models
ROWS_MAX = 5  # of a table
HASH_DIGITS = 10
ATTENTION_CUT = 4  # lines of what needs it, where there is no room for all of them
LIST_LINES = 2  # of a list besides its rows: a blank line, and the names of columns
ROWS_LEAST = 3  # of a list, before another one has more
ROWS_PLAIN_MAX = 50
BOLD, ALARM = "bold", "bold red"
NAMES = (
    "hit rate",
    "misses",
    "tier",
    "full",
    "latency",
    "model",
    "tenant",
    "client",
    "prefix",
    "lives in",
)  # to the left; figures to the right
NOT_OF_A_TENANT = (
    "problems",
    "attention",
    "tiers",
    "latencies",
    "sessions",
    "prefixes",
)  # lists that who asks as one does not get
LONG = ("model", "tenant", "client")  # cut first, where not all columns fit

Figures = Mapping[str, Any]


def screen(
    console: Console, figures: Figures, away: str = "", before: Sequence[str] = (), keys: str = ""
) -> Group:
    """As high as the console at most. away: why the daemon does not answer, "" where it does. before: lines of what needed attention
    and does not any more. keys: what may be pressed."""
    figures = {**dict.fromkeys(NOT_OF_A_TENANT, ()), **figures}
    narrow = console.width < NARROW
    blank = Text()
    parts: list[RenderableType] = [
        *_head(console, figures, away),
        blank,
        _beside(_hits(figures, narrow), _misses(figures, narrow)),
    ]
    if figures["tiers"]:
        parts += [blank, _beside(_tiers(figures, narrow), _latencies(figures, narrow))]
    room = console.height - len(console.render_lines(Group(*parts))) - bool(keys)
    if figures["attention"]:
        parts += [blank, *_attention(figures, console.width, room - 1)]
    room = console.height - len(console.render_lines(Group(*parts))) - bool(keys)
    lists: list[tuple[int, Callable[[int], RenderableType]]] = [
        (len(figures["models"]), lambda rows: _models(figures, narrow, rows)),
        (len(figures["sessions"]), lambda rows: _sessions(figures, console.width, rows)),
        (len(figures["prefixes"]), lambda rows: _prefixes(figures, narrow, rows)),
        (len(before), lambda rows: _before(before, rows)),
    ]
    for rows, (_, table) in zip(_shared(room, [count for count, _ in lists]), lists, strict=True):
        if rows:
            parts += [blank, table(rows)]
            room -= rows + LIST_LINES
    if keys:
        parts += [*[blank] * max(0, room), line_of(keys)]
    return Group(*parts)


def _shared(room: int, counts: Sequence[int]) -> list[int]:
    """Rows of lists of so many: a few of each as far as there is room, then more of the first."""
    rows = [0] * len(counts)
    for most in (ROWS_LEAST, ROWS_PLAIN_MAX):
        for number, count in enumerate(counts):
            left = (
                room
                - sum(each + LIST_LINES for each in rows if each)
                + (rows[number] + LIST_LINES) * bool(rows[number])
            )
            wanted = min(count, most, max(0, left - LIST_LINES))
            rows[number] = max(rows[number], wanted)
    return rows


def _attention(figures: Figures, width: int, room: int) -> list[Text]:
    """What needs it: whole, with what to do, as far as there is room; else cut to a line each, and the rest is counted."""
    fixes = [problem["fix"] for problem in figures["problems"]]
    lines, fixes = figures["attention"], [*fixes, *[""] * (len(figures["attention"]) - len(fixes))]
    for with_fixes in (len(lines), 1, 0):
        shown: list[Text] = []
        for number, (line, fix) in enumerate(zip(lines, fixes, strict=True)):
            shown += [line_of(text, ALARM) for text in _wrapped(line, "! ", width)]
            if fix and number < with_fixes:
                shown += map(line_of, _wrapped(fix, "  → ", width))
        if len(shown) <= room:
            return shown
    more = len(lines) - ATTENTION_CUT
    cut = [*lines[:ATTENTION_CUT], *[f"and {more} more: kvstore status"] * (more > 0)]
    return [line_of(f"! {line}", ALARM) for line in cut]


def _wrapped(text: str, mark: str, width: int) -> list[str]:
    """Behind a mark, and as far in on the lines below."""
    lines = textwrap.wrap(printable(text), max(20, width - len(mark)), break_on_hyphens=False)
    return [f"{' ' * len(mark) if number else mark}{line}" for number, line in enumerate(lines)]


def connecting(path: str, why: str) -> Text:
    """Before anything is known."""
    return line_of(f"kvstore top: {path}: {why or 'waiting for the first figures'}")


def line_of(text: str, style: str = "") -> Text:
    return Text(printable(text), style, no_wrap=True, overflow="ellipsis")


def _head(console: Console, figures: Figures, away: str) -> list[RenderableType]:
    is_well = not away and not any(problem["level"] == "problem" for problem in figures["problems"])
    state = "AWAY" if away else how_it_is(figures["problems"])
    right = format_time(figures["now_s"], True).split()[-1]
    if is_whole := "uptime_s" in figures:
        place = f"{figures['host'] or figures['instance'][:8]}" + f" in {figures['region_name']}" * bool(
            figures["region_name"]
        )
        left = f"kvstore {place}  {state}  up {format_duration(figures['uptime_s'])}"
    else:
        left = "kvstore: the figures of a tenant"
    if console.width >= NARROW and is_whole:
        engines = plural(figures["sessions_total"], "session")
        right = f"{engines}  {plural(figures['namespaces_total'], 'namespace')}  {right} UTC"
    free = console.width - cell_len(left) - cell_len(right)
    lines = [line_of(f"{left}{' ' * free}{right}" if free > 1 else left, BOLD if is_well else ALARM)]
    if away:
        lines.append(line_of(f"The daemon does not answer; the figures are old. {away}", ALARM))
    words = [
        f"{short_count(figures['lookups_per_s'])} lookups/s",
        f"{short_count(figures['tokens_per_s'])} tokens/s",
        f"loaded {bytes_per_s(figures['loaded_bytes_per_s'])}",
        f"stored {bytes_per_s(figures['stored_bytes_per_s'])}",
    ]
    if figures["prefill_s_saved_per_s"]:
        words.append(f"saves {figures['prefill_s_saved_per_s']:.3g} s of prefill a second")
    return [*lines, line_of("  ".join(words))]


# -- tables --


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style=BOLD)
    for name in names:
        side = "left" if name in NAMES else "right"
        table.add_column(name, justify=side, no_wrap=name not in LONG, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*map(line_of, cells))


def _beside(first: Table, second: Table) -> RenderableType:
    """In one row where both fit, else the second one below."""
    return Columns([first, second], padding=(0, 3)) if second.row_count else first


def _hits(figures: Figures, narrow: bool) -> Table:
    spans = ("now", "1_min", "15_min") if narrow else ("now", "1_min", "5_min", "15_min")
    table = _table("hit rate", *(span.replace("_", " ") for span in spans))
    for row in figures["hits"][:ROWS_MAX]:
        _add(table, row["tier"], *(share_of(row.get(span)) for span in spans))
    return table


def _misses(figures: Figures, narrow: bool) -> Table:
    table = _table("misses", "now", "15 min")
    for row in figures["misses"][: 3 if narrow else ROWS_MAX]:
        _add(table, row["reason"], share_of(row["now"]), share_of(row.get("15_min")))
    return table


def _tiers(figures: Figures, narrow: bool) -> Table:
    width = 8 if narrow else 10
    table = _table("tier", "full", "", "of")
    for tier in figures["tiers"]:
        share = tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0.0
        bar = "█" * int(min(1.0, share) * width)
        _add(
            table, tier["name"], bar.ljust(width, "·"), share_of(share), format_bytes(tier["capacity_bytes"])
        )
    return table


def _latencies(figures: Figures, narrow: bool) -> Table:
    table = _table("latency", "per s", "p50", "p99")
    rows = sorted(figures["latencies"], key=lambda row: row["what"].startswith("store"))
    for row in rows[: 3 if narrow else ROWS_MAX + 1]:
        _add(table, row["what"], short_count(row["per_s"]), _seconds(row["p50_s"]), _seconds(row["p99_s"]))
    return table


def _models(figures: Figures, narrow: bool, room: int) -> Table:
    """As many rows as there is room for, who asks for most first."""
    rows = figures["models"]
    names = ("hits", "tokens/s") if narrow else ("hits", "tokens/s", "lookups/s", "loaded", "stored")
    table = _table("model", "tenant", *names)
    shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
    for row in shown:
        cells = (
            share_of(row["hit_ratio"]),
            short_count(row["tokens_per_s"]),
            short_count(row["lookups_per_s"]),
            bytes_per_s(row["loaded_bytes_per_s"]),
            bytes_per_s(row["stored_bytes_per_s"]),
        )
        _add(table, row["model"] or "(none)", row["tenant"] or "(none)", *cells[: len(names)])
    if len(shown) < len(rows) and room:
        _add(table, f"… and {len(rows) - len(shown)} more")
    return table


def _sessions(figures: Figures, width: int, room: int) -> Table:
    """Who is connected and may hold leases, who asks most first."""
    narrow, wide = width < NARROW, width >= WIDE
    names = (
        ("requests/s", "leases") if narrow else ("since", "requests/s", "loaded", "stored", "hits", "leases")
    )
    table = _table("client", "pid", *(("model",) if wide else ()), *names)
    rows = figures["sessions"]
    shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
    for row in shown:
        rate, leases = short_count(row["requests_per_s"]), str(row["leases"])
        who = [row["label"] or "unnamed", str(row["pid"] or "?")]
        share = row["hit_blocks"] / row["asked_blocks"] if row["asked_blocks"] else None
        if narrow:
            _add(table, *who, rate, leases)
        else:
            moved = (bytes_per_s(row[f"{way}_bytes_per_s"]) for way in ("loaded", "stored"))
            _add(
                table,
                *who,
                *([row["model"]] if wide else []),
                format_duration(row["connected_s"]),
                rate,
                *moved,
                share_of(share),
                leases,
            )
    if len(shown) < len(rows):
        _add(table, f"… and {len(rows) - len(shown)} more")
    return table


def _prefixes(figures: Figures, narrow: bool, room: int) -> Table:
    """Those that saved most."""
    names = ("hits",) if narrow else ("tokens", "hits", "last hit", "lives in")
    table = _table("prefix", "model", "saved", *names)
    for row in figures["prefixes"][:room]:
        ago = format_duration(max(0.0, figures["now_s"] - row["last_s"]))
        more = (short_count(row["tokens"]), short_count(row["uses"]), ago, ", ".join(row["tiers"]) or "gone")
        saved = short_count(row["tokens_saved"])
        _add(
            table,
            row["block_hash"][:HASH_DIGITS],
            row["model"] or "(none)",
            saved,
            *(more[1:2] if narrow else more),
        )
    return table


def _before(lines: Sequence[str], room: int) -> Group:
    return Group(line_of("needed attention before", BOLD), *(line_of(f"  {line}") for line in lines[:room]))


def bytes_per_s(number: float) -> str:
    return f"{format_bytes(int(number))}/s"


def share_of(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.0f} µs"
