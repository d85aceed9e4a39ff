"""Checks of the machine, each with its bad case really made: small cgroups and file systems, other users, sick disks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.retention.clock import boot_id
from kvstore.tools.doctor import apart, disk_speed, disks, memory, places, regions, software
from kvstore.tools.doctor.examine import examine
from kvstore.tools.doctor.findings import Case, Finding
from tests.doctor.looked import Findings, case, findings, levels, of, only
from tests.region.regions import init, regions_file
from tests.running import TIMEOUT_S, environment
from tests.start.machine import NOBODY, Machine
from tiers.dram.arenas_left import Found

MIB = 1 << 20


def looked(machine: Machine, *arguments: str, code: int, uid: int = 0, group: Path | None = None) -> Findings:
    done = machine.run("doctor", "-o", "json", *arguments, uid=uid, group=group)
    assert (done.code, done.err) == (code, ""), (done.out, done.err)
    return findings(done.out)


def test_a_cgroup_that_is_too_small(group: Callable[[int], Path], machine: Machine) -> None:
    """An arena that is larger than the memory limit is a problem that names both; a smaller one fits."""
    directory = group(400 * MIB)
    large = ["--set=dram.capacity_bytes=1GiB", "--set=dram.huge_pages=off"]
    (said,) = of(looked(machine, *large, code=1, group=directory), "memory", "problem")
    assert said.startswith("dram.capacity_bytes = 1GiB: of the 400 MiB of cgroup /") and "would fit" in said
    small = ["--set=dram.capacity_bytes=64MiB", "--set=dram.huge_pages=off"]
    (said,) = of(looked(machine, *small, code=0, group=directory), "memory", "ok")
    assert said.endswith("an arena of 64 MiB fits")


def test_a_daemon_is_measured_by_its_own_cgroup(group: Callable[[int], Path], machine: Machine) -> None:
    """Where the daemon's cgroup is nearly full that is a warning, from a shell that is in none."""
    directory = group(300 * MIB)
    machine.serve(
        "--set=dram.capacity_bytes=64MiB", "--set=dram.prefault=false", "--set=web.listen=", group=directory
    )
    (said,) = of(looked(machine, "--set=web.listen=", code=0), "memory")
    assert directory.name in said


def test_the_shared_memory_of_a_container(machine: Machine) -> None:
    """64 MiB at /dev/shm are too little for the arena that is asked for, and worth a warning in any case."""
    machine.shell("mount -o remount,size=64m /dev/shm")
    off = "--set=dram.huge_pages=off"
    found = looked(machine, off, "--set=dram.capacity_bytes=128MiB", code=1)
    (said,) = of(found, "memory", "problem")
    assert said.startswith("dram.capacity_bytes = 128MiB: of the 64 MiB of /dev/shm 64 MiB are free")
    assert of(looked(machine, off, "--set=dram.capacity_bytes=32MiB", "--set=dram.slab_bytes=8MiB", code=0),
              "shared memory", "warning")  # fmt: skip


def test_an_arena_that_lies_elsewhere(machine: Machine) -> None:
    """A small /dev/shm is no problem beside a tmpfs at /run/kvstore/huge that the arena would lie in, unless it is small, too."""
    machine.shell("mount -o remount,size=64m /dev/shm; mkdir -p /run/kvstore/huge")
    machine.shell("mount -t tmpfs -o size=512m none /run/kvstore/huge")
    found = looked(machine, "--set=dram.capacity_bytes=128MiB", code=0)
    assert of(found, "shared memory", "ok") == ["/run/kvstore/huge has 512 MiB of 512 MiB free"]
    machine.shell("mount -o remount,size=96m /run/kvstore/huge")
    assert of(looked(machine, "--set=dram.capacity_bytes=128MiB", code=1), "memory", "problem")


def test_a_daemon_of_another_user(machine: Machine) -> None:
    """As nobody beside a daemon of root: whose the socket is, whose the data directory, and exit code 1."""
    machine.shell("mkdir -m 755 /run/k /var/lib/k")
    its = ["--socket=/run/k/s", "--data-dir=/var/lib/k/d", "--set=web.listen="]
    machine.serve(*its, "--set=dram.capacity_bytes=64MiB", "--set=dram.huge_pages=off")
    found = looked(machine, *its, code=1, uid=NOBODY)
    assert of(found, "socket", "problem") == ["/run/k/s belongs to root, and you are nobody"]
    assert of(found, "data directory") == ["/var/lib/k/d belongs to root, and you are nobody"]
    assert of(looked(machine, *its, code=0), "socket", "ok")


