"""Disks are known by who they are: what was known and is another one now is left alone until somebody says otherwise."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvstore.daemon.disks.filesystem import differ
from kvstore.daemon.disks.known import Known
from kvstore.daemon.disks.watch import Disks
from tests.running import TIMEOUT_S, Daemon, Place, kvstore
from tests.start.machine import Machine
from tiers.base import TierStats
from tiers.errors import OpenError
from tiers.nvme.device import Device, capacity_for

SLAB_BYTES = 2 << 20
Serve = Callable[..., Daemon]


class Node:
    """The devices of a daemon, without the rest of it: two directories and a data directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.a, self.b = path / "a" / "kv", path / "b" / "kv"
        self.file = path / "disks.json"
        for directory in (self.a, self.b):
            directory.mkdir(parents=True, mode=0o700)

    def start(self, *directories: Path, slab_bytes: int = SLAB_BYTES) -> dict[str, str]:
        """Of each directory, as what it was taken: the disk's id, or ! and the word for why it was left alone."""
        directories = directories or (self.a, self.b)
        known = Known(self.file, directories)
        taken, opened = {}, []
        for directory in directories:
            device = Device(directory, capacity_for(2, slab_bytes), slab_bytes, memory=known)
            try:
                device.open()
                opened.append(device)
                taken[directory.parent.name] = device.disk
            except OpenError:
                taken[directory.parent.name] = f"!{known.state(directory)}"
        for device in opened:
            device.close()
        return taken

    def say(self, change: Callable[[Known], object]) -> None:
        known = Known(self.file, (self.a, self.b))
        change(known)
        known.save()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _gone(node: Node) -> None:
    shutil.rmtree(node.b)


def _gone_with_its_mount(node: Node) -> None:
    shutil.rmtree(node.b.parent)


def _empty(node: Node) -> None:
    _gone(node)
    node.b.mkdir(mode=0o700)


def _fresh_file_system(node: Node) -> None:
    _empty(node)
    (node.b / "lost+found").mkdir()


def _another(node: Node) -> None:
    """What an older program left on the file system below the mount."""
    _empty(node)
    device = Device(node.b, capacity_for(2, SLAB_BYTES), SLAB_BYTES)
    device.open()
    device.close()


def _copied_elsewhere(node: Node) -> None:
    content = json.loads(node.file.read_text())
    for row in content["disks"]:
        if row["directory"] == str(node.b):
            row["identity"] = row["identity"].partition(" ")[0] + " 0123"
    node.file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("lose", "state"),
    [
        (_gone, "gone"),
        (_gone_with_its_mount, "gone"),
        (_empty, "empty"),
        (_fresh_file_system, "empty"),
        (_another, "another"),
        (_copied_elsewhere, "elsewhere"),
    ],
)
def test_what_is_not_the_disk_that_was_known(node: Node, lose: Callable[[Node], None], state: str) -> None:
    """It is left alone, start after start, and nothing is made or written there; the other one is used. Accepted, or
    forgotten, it is taken as it is."""
    was = node.start()
    lose(node)
    there = sorted(node.path.rglob("b/**/*"))
    for _ in range(2):
        assert node.start() == {"a": was["a"], "b": f"!{state}"}
    assert sorted(node.path.rglob("b/**/*")) == there
    remembered = node.file.read_text()
    node.say(lambda known: known.accept(node.b))
    accepted = node.start()
    assert accepted["a"] == was["a"] and len(accepted["b"]) == 36
    assert node.start() == accepted
    node.file.write_text(remembered)
    node.say(lambda known: known.forget(str(node.b)))
    assert node.start() == accepted


def test_it_is_used_as_soon_as_it_is_back(node: Node) -> None:
    """The same memory takes a directory that is itself again, without a restart."""
    was = node.start()
    aside = node.path / "aside"
    node.b.rename(aside)
    known = Known(node.file, (node.a, node.b))
    device = Device(node.b, capacity_for(2, SLAB_BYTES), SLAB_BYTES, memory=known)
    with pytest.raises(OpenError, match="is gone"):
        device.open()
    aside.rename(node.b)
    device.open()
    assert (device.disk, known.state(node.b)) == (was["b"], "")
    device.close()


