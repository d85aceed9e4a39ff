"""Damaged files: a daemon starts over each of them, says what was lost, and serves what was not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.daemon.data_dir import DataDirError, hold
from tests.cli.test_service import HASHES, hits, put
from tests.running import Daemon, Place, kvstore

Serve = Callable[..., Daemon]


def arguments(place: Place) -> list[str]:
    return [*place.with_nvme(), "--set=nvme.write_bytes_per_day=2GiB"]


def files(place: Place) -> list[Path]:
    """Everything on disk but the bytes of records."""
    found = [path for directory in ("data", "nvme0", "nvme1") for path in (place.path / directory).rglob("*")]
    return sorted(path for path in found if path.is_file() and path.suffix != ".kvs")


@pytest.fixture
def filled(place: Place, serve: Serve) -> Place:
    """A stopped daemon's place, with records in DRAM and on NVMe."""
    daemon = serve(place, *arguments(place))
    put(place.socket)
    daemon.stop()
    names = {path.name for path in files(place)}
    assert names >= {"kvstore-data.json", "totals.sqlite", "kvstore.json", "slots.table"}
    return place


def test_every_damaged_file_is_started_over(filled: Place, serve: Serve) -> None:
    """Garbage in each file in turn: the daemon starts, and all is hit: from DRAM where NVMe's files are damaged,
    from NVMe where nobody knows any more which arena is ours."""
    for path in [path for path in files(filled) if path.parent.name != "nvme1"]:
        kept = path.read_bytes()
        path.write_bytes(os.urandom(max(64, min(len(kept), 1 << 20))))
        again = serve(filled, *arguments(filled))
        assert hits(filled.socket) == len(HASHES), path
        assert again.stop() == 0, path
        assert "Traceback" not in again.log(), again.log()
        assert ("kvstore-data.json is damaged" in again.log()) == (path.name == "kvstore-data.json")
        path.write_bytes(kept)


@pytest.mark.parametrize("share", [0, 2])
def test_all_files_damaged_is_a_cold_start(filled: Place, serve: Serve, share: int) -> None:
    """All of them empty, or cut in half, as after a full disk: the daemon starts with nothing, and stores again."""
    for path in files(filled):
        os.truncate(path, path.stat().st_size // share if share else 0)
    daemon = serve(filled, *arguments(filled))
    put(filled.socket)
    assert hits(filled.socket) == len(HASHES)
    assert daemon.stop() == 0 and "Traceback" not in daemon.log()


def test_a_damaged_mark_makes_a_new_instance(place: Place, serve: Serve) -> None:
    """The old arena is told of and can be given back; fsck changes nothing before the start does."""
    daemon = serve(place)
    put(place.socket)  # an arena with nothing in it goes at a stop
    daemon.stop()
    (old,) = (place.path / "shm").glob("*.arena")
    mark = place.data_dir / "kvstore-data.json"
    mark.write_text("{")
    examined = kvstore("fsck", "--offline", *place.arguments)
    assert examined.returncode == 2 and "is damaged; the next start makes a new one" in examined.stderr
    daemon = serve(place)
    assert "stays in memory until `kvstore arena rm`" in daemon.log()
    assert (place.data_dir / "kvstore-data.unreadable").read_text() == "{"
    listed = json.loads(kvstore("arena", "ls", "-o", "json", *place.arguments).stdout)["arenas"]
    states = {arena["path"]: arena["state"] for arena in listed if Path(arena["path"]).parent == old.parent}
    assert sorted(states.values()) == ["in use", "left"] and states[str(old)] == "left"
    instance = old.stem.removeprefix("kvstore-")
    assert kvstore("arena", "rm", instance, *place.arguments).returncode == 0
    assert not old.exists() and not old.with_suffix(".table").exists()
    again = kvstore("arena", "rm", instance, *place.arguments)
    assert (again.returncode, again.stderr) == (
        3,
        f"kvstore: arena rm: {instance}: no such arena; `kvstore arena ls` lists them\n",
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "not a file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/null"), "Too many levels of symbolic links"),
    ],
)
def test_a_lock_that_is_no_file_is_named(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    """The line says which of the files of the data directory it is."""
    hold(tmp_path / "data").close()
    (tmp_path / "data" / "lock").unlink()
    make(tmp_path / "data" / "lock")
    with pytest.raises(DataDirError, match=f"data: lock: {why}"):
        hold(tmp_path / "data")


def test_a_mark_that_cannot_be_put_aside_is_written_anew(tmp_path: Path) -> None:
    """Damaged again, while a directory lies where the first one was kept."""
    hold(tmp_path / "data").close()
    (tmp_path / "data" / "kvstore-data.unreadable" / "notes").mkdir(parents=True)
    (tmp_path / "data" / "kvstore-data.json").write_text("{")
    first = hold(tmp_path / "data")
    first.close()
    assert hold(tmp_path / "data").instance == first.instance


def test_a_mark_of_somebody_else_is_left_alone(place: Place) -> None:
    """A file of that name that another program has written is no damage."""
    place.data_dir.mkdir()
    (place.data_dir / "kvstore-data.json").write_text('{"magic": "theirs", "format": 1, "instance": "x"}')
    done = kvstore("serve", *place.arguments)
    assert done.returncode == 2 and "was not written by kvstore" in done.stderr
    assert len(list(place.data_dir.iterdir())) == 1


def test_a_damaged_nvme_marker_costs_that_directory_only(place: Place, serve: Serve) -> None:
    """It starts cold and stores again; one that was never ours is left alone."""
    serve(place, *arguments(place)).stop()
    marker = place.path / "nvme0" / "kvstore.json"
    marker.write_bytes(b"\xff\xfe")
    daemon = serve(place, *arguments(place))
    put(place.socket)
    daemon.stop()
    assert "its kvstore.json is damaged: it starts cold" in daemon.log()
    assert json.loads(marker.read_text())["magic"] == "kvstore nvme directory"
    shutil.rmtree(place.path / "nvme0")
    (place.path / "nvme0").mkdir(mode=0o755)
    marker.write_text("my own notes")
    daemon = serve(place, *arguments(place))
    daemon.stop()
    assert "its kvstore.json is not ours" in daemon.log()
    assert marker.read_text() == "my own notes"


def test_fsck_repairs_without_another_word(place: Place, serve: Serve) -> None:
    """`--repair` and `--verify` mean a stopped daemon; one that runs is named."""
    daemon = serve(place)
    refused = kvstore("fsck", "--repair", *place.arguments)
    assert refused.returncode == 1 and f"in use by pid {daemon.process.pid}" in refused.stderr
    daemon.stop()
    for option in ("--repair", "--verify"):
        assert kvstore("fsck", option, *place.arguments).returncode == 0
