"""The frame of a page: escaping, style sheet, sections, tables, bars inside of tables.

Functions take plain texts and give HTML; what is HTML already has the type `Html`, so that
a text cannot slip through unescaped: `cell("<b>")` is five visible characters.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.pages.style import STYLE

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


class Figure(str):
    """A number in words: set to the right in tables."""

    __slots__ = ()


def escape(text: object) -> Html:
    """Any text, harmless: markup is shown, control characters are replaced."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_UNPRINTABLE.sub("\ufffd", str(text)), quote=True))


def name(text: str, otherwise: str) -> Html:
    """A name that a client chose: kept from turning the text around it (bidi), cut where it is long."""
    if not text:
        return Html(f'<span class="soft">{escape(otherwise)}</span>')
    short = text if len(text) <= 60 else f"{text[:40]}…{text[-16:]}"
    return Html(f'<bdi title="{escape(text)}">{escape(short)}</bdi>')


def page(title: str, lead: Iterable[str], parts: Iterable[str], made_by: str) -> str:
    """The whole document. lead: paragraphs below the title. parts: HTML."""
    paragraphs = "".join(f'<p class="lead">{escape(text)}</p>' for text in lead)
    content = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1>{paragraphs}\n{content}\n"
        f"<footer>{escape(made_by)}</footer></main></body></html>\n"
    )


def section(title: str, *parts: str, note: str = "") -> Html:
    """A heading, a sentence that says what is to be seen, and what is to be seen."""
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    return Html(f"<section><h2>{escape(title)}</h2>{told}{''.join(parts)}</section>")


def tiles(figures: Iterable[tuple[str, str, str]]) -> Html:
    """Headline figures: (what, figure, what it means)."""
    boxes = (
        f'<div class="tile"><div class="what">{escape(what)}</div><div class="figure">{escape(figure)}</div>'
        f'<div class="means">{escape(means)}</div></div>'
        for what, figure, means in figures
    )
    return Html(f'<div class="tiles">{"".join(boxes)}</div>')


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], marked: Sequence[int] = ()
) -> Html:
    """A table with a caption; `Figure` cells go right. marked: numbers of rows that stand out.

    The caption stands outside of what scrolls, so that it wraps where a table is wider than the page.
    """
    listed = [list(row) for row in rows]
    right = [bool(listed) and all(isinstance(row[n], Figure) for row in listed) for n in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_right(r)}>{escape(column)}</th>' for column, r in zip(columns, right, strict=True)
    )
    body = "".join(
        f"<tr{_marked(number in marked)}>"
        + "".join(f"<td{_right(r)}>{escape(cell)}</td>" for cell, r in zip(row, right, strict=True))
        + "</tr>"
        for number, row in enumerate(listed)
    )
    return Html(
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def folded(summary: str, part: str) -> Html:
    """Something that is opened by a click."""
    return Html(f"<details><summary>{escape(summary)}</summary>{part}</details>")


def paragraph(text: str, css: str = "") -> Html:
    kind = f' class="{css}"' if css else ""
    return Html(f"<p{kind}>{escape(text)}</p>")


def bar(share: float, css: str, tip: str) -> Html:
    """One bar in a table cell; share: 0 to 1 of the cell."""
    return bars([(share, css, tip)])


def bars(parts: Iterable[tuple[float, str, str]]) -> Html:
    """Bars in a row, in one cell: (share of the cell, colour, what it is)."""
    pieces = "".join(
        f'<i class="{css}" style="width:{100 * min(max(share, 0.0), 1.0):.2f}%" title="{escape(tip)}"></i>'
        for share, css, tip in parts
        if share > 0
    )
    return Html(f'<span class="bar">{pieces}</span>')


def chip(css: str, what: str) -> Html:
    """A colour and its word, on one line."""
    return Html(f'<span class="chipped"><i class="chip {css}"></i>{escape(what)}</span>')


def legend(entries: Iterable[tuple[str, str, str]]) -> Html:
    """What each colour stands for: (colour, name, figure)."""
    items = "".join(f"<li>{chip(css, what)} <b>{escape(figure)}</b></li>" for css, what, figure in entries)
    return Html(f'<ul class="legend">{items}</ul>')


def glossary(words: Iterable[tuple[str, str]]) -> Html:
    terms = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(means)}</dd></div>" for word, means in words)
    return Html(f"<dl>{terms}</dl>")


def require_writable(path: Path) -> None:
    """Refuse early what `write` would refuse after all the work. Raises OSError."""
    if path.exists() and not path.is_file():
        raise IsADirectoryError(None, "not a file") if path.is_dir() else OSError(None, "not a regular file")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(None, "no such directory")
    if not os.access(path.absolute().parent, os.W_OK):
        raise PermissionError(None, "the directory cannot be written to")


def write(path: Path, text: str) -> None:
    """Write a page; whoever reads the path meanwhile sees the old one or the new one. Raises OSError."""
    require_writable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _right(right: bool) -> str:
    return ' class="right"' if right else ""


def _marked(marked: bool) -> str:
    return ' class="marked"' if marked else ""
