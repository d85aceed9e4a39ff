"""fsck: over the door, on stopped storage, and on damaged storage."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client
from kvstore.daemon.config.config_sources import load
from kvstore.daemon.fsck import examine
from kvstore.tools.cli.commands.fsck import CHECK_TIMEOUT_S
from tests.cli.test_service import HASHES, RECORD_BYTES, hits, put
from tests.running import TIMEOUT_S, Daemon, Place, kvstore
from tiers.constants import ROW_BYTES
from tiers.nvme.direct import LookingIO

Serve = Callable[..., Daemon]


def fsck(place: Place, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of an offline check of DRAM and NVMe."""
    done = kvstore("fsck", "--offline", "-o", "json", *options, *place.with_nvme())
    assert "Traceback" not in done.stderr
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (not report["problems"]) == (done.returncode == 0)
    assert set(report) == {"mode", "ok", "problems", "stores"}
    return done.returncode, report


def store(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in report["stores"] if entry["store"] == name)
    assert isinstance(found, dict)
    return found


def flip(path: Path, content: bytes) -> None:
    """Change a few bytes in the middle of the one run of `content` in a file."""
    data = path.read_bytes()
    at = data.find(content)
    assert at >= 0
    with open(path, "r+b") as file:
        file.seek(at + len(content) // 2)
        file.write(b"\xff\xee\xdd")


@pytest.fixture
def stopped(place: Place, serve: Serve) -> Place:
    """Storage of a daemon that was stopped cleanly with every record in DRAM and on NVMe."""
    daemon = serve(place, *place.with_nvme())
    put(place.socket)
    with Client(place.socket, timeout_s=10, label="watch", attach=False) as client:
        give_up_s = time.monotonic() + TIMEOUT_S
        while client.status()["counters"]["demoted"] < len(HASHES):
            assert time.monotonic() < give_up_s, daemon.log()
            time.sleep(0.05)
    assert daemon.stop() == 0
    return place


def test_a_running_daemon_checks_itself(place: Place, serve: Serve) -> None:
    """Online: the daemon's own check(), as text and as JSON."""
    serve(place, *place.with_nvme())
    put(place.socket)
    done = kvstore("fsck", "--socket", place.socket)
    assert (done.returncode, done.stdout) == (0, "sound\n")
    done = kvstore("fsck", "-o", "json", "--socket", place.socket)
    assert json.loads(done.stdout) == {"mode": "online", "ok": True, "problems": [], "stores": []}


def test_offline_needs_a_stopped_daemon(place: Place, serve: Serve) -> None:
    """While a daemon runs its storage is not opened a second time; its pid is named."""
    daemon = serve(place)
    done = kvstore("fsck", "--offline", *place.arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"in use by pid {daemon.process.pid}" in done.stderr


def test_offline_makes_nothing(place: Place) -> None:
    """Where kvstore never ran, fsck says so and leaves nothing behind."""
    done = kvstore("fsck", "--offline", *place.with_nvme())
    assert (done.returncode, done.stdout) == (3, "")
    assert f"data_dir {place.data_dir}: not found" in done.stderr
    assert [path.name for path in place.path.iterdir()] == ["shm"]
    assert not list((place.path / "shm").iterdir())


def test_sound_storage_is_sound(stopped: Place) -> None:
    """After a clean stop every record of both stores verifies, and nothing is changed by it."""
    code, report = fsck(stopped, "--verify")
    assert code == 0
    for name in ("dram", "nvme"):
        found = store(report, name)
        assert (found["records"], found["verified"]) == (len(HASHES), len(HASHES))
        assert (found["corrupt"], found["unreadable"], found["repairs"]) == (0, 0, [])
    assert fsck(stopped, "--verify") == (code, report)


def test_a_damaged_record_in_dram_is_found_and_dropped(stopped: Place, serve: Serve) -> None:
    """Flipped bytes in the arena: reported, dropped by --repair, and hit again from NVMe."""
    flip(stopped.arena(), bytes([3]) * RECORD_BYTES)
    assert fsck(stopped)[0] == 0, "without --verify bytes are not read"
    code, report = fsck(stopped, "--verify")
    assert (code, report["problems"]) == (1, ["dram: 1 corrupt records; --repair drops them"])
    code, report = fsck(stopped, "--verify", "--repair")
    assert (code, store(report, "dram")["repairs"]) == (0, ["dropped 1 corrupt records"])
    assert store(report, "dram")["records"] == len(HASHES) - 1
    assert fsck(stopped, "--verify")[0] == 0
    serve(stopped, *stopped.with_nvme())
    assert hits(stopped.socket) == len(HASHES)


def test_a_damaged_record_on_nvme_is_found_and_dropped(stopped: Place) -> None:
    """Flipped bytes in a slab: a problem as often as it is looked for, gone when it is repaired."""
    slabs = [path for n in (0, 1) for path in (stopped.path / f"nvme{n}").glob("slab-*.kvs")]
    content = bytes([3]) * RECORD_BYTES
    flip(next(path for path in slabs if content in path.read_bytes()), content)
    for _ in range(2):
        code, report = fsck(stopped, "--verify")
        assert (code, report["problems"]) == (1, ["nvme: 1 corrupt records; --repair drops them"])
        found = store(report, "nvme")
        assert (found["corrupt"], found["verified"], found["records"]) == (1, len(HASHES) - 1, len(HASHES))
    code, report = fsck(stopped, "--verify", "--repair")
    found = store(report, "nvme")
    assert (code, found["repairs"], found["records"]) == (0, ["dropped 1 corrupt records"], len(HASHES) - 1)
    code, report = fsck(stopped, "--verify")
    assert (code, store(report, "nvme")["corrupt"]) == (0, 0)


def spoil_rows(place: Place, every: int = 1) -> None:
    """Flip a byte in one of `every` rows that hold a record, over all directories."""
    rows = 0
    for table in sorted(place.path.glob("nvme*/slots.table")):
        data = bytearray(table.read_bytes())
        for at in range(0, len(data), ROW_BYTES):
            if any(data[at : at + ROW_BYTES]):
                data[at + 40] ^= 0 if rows % every else 0xFF
                rows += 1
        table.write_bytes(data)


def test_damaged_rows_are_dropped(stopped: Place) -> None:
    """Damaged rows are a problem until they are repaired, and the records of other rows stay."""
    records = store(fsck(stopped)[1], "nvme")["records"]
    spoil_rows(stopped, every=2)
    for _ in range(2):
        code, report = fsck(stopped)
        assert code == 1 and "damaged rows; --repair drops them" in report["problems"][0]
    assert fsck(stopped, "--repair")[0] == 0
    code, report = fsck(stopped, "--verify")
    found = store(report, "nvme")
    assert code == 0 and 0 < found["records"] == found["verified"] < records


@pytest.mark.parametrize("is_arena_lost", [False, True])
def test_lost_names_cost_no_record(stopped: Place, serve: Serve, is_arena_lost: bool) -> None:
    """The rows of DRAM, and those of NVMe, say which namespaces there are and how their records are laid out."""
    (stopped.data_dir / "namespaces.json").unlink(missing_ok=True)
    if is_arena_lost:
        stopped.arena().unlink()
    serve(stopped, *stopped.with_nvme())
    assert hits(stopped.socket) == len(HASHES)


def test_damaged_rows_stop_no_start(stopped: Place, serve: Serve) -> None:
    """A daemon starts over a table of garbage, and what DRAM still has is hit."""
    spoil_rows(stopped)
    serve(stopped, *stopped.with_nvme())
    assert hits(stopped.socket) == len(HASHES)


def test_a_missing_directory_is_a_problem(stopped: Place) -> None:
    """A directory that is gone is one line, and nothing is made in its place."""
    (stopped.path / "nvme0").rename(stopped.path / "elsewhere")
    code, report = fsck(stopped)
    assert code == 1 and report["problems"] == [
        f"nvme directory {stopped.path / 'nvme0'}: No such file or directory"
    ]
    assert not (stopped.path / "nvme0").exists()


def test_fsck_keeps_an_arena_of_other_settings(stopped: Place) -> None:
    """fsck checks what is there, whatever the settings say now; it never replaces an arena."""
    code, report = fsck(stopped, "--verify", "--set=dram.capacity_bytes=32MiB")
    assert code == 0
    assert store(report, "dram")["verified"] == len(HASHES)


def files_of(place: Place) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.path.glob("nvme*/*")}


def test_it_looks_at_disks_as_they_were_made(stopped: Place) -> None:
    """Settings that were edited since, which would have a start begin cold or cut a disk off, change nothing; nor does a
    repair drop anything that is sound."""
    before = files_of(stopped)
    edited = ["--set=nvme.slab_bytes=8MiB", "--set=nvme.capacity_bytes=8MiB"]
    for words in (["--verify"], ["--verify", *edited], edited[1:]):
        code, report = fsck(stopped, *words)
        assert (code, store(report, "nvme")["records"]) == (0, len(HASHES))
        assert files_of(stopped) == before
    code, report = fsck(stopped, "--verify", "--repair", *edited)
    assert (code, store(report, "nvme")["verified"]) == (0, len(HASHES))


def test_a_sick_disk_is_one_line(stopped: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that fail, of the table or of its extents, end no check, and the other disk is looked at all the same."""
    sets = [word.removeprefix("--set=") for word in stopped.with_nvme() if word.startswith("--set=")]
    environment = {"KVSTORE_CONFIG": "", "KVSTORE_DATA_DIR": str(stopped.data_dir)}
    config = load(None, sets, environment=environment).config

    def held(directory: str) -> int:
        alone = load(None, [*sets, f"nvme.directories={directory}"], environment=environment).config
        return examine(alone, True, False, lambda what, done, total: None)[-1].verified

    sick, other = sorted(
        map(str, config.nvme.directories), key=held, reverse=True
    )  # one of them may have got nothing
    on_other = held(other)
    read, seek = LookingIO.preadv, os.lseek

    def is_sick(fd: int) -> bool:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(sick)

    def fails(io: Any, fd: int, *rest: Any) -> int:
        if is_sick(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(io, fd, *rest)

    def fails_too(fd: int, *rest: Any) -> int:
        if is_sick(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return seek(fd, *rest)

    monkeypatch.setattr(LookingIO, "preadv", fails)
    for patch in (False, True):
        if patch:
            monkeypatch.setattr(os, "lseek", fails_too)
        found = examine(config, True, False, lambda what, done, total: None)[-1]
        assert len(found.problems) == 1 and found.problems[0].startswith(f"nvme directory {sick}: ")
        assert found.verified == on_other


def test_a_lost_arena_is_no_problem(stopped: Place) -> None:
    """After a reboot there is no arena: only NVMe is checked."""
    for path in (stopped.path / "shm").iterdir():
        path.unlink()
    code, report = fsck(stopped)
    assert (code, [found["store"] for found in report["stores"]]) == (0, ["nvme"])


@pytest.mark.parametrize("words", [["fsck"], ["clear", "--all", "--yes"], ["disks"]])
def test_a_daemon_that_hangs_is_told_before_the_work(tmp_path: Path, words: list[str]) -> None:
    """What may take minutes waits seconds only for a daemon that does not even greet; what could look without one does not."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        begun_s = time.monotonic()
        done = kvstore(*words, "--socket", tmp_path / "s")
    assert (done.returncode, done.stdout, "no answer in time" in done.stderr) == (4, "", True)
    assert time.monotonic() - begun_s < CHECK_TIMEOUT_S / 2
