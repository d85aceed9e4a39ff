"""The documentation as a site, and as a map of the source."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_tidy import PACKAGES, ROOMS, ROOT

SITE_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A page that is missing, or a link or an anchor that leads nowhere, fails it."""
    target = tmp_path_factory.mktemp("site")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SITE_TIMEOUT_S,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert run.returncode == 0, "\n".join(
        line for line in run.stderr.splitlines() if not line.startswith("INFO")
    )
    return target


def test_it_has_every_document(site: Path) -> None:
    """The site is built without a warning, and each file of docs/ is a page of it."""
    assert (site / "index.html").exists() and (site / "changelog.html").exists()
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / f"{path.stem}.html").exists(), path.name


def test_it_fetches_nothing(site: Path) -> None:
    """No page loads a script, a style, a font or a picture from another place."""
    fetched = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"'> ]+"
    )
    found = [
        f"{page.name}: {tag}"
        for page in site.rglob("*.html")
        for tag in fetched.findall(page.read_text(encoding="utf-8"))
    ]
    styles = [
        f"{sheet.name}: {url}"
        for sheet in site.rglob("*.css")
        for url in re.findall(
            r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']+)", sheet.read_text(encoding="utf-8")
        )
    ]
    assert not found + styles


def test_links_to_the_source_have_something_to_show(site: Path) -> None:
    """What a page links to outside of docs/ is in the site as text, the same bytes."""
    for path in ("kvstore/ledger/counters.py", "deploy/kvstore.toml"):
        assert (site / f"source/{path}.txt").read_bytes() == (ROOT / path).read_bytes()
        assert f"source/{path}.txt" in (site / "cli.html").read_text(encoding="utf-8")


def test_architecture_names_every_room_and_package() -> None:
    """docs/architecture.md names each room and each package of kvstore/ once, in the order in which they may
    import each other, and none that is not there."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    assert rooms == [room for room in ROOMS if (ROOT / room).is_dir()]
    table = text[text.index("| package | what it is responsible for |") :]
    named = re.findall(r"\[(\w+)/\]\(\.\./kvstore/\1\)", table[: table.index("## Where is")])
    there = {path.parent.name for path in (ROOT / "kvstore").glob("*/__init__.py")}
    assert named == list(reversed(PACKAGES["kvstore"])) and set(named) == there
