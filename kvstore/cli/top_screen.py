"""What `kvstore top` shows, as lines that fit a terminal: figures in, text out.

    who it is, how it is             a line          (two where it is not well)
    rates                            a line
    hits by tier │ why not           side by side, one above the other where it is narrow
    tiers        │ latencies         likewise
    what needs attention             as many as there are, up to a few
    models and tenants               as many as there is room for

Names were chosen by clients: what could steer a terminal is taken out of them, and each line is cut to the width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from kvstore.units import NOTHING, format_bytes, format_duration, format_time, plural, printable, short_count

NARROW = 60  # columns; below it there is one block in a row, and the least important columns are left out
GAP = "   "
ROWS_MAX = 5  # of a block
ATTENTION_MAX = 4
BOLD, DIM, ALARM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[1;31m", "\x1b[0m"

Figures = Mapping[str, Any]
Block = list[tuple[str, ...]]  # a header and rows, all of equally many cells


class Page:
    """Lines that are put together. Each is cut to the width; styled where that is wanted."""

    def __init__(self, columns: int, rows: int, styled: bool) -> None:
        self.columns, self.rows = max(1, columns), max(1, rows)
        self.lines: list[str] = []
        self._styled = styled

    @property
    def room(self) -> int:
        """How many lines more."""
        return self.rows - len(self.lines)

    def add(self, text: str = "", style: str = "") -> None:
        """One line, if there is room for it."""
        if self.room > 0:
            text = cut(text, self.columns)
            self.lines.append(f"{style}{text}{RESET}" if style and text and self._styled else text)

    def add_block(self, block: Block) -> None:
        """A table: its first row is the header."""
        for number, line in enumerate(_lines(block)):
            self.add(line, "" if number else BOLD)


def screen(figures: Figures, columns: int, rows: int, styled: bool = True, away: str = "") -> list[str]:
    """At most `rows` lines of at most `columns` characters. away: why the daemon does not answer, "" where it does."""
    page = Page(columns, rows, styled)
    _head(page, figures, away)
    page.add()
    narrow = columns < NARROW
    _side_by_side(page, _hits(figures, narrow), _misses(figures, narrow))
    page.add()
    _side_by_side(page, _tiers(figures, narrow), _latencies(figures, narrow))
    if figures["attention"]:
        page.add()
        told = figures["attention"][:ATTENTION_MAX]
        more = len(figures["attention"]) - len(told)
        for line in told:
            page.add(f"! {line}", ALARM)
        if more:
            page.add(f"! and {more} more: kvstore status", ALARM)
    page.add()
    if page.room > 1:
        page.add_block(_models(figures, columns, page.room - 1))
    return page.lines


def connecting(path: str, why: str, columns: int) -> list[str]:
    """Before anything is known."""
    return [cut(f"kvstore top: {path}: {why or 'waiting for the first figures'}", columns)]


def cut(text: str, columns: int) -> str:
    """Without what could steer a terminal, and no wider than that."""
    text = printable(text)
    return text if cell_len(text) <= columns else set_cell_size(text, max(0, columns - 1)) + "…"


def _head(page: Page, figures: Figures, away: str) -> None:
    is_well = figures["health"]["ok"] and not away
    state = "ok" if is_well else "AWAY" if away else plural(len(figures["health"]["problems"]), "PROBLEM")
    up = f"up {format_duration(figures['uptime_s'])}"
    at = format_time(figures["now_s"], True).split()[-1]
    left = f"kvstore {figures['instance'][:8]}  {state}  {up}"
    engines = plural(figures["sessions_total"], "session")
    spaces = plural(figures["namespaces_total"], "namespace")
    right = f"{engines}  {spaces}  {at} UTC" if page.columns >= NARROW else at
    page.add(_apart(left, right, page.columns), BOLD if is_well else ALARM)
    if away:
        page.add(f"The daemon does not answer; the figures are old. {away}", ALARM)
    words = [
        f"{short_count(figures['lookups_per_s'])} lookups/s",
        f"{short_count(figures['tokens_per_s'])} tokens/s",
        f"loaded {_bytes_per_s(figures['loaded_bytes_per_s'])}",
        f"stored {_bytes_per_s(figures['stored_bytes_per_s'])}",
    ]
    if figures["prefill_s_saved_per_s"]:
        words.append(f"saves {figures['prefill_s_saved_per_s']:.3g} s of prefill a second")
    while len(words) > 1 and len("  ".join(words)) > page.columns:
        words.pop()
    page.add("  ".join(words))


def _apart(left: str, right: str, columns: int) -> str:
    free = columns - cell_len(left) - cell_len(right)
    return f"{left}{' ' * free}{right}" if free > 1 else left


def _bytes_per_s(number: float) -> str:
    return f"{format_bytes(int(number))}/s"


# -- blocks --


def _hits(figures: Figures, narrow: bool) -> Block:
    spans = ("now", "1_min", "15_min") if narrow else ("now", "1_min", "5_min", "15_min")
    block: Block = [("hit rate", *(span.replace("_", " ") for span in spans))]
    return block + [
        (row["tier"], *(_percent(row[span]) for span in spans)) for row in figures["hits"][:ROWS_MAX]
    ]


def _misses(figures: Figures, narrow: bool) -> Block:
    block: Block = [("misses", "now", "15 min")]
    rows = figures["misses"][: 3 if narrow else ROWS_MAX]
    return block + [(row["reason"], _percent(row["now"]), _percent(row["15_min"])) for row in rows]


def _tiers(figures: Figures, narrow: bool) -> Block:
    width = 8 if narrow else 10
    block: Block = [("tier", "full", "", "of")]
    for tier in figures["tiers"]:
        share = tier["used_bytes"] / tier["capacity_bytes"] if tier["capacity_bytes"] else 0.0
        bar = "█" * int(min(1.0, share) * width)
        row = (tier["name"], bar.ljust(width, "·"), _percent(share), format_bytes(tier["capacity_bytes"]))
        block.append(row)
    return block


def _latencies(figures: Figures, narrow: bool) -> Block:
    block: Block = [("latency", "per s", "p50", "p99")]
    rows = sorted(figures["latencies"], key=lambda row: row["what"].startswith("store"))
    return block + [
        (row["what"], short_count(row["per_s"]), _seconds(row["p50_s"]), _seconds(row["p99_s"]))
        for row in rows[: 3 if narrow else ROWS_MAX + 1]
    ]


def _models(figures: Figures, columns: int, room: int) -> Block:
    """Of figures as many as fit, who asks for most first; names take what is left."""
    rows = figures["models"]
    shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
    cells: list[tuple[str, ...]] = [
        (
            _percent(row["hit_ratio"]),
            short_count(row["tokens_per_s"]),
            short_count(row["lookups_per_s"]),
            _bytes_per_s(row["loaded_bytes_per_s"]),
            _bytes_per_s(row["stored_bytes_per_s"]),
        )
        for row in shown
    ]
    cells.insert(0, ("hits", "tokens/s", "lookups/s", "loaded", "stored"))
    count = 5 if columns >= NARROW else 2
    widths = [max(cell_len(row[n]) for row in cells) for n in range(count)]
    left = columns - sum(widths) - len(GAP) * (count + 1)
    names = [("model", "tenant"), *((row["model"] or "(none)", row["tenant"] or "(none)") for row in shown)]
    tenant = min(max(cell_len(printable(name)) for _, name in names), max(6, left // 3))
    block: Block = [
        (cut(model, max(5, left - tenant)), cut(name, tenant), *line[:count])
        for (model, name), line in zip(names, cells, strict=True)
    ]
    if len(shown) < len(rows):
        block.append((f"… and {len(rows) - len(shown)} more", *[""] * (count + 1)))
    return block


def _side_by_side(page: Page, first: Block, second: Block) -> None:
    """In one row where both fit, else the second one below."""
    left, right = _lines(first), _lines(second)
    width = max(map(cell_len, left))
    if len(second) == 1:
        page.add_block(first)
    elif page.columns < NARROW or width + len(GAP) + max(map(cell_len, right)) > page.columns:
        page.add_block(first)
        page.add_block(second)
    else:
        for number in range(max(len(left), len(right))):
            line = left[number] if number < len(left) else ""
            other = right[number] if number < len(right) else ""
            page.add(f"{set_cell_size(line, width)}{GAP}{other}".rstrip(), "" if number else BOLD)


def _lines(block: Block) -> list[str]:
    """The rows of a table: names to the left, figures to the right."""
    texts = [[printable(cell) for cell in row] for row in block]
    widths = [max(cell_len(row[n]) for row in texts) for n in range(len(block[0]))]
    named = [n == 0 or block[0][n] in ("tenant", "full") for n in range(len(widths))]
    lines = []
    for row in texts:
        cells = [
            cell + " " * (width - cell_len(cell)) if name else " " * (width - cell_len(cell)) + cell
            for cell, width, name in zip(row, widths, named, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.0f} µs"


def rows_of(lines: Sequence[str]) -> str:
    """Lines as they are drawn over what was there: each clears the rest of its row, the last one what is below."""
    return "\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J"