def test_disks_that_changed_places(node: Node) -> None:
    """Two mounts that were swapped are known by their ids, whichever of them is there first; none is ever made anew."""
    was = node.start()
    one, other = node.a.parent, node.b.parent
    one.rename(node.path / "x")
    other.rename(one)
    assert node.start() == {"a": was["b"], "b": "!gone"}  # the other one is not mounted yet
    assert node.start() == {"a": was["b"], "b": "!gone"}
    (node.path / "x").rename(other)
    swapped = {"a": was["b"], "b": was["a"]}
    assert node.start() == swapped
    assert node.start(node.b, node.a) == {"b": was["a"], "a": was["b"]}


def test_a_disk_that_moved(node: Node) -> None:
    """Settings that name it at another place find it there; the old place, if it is still named, is not made anew."""
    was = node.start()
    new = node.path / "c" / "kv"
    new.parent.mkdir()
    node.b.rename(new)
    assert node.start(node.a, node.b, new) == {"a": was["a"], "b": "!gone", "c": was["b"]}
    assert node.start(node.a, new) == {"a": was["a"], "c": was["b"]}


@pytest.mark.parametrize("together", [True, False])
def test_a_copy_is_a_disk_of_its_own(node: Node, together: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Configured beside the original or instead of it, it is told in one line and gets another id, and its records; the
    original stays what it is, whichever of them is opened first."""
    was = node.start()
    copy = node.path / "c" / "kv"
    copy.parent.mkdir()
    subprocess.run(["cp", "-a", node.b, copy], check=True)
    instance = json.loads((copy / "kvstore.json").read_text())["instance"]
    caplog.clear()
    taken = node.start(copy, node.a, node.b) if together else node.start(copy, node.a)
    assert taken["c"] not in (*was.values(), "") and taken["c"][0] != "!"
    assert [r.getMessage() for r in caplog.records] == [
        f"nvme directory {copy}: a copy of {node.b}, and a disk of its own from now on"
    ]
    assert json.loads((copy / "kvstore.json").read_text())["instance"] == instance
    assert node.start(node.b, copy, node.a) == {**was, "c": taken["c"]}
    assert len(caplog.records) == 1


def test_a_copy_in_the_place_of_another_disk(node: Node) -> None:
    """It is left alone until somebody accepts it, and the original stays what it is all the while."""
    was = node.start()
    shutil.rmtree(node.b)
    subprocess.run(["cp", "-a", node.a, node.b], check=True)
    for order in ((node.a, node.b), (node.b, node.a)):
        assert node.start(*order) == {"a": was["a"], "b": "!another"}
    node.say(lambda known: known.accept(node.b))
    accepted = node.start(node.b, node.a)
    assert accepted["a"] == was["a"] and accepted["b"] not in (*was.values(), "!another")
    assert node.start() == accepted


def test_it_is_the_same_disk_when_it_starts_cold(node: Node) -> None:
    """Other settings, or a damaged marker, cost the records and not the identity, also where the memory was not saved after."""
    was = node.start()
    remembered = node.file.read_text()
    assert node.start(slab_bytes=2 * SLAB_BYTES) == was
    (node.b / "kvstore.json").write_text("{")
    node.file.write_text(remembered)
    assert node.start(slab_bytes=2 * SLAB_BYTES) == was


@pytest.mark.parametrize("lost", ["gone", "damaged", "of another format"])
def test_a_lost_memory(node: Node, lost: str) -> None:
    """Without it, or with one that cannot be read, the disks are taken as they are, and known again from then on."""
    was = node.start()
    if lost == "gone":
        node.file.unlink()
    else:
        node.file.write_text("{" if lost == "damaged" else '{"format": 99, "disks": []}')
    assert node.start() == was
    assert (node.path / "disks.unreadable").exists() == (lost != "gone")
    _empty(node)
    assert node.start()["b"] == "!empty"


def test_nothing_is_concluded_from_nothing() -> None:
    """Two file systems differ where both say who they are, in the same way, and say something else."""
    assert differ("uuid 1", "uuid 2")
    for before, now in (("", ""), ("uuid 1", ""), ("", "uuid 1"), ("uuid 1", "fsid 1"), ("uuid 1", "uuid 1")):
        assert not differ(before, now)


# -- real daemons --


def disks(machine: Machine, *words: str, code: int = 0) -> list[dict[str, Any]]:
    done = machine.run("disks", "-o", "json", *words)
    assert done.code == code, (done.out, done.err)
    return json.loads(done.out)["disks"]  # type: ignore[no-any-return]


def until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.1)


SIZES = [
    "--set=dram.capacity_bytes=16MiB", "--set=dram.slab_bytes=4MiB", "--set=dram.huge_pages=off", "--set=web.listen=",
    "--set=nvme.capacity_bytes=32MiB", "--set=nvme.slab_bytes=4MiB",
]  # fmt: skip


def test_a_disk_that_is_not_mounted_at_a_start(machine: Machine) -> None:
    """Nothing is made below it, the daemon serves and says so; once mounted it is used without a restart. One that is
    replaced by a new file system is taken once it is accepted."""
    machine.shell("mkdir -p -m 700 /mnt/a /mnt/b /mnt/store && mount --bind /mnt/store /mnt/b")
    words = [*SIZES, "--set=nvme.directories=/mnt/a/kv,/mnt/b/kv"]
    first = machine.serve(*words)
    until(lambda: machine.run("disks").code == 0, "both are used")
    assert first.stop() == 0
    for level, path in (("nvme0", "/mnt/a/kv"), ("nvme1", "/mnt/b/kv")):
        assert first.log().count(f"{level} {path}: 0 records, 0 B of 28 MiB, on tmpfs none at /mnt") == 1
    machine.shell("umount /mnt/b")
    before = disks(machine, *words[-1:], code=1)
    assert [d["state"] for d in before] == ["ok", "gone"]
    assert [d["records"] for d in before] == [None, None]  # nobody has read them
    second = machine.serve(*words)
    until(lambda: [d["state"] for d in disks(machine, code=1)] == ["ok", "gone"], "it is left alone")
    until(lambda: "is left alone: is gone" in machine.run("top", "--once").out, "it is one of the problems")
    status = json.loads(machine.run("status", "-o", "json").out)
    (problem,) = [one for one in status["problems"] if one["kind"] == "disk"]
    assert problem["subject"] == "nvme1" and problem["text"].startswith("/mnt/b/kv: is left alone: is gone")
    assert not status["health"]["ok"] and not machine.shell("ls -A /mnt/b")
    doctor = json.loads(machine.run("doctor", "-o", "json", *words).out)["findings"]
    (found,) = [f for f in doctor if f["check"] == "disk" and "nvme1: /mnt/b/kv: is left alone" in f["found"]]
    assert [f["level"] for f in doctor if f["check"] == "disk /mnt/b/kv"] == ["note"]  # which is not touched
    assert found["level"] == "problem" and "--accept /mnt/b/kv" in found["action"]
    machine.shell("mount --bind /mnt/store /mnt/b")
    until(lambda: machine.run("disks").code == 0, "it is used again")
    assert "nvme1 is used: /mnt/b/kv" in second.log()
    assert second.stop() == 0
    machine.shell(
        "umount /mnt/b && mount -t tmpfs -o size=200m,mode=700 none /mnt/b && mkdir -m 700 /mnt/b/kv"
    )
    third = machine.serve(*words)
    until(
        lambda: [d["state"] for d in disks(machine, code=1)] == ["ok", "empty"],
        "it is not the one that was known",
    )
    assert machine.run("disks", "--forget", "/mnt/a/kv").line.endswith(
        "is in use, and is the one that is known"
    )
    done = machine.run("disks", "--accept", "/mnt/b/kv")
    assert done.out == "/mnt/b/kv is taken as it is, now: on tmpfs none at /mnt/b\n", done.err
    until(lambda: machine.run("disks").code == 0, "it is used")
    assert third.stop() == 0


def test_a_disk_with_too_little_room(machine: Machine) -> None:
    """What it has of what was asked for is told, with what to do; two directories of one file system share what is free."""
    machine.shell("mkdir /mnt/n && mount -t tmpfs -o size=124m,mode=700 none /mnt/n")
    words = [*SIZES, "--set=nvme.directories=/mnt/n/a,/mnt/n/b", "--set=nvme.capacity_bytes=64MiB"]
    serving = machine.serve(*words)

    def has_settled() -> bool:
        rows = disks(machine, code=1)
        return "full" in {d["state"] for d in rows} and sum(d["room_bytes"] for d in rows) <= 60 << 20

    until(has_settled, "it is full, and what each has is known")
    rows = disks(machine, code=1)
    assert {d["capacity_bytes"] for d in rows} == {60 << 20}
    assert all("of the 60 MiB that were asked for" in d["problem"] and "make room" in d["todo"] for d in rows)
    status = json.loads(machine.run("status", "-o", "json").out)
    assert status["health"]["ok"]  # it is used
    assert "room for" in serving.log() or "no room for another slab" in serving.log()
    assert serving.stop() == 0


def test_nothing_is_written_to_what_was_mounted_over_it(place: Place, serve: Serve) -> None:
    """A daemon whose directory is replaced goes on in the one that it has, and makes nothing in the other."""
    daemon = serve(place, *place.with_nvme())
    nvme = place.path / "nvme0"

    def states() -> list[str]:
        done = kvstore("disks", "-o", "json", "--socket", place.socket)
        return [disk["state"] for disk in json.loads(done.stdout)["disks"]]

    until(lambda: states() == ["ok", "ok"], "both are open")  # one that is not is looked for by its path
    nvme.rename(place.path / "aside")
    nvme.mkdir(mode=0o700)
    until(lambda: states() == ["removed", "ok"], "it is noticed")
    assert daemon.stop() == 0
    assert os.listdir(nvme) == []


def test_the_doctor_writes_nothing_to_a_disk(machine: Machine) -> None:
    """On a file system that lets nobody write (fsfreeze) it ends, and says what it found."""
    make = (
        "truncate -s 64M /mnt/img && mkfs.ext4 -q /mnt/img && mkdir /mnt/l && mount -o loop /mnt/img /mnt/l"
    )
    try:
        machine.shell(f"{make} && mkdir -m 700 /mnt/l/kv")
    except subprocess.CalledProcessError:
        pytest.skip("needs mkfs.ext4 and loop devices")
    try:
        machine.shell("fsfreeze -f /mnt/l")
        done = machine.run("doctor", "-o", "json", "--set=nvme.directories=/mnt/l/kv")
    finally:
        machine.shell("fsfreeze -u /mnt/l; umount /mnt/l")
    found = [f for f in json.loads(done.out)["findings"] if f["check"] == "disk /mnt/l/kv"]
    assert found[0]["level"] == "ok" and found[0]["found"].startswith("file system ext4")


@pytest.mark.parametrize(
    ("instance", "todo"), [("", "it is tried again by itself"), ("one", "restart the daemon")]
)
def test_what_was_open_is_not_tried_again(tmp_path: Path, instance: str, todo: str) -> None:
    """A disk that fails while its rows are read is left alone until the next start, and that is what is said."""
    device = Mock(instance=instance)
    device.stats.return_value = TierStats("nvme0", 0, 0, 0)
    member = Mock(left_alone="cannot be read: Input/output error", device=device)
    member.name = "nvme0"
    adoption = Mock()
    disks = Disks([member], [tmp_path], Known(tmp_path / "disks.json"), adoption, Mock())
    disks.look()
    (row,) = disks.rows()
    assert (row["state"], row["todo"]) == ("left alone", f"mend what it names: {todo}")
    assert adoption.again.called is not bool(instance)


def test_a_directory_that_may_not_be_looked_into_is_not_called_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no daemon answers the command looks itself, and says what it met in the words of every other line."""

    def shut(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    from kvstore.tools.cli.commands.disks import _offline_row

    monkeypatch.setattr(Known, "recognise", shut)
    row = _offline_row("nvme", tmp_path, Known(tmp_path / "disks.json"), 1)
    assert (row["state"], row["problem"]) == ("left alone", f"nvme {tmp_path}: Permission denied")
