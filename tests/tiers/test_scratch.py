"""Scratch directories: gone at the end of their block, whatever ends it, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiers.scratch import scratch_directory


def test_it_is_there_for_a_block(tmp_path: Path) -> None:
    """Of its own, for nobody else, and removed with what is in it, also where the block fails."""
    with scratch_directory("a-", tmp_path) as one, scratch_directory("a-", tmp_path) as other:
        assert one != other and one.parent == tmp_path and one.name.startswith("a-")
        assert one.stat().st_mode & 0o777 == 0o700
        (one / "folder").mkdir()
        (one / "folder" / "file").touch()
    with pytest.raises(ValueError), scratch_directory("a-", tmp_path):
        raise ValueError
    assert not list(tmp_path.iterdir())


def test_a_signal_while_it_is_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the disk, and nobody has been told."""
    make = Path.mkdir

    def interrupted(path: Path, mode: int) -> None:
        make(path, mode)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), scratch_directory("a-", tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_of_its_parent_is_said(tmp_path: Path) -> None:
    """No directory to make it in: an error that names it."""
    with pytest.raises(FileNotFoundError, match="no"), scratch_directory("a-", tmp_path / "no"):
        pass
