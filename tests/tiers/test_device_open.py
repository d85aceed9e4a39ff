"""Opening an NVMe device: what is refused and stays untouched, and what starts cold."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiers.devices import SIZE, SLAB_BYTES, opened, put_slot, read
from tiers.base import Get
from tiers.errors import BusyError, NotOursError, OpenError, VersionError
from tiers.nvme.device import Device, capacity_for
from tiers.nvme.device_home import DEVICE_VERSION
from tiers.nvme.direct import DiskIO

CAPACITY_BYTES = capacity_for(3, SLAB_BYTES)


class NoDirect(DiskIO):
    """A file system without O_DIRECT."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


class NoInode(DiskIO):
    """A file system on which no further file can be made."""

    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_CREAT and not path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().open(path, flags)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def used(directory: Path, count: int = 15) -> Path:
    """A closed directory that holds some records."""
    device, _ = opened(directory)
    for number in range(count):
        put_slot(device, number)
    device.close()
    return directory


def refusal(directory: Path, kind: type[OpenError] = OpenError) -> str:
    """Why a directory does not open: one line. Nothing in it has changed."""
    before = contents(directory)
    with pytest.raises(kind) as caught:
        Device(directory, CAPACITY_BYTES, SLAB_BYTES).open()
    assert (
        contents(directory) == before
        and "\n" not in str(caught.value)
        and str(directory) in str(caught.value)
    )
    return str(caught.value)


def test_no_free_inode_costs_no_record(tmp_path: Path) -> None:
    """A used directory opens, and has all its records, where not one more file can be made."""
    directory = used(tmp_path / "disk")
    device, rows = opened(directory, io=NoInode())
    assert len(rows) == 15
    device.close()