def test_memory_of_another_user(machine: Machine) -> None:
    """Where root has mounted memory in a directory of its own: nobody reads whose it is, and not that there were no arena."""
    machine.shell(
        "mkdir -m 700 /run/kvstore; mkdir /run/kvstore/huge; mount -t tmpfs -o huge=always none /run/kvstore/huge"
    )
    done = machine.run("arena", "ls", uid=NOBODY)
    assert "/run/kvstore/huge: another user's" in done.err and "that this user may see" in done.out
    (found,) = [f for f in looked(machine, code=0, uid=NOBODY) if f["check"] == "huge pages"]
    assert "mounted for another user than nobody" in found["action"]


def test_disks_that_are_none(machine: Machine) -> None:
    """A directory in memory, one that others may write into, one that holds other files, and one that nobody may make."""
    machine.shell(
        "mkdir -m 777 /mnt/open; mkdir -m 700 /mnt/full; touch /mnt/full/thesis; mkdir -m 755 /mnt/closed"
    )
    words = "--set=nvme.directories=/mnt/open,/mnt/full,/mnt/closed/n"
    found = looked(machine, words, code=1)
    assert of(found, "disk /mnt/open", "warning")[0] == "file system tmpfs: this is memory"
    assert of(found, "disk /mnt/open", "problem") == ["others may write into it: no daemon takes it"]
    assert "holds 'thesis'" in of(found, "disk /mnt/full", "problem")[0]
    assert "is not there, and nobody may not make it in /mnt/closed" in of(
        looked(machine, words, code=1, uid=NOBODY), "disk /mnt/closed/n", "problem"
    )
    assert of(found, "disk /mnt/open", "note") == [
        "on one file system with /mnt/full, /mnt/closed/n: they share its speed, and its failures"
    ]


def test_a_disk_without_room(machine: Machine) -> None:
    """A capacity that the file system cannot hold is a warning that says what it can."""
    machine.shell("mkdir /mnt/n && mount -t tmpfs -o size=256m,mode=700 none /mnt/n")
    found = looked(machine, "--set=nvme.directories=/mnt/n", "--set=nvme.capacity_bytes=1GiB", code=0)
    assert (
        of(found, "disk /mnt/n", "warning")[1]
        == "256 MiB free, 0 B are ours: nvme.capacity_bytes = 1 GiB does not fit"
    )


def test_directories_that_share_a_disk_share_its_room(machine: Machine) -> None:
    """Two directories of 150 MiB do not fit on 256 MiB, although each alone would."""
    machine.shell("mkdir /mnt/n && mount -t tmpfs -o size=256m,mode=700 none /mnt/n")
    size = "--set=nvme.capacity_bytes=150MiB"
    both = looked(machine, "--set=nvme.directories=/mnt/n/a,/mnt/n/b", size, code=0)
    for path in ("/mnt/n/a", "/mnt/n/b"):
        (said,) = [text for text in of(both, f"disk {path}", "warning") if "does not fit" in text]
        assert said.endswith("nvme.capacity_bytes = 150 MiB for each of 2 directories does not fit")
    alone = looked(machine, "--set=nvme.directories=/mnt/n/a", size, code=0)
    assert not [text for text in of(alone, "disk /mnt/n/a", "warning") if "does not fit" in text]


def test_the_page_of_a_daemon_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is its own, with the last figures, and nobody else's that has taken its port; unless it is another daemon's."""
    (tmp_path / "lock").write_text(f"{os.getpid()}")
    (tmp_path / "kvstore-data.json").write_text('{"instance": "mine"}')
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "cmdline").write_text("kvstore serve")
    for who, level in (("mine", "ok"), ("other", "warning"), ("", "warning"), (None, "ok")):
        monkeypatch.setattr(places, "_who_answers", lambda _, who=who: who)
        assert only(places.web, case(tmp_path, proc=tmp_path)).level == level


def test_a_page_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port is open, and nobody answers: that is said, and not that another program has it."""
    monkeypatch.setattr(places, "DOCTOR_ANSWER_S", 0.1)
    monkeypatch.setattr(places, "_holder", lambda _: 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listen = f"127.0.0.1:{silent.getsockname()[1]}"
        found = only(places.web, case(tmp_path, settings={"web": {"listen": listen}}))
    assert found.found == f"{listen} is open, and nobody answers there: no metrics"


def test_few_descriptors(tmp_path: Path) -> None:
    """A limit of 128 open files is less than the connections that may come: a warning; 65,536 are enough."""
    for limit, level in ((128, "warning"), (65_536, "ok")):
        script = f'ulimit -n {limit}; exec "{sys.executable}" -m kvstore doctor -o json --data-dir={tmp_path}'
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=environment())
        assert len(of(findings(done.stdout), "open files", level)) == 1, (done.stdout, done.stderr)


