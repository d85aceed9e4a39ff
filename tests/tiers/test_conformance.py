"""What every tier promises, whatever it is made of."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.tiers.factories import CAPACITY_BYTES, SLAB_BYTES, Factory, content, key, record
from tests.tiers.filler import RECORDS, SIZES
from tiers.base import Get, Put, Tier
from tiers.checksum import digest
from tiers.errors import RecordSizeError
from tiers.slots import slot_bytes_for

SIZE = 50_000


def read(tier: Tier, number: int, size_bytes: int = SIZE) -> tuple[Get, bytes]:
    into = bytearray(size_bytes)
    ((answer, checksum),) = tier.get([(key(number), memoryview(into))])
    assert checksum == (digest(into) if answer is Get.HIT else b"")
    return answer, bytes(into)


def fill(tier: Tier, size_bytes: int) -> int:
    """Put records until there is no room; answers how many went in."""
    count = 0
    while tier.put([record(count, size_bytes)]) == [Put.STORED]:
        count += 1
    return count


@pytest.fixture
def holding(factory: Factory, tier: Tier) -> Tier:
    if not factory.holds:
        pytest.skip("this tier holds nothing")
    return tier


def test_null_answers_without_holding(factory: Factory, tier: Tier) -> None:
    """A tier without capacity refuses every put and misses every get."""
    if factory.holds:
        assert tier.stats().capacity_bytes > 0
        return
    assert tier.put([record(0, SIZE)]) == [Put.NO_ROOM]
    assert read(tier, 0)[0] is Get.MISS
    assert (list(tier.scan()), tier.delete([key(0)]), tier.reclaim(SIZE)) == ([], 0, [])


@pytest.mark.parametrize("size_bytes", [1, 4095, 4096, 4097, SIZE, SLAB_BYTES])
def test_get_answers_what_was_put(holding: Tier, size_bytes: int) -> None:
    """A get answers exactly the bytes that were put, for any size a slot can have."""
    assert holding.put([record(0, size_bytes)]) == [Put.STORED]
    assert read(holding, 0, size_bytes) == (Get.HIT, content(0, size_bytes))


def test_batches_answer_in_order(holding: Tier) -> None:
    """A batch gets one answer per item, in the order asked."""
    assert holding.put([record(n, SIZE) for n in (0, 2)]) == [Put.STORED, Put.STORED]
    into = [bytearray(SIZE) for _ in range(3)]
    answers = holding.get([(key(n), memoryview(view)) for n, view in enumerate(into)])
    assert [answer for answer, _ in answers] == [Get.HIT, Get.MISS, Get.HIT]
    assert (bytes(into[0]), bytes(into[2])) == (content(0, SIZE), content(2, SIZE))


def test_put_replaces(holding: Tier) -> None:
    """Putting a held key replaces its bytes, also with another size, and counts it once."""
    holding.put([record(0, SIZE)])
    assert holding.put([record(0, SIZE, version=1)]) == [Put.STORED]
    assert read(holding, 0) == (Get.HIT, content(0, SIZE, version=1))
    assert holding.put([record(0, 9_000, version=2)]) == [Put.STORED]
    assert read(holding, 0, 9_000) == (Get.HIT, content(0, 9_000, version=2))
    assert holding.stats().records == 1


def test_replacing_works_when_full(holding: Tier) -> None:
    """A full tier still replaces a record by one of the same size."""
    fill(holding, SIZE)
    assert holding.put([record(0, SIZE, version=1)]) == [Put.STORED]
    assert read(holding, 0) == (Get.HIT, content(0, SIZE, version=1))


def test_wrong_length_is_a_miss(holding: Tier) -> None:
    """A view of another length than the record is a miss and does not cost the record."""
    holding.put([record(0, SIZE)])
    assert read(holding, 0, SIZE - 1)[0] is Get.MISS
    assert read(holding, 0)[0] is Get.HIT


@pytest.mark.parametrize("size_bytes", [0, CAPACITY_BYTES + 1])
def test_impossible_sizes_are_refused(holding: Tier, size_bytes: int) -> None:
    """A record that no slot can hold raises, and nothing of its batch is stored."""
    with pytest.raises(RecordSizeError, match=str(size_bytes)):
        holding.put([record(1, SIZE), record(0, size_bytes)])
    assert holding.stats().records == 0


def test_capacity_is_never_exceeded(holding: Tier) -> None:
    """A tier fills to its capacity, says so, and has room again after a delete."""
    count = fill(holding, SIZE)
    stats = holding.stats()
    assert stats.records == count and 0.9 * stats.capacity_bytes < stats.used_bytes <= stats.capacity_bytes
    assert holding.delete([key(0), key(count + 5)]) == 1
    assert holding.put([record(count, SIZE)]) == [Put.STORED]
    assert holding.check() == []


def test_used_and_free_make_total(holding: Tier) -> None:
    """The bytes and slots of every class add up at any fill."""
    for number, size_bytes in enumerate((1, SIZE, 300_000, SIZE, 1)):
        holding.put([record(number, size_bytes)])
        stats = holding.stats()
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
        if stats.classes:
            assert sum(entry.used * entry.slot_bytes for entry in stats.classes) == stats.used_bytes
            assert sum(entry.used for entry in stats.classes) == stats.records


@pytest.mark.parametrize("size_bytes", [1, 5000, 20_000])
def test_a_record_takes_the_slot_that_is_told(holding: Tier, size_bytes: int) -> None:
    """Whole slots, and none smaller than the tier's smallest."""
    holding.put([record(0, size_bytes)])
    assert holding.stats().used_bytes == max(slot_bytes_for(size_bytes), holding.slot_bytes_min)


