"""kill -9 of a process that puts, replaces and deletes from several threads at once.

Run as a program this module is that process:

    python -m tests.tiers.test_nvme_kill DIRECTORY COUNT SEED
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tiers.factories import content, key, record
from tiers.base import Get
from tiers.checksum import digest
from tiers.nvme import NvmeTier, capacity_for

SLAB_BYTES = 1 << 20
SLABS = 3
RECORDS = 120  # more than fits: the tier is full most of the time
SIZES = (16_000, 33_000, 70_000)
THREADS = 3
ROUNDS = 16


def open_tier(directory: Path, count: int) -> NvmeTier:
    paths = [directory / f"disk-{n}" for n in range(count)]
    tier = NvmeTier(paths, capacity_for(SLABS, SLAB_BYTES), SLAB_BYTES)
    for _ in tier.scan_rows():
        continue
    return tier


def work(tier: NvmeTier, seed: int) -> None:
    """Put batches, replace, delete and reclaim for ever."""
    chance = random.Random(seed)
    while True:
        numbers = chance.sample(range(RECORDS), 4)
        tier.put([record(n, SIZES[n % 3], chance.randrange(3)) for n in numbers])
        tier.delete([key(n) for n in chance.sample(range(RECORDS), 3)])
        if chance.random() < 0.1:
            tier.delete(tier.reclaim(chance.choice(SIZES)))


def main() -> None:
    directory, count, seed = sys.argv[1:]
    tier = open_tier(Path(directory), int(count))
    print("ready", flush=True)
    for number in range(THREADS):
        threading.Thread(target=work, args=(tier, int(seed) * THREADS + number)).start()


def survivors(tier: NvmeTier) -> int:
    """How many records are hit; each must be one whole version of itself."""
    found = 0
    for number in range(RECORDS):
        size_bytes = SIZES[number % 3]
        into = bytearray(size_bytes)
        ((answer, checksum),) = tier.get([(key(number), memoryview(into))])
        assert answer in (Get.HIT, Get.MISS)
        if answer is Get.HIT:
            assert bytes(into) in [content(number, size_bytes, version) for version in range(3)]
            assert checksum == digest(into)
            found += 1
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [1, 3])
def test_kill_9_leaves_right_bytes_or_misses(tmp_path: Path, count: int) -> None:
    """After kill -9 at a random instant, again and again: hits are right, books balance, capacity holds."""
    chance = random.Random(count)
    found = 0
    for seed in range(ROUNDS if count == 1 else 4):
        command = [sys.executable, "-m", "tests.tiers.test_nvme_kill", str(tmp_path), str(count), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.005, 0.12))
            process.kill()
        tier = open_tier(tmp_path, count)
        assert tier.check() == []
        found += survivors(tier)
        stats = tier.stats()
        assert stats.records == len(list(tier.scan())) and stats.used_bytes <= stats.capacity_bytes
        slab_bytes = sum(path.stat().st_size for path in tmp_path.glob("disk-*/slab-*"))
        assert slab_bytes <= stats.capacity_bytes == count * SLABS * SLAB_BYTES
        assert tier.check() == []
        assert (tier.counters().corrupt, tier.counters().rows_damaged, tier.counters().rows_lost) == (0, 0, 0)
        tier.close()
    assert found > 20


if __name__ == "__main__":
    main()
