"""A device against a model, over seeded faults, restarts and evictions: a hit is right or it is no hit."""

from __future__ import annotations

import random
import threading
from dataclasses import astuple
from pathlib import Path

import pytest

from tests.tiers.devices import Clock, FaultyIO, opened, read
from tests.tiers.records import STORED_S, content, key, record
from tiers.base import Get, Put
from tiers.nvme.device import NVME_RETRY_S, Device, Row

KEYS = 40
SIZES = (9_000, 33_000, 70_000)
SLABS = 4


class Model:
    """What a caller's index would know: which record lies in which slot."""

    def __init__(self, path: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = FaultyIO(seed)
        self.clock = Clock()
        self.path = path
        self.held: dict[int, tuple[int, int]] = {}  # number -> slot, version
        self.cleared: set[int] = set()  # versions that must not come back
        self.version = 0
        self.device = self.reopened()

    def reopened(self) -> Device:
        """Open again without faults; adopt what the scan finds, as an index does. Acknowledged records are there."""
        self.disk.failing, faults = 0.0, self.disk.failing
        device, rows = opened(self.path, slabs=SLABS, io=self.disk, clock=self.clock)
        by_slot = {row.slot: row for row in rows}
        numbers = {key(n): n for n in range(KEYS)}
        for number, (slot, version) in self.held.items():
            assert by_slot[slot] == (slot, *astuple(record(number, SIZES[number % 3], version)[0]))
            assert read(device, slot, number, SIZES[number % 3], version) is Get.HIT
        adopted = {slot for slot, _version in self.held.values()}
        for row in rows:
            number = numbers[row.key]
            assert row.stored_s - STORED_S not in self.cleared
            if row.slot in adopted:
                continue
            if number not in self.held and self.adopt(device, row, number):
                continue
            device.pool.give(row.slot)
        self.disk.failing = faults
        return device

    def adopt(self, device: Device, row: Row, number: int) -> bool:
        """Take over a row that was evicted, or whose write was not acknowledged, if it is true."""
        size_bytes = SIZES[number % 3]
        into = memoryview(bytearray(size_bytes))
        ((answer, checksum),) = device.read([(row.slot, row.key, into)])
        if answer is not Get.HIT:
            return False
        version = row.stored_s - STORED_S
        assert into == content(number, size_bytes, version) and checksum == row.checksum
        self.held[number] = (row.slot, version)
        return True

    def write(self) -> None:
        """Write a few records as a batch; whoever is replaced is evicted first."""
        batch = []
        for number in self.chance.sample(range(KEYS), 5):
            self.evict(number)
            self.version += 1
            size_bytes = SIZES[number % 3]
            slot = self.device.pool.take(self.device.slot_bytes(size_bytes))
            if slot is not None:
                item, view = record(number, size_bytes, self.version)
                batch.append((number, self.version, (slot, item, view)))
        answers = self.device.write([item for _number, _version, item in batch])
        for (number, version, item), answer in zip(batch, answers, strict=True):
            if answer is Put.STORED:
                self.held[number] = (item[0], version)
            else:
                self.device.set_aside(item[0])

    def evict(self, number: int) -> None:
        if number in self.held:
            self.device.pool.give(self.held.pop(number)[0])

    def read(self) -> None:
        number = self.chance.randrange(KEYS)
        slot, version = self.held.get(number, (self.chance.randrange(64), -1))
        into = memoryview(bytearray(SIZES[number % 3]))
        ((answer, _checksum),) = self.device.read([(slot, key(number), into)])
        if version < 0:
            (row,) = self.device.rows([slot])  # a hit on what was evicted
            if answer is Get.HIT and row is not None:
                assert into == content(number, len(into), row.stored_s - STORED_S)
        elif answer is Get.HIT:
            assert into == content(number, len(into), version)
        else:
            assert self.disk.failing and answer in (Get.FAILED, Get.MISS, Get.CORRUPT)

    def clear(self) -> None:
        for number in self.chance.sample(sorted(self.held), min(3, len(self.held))):
            slot, version = self.held[number]
            if self.device.clear([slot]):
                self.cleared.add(version)
            self.evict(number)

    def step(self) -> None:
        (action,) = self.chance.choices(
            [self.write, self.read, lambda: self.evict(self.chance.randrange(KEYS)), self.clear], [6, 6, 4, 1]
        )
        action()
        self.clock.now += NVME_RETRY_S / 4


@pytest.mark.parametrize("failing", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_a_device_agrees_with_a_model(tmp_path: Path, seed: int, failing: float) -> None:
    """Whatever fails, is torn, evicted, cleared or reopened: hits are right, and without faults nothing is lost."""
    model = Model(tmp_path, seed)
    for _life in range(5):
        model.disk.failing = failing
        for _ in range(40):
            model.step()
        assert model.device.pool.check() == []
        model.device.close()
        if failing:
            model.held.clear()  # a failed row write may have cost a neighbour's row
        model.device = model.reopened()
    model.disk.failing = 0.0
    assert model.device.check() == []
    model.device.close()


def test_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Four threads that write, read and clear slots of their own see only their own records."""
    device, _ = opened(tmp_path, slabs=SLABS)
    slots = device.pool.take_run(device.slot_bytes(SIZES[0]), 128)
    wrong: list[object] = []

    def work(mine: int) -> None:
        chance = random.Random(mine)
        for version in range(30):
            numbers = [n for n in range(mine, 128, 4) if chance.random() < 0.2]
            batch = [(slots[n], *record(n, SIZES[0], version)) for n in numbers]
            answers = device.write(batch)
            wrong.extend(answer for answer in answers if answer is not Put.STORED)
            wrong.extend(n for n in numbers if read(device, slots[n], n, SIZES[0], version) is not Get.HIT)
            device.clear([slots[n] for n in numbers[::2]])
            wrong.extend(
                n for n in numbers[::2] if read(device, slots[n], n, SIZES[0], version) is not Get.MISS
            )

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and device.counters.corrupt == 0 and device.check() == []
    device.close()