def test_a_process_that_was_killed_for_memory(tmp_path: Path) -> None:
    """The kernel's count of OOM kills has grown since the daemon began: a warning; the same count: ok."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "vmstat").write_text("oom_kill 5\n")
    serving = {"boot_id": boot_id(), "oom_kills": 5, "headroom_bytes": 1}
    (tmp_path / "serving.json").write_text(json.dumps(serving))
    assert levels(memory.killed, case(tmp_path, proc=proc)) == ["ok"]
    (proc / "vmstat").write_text("oom_kill 6\n")
    found = only(memory.killed, case(tmp_path, proc=proc))
    assert (found.level, found.found) == (
        "warning",
        "the kernel killed a process while the last daemon served",
    )


@pytest.mark.parametrize(
    ("total", "free", "level"), [(0, 0, "ok"), (4096, 4096, "note"), (4096, 2048, "warning")]
)
def test_swap(tmp_path: Path, total: int, free: int, level: str) -> None:
    """None is ok, some is a note, some in use is a warning."""
    (tmp_path / "meminfo").write_text(f"SwapTotal: {total << 10} kB\nSwapFree: {free << 10} kB\n")
    assert levels(memory.swap, case(tmp_path, proc=tmp_path)) == [level]


def test_huge_pages_that_must_be(tmp_path: Path) -> None:
    """huge_pages = "on" in a directory without any is a problem, "off" a note."""
    settings = {"dram": {"directory": str(tmp_path), "huge_pages": "on"}}
    assert levels(memory.huge_pages, case(tmp_path, settings=settings))[-1] == "problem"
    settings["dram"]["huge_pages"] = "off"
    assert levels(memory.huge_pages, case(tmp_path, settings=settings))[-1] == "note"


def test_a_data_directory_that_is_gone(tmp_path: Path) -> None:
    """Before a start it is not there yet; under a daemon that runs that is a problem of its own list, and not ok."""
    gone = tmp_path / "gone"
    assert only(places.data_directory, case(gone)).found == f"{gone} is not there yet"
    assert not list(places.data_directory(case(gone, status={"daemon": {"data_dir": str(gone)}})))


@pytest.mark.parametrize(
    ("version", "bounds", "holds"),
    [
        ("0.32.0", ">=0.32,<0.34", True), ("0.33.9+cpu", ">=0.32,<0.34", True), ("0.34.0", ">=0.32,<0.34", False),
        ("0.9", ">=0.20", False), ("14", ">=14.0", True), ("1", "", True),
    ],
)  # fmt: skip
def test_bounds_of_versions(version: str, bounds: str, holds: bool) -> None:
    """A version is compared with its bounds number by number."""
    assert software.within(version, bounds) is holds


def test_a_package_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package below its bound, and one that is missing, are one problem with both names."""
    versions = {"msgspec": "0.19.1", "xxhash": None}
    monkeypatch.setattr(
        software,
        "_requirements",
        lambda: {"msgspec": ">=0.20", "xxhash": ">=3.5", "vllm": ">=0.32; extra == 'vllm'"},
    )
    monkeypatch.setattr(software, "installed", versions.get)
    said = {f.check: (f.level, f.found) for f in software.versions(case(tmp_path))}
    assert said["packages"] == ("problem", "msgspec 0.19.1, tested with >=0.20; xxhash is missing")


