"""Tests that documents name: each is there, under that name, in the file that was linked last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.running import ROOT

NAMED = re.compile(r"\]\(\.\./(tests/[^)]+\.py)\)|`(test_\w+)`(?!\])")  # a file, a test of it


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_each_named_test_is_there(document: Path) -> None:
    """A promise whose test was renamed would be shown by nobody."""
    missing, linked = [], ""
    for path, name in NAMED.findall(document.read_text(encoding="utf-8")):
        linked = path or linked
        file = ROOT / linked
        if not file.is_file() or (name and f"def {name}(" not in file.read_text(encoding="utf-8")):
            missing.append((linked, name))
    assert missing == []
