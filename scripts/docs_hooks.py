"""What mkdocs.yml needs beyond Markdown: pages that lie outside of docs/, and links to files that do.

On GitHub a link goes to any file of the checkout; a site has only what is in it. So a link to a file outside of docs/
leads to a copy of it, below source/ and as plain text, and one to a directory becomes plain words. README.md,
CHANGELOG.md and examples/README.md are pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "examples/README.md": "examples.md"}
STYLE = """.md-grid{max-width:76rem}
.md-typeset table:not([class]) th{min-width:0}
.md-typeset table:not([class]) td,.md-typeset table:not([class]) th{padding:.5em .8em}
"""  # tables of ten columns have room
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_WORDS_OF_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from elsewhere, and copies of the files that any page links to."""
    files.append(File.generated(config, "site.css", content=STYLE))
    for path, name in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    for page in list(files.documentation_pages()):
        for target, _ in _LINK.findall(page.content_string):
            path = _in_checkout(page.src_uri, target)
            if path and (copy := _copy_of(path)) and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the checkout → links within the site."""

    def without_directories(found: re.Match[str]) -> str:
        path = _in_checkout(page.file.src_uri, found[2])
        is_directory = path is not None and (ROOT / path).is_dir() and f"{path}/README.md" not in PAGES
        return found[1] if is_directory else found[0]

    def within(found: re.Match[str]) -> str:
        path = _in_checkout(page.file.src_uri, found[1])
        if path is None:
            return found[0]
        return f"]({posixpath.relpath(_page_of(path), posixpath.dirname(page.file.src_uri))}{found[2] or ''})"

    return _LINK.sub(within, _WORDS_OF_LINK.sub(without_directories, markdown))


def _in_checkout(page: str, target: str) -> str | None:
    """What a link of a page names, from the root of the checkout; None for an address."""
    if "://" in target or target.startswith("mailto:"):
        return None
    origin = next((path for path, name in PAGES.items() if name == page), f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _page_of(path: str) -> str:
    """Where in the site a file of the checkout is."""
    for name in (path, f"{path}/README.md"):
        if name in PAGES:
            return PAGES[name]
    return _copy_of(path) or path.removeprefix("docs/")


def _copy_of(path: str) -> str:
    """Where its copy is; "" for what is in the site anyway, or cannot be."""
    if path in PAGES or path.startswith("docs/") or not (ROOT / path).is_file():
        return ""
    return f"source/{path}.txt"
