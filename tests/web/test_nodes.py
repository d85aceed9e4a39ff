"""Nodes of the region on the page: where nobody can say which there are, it says so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvstore.tools.web.nodes import Nodes


@pytest.mark.parametrize("ends", ["kill -9 $$", "exit 0", None])
def test_a_process_that_says_nothing_is_a_problem(
    ends: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed, that ends without a word, and one that cannot be started: what was known stays, and is not told as if it
    were of now."""
    program = tmp_path / "program"
    if ends is not None:
        program.write_text(f"#!/bin/sh\n{ends}\n")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def problem() -> str:
        nodes = Nodes("na")
        nodes.newest()
        await asyncio.wait_for(asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}), 60)
        return str(nodes.newest()["problem"])

    expected = {"kill -9 $$": "exit code -9", "exit 0": "exit code 0", None: "No such file"}
    assert expected[ends] in asyncio.run(problem())
