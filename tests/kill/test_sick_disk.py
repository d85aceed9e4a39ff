"""A disk that is full, fails or hangs under a real daemon: no false success, and life goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import Client, Namespace
from kvstore.protocol.residency_bits import IN_NVME
from tests.kill import load
from tests.running import TIMEOUT_S, Daemon, Place

SOURCE = Path(__file__).with_name("sick_disk.c")
STALL_S = 1.0  # nvme.stall_s
DRAM_CHAINS = 14  # 16 MiB of arena hold this many chains of 12 blocks of 96 KiB


class SickDisk:
    """A daemon over a disk whose health the test decides."""

    def __init__(self, switch: Path, client: Client) -> None:
        self._switch = switch
        self._others = 1000
        self.client = client
        self.space: Namespace = load.namespace(client)

    def fails(self, how: str) -> None:
        self._switch.write_text(how)

    def recovers(self) -> None:
        self._switch.unlink()

    def put(self, number: int) -> int:
        hashes = load.chain(number)
        return self.client.put(self.space, hashes, b"", [load.content(h) for h in hashes])

    def get(self, number: int, wait_s: float = 5.0) -> int:
        """Leading blocks that came back, each compared with what was put."""
        hashes = load.chain(number)
        into = [bytearray(load.RECORD_BYTES) for _ in hashes]
        got = self.client.get(self.space, hashes, into, wait_s)
        assert [bytes(data) for data in into[:got]] == [load.content(h) for h in hashes[:got]]
        return got

    def counter(self, name: str) -> int:
        count = self.client.status()["counters"][name]
        assert isinstance(count, int)
        return count

    def breaker(self, name: str) -> dict[str, Any]:
        """Of all devices: the worst of its kind ("nvme loads", "nvme stores")."""
        kind = name.split()[1]
        found = [b for b in self.client.status()["breakers"] if b["name"].endswith(kind)]
        return max(found, key=lambda b: (b["state"] != "closed", b["trips"]))

    def no_device_is_used(self) -> bool:
        breakers = self.client.status()["breakers"]
        used = [b["name"].split()[0] for b in breakers if b["state"] == "closed"]
        return not any(used.count(name) == 2 for name in used)  # for loads, and for stores

    def wait_until(self, truth: Callable[[], bool], timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not truth():
            assert time.monotonic() < deadline_s, self.client.status()["breakers"]
            time.sleep(0.05)

    def works_again(self) -> None:
        """The disk is well, and the daemon knows."""
        self.recovers()
        self.wait_until(lambda: self.breaker("nvme loads")["state"] == "closed")

    def settle(self) -> None:
        """Wait until nothing is on its way to or from the disk."""
        deadline_s = time.monotonic() + 10
        while self.client.status()["demoting_blocks"] or self.client.status()["loading_blocks"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def fill_dram_with_others(self) -> None:
        for _ in range(DRAM_CHAINS + 2):
            self._others += 1
            self.put(self._others)
            self.settle()


def compiled(directory: Path) -> Path:
    """The library that makes a disk sick."""
    library = directory / "sick_disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


@pytest.fixture
def sick_at_start() -> str:
    """What the disk has when the daemon starts; tests may say otherwise."""
    return ""


@pytest.fixture
def disk(
    place: Place, serve: Callable[..., Daemon], tmp_path: Path, sick_at_start: str
) -> Iterator[SickDisk]:
    switch = tmp_path / "sick"
    if sick_at_start:
        switch.write_text(sick_at_start)
    arguments = [*place.with_nvme(), "--set=engine.policy=lru"]  # what came first leaves DRAM first
    serve(place, *arguments, LD_PRELOAD=str(compiled(tmp_path)), SICK_DISK=str(switch))
    with Client(str(place.socket), timeout_s=20.0, label="test") as client:
        disk = SickDisk(switch, client)
        disk.wait_until(lambda: not client.status()["adopting"])
        yield disk
        with Client(str(place.socket), timeout_s=20.0, label="check", attach=False) as tool:
            assert tool.check() == []


def test_read_errors_are_misses(disk: SickDisk) -> None:
    """With every read failing, what only NVMe has is a miss that is counted; new blocks work."""
    assert disk.put(1) == load.CHAIN_BLOCKS
    disk.settle()
    disk.fill_dram_with_others()
    assert disk.get(1) == load.CHAIN_BLOCKS  # from NVMe, while it is well
    disk.fill_dram_with_others()
    disk.fails("r")
    missed = load.CHAIN_BLOCKS - disk.get(1)
    assert missed > 0
    assert disk.counter("promote_failed") > 0
    disk.works_again()
    assert disk.get(1) == load.CHAIN_BLOCKS  # none of them was given up
    assert disk.put(2) == load.CHAIN_BLOCKS
    assert disk.get(2) == load.CHAIN_BLOCKS


@pytest.mark.parametrize("how", ["w", "f"])
def test_write_errors_and_a_full_disk_lose_no_service(disk: SickDisk, how: str) -> None:
    """Blocks that cannot be written stay in DRAM and are true; nothing claims to be on NVMe."""
    disk.fails(how)
    for number in range(1, 4):
        assert disk.put(number) == load.CHAIN_BLOCKS
    disk.settle()
    records = {tier["name"]: tier["records"] for tier in disk.client.status()["tiers"]}
    assert records == {"dram": 3 * load.CHAIN_BLOCKS, "nvme": 0}
    assert how == "f" or disk.counter("demote_failed") > 0  # a full disk has no slots to try
    assert [disk.get(number) for number in range(1, 4)] == [load.CHAIN_BLOCKS] * 3
    for number in range(10, 10 + DRAM_CHAINS + 2):  # more than DRAM: the oldest leave, nobody waits
        assert disk.put(number) > 0
        disk.settle()
    disk.recovers()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sick_at_start", "how"),
    [("", "w"), ("f", "f"), *([("", "f"), ("w", "w")] if "ROUNDS" in os.environ else [])],  # make soak
)
def test_blocks_the_disk_refused_are_written_when_it_recovers(disk: SickDisk, how: str) -> None:
    """A disk that is well again is used again, without a restart and without a new block, even one that could not
    give a single slab at the start."""
    disk.fails(how)
    disk.put(1)
    disk.settle()
    disk.recovers()
    deadline_s = time.monotonic() + 60
    while disk.counter("demoted") < load.CHAIN_BLOCKS:
        assert time.monotonic() < deadline_s, "NVMe was never tried again"
        time.sleep(0.2)


@pytest.mark.slow
def test_rows_that_cannot_be_written_cost_nothing_but_nvme(disk: SickDisk) -> None:
    """While rows cannot be written, no block claims to be on NVMe and service goes on; later new ones are written."""
    assert disk.put(1) == load.CHAIN_BLOCKS
    disk.settle()
    demoted = disk.counter("demoted")
    assert demoted == load.CHAIN_BLOCKS
    disk.fails("l")
    for number in (2, 3):
        assert disk.put(number) == load.CHAIN_BLOCKS
    disk.settle()
    assert disk.counter("demoted") == demoted and disk.counter("demote_failed") > 0
    assert not any(where & IN_NVME for where in disk.client.residency(disk.space, load.chain(2)))
    assert [disk.get(number) for number in (1, 2, 3)] == [load.CHAIN_BLOCKS] * 3
    for number in range(10, 10 + DRAM_CHAINS + 2):  # more than DRAM: the oldest leave, nobody waits
        assert disk.put(number) > 0
        disk.settle()
    assert disk.counter("demoted") == demoted
    assert disk.get(1) == load.CHAIN_BLOCKS  # its rows can be read all the while
    disk.recovers()
    deadline_s = time.monotonic() + 60
    number = 50
    while not disk.client.residency(disk.space, load.chain(number))[-1] & IN_NVME:
        assert time.monotonic() < deadline_s, "NVMe was never tried again"
        number += 1
        disk.put(number)
        disk.settle()
        time.sleep(1)
    disk.fill_dram_with_others()
    assert disk.get(number) == load.CHAIN_BLOCKS


def test_hanging_writes_do_not_hold_up_reads(disk: SickDisk) -> None:
    """While every write hangs, blocks that are on NVMe are still read from it."""
    disk.put(1)
    disk.settle()
    disk.fill_dram_with_others()
    disk.fails("s")
    for number in range(2, 8):
        disk.put(number)
    assert disk.client.residency(disk.space, load.chain(1))[-1] == IN_NVME
    assert disk.get(1) == load.CHAIN_BLOCKS
    disk.recovers()
    disk.settle()


def test_a_hanging_disk_costs_a_deadline_not_the_daemon(disk: SickDisk) -> None:
    """While reads hang, an acquire answers at its deadline, and lookups, puts and DRAM hits go on."""
    disk.put(1)
    disk.settle()
    disk.fill_dram_with_others()
    disk.fails("h")
    started_s = time.monotonic()
    assert disk.get(1, wait_s=0.5) < load.CHAIN_BLOCKS
    assert time.monotonic() - started_s < 5.0
    assert disk.put(2) > 0
    assert disk.get(2) > 0
    assert disk.client.lookup([disk.space], load.chain(2)) > 0
    disk.works_again()
    disk.settle()
    deadline = time.monotonic() + TIMEOUT_S
    while disk.get(1) < load.CHAIN_BLOCKS:  # a disk that was slow a moment ago is used again bit by bit
        assert time.monotonic() < deadline


def test_a_daemon_whose_disk_hangs_stops_and_its_successor_is_warm(
    place: Place, serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """SIGTERM ends a daemon whose I/O threads hang; what was in memory is there for the next one."""
    switch = tmp_path / "sick"
    daemon = serve(place, *place.with_nvme(), LD_PRELOAD=str(compiled(tmp_path)), SICK_DISK=str(switch))
    with Client(str(place.socket), timeout_s=20.0, label="test") as client:
        space = load.namespace(client)
        switch.write_text("d")
        assert client.put(space, load.chain(1), b"", [load.content(h) for h in load.chain(1)]) > 0
    begun_s = time.monotonic()
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGTERM)  # no flush
    daemon.process.wait(60)
    assert time.monotonic() - begun_s < 30
    assert "hangs; stopping as after a crash" in daemon.log()
    switch.unlink()
    serve(place, *place.with_nvme())
    with Client(str(place.socket), timeout_s=20.0, label="test") as client:
        into = [bytearray(load.RECORD_BYTES) for _ in load.chain(1)]
        assert client.get(load.namespace(client), load.chain(1), into, 5.0) == load.CHAIN_BLOCKS
        assert into[3] == load.content(load.chain(1)[3])


def test_a_dead_disk_costs_one_timeout_and_not_one_per_request(disk: SickDisk) -> None:
    """With reads and writes hanging one request waits for a stall; those after it, and new blocks, for nothing."""
    disk.put(1)
    disk.settle()
    disk.fill_dram_with_others()
    disk.fails("d")
    begun_s = time.monotonic()
    assert disk.get(1, wait_s=15.0) == 0
    assert STALL_S <= time.monotonic() - begun_s < 10.0  # and not the 15 s that the request would wait
    asked = disk.counter("refused_unavailable")
    for _ in range(20):
        assert disk.client.lookup([disk.space], load.chain(1)) == 0
        begun_s = time.monotonic()
        assert disk.get(1, wait_s=15.0) == 0
        assert time.monotonic() - begun_s < 10.0
    assert disk.breaker("nvme loads")["trips"] == 1
    assert disk.counter("refused_unavailable") == asked + 20
    disk.put(29)  # a device that nothing was read from is found out by a write
    disk.wait_until(disk.no_device_is_used)
    for number in range(30, 30 + DRAM_CHAINS + 2):  # more than DRAM: nobody waits for the disk to make room
        assert disk.put(number) == load.CHAIN_BLOCKS
    assert disk.get(31 + DRAM_CHAINS) == load.CHAIN_BLOCKS
    disk.works_again()
    disk.wait_until(lambda: disk.counter("promote_failed") == 0 and disk.get(1) == load.CHAIN_BLOCKS)
    disk.settle()
