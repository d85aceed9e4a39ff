"""kill -9 of a process that writes, evicts, clears and takes over slabs from several threads at once.

Run as a program this module is that process; a line `+SLOT N VERSION` is written to stdout when a
record was acknowledged, `-SLOT` before its slot is cleared or used again:

    python -m tests.tiers.test_device_kill DIRECTORY SEED
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tiers.devices import opened, read
from tests.tiers.records import STORED_S, content, key, record
from tiers.base import Get, Put
from tiers.checksum import digest
from tiers.nvme.device import Device

SLABS = 4
RECORDS = 60
SIZES = (16_000, 33_000, 70_000)
VERSIONS = 100_000
THREADS = 3
ROUNDS = 4


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def work(device: Device, pool: threading.Lock, seed: int) -> None:
    """Write, clear and evict for ever; `pool` stands for the engine's thread."""
    chance = random.Random(seed)
    held: list[int] = []
    while True:
        size_bytes = chance.choice(SIZES)
        numbers = [n for n in chance.sample(range(RECORDS), 9) if SIZES[n % 3] == size_bytes]
        version = chance.randrange(VERSIONS)
        with pool:
            slots = device.pool.take_run(device.slot_bytes(size_bytes), len(numbers))
        items = [
            (slot, number, *record(number, size_bytes, version))
            for slot, number in zip(slots, numbers, strict=False)
        ]
        answers = device.write([(slot, item, view) for slot, _n, item, view in items])
        for (slot, number, _item, _view), answer in zip(items, answers, strict=True):
            assert answer is Put.STORED
            say(f"+{slot} {number} {version}")
        held += slots
        if chance.random() < 0.5 or not slots:  # some are cleared, some only evicted
            chance.shuffle(held)
            gone, held = held[:8], held[8:]
            for slot in gone:
                say(f"-{slot}")
            device.clear(gone[::2])
            say(" ".join(["cleared", *map(str, gone[::2])]))
            with pool:
                device.pool.give_run(gone)


def main(directory: str, seed: str) -> None:
    device, rows = opened(Path(directory), slabs=SLABS)
    device.pool.give_run([row.slot for row in rows])  # nothing is kept: slabs are taken over all the time
    print("ready", flush=True)
    pool = threading.Lock()
    for number in range(THREADS):
        threading.Thread(target=work, args=(device, pool, int(seed) * THREADS + number)).start()


Version = tuple[int, int]  # number, version


def acknowledged(lines: list[str]) -> tuple[dict[int, Version], dict[int, Version]]:
    """What must be there, and what must not come back because its slot was cleared; both by slot."""
    held: dict[int, Version] = {}
    leaving: dict[int, Version] = {}
    cleared: dict[int, Version] = {}
    for line in lines:
        if line.startswith("+"):
            slot, number, version = map(int, line[1:].split())
            held[slot] = number, version
        elif line.startswith("-"):
            leaving[int(line[1:])] = held.pop(int(line[1:]))
        else:
            cleared.update({slot: leaving[slot] for slot in map(int, line.split()[1:])})
    return held, cleared


@pytest.mark.timeout(180)
def test_kill_9_leaves_right_bytes_or_misses(tmp_path: Path) -> None:
    """After kill -9 at a random instant, again and again: what was acknowledged hits, what was cleared stays
    away, and every other row is true or caught by its checksum. Until enough was found."""
    chance = random.Random(5)
    numbers = {key(n): n for n in range(RECORDS)}
    found = seed = 0
    while seed < ROUNDS or found <= ROUNDS:
        seed += 1
        command = [sys.executable, "-m", "tests.tiers.test_device_kill", str(tmp_path), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.02, 0.2))
            process.kill()
            lines = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        held, cleared = acknowledged(lines)
        device, rows = opened(tmp_path, slabs=SLABS)
        assert device.counters.rows_damaged == device.counters.rows_lost == 0
        assert device.check() == []
        by_slot = {row.slot: row for row in rows}
        for slot, (number, version) in held.items():
            assert by_slot[slot].key == key(number)
            assert read(device, slot, number, SIZES[number % 3], version) is Get.HIT
        lies = 0
        for row in rows:
            number, version = numbers[row.key], row.stored_s - STORED_S
            assert cleared.get(row.slot) != (number, version)
            true = content(number, SIZES[number % 3], version)
            assert row.size_bytes == len(true) and row.checksum == digest(true, row.columns)
            answer = read(device, row.slot, number, len(true), version)
            assert answer in (Get.HIT, Get.CORRUPT)
            lies += answer is Get.CORRUPT
        assert lies <= THREADS * 9  # only slots that were being written when it was killed
        found += len(held)
        device.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