def test_a_device_is_made_without_touching_the_disk(tmp_path: Path) -> None:
    """Making a Device does no I/O; until it is open and scanned nothing can be taken from its pool."""
    device = Device(tmp_path / "disk", CAPACITY_BYTES, SLAB_BYTES)
    assert not (tmp_path / "disk").exists() and not device.ready
    assert device.pool.take(device.slot_bytes(SIZE)) is None and device.stats().used_bytes == 0
    device.open()
    assert not device.ready and device.pool.take(device.slot_bytes(SIZE)) is None
    assert list(device.scan()) == [] and device.ready
    assert device.pool.take(device.slot_bytes(SIZE)) == 0
    device.close()
    device.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    """While one process has a directory open another gets BusyError; after its kill the directory opens."""
    code = (
        "import sys; from pathlib import Path; from tiers.nvme.device import Device\n"
        f"d = Device(Path(sys.argv[1]), {CAPACITY_BYTES}, {SLAB_BYTES}); d.open(); print('open', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(used(tmp_path / "disk"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        assert "another process" in refusal(tmp_path / "disk", BusyError)
        process.kill()
    device, rows = opened(tmp_path / "disk")
    assert len(rows) == 15
    device.close()


@pytest.mark.parametrize(
    "marker", [None, b"{}", b"not json", b'{"magic": "other", "version": 1}', b"[]", b"\xff"]
)
def test_a_foreign_directory_is_untouched(tmp_path: Path, marker: bytes | None) -> None:
    """A directory with somebody else's files is refused, and not one byte in it changes."""
    (tmp_path / "photos").write_bytes(b"dear")
    if marker is not None:
        (tmp_path / "kvstore.json").write_bytes(marker)
    assert "kvstore.json" in refusal(tmp_path, NotOursError)


def test_a_newer_format_is_untouched(tmp_path: Path) -> None:
    """A directory of a newer program is refused, naming both versions."""
    marker = used(tmp_path) / "kvstore.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "version": DEVICE_VERSION + 1}))
    assert f"version {DEVICE_VERSION + 1}; this program reads {DEVICE_VERSION}" in refusal(
        tmp_path, VersionError
    )


def test_a_claim_cut_short_is_taken_up_again(tmp_path: Path) -> None:
    """A crash between lock and marker leaves a directory that still counts as empty."""
    (tmp_path / "lock").touch()
    (tmp_path / "kvstore.json.tmp").write_bytes(b'{"mag')
    (tmp_path / "lost+found").mkdir()
    device, _ = opened(tmp_path)
    put_slot(device, 0)
    device.close()


def test_another_slab_size_starts_cold_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Settings that changed empty the device, say so once, and its slab files are used again."""
    used(tmp_path)
    with caplog.at_level(logging.WARNING):
        device = Device(tmp_path, capacity_for(2, 2 << 20), 2 << 20)
        device.open()
    assert list(device.scan()) == [] and device.check() == []
    assert {path.stat().st_size for path in tmp_path.glob("slab-*")} == {2 << 20}
    assert [record.message for record in caplog.records] == [
        f"nvme directory {tmp_path}: was made with slab_bytes = 1048576, not 2097152: it starts cold"
    ]
    slot = put_slot(device, 3)
    device.close()
    caplog.clear()
    device = Device(tmp_path, capacity_for(2, 2 << 20), 2 << 20)
    device.open()
    assert [slot for piece in device.scan() for slot in piece.slots] == [slot] and not caplog.records
    device.close()
    device, rows = opened(tmp_path)  # back again: files that are too large are replaced
    assert rows == [] and read(device, put_slot(device, 1), 1) is Get.HIT and device.check() == []
    device.close()


def test_a_directory_whose_rows_know_no_columns_starts_cold_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None of the rows of the former format is believed."""
    used(tmp_path)
    marker = json.loads((tmp_path / "kvstore.json").read_text())
    (tmp_path / "kvstore.json").write_text(json.dumps({**marker, "version": 2}))
    device, rows = opened(tmp_path)
    assert rows == [] and device.counters.rows_damaged == 0
    assert caplog.messages == [
        f"nvme directory {tmp_path}: has format version 2, not {DEVICE_VERSION}: it starts cold"
    ]
    device.close()


@pytest.mark.parametrize(
    "name", ["kvstore.json", "kvstore.json.tmp", "lock", "slots.table", "slab-000000.kvs"]
)
@pytest.mark.parametrize("is_used", [False, True])
def test_no_planted_link_is_followed(tmp_path: Path, name: str, is_used: bool) -> None:
    """A link in place of any of our files is refused or replaced; what it points to stays as it was."""
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o700)
    if is_used:
        used(directory)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(victim)
    with contextlib.suppress(OpenError):
        device, _ = opened(directory)
        put_slot(device, 0)
        device.close()
    assert victim.read_bytes() == b"precious" * 1000


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """Where others may plant files nothing is opened, and the line says what to do."""
    used(tmp_path / "disk").chmod(mode)
    assert "chmod go-w" in refusal(tmp_path / "disk")


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A directory that belongs to another user is not ours, whatever its mode."""
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(used(tmp_path / "disk"), 12345, -1)
    assert "belongs to user 12345" in refusal(tmp_path / "disk")


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """Whatever the umask, nobody else may read or write what is cached."""
    before = os.umask(0)
    try:
        used(tmp_path / "disk")
    finally:
        os.umask(before)
    assert (tmp_path / "disk").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "disk").iterdir()} == {0o600}


def test_a_failed_open_leaves_nothing_open_and_may_be_tried_again(tmp_path: Path) -> None:
    """A path that is a file is one clear error; once it is a directory the same device opens."""
    (tmp_path / "disk").touch()
    device = Device(tmp_path / "disk", CAPACITY_BYTES, SLAB_BYTES)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OpenError, match="disk"):
            device.open()
    (tmp_path / "disk").unlink()
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk" / "slots.table").mkdir()
    with pytest.raises(OpenError):
        device.open()
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "disk" / "slots.table").rmdir()
    device.open()
    device.close()


def test_o_direct_as_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """direct = "on" refuses a file system without O_DIRECT, "auto" warns once there, "off" never uses it."""
    device, _ = opened(tmp_path, direct="off")
    assert not device.direct and read(device, put_slot(device, 0), 0) is Get.HIT
    device.close()
    disk = NoDirect()
    with pytest.raises(OpenError, match='direct is "on"'):
        opened(tmp_path, direct="on", io=disk)
    device, _ = opened(tmp_path, io=disk)
    assert not device.direct and read(device, put_slot(device, 1), 1) is Get.HIT
    assert len(caplog.records) == 1 and "O_DIRECT" in caplog.text
    device.close()


def test_disk_use_stays_within_the_capacity(tmp_path: Path) -> None:
    """A full device of smallest records, table included, takes no more bytes than it was given."""
    device, _ = opened(tmp_path)
    slots = device.pool.take_run(device.slot_bytes(1), 1000)
    assert len(slots) * (16 << 10) == device.stats().used_bytes == device.stats().capacity_bytes
    assert sum(path.stat().st_size for path in tmp_path.glob("s*")) <= CAPACITY_BYTES
    device.close()


@pytest.mark.parametrize(
    "lose",
    [
        lambda path: (path / "slots.table").unlink(),
        lambda path: os.truncate(path / "slots.table", 0),
        lambda path: (path / "slots.table").replace(path / "slots.table.old"),
        lambda path: [slab.unlink() for slab in path.glob("slab-*")],
        lambda path: (path / "kvstore.json").unlink(),
        lambda path: path.rename(path.with_name("elsewhere")),
    ],
)
def test_a_directory_without_one_of_its_files_is_not_in_place(
    tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    """The next start would lose its records, so that it is told while it is open."""
    device, _ = opened(used(tmp_path / "disk"))
    put_slot(device, 15)
    assert device.is_in_place()
    lose(tmp_path / "disk")
    assert not device.is_in_place()
    device.close()
    assert device.is_in_place()
