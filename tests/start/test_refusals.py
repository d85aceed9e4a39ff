"""Starts that cannot succeed: one line, an exit code that says whether to try again, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.daemon.data_dir import hold
from tests.running import TIMEOUT_S, Place, environment, kvstore
from tests.start.machine import Machine
from tiers.nvme.direct import NO_LIMIT_BYTES, free_bytes

SMALL = ("--set=dram.capacity_bytes=64MiB", "--set=web.listen=", "--set=dram.huge_pages=off")


def left(place: Place) -> list[str]:
    """What lies in shared memory."""
    return sorted(path.name for path in (place.path / "shm").iterdir())


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("nvme.directories=/proc/nowhere", "nvme directory /proc/nowhere: No such file"),
        ("nvme.directories=/dev/null", "nvme directory /dev/null: "),
        ("nvme.directories=/dev/null/below", "nvme directory /dev/null/below: "),
        ("dram.directory=/proc", "arena /proc/"),
        ("dram.directory=/dev/null", "dram.directory /dev/null: not a directory"),
        ("socket_path=/proc/s", "/proc/s: "),
        ("socket_path=/dev/null/s", "/dev/null"),
        ("data_dir=/proc/nowhere", "data_dir /proc/nowhere"),
    ],
)
def test_a_path_that_cannot_be(place: Place, setting: str, says: str) -> None:
    """Exit code 2: no supervisor tries again; shared memory is as it was."""
    done = kvstore("serve", *place.arguments, f"--set={setting}", *dedicated(place, setting))
    said = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, done.stdout, len(said)) == (2, "", 1), done.stderr
    assert says in said[0] and said[0].startswith("kvstore: ")
    assert left(place) == []


def dedicated(place: Place, setting: str) -> list[str]:
    """The flags that win over --set, with the same value."""
    key, _, value = setting.partition("=")
    flags = {"data_dir": "--data-dir", "socket_path": "--socket"}
    return [f"{flags[key]}={value}"] if key in flags else []


REGIONS = {
    "a host that cannot be": 'url = "s3://Bad_Bucket"\nendpoint = "http://1.2.3.4:9"\npath_style = "off"',
    "no such region": None,
    "no url": 'url = "ftp://x"',
}


@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("command", ["serve", "config", "mirror"])
def test_a_region_that_can_never_work(place: Place, kind: str, command: str) -> None:
    """Found by `config check`, and by a start before anything is made."""
    file = place.path / "regions.toml"
    body = REGIONS[kind] or 'url = "s3://acme-here"'
    rules = '[[rules]]\nfrom = ["na"]\nto = ["eu"]\n'
    name = "eu" if kind != "no such region" else "na"
    other = "na" if name == "eu" else "apac"
    file.write_text(
        f'deployment = "acme"\n[regions.{name}]\n{body}\n[regions.{other}]\nurl = "s3://acme-{other}"\n'
        + (rules if name == "eu" else "")
    )
    words = {
        "serve": ["serve", *place.arguments, f"--set=regions_file={file}"],
        "config": ["config", "check", *place.arguments, f"--set=regions_file={file}"],
        "mirror": ["mirror", f"--regions={file}", f"--data-dir={place.path / 'mirror'}"],
    }[command]
    done = kvstore(*words, "--set=region=eu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert left(place) == [] and not (place.path / "mirror").exists()


def test_no_shared_memory(machine: Machine) -> None:
    """Without /dev/shm, or one that nobody may write to: a line that says what to do."""
    machine.shell("mount -t tmpfs none /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9")
    run = machine.run("serve", *SMALL)
    assert run.code == 2
    assert run.line.startswith("no shared memory for the arena: /dev/shm: No such file or directory; mount")


def limited(place: Place, limit: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvstore", "serve", *place.arguments]
    return subprocess.run(
        ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("limit_kib", [60_000, 120_000, 180_000])
def test_no_address_space_for_libraries(place: Place, limit_kib: int) -> None:
    """A line, before those are loaded that say in words of their own that they cannot be; of the first ones, which it is."""
    done = limited(place, f"-v {limit_kib}")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    of_limit = f"kvstore: too little memory; memory is limited (ulimit -v, LimitAS: {limit_kib * 1024} bytes)"
    assert done.stderr.startswith((of_limit, "kvstore: serve: a library cannot be loaded: "))
    assert limit_kib < 100_000 or "; 256 MiB are needed at least" in done.stderr
    assert left(place) == []


@pytest.mark.parametrize("limit", ["-v 400000", "-v 1200000"])
def test_little_address_space(place: Place, limit: str) -> None:
    """A limit of a shell or a unit is named; nothing was made."""
    done = limited(place, limit)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvstore: too few threads: ")
    assert "memory is limited (ulimit -v, LimitAS: " in done.stderr
    assert left(place) == []


def test_the_root_of_a_volume(tmp_path: Path) -> None:
    """A fresh ext4 has a lost+found: it is empty all the same, for a data directory as for NVMe."""
    (tmp_path / "data" / "lost+found").mkdir(parents=True)
    (tmp_path / "data").chmod(0o700)
    hold(tmp_path / "data").close()


def test_a_file_system_that_tells_no_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """0 of 0 (ramfs, some of FUSE) is not full."""
    real = os.statvfs(tmp_path)
    assert free_bytes(tmp_path) == os.statvfs(tmp_path).f_bavail * real.f_frsize
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    assert free_bytes(tmp_path) == NO_LIMIT_BYTES
