"""The block table answers as one dict would, and no dict of it ever grows large, whatever comes and goes."""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.block import Block
from kvstore.index.namespaces import NamespaceRegistry
from kvstore.index.table import TABLE_PART_ENTRIES, BlockTable
from tiers.namespace_spec import NamespaceSpec

PART_BYTES_MAX = sys.getsizeof(dict.fromkeys(range(TABLE_PART_ENTRIES[-1])))
SPACE = NamespaceRegistry().register(NamespaceSpec(bytes(16), 4096, 8))


def name(number: int) -> bytes:
    return number.to_bytes(8, "little")


def filled(*numbers: range) -> BlockTable:
    table = BlockTable()
    for number in (n for each in numbers for n in each):
        table.setdefault(name(number), Block(SPACE, name(number)))
    return table


def largest_bytes(table: BlockTable) -> int:
    return max(map(sys.getsizeof, table.dicts()))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9000)), max_size=12))
@settings(max_examples=25, deadline=None)
def test_it_answers_as_a_dict_does(steps: list[tuple[int, int]]) -> None:
    """Any number of blocks come, and leave from the oldest or the youngest on; now and then all of them."""
    table, model = BlockTable(), dict[bytes, Block]()
    order, number = deque[bytes](), 0
    for what, count in steps:
        for _ in range(count):
            if what <= 1:
                key = name(number)
                number += 1
                model[key] = table.setdefault(key, Block(SPACE, key))
                order.append(key)
            elif what <= 3 and order:
                key = order.popleft() if what == 2 else order.pop()
                table.delete_run([key])
                del model[key]
        if what == 4:
            table.clear()
            model.clear()
            order.clear()
        assert len(table) == len(model)
        assert bool(table) == bool(model)
        assert dict(table.walk_items()) == model
        assert sorted(map(id, table.values())) == sorted(map(id, model.values()))
        asked = [name(n) for n in range(max(0, number - 20_000), number + 10)]
        assert [table.get(key) for key in asked] == [model.get(key) for key in asked]
        assert [key in table for key in asked] == [key in model for key in asked]
        assert largest_bytes(table) <= PART_BYTES_MAX


def test_what_is_not_there_is_a_key_error() -> None:
    """As of a dict: asking for it, and letting it go."""
    table = filled(range(10))
    for act in (table.__getitem__, lambda key: table.delete_run([key])):
        with pytest.raises(KeyError):
            act(name(10))
    assert len(table) == 10


def test_the_memory_is_that_of_what_is_there() -> None:
    """A cache that is full and goes on for ten lifetimes of a block takes no more than at its first day."""
    held = 60_000
    table = filled(range(held))
    before_bytes = sum(map(sys.getsizeof, table.dicts()))
    for number in range(held, 11 * held):
        table.delete_run([name(number - held)])
        table.setdefault(name(number), Block(SPACE, name(number)))
    after_bytes = sum(map(sys.getsizeof, table.dicts()))
    assert len(table) == held
    assert after_bytes <= 1.1 * before_bytes
    for number in range(10 * held, 11 * held):
        table.delete_run([name(number)])
    assert sum(map(sys.getsizeof, table.dicts())) < before_bytes / 100


def test_a_part_is_large_enough_to_last() -> None:
    """Where a part was just tidied up or split, so many blocks come before it is again that each of them pays for
    a few entries that are moved."""
    table = filled(range(500_000))
    sizes = [len(blocks) for blocks in table.dicts()]
    assert max(sizes) <= TABLE_PART_ENTRIES[-1]
    assert min(sizes) >= TABLE_PART_ENTRIES[-1] / 6


def test_dicts_are_as_large_as_what_is_in_them() -> None:
    """After nine lifetimes of a block, whatever their number: most take no more places than they would if they
    were made anew."""
    for held in (20_000, 30_000, 45_000, 70_000):
        table = filled(range(held))
        for number in range(held, 10 * held):
            table.delete_run([name(number - held)])
            table.setdefault(name(number), Block(SPACE, name(number)))
        entries = [next(n for n in TABLE_PART_ENTRIES if len(blocks) <= n) for blocks in table.dicts()]
        sizes = [sys.getsizeof(dict.fromkeys(range(n))) for n in entries]
        assert sum(map(sys.getsizeof, table.dicts())) <= 1.7 * sum(sizes)


def test_no_collection_walks_it() -> None:
    """The dicts of millions of blocks are as invisible to the garbage collector as the blocks are."""
    table = filled(range(20_000))
    for number in range(0, 20_000, 3):
        table.delete_run([name(number)])
    for number in range(20_000, 40_000):
        table.setdefault(name(number), Block(SPACE, name(number)))
    assert not any(map(gc.is_tracked, table.dicts()))


@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans(), st.integers(1, 20_000)), max_size=6))
@settings(max_examples=25, deadline=None)
def test_a_walk_sees_all_that_stay(changes: list[tuple[int, bool, int]]) -> None:
    """Blocks come and go while somebody walks: none that was there all the time is missed."""
    table = filled(range(20_000))
    stay, coming = set(range(20_000)), 20_000
    seen = set[bytes]()
    due = sorted(changes, key=lambda change: change[0])
    for at, block in enumerate(table.walk()):
        seen.add(block.hash)
        while due and due[0][0] <= at:
            _, come, count = due.pop(0)
            if come:
                for number in range(coming, coming + count):
                    table.setdefault(name(number), Block(SPACE, name(number)))
                coming += count
            else:
                for number in sorted(stay)[:count]:
                    table.delete_run([name(number)])
                    stay.discard(number)
    assert {name(number) for number in stay} <= seen


def test_parts_do_not_all_split_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes fill all parts alike. Of a run of 512 blocks few make a part split; were parts full at one size, ten did."""
    table: BlockTable[int] = BlockTable()
    splits, split = [0], BlockTable._split

    def counted(self: BlockTable[int], part: Any, low: int) -> None:
        splits[-1] += 1
        split(self, part, low)

    monkeypatch.setattr(BlockTable, "_split", counted)
    draw = random.Random(1)
    for number in range(300_000):
        if number % 512 == 0:
            splits.append(0)
        table.setdefault(draw.getrandbits(60), number)  # type: ignore[arg-type]  # whose hash is the same in each process
    assert len(table) == 300_000
    assert max(splits) <= 6
    assert sum(splits) > 100
