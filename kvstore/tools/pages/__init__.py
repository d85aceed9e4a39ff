"""Pages: self-contained HTML for people who have never seen the project, drawn by the scripts of the live page.

    report.html ──▶ page.css, document.css ───────╮
         │                                        ├──▶ one file, which opens without a server or a network
         ╰────────▶ report.js ──▶ plots.js, … ────┤
    the document of `kvstore report -o json` ─────╯

A page is one of the .html files beside this one, with all that it names put into it. What it tells is JSON, and its
scripts show it as text: names of models and tenants come from clients. Its content security policy has the digests of
its script and its style: the browser runs nothing else, and asks nobody for anything.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvstore import __version__
from kvstore.ledger.report import figures
from kvstore.ledger.totals import HOUR_S

Document = Mapping[str, Any]

COLUMNS_MAX = 76  # of a plot
COLUMN_MINUTES = (1, 2, 5, 10)
MINUTES_HOURS_MAX = 6  # of a report that is drawn by the minute
COLUMN_HOURS = (1, 2, 3, 4, 6, 8, 12, 24, 48, 96, 168, 336, 672)

HERE = Path(__file__).parent
_STYLES = re.compile(r'(?:<link rel="stylesheet" href="[^"]+">\s*)+')
_SCRIPT = re.compile(r'<script type="module" src="([^"]+)"></script>')
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "([^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:function|class|const) (\w+))", re.MULTILINE)


def report_page(document: Document, first: Document | None = None) -> str:
    """The page of a report. document: with every grouping of `report.GROUPINGS`. first: a table before all others:
    {title, note, caption, columns, rows, problems}."""
    by = {name: groups for name, groups in document["by"].items() if name not in ("hour", "minute")}
    return _page("report", {"document": {**document, "by": by}, "first": first, **_columns(document)})


def replay_page(document: Document, traces: Sequence[str], drop_tail: bool, lasted_s: float = 0.0) -> str:
    """The page of a replay. document: what `-o json` prints. traces: names of the recordings, which lasted so long."""
    about = {"traces": traces, "drop_tail": drop_tail, "lasted_s": lasted_s}
    return _page("replay", {"document": document, **about})


def _columns(document: Document) -> Document:
    """Hours, some together: the page of a year is no larger than that of a week. An hour without a row is one in which
    nobody asked for anything. Minutes, where there are some and they are all of it."""
    minutes, hours = document["by"].get("minute"), document["by"]["hour"]
    if minutes and document["until_s"] - document["since_s"] <= MINUTES_HOURS_MAX * HOUR_S:
        lasted_s = document["until_s"] - minutes[0]["minute_s"]
        lengths = (length for length in COLUMN_MINUTES if 60 * length * COLUMNS_MAX >= lasted_s)
        return _together(minutes, "minute_s", 60 * next(lengths, COLUMN_MINUTES[-1]))
    lasted_s = document["until_s"] - hours[0]["hour_s"] if hours else 0
    wanted = lasted_s / HOUR_S / COLUMNS_MAX
    step_s = HOUR_S * next((length for length in COLUMN_HOURS if length >= wanted), COLUMN_HOURS[-1])
    return _together(hours, "hour_s", step_s)


def _together(rows: Sequence[Document], at: str, step_s: int) -> Document:
    columns: dict[float, list[Document]] = {}
    for row in rows:
        columns.setdefault(row[at] // step_s * step_s, []).append({**row, "tokens": row["outcomes"]})
    made = [{"from_s": at_s, **figures(rows, 0)} for at_s, rows in columns.items()]
    return {"columns": made, "column_s": step_s}


def _page(name: str, data: Document) -> str:
    """The file of this name in one piece. data: what its script reads."""
    content = (HERE / f"{name}.html").read_text("utf-8")
    links, link = _found(_STYLES, content), _found(_SCRIPT, content)
    style = "".join((HERE / file).read_text("utf-8") for file in re.findall(r'href="([^"]+)"', links[0]))
    script = "".join(_modules(HERE / link[1], {}).values())
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'; form-action 'none'"
    text = json.dumps({**data, "version": __version__}, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no end of a script is in it
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    body = (
        f'<script type="application/json" id="data">{text}</script>\n<script type="module">{script}</script>'
    )
    return content.replace(links[0], head).replace(link[0], body)


def _found(pattern: re.Pattern[str], content: str) -> re.Match[str]:
    found = pattern.search(content)
    assert found is not None, f"{pattern.pattern} is not in a page of ours"
    return found


def _modules(file: Path, known: dict[Path, str]) -> dict[Path, str]:
    """A module and those that it imports, each as a scope with a name, after those that it needs."""
    text = file.read_text("utf-8")
    for _, needed in _IMPORT.findall(text):
        path = (file.parent / needed).resolve()
        if path not in known:
            _modules(path, known)
    inner = _IMPORT.sub(lambda found: f"const {found[1]} = {_scope(Path(found[2]))};", text)
    exported = ", ".join(_EXPORT.findall(text))
    known[file.resolve()] = (
        f"const {_scope(file)} = (() => {{\n{_EXPORT.sub('', inner)}return {{ {exported} }};\n}})();\n"
    )
    return known


def _scope(file: Path) -> str:
    return f"{file.stem}_module"


def _digest(text: str) -> str:
    """How a content security policy names what stands in a page."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