def test_a_disk_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever touches it never comes back: a problem after the deadline, and the other directory is looked at all the same.
    One that the daemon says is sick is not touched at all."""
    sick, well = tmp_path / "sick", tmp_path / "well"
    hung: list[int] = []

    def hangs(path: Path) -> int:
        if path == sick:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            time.sleep(TIMEOUT_S)
        return 1 << 40

    for path in (sick, well):
        path.mkdir(mode=0o700)
    monkeypatch.setattr(disks, "free_bytes", hangs)
    monkeypatch.setattr(disks, "LOOK_S", 5.0)  # a process that is well has to begin within it
    looked_at = case(tmp_path, settings={"nvme": {"directories": [str(sick), str(well)]}})
    found = list(disks.disks(looked_at))
    assert [f.found for f in found if f.check == f"disk {sick}"] == ["does not answer"]
    assert [f.level for f in found if f.check == f"disk {well}"][-1] in ("ok", "note", "warning")
    status = {"disks": [{"directory": str(sick), "state": "off"}], "daemon": {"data_dir": str(tmp_path)}}
    monkeypatch.setattr(disks, "apart", lambda work, within_s: hung.append(1) or iter(()))
    found = list(disks.disks(replace(looked_at, status=status)))
    assert [(f.level, f.found) for f in found if f.check == f"disk {sick}"] == [
        ("note", "not looked at: it is off")
    ]
    assert len(hung) == 1  # the one that is well


def test_a_check_that_ends_without_a_word(tmp_path: Path) -> None:
    """A process that is killed while it looks, and one that raises: each is said, and nobody waits."""
    with pytest.raises(apart.NoAnswer):
        list(apart.apart(lambda: os.kill(os.getpid(), signal.SIGKILL) or ()))
    with pytest.raises(OSError, match="broken") as raised:
        list(apart.apart(lambda: [1][3:] or (_ for _ in ()).throw(ValueError("broken"))))
    assert raised.value.strerror == "broken"

    def hindered(_: Case) -> Iterator[Finding]:
        yield from apart.apart(
            lambda: [1][3:] or (_ for _ in ()).throw(PermissionError(1, "not allowed", "/x"))
        )

    (said,) = examine(case(tmp_path), [hindered])
    assert said.found == "could not be looked at: /x: not allowed"
    assert list(apart.apart(lambda: [{"a": 1}, {"b": [2]}])) == [{"a": 1}, {"b": [2]}]


def test_arenas_of_others_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many daemons left one in a place: how many, how much they hold, and what lists them."""
    left = [
        Found(f"{n:032x}", tmp_path / f"{n}.arena", 0, "left", 1 << 30, 1 << 20, "4 KiB") for n in range(17)
    ]
    monkeypatch.setattr(memory, "find_arenas", lambda _: left)
    found = only(memory.arenas, case(tmp_path))
    assert (found.level, found.found) == (
        "warning",
        f"17 MiB in {tmp_path} are of 17 daemons that do not run",
    )


def test_a_disk_is_not_measured_where_there_is_no_room(machine: Machine) -> None:
    """--disks writes nothing where less than four times as much is free."""
    machine.shell("mkdir /mnt/n && mount -t tmpfs -o size=256m,mode=700 none /mnt/n")
    found = looked(machine, "--set=nvme.directories=/mnt/n", "--disks", code=0)
    assert of(found, "disk /mnt/n", "note") == ["not measured: less than 1 GiB free"]


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads slower than those of any local NVMe are a warning."""
    slow = disk_speed.Speed(90e6, 80e6, 0.004, 0.02, True)
    monkeypatch.setattr(disks, "measure", lambda _: slow)
    looked_at = case(tmp_path, settings={"nvme": {"directories": [str(tmp_path / "n")]}}, disks=True)
    found = list(disks.disks(looked_at))[-1]
    assert found.level == "warning" and found.found.startswith(
        "reads 90 MB/s, writes 80 MB/s; 4 KiB in 4,000 µs"
    )


def test_a_region(tmp_path: Path) -> None:
    """A bucket that is no region yet is a problem, then ok; a mirror that never ran is a warning, a file that is wrong a problem."""
    file = regions_file(tmp_path, "na", "eu", rules='[[rules]]\nfrom = ["na"]\nto = ["eu"]')
    looked_at = case(tmp_path, settings={"regions_file": str(file), "region": "eu"})
    found = only(regions.region, looked_at)
    assert found.level == "problem" and "no region is there" in found.found
    init(file, "eu")
    bucket, mirror = regions.region(looked_at)
    assert (bucket.level, mirror.check, mirror.level, mirror.found) == (
        "ok",
        "mirror of na",
        "warning",
        "never ran",
    )
    file.write_text("deployment = 3")
    assert set(levels(regions.region, looked_at)) == {"problem"}