def test_delete_forgets(holding: Tier) -> None:
    """A delete forgets all it was asked to, or raises: its keys miss, their bytes are free, again it counts nothing."""
    holding.put([record(0, SIZE), record(1, SIZE)])
    assert holding.delete([key(0), key(0), key(1)]) == 2
    assert holding.delete([key(0), key(1)]) == 0
    assert read(holding, 0)[0] is Get.MISS
    assert (holding.stats().used_bytes, holding.stats().records) == (0, 0)


def test_scan_lists_what_is_held(holding: Tier) -> None:
    """A scan answers the full record of every held key."""
    records = [record(n, SIZE) for n in range(5)]
    holding.put(records)
    holding.delete([key(3)])
    expected = {item.key: item for item, _ in records if item.key != key(3)}
    assert {item.key: item for item in holding.scan()} == expected


def test_scan_by_key_answers_only_those(holding: Tier) -> None:
    """A scan with keys answers the records held under them, and no others."""
    records = [record(n, SIZE)[0] for n in range(4)]
    holding.put([record(n, SIZE) for n in range(4)])
    assert {item.key: item for item in holding.scan([key(3), key(9), key(1)])} == {
        item.key: item for item in (records[1], records[3])
    }
    assert list(holding.scan([])) == []


def test_wrong_bytes_are_not_a_hit(holding: Tier) -> None:
    """Bytes that do not match their checksum are reported once as corrupt, then missed."""
    item, _ = record(0, SIZE)
    holding.put([(item, memoryview(content(1, SIZE)))])
    assert read(holding, 0)[0] is Get.CORRUPT
    assert read(holding, 0)[0] is Get.MISS
    assert holding.stats().records == 0


def test_reclaim_frees_a_slab(factory: Factory, holding: Tier) -> None:
    """Deleting what reclaim names makes room for a record of another size."""
    if not factory.slab_bytes:
        pytest.skip("this tier has no slabs")
    assert holding.reclaim(SIZE) == []
    fill(holding, SIZE)
    assert holding.put([record(1000, 300_000)]) == [Put.NO_ROOM]
    keys = holding.reclaim(300_000)
    assert 0 < len(keys) < holding.stats().records
    assert holding.delete(keys) == len(keys)
    assert holding.put([record(1000, 300_000)]) == [Put.STORED]


def test_threads_never_see_mixed_bytes(holding: Tier) -> None:
    """Readers beside a writer get one whole version or a miss, never a mixture."""
    stop, wrong = threading.Event(), []

    def reading() -> None:
        into = memoryview(bytearray(SIZE))
        while not stop.is_set():
            for number in range(4):
                ((answer, _),) = holding.get([(key(number), into)])
                if answer is Get.HIT and bytes(into[:16]) * (SIZE // 16) != bytes(into[: SIZE // 16 * 16]):
                    wrong.append("mixed")
                if answer not in (Get.HIT, Get.MISS):
                    wrong.append(answer.value)

    threads = [threading.Thread(target=reading) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(150):
        holding.put([record(version % 4, SIZE, version)])
        if version % 5 == 0:
            holding.delete([key(version % 3)])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_reopening_keeps_records(factory: Factory, directory: Path) -> None:
    """What was put is hit again after a clean close and reopen, and a close may be repeated."""
    if not factory.survives:
        pytest.skip("this tier ends with its process")
    tier = factory.open_ready(directory)
    tier.put([record(n, SIZE) for n in range(6)])
    tier.delete([key(2)])
    before = tier.stats()
    tier.close()
    tier.close()
    again = factory.open_ready(directory)
    assert [read(again, n)[0] for n in range(6)] == [Get.HIT] * 2 + [Get.MISS] + [Get.HIT] * 3
    assert again.stats() == before and again.check() == []
    again.close()


def test_damaged_bytes_are_corrupt(factory: Factory, directory: Path) -> None:
    """Bytes damaged while the tier was closed come back as corrupt, never as a hit."""
    if factory.damage is None:
        pytest.skip("nothing of this tier can be damaged from outside")
    tier = factory.open_ready(directory)
    tier.put([record(n, SIZE) for n in range(4)])
    tier.close()
    factory.damage(directory)
    again = factory.open_ready(directory)
    assert [read(again, n)[0] for n in range(4)] == [Get.CORRUPT] * 4
    assert again.stats().records == 0 and again.check() == []
    again.close()


@pytest.mark.timeout(120)
def test_kill_9_keeps_what_was_acknowledged(factory: Factory, directory: Path) -> None:
    """After kill -9 at any instant, every acknowledged record is hit with the right bytes."""
    if not factory.survives:
        pytest.skip("this tier ends with its process")
    held: dict[int, int] = {}
    for seed in range(4):
        command = [sys.executable, "-m", "tests.tiers.filler", factory.name, str(directory), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.05 + 0.037 * seed)
            process.kill()
            lines = process.stdout.read().splitlines(keepends=True)
        assert len(lines) > 10
        for line in (line for line in lines if line.endswith("\n")):
            if line.startswith("-"):
                held.pop(int(line[1:]), None)
            else:
                acknowledged, its_version = line[1:].split()
                held[int(acknowledged)] = int(its_version)
        tier = factory.open_ready(directory)
        for number, version in held.items():
            size_bytes = SIZES[number % 3]
            assert read(tier, number, size_bytes) == (Get.HIT, content(number, size_bytes, version))
        answers = {read(tier, number, SIZES[number % 3])[0] for number in range(RECORDS)}
        assert answers <= {Get.HIT, Get.MISS} and tier.check() == []
        tier.close()
