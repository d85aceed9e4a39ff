"""What every page of ours must be: well-formed, self-contained, and deaf to what names say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page and notes what is wrong with it; `texts` is all that a reader sees."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read_page(content: str) -> Page:
    """The page, once it is proven sound: balanced tags, nothing from elsewhere, nothing that runs."""
    page = Page(content)
    assert page.problems == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "xlink:href", "srcset", "action"} & names
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", content)
    assert "svg" not in page.tags or "table" in page.tags  # the figures stand beside the plots
    for value in re.findall(r'(?:\s(?:x|y|x1|x2|y1|y2|cx|cy|width|height))="([^"]*)"', content):
        assert re.fullmatch(r"-?\d+(\.\d+)?", value), f"not a place in a plot: {value}"
    return page
