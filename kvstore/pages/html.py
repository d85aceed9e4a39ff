"""The frame of a page: escaping, style sheet, sections, tables, bars inside of tables.

Functions take plain texts and return HTML; what is HTML already has the type `Html`, so that
a text cannot slip through unescaped: a cell "<b>" is three visible characters.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from kvstore.pages.style import STYLE

CARD_COLUMNS = 3  # a table of more has cards on a narrow screen
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
    """A name that a client chose: it cannot turn the text around it (bidi), and is cut where it is long."""
    if not text:
        return Html(f'<span class="soft">{escape(otherwise)}</span>')
    short = text if len(text) <= 60 else f"{text[:40]}…{text[-16:]}"
    return Html(f'<bdi title="{escape(text)}">{escape(short)}</bdi>')


def page(title: str, lead: Iterable[str], parts: Iterable[str], made_by: str) -> str:
    """The whole document. lead: paragraphs below the title. parts: HTML."""
    paragraphs = "".join(paragraph(text, "lead") for text in lead)
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
    sentence = paragraph(note, "note") if note else ""
    return Html(f"<section><h2>{escape(title)}</h2>{sentence}{''.join(parts)}</section>")


def boxed(css: str, part: str) -> Html:
    """A part in a box of the style sheet."""
    return Html(f'<div class="{css}">{part}</div>')


def tiles(figures: Iterable[tuple[str, str, str]]) -> Html:
    """Headline figures: (what, figure, what it means)."""
    return boxed(
        "tiles",
        "".join(
            boxed("tile", "".join(map(boxed, ("what", "figure", "means"), map(escape, one))))
            for one in figures
        ),
    )


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], marked: str | None = None
) -> Html:
    """A table with a caption; columns of `Figure` cells go right. marked: first cell of the row that stands out.

    The caption stands outside of what scrolls, so that it wraps where a table is wider than the page. On a narrow
    screen a row of many columns is a card, each cell with the name of its column.
    """
    listed = [list(row) for row in rows]
    right = [
        ' class="right"' if listed and all(isinstance(row[n], Figure) for row in listed) else ""
        for n in range(len(columns))
    ]
    head = "".join(
        f'<th scope="col"{css}>{escape(text)}</th>' for css, text in zip(right, columns, strict=True)
    )
    body = "".join(
        ('<tr class="marked">' if row[0] == marked else "<tr>")
        + "".join(
            f'<td{css} data-column="{escape(column)}">{escape(cell)}</td>'
            for css, column, cell in zip(right, columns, row, strict=True)
        )
        + "</tr>"
        for row in listed
    )
    css = "scroll cards" if len(columns) > CARD_COLUMNS else "scroll"
    scrolled = boxed(css, f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return Html(f"<figure><figcaption>{escape(caption)}</figcaption>{scrolled}</figure>")


def folded(summary: str, part: str) -> Html:
    """Something that is opened by a click."""
    return Html(f"<details><summary>{escape(summary)}</summary>{part}</details>")


def paragraph(text: str, css: str = "") -> Html:
    kind = f' class="{css}"' if css else ""
    return Html(f"<p{kind}>{escape(text)}</p>")


def bars(*parts: tuple[float, str, str]) -> Html:
    """Bars in a row, in one cell: (share of the cell from 0 to 1, colour, what it is)."""
    pieces = "".join(
        f'<i class="c-{colour}" style="width:{100 * min(max(share, 0.0), 1.0):.2f}%" title="{escape(tip)}"></i>'
        for share, colour, tip in parts
        if share > 0
    )
    return Html(f'<span class="bar">{pieces}</span>')


def chip(colour: str, what: str) -> Html:
    """A colour and its word, on one line."""
    return Html(f'<span class="chipped"><i class="chip c-{colour}"></i>{escape(what)}</span>')


def legend(entries: Iterable[tuple[str, str, str]]) -> Html:
    """What each colour stands for: (colour, name, figure)."""
    items = "".join(
        f"<li>{chip(colour, what)} <b>{escape(figure)}</b></li>" for colour, what, figure in entries
    )
    return Html(f'<ul class="legend">{items}</ul>')


def glossary(title: str, words: Mapping[str, str]) -> Html:
    """A section of words and what they mean."""
    terms = "".join(
        f"<div><dt>{escape(word)}</dt><dd>{escape(means)}</dd></div>" for word, means in words.items()
    )
    return section(title, f"<dl>{terms}</dl>")
