"""What others may find, plant or name: links under our temporary names, open directories, odd paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.daemon.config import config_sources
from kvstore.daemon.data_dir import MARK, hold
from kvstore.errors import ConfigError, DataDirError
from tiers.files import replace_file


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """A link under the temporary name is replaced; its target keeps its bytes."""
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "x.json.tmp").symlink_to(target)
    replace_file(tmp_path / "x.json", b"new")
    assert target.read_bytes() == b"precious" and (tmp_path / "x.json").read_bytes() == b"new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["target", "x.json"]


def test_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    """With umask 0 a file is readable by its owner only."""
    before = os.umask(0)
    try:
        replace_file(tmp_path / "x.json", b"new")
    finally:
        os.umask(before)
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o720])
def test_a_data_dir_of_everybody_is_refused(tmp_path: Path, mode: int) -> None:
    """Where others may write nothing is made, and the message says what to type."""
    directory = tmp_path / "data"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(DataDirError, match=f"chmod go-w {directory}"):
        hold(directory)
    assert list(directory.iterdir()) == []


def test_a_linked_mark_is_not_read(tmp_path: Path) -> None:
    """A link in place of the data dir's mark is put aside: it gives no directory the identity of another one."""
    one = hold(tmp_path / "one")
    kept = (tmp_path / "one" / MARK).read_bytes()
    (tmp_path / "two").mkdir(0o700)
    (tmp_path / "two" / MARK).symlink_to(tmp_path / "one" / MARK)
    two = hold(tmp_path / "two")
    assert two.instance != one.instance and not (tmp_path / "two" / MARK).is_symlink()
    assert (tmp_path / "one" / MARK).read_bytes() == kept
    one.close()
    two.close()


@pytest.mark.parametrize("path", ["/a\0b", "/a\nb", "/a\x1bb"])
@pytest.mark.parametrize("key", ["data_dir", "socket_path", "dram.directory", "nvme.directories"])
def test_a_path_is_one_line(key: str, path: str) -> None:
    """A path that would split a message, or that no file system knows, is one problem of one line."""
    with pytest.raises(ConfigError) as caught:
        config_sources.load(Path("/dev/null"), [f"{key}={path}"], environment={})
    (problem,) = caught.value.problems
    assert problem.isprintable() and "control characters" in problem


def test_a_fifo_is_no_configuration(tmp_path: Path) -> None:
    """A FIFO nobody writes to is refused at once, and so is a path with NUL in it."""
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/a\0b")):
        with pytest.raises(ConfigError) as caught:
            config_sources.load(path, environment={})
        assert "not a" in str(caught.value) and str(caught.value).isprintable()
