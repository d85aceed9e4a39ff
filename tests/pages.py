"""What every page of ours must be: one file, sound, that asks nobody for anything and runs nothing but its own script."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.browser import CUT, OUTSIDE, Browser, Page

VOID = {"meta", "br", "hr", "img", "link", "input"}
ALIEN = r"(https?|wss?):|[\"'(]//|@import|url\(|\bimport\b|\bfetch\b|innerHTML|insertAdjacentHTML|document\.write|\beval\b"


class Parts(HTMLParser):
    """Reads a page and notes what is wrong with it. `inner`: of each script and style, with its type."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.inner: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag in ("script", "style"):
            self.inner.append((dict(attrs).get("type") or tag, ""))

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            kind, before = self.inner.pop()
            self.inner.append((kind, before + data))


def read_page(content: str) -> dict[str, Any]:
    """What a page is made of, once its file is proven sound: balanced tags, one style, one script that the policy allows by
    its digest, and nothing from elsewhere."""
    page = Parts(content)
    assert page.problems == []
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "a"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "action", "style"} & names
    assert not [name for name in names if name.startswith("on")]
    assert [kind for kind, _ in page.inner] == ["style", "application/json", "module"]
    style, data, script = (text for _, text in page.inner)
    without_data = content.replace(data, "").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(ALIEN, without_data), re.search(ALIEN, without_data)
    (policy,) = [value for _, value in page.attributes if "default-src" in value]
    digests = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (style, script)]
    assert policy == (
        f"default-src 'none'; style-src {digests[0]}; script-src {digests[1]}; base-uri 'none'; form-action 'none'"
    )
    told: dict[str, Any] = json.loads(data)
    return told


def opened(browser: Browser, path: Path, width: int = 1300, dark: bool = False) -> Page:
    """A page of ours from its file, once its script has run: it asked for nothing else, complained of nothing, and all of it
    is inside the window."""
    page = browser.page(width, 900, dark)
    page.go(path.as_uri())
    page.wait("document.readyState === 'complete' && document.querySelector('#version').textContent !== ''")
    assert page.heard() == []
    assert page.requests == [path.as_uri()]
    assert page.value(OUTSIDE) == []
    assert page.value(CUT) == []
    assert not re.search(
        r"\b(NaN|undefined|null|Infinity)\b", page.value("document.querySelector('main').innerText")
    )
    return page


def text(page: Page, selector: str) -> str:
    """What a reader sees of the first such element."""
    return str(page.value(f"document.querySelector({json.dumps(selector)}).innerText")).replace("\u00a0", " ")


def texts(page: Page, selector: str) -> list[str]:
    """What is in each such element, seen or not."""
    found: list[str] = page.value(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent.replace(/\\u00a0/g, ' '))"
    )
    return found
