"""A file system that hangs, call by call: only the device on it waits, nobody else in the process.

Run as a program this module is that process; a call that hung with the GIL held would stop it for good:

    LD_PRELOAD=sick_disk.so SICK_DISK=SWITCH SICK_BELOW=DIR/sick python -m tests.tiers.test_device_hang DIR SWITCH
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kill.test_sick_disk import compiled
from tests.tiers.devices import SIZE, SLAB_BYTES, opened, put_slot, read
from tiers.base import Get
from tiers.nvme.device import Device, capacity_for

CALLS = (
    *("mkdir", "stat64", "opendir", "readdir64", "open64", "flock", "write", "fsync", "rename", "read"),
    *("unlink", "lstat64", "ftruncate64", "lseek64", "statvfs64", "posix_fallocate64", "fstat64"),
    *("pwritev64v2", "preadv64v2", "close", ""),  # "": all of them
)
SLABS = 2


def live(device: Device, done: list[str]) -> None:
    """All of a device's life, in the thread that may hang."""
    device.open()
    assert list(device.scan()) == []
    slot = put_slot(device, 0)
    assert read(device, slot, 0) is Get.HIT
    assert device.clear([slot]) and device.check() == []
    device.close()
    device.open()
    device.close()
    done.append("lived")


def hang(call: str, directory: Path, switch: Path, healthy: Device) -> None:
    """Let one call hang in the life of a device, and use another device meanwhile."""
    hung = switch.with_name(switch.name + ".hung")
    switch.write_text(f"x {call}" if call else "x")
    sick = Device(directory, capacity_for(SLABS, SLAB_BYTES), SLAB_BYTES)
    done: list[str] = []
    thread = threading.Thread(target=live, args=(sick, done))
    thread.start()
    while not hung.exists():
        assert thread.is_alive(), f"{call} was never called"
    for number in range(5):
        slot = put_slot(healthy, number)
        assert read(healthy, slot, number) is Get.HIT
        healthy.pool.give(slot)
        assert sick.stats().capacity_bytes == SLABS * SLAB_BYTES
        sick.pool.take_run(sick.slot_bytes(SIZE), 0)
    assert thread.is_alive() and not done
    switch.unlink()
    thread.join()
    assert done == ["lived"], call
    hung.unlink()
    shutil.rmtree(directory)


def main(directory: Path, switch: Path) -> None:
    healthy, _ = opened(directory / "healthy", slabs=SLABS)
    for call in CALLS:
        hang(call, directory / "sick", switch, healthy)
        print(call or "all", flush=True)


@pytest.mark.timeout(150)
def test_a_call_that_hangs_stops_only_its_own_device(tmp_path: Path) -> None:
    """Whichever system call hangs, in opening, scanning, growing, writing, reading or closing: other devices go on."""
    library, switch = compiled(tmp_path), tmp_path / "switch"
    surroundings = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "SICK_DISK": str(switch),
        "SICK_BELOW": str(tmp_path / "sick"),
    }
    command = [sys.executable, "-m", "tests.tiers.test_device_hang", str(tmp_path), str(switch)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [call or "all" for call in CALLS]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
