"""The heap gives back what was let go."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
from kvstore.daemon import heap
from benchmarks.bench.policy import _resident_bytes
kept = []
gone = []
for number in range(3000):  # every other one stays: no hole reaches the end of the heap
    gone.append(bytearray(100_000))
    kept.append(bytearray(1000))
before = _resident_bytes()
gone.clear()
let_go = _resident_bytes()
heap.give_back()
print(before - let_go, let_go - _resident_bytes())
"""


def test_memory_that_is_let_go_goes_back() -> None:
    """300 MB in pieces that are too small for pages of their own, with others in between that stay."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    at_once, given_back = map(int, done.stdout.split())
    if at_once > 200e6:
        pytest.skip("the C library gives everything back by itself")
    assert given_back > 100e6


FREEZE = """
import gc
from kvstore.daemon import heap
held = [[number] for number in range(100_000)]  # stands for what an index holds: lists are what is collected
heap.freeze()
print(len(gc.get_objects()), gc.get_threshold()[2])
"""


def test_what_is_there_is_not_searched_for_garbage() -> None:
    """After a freeze a collection has nothing to walk of a hundred thousand lists, and a full one never starts."""
    done = subprocess.run([sys.executable, "-c", FREEZE], capture_output=True, text=True, check=True)
    walked, full_rounds = map(int, done.stdout.split())
    assert walked < 1000 and full_rounds >= 1_000_000


AGE = """
import gc
from kvstore.daemon import heap
gc.disable()
held = [[number] for number in range(100_000)]
heap.age()
young = len(gc.get_objects(0)) + len(gc.get_objects(1))
print(young, len(held))
"""


def test_what_stays_is_walked_once_while_it_is_small() -> None:
    """A hundred thousand lists that stay are no longer young or middle-aged, so that no such collection walks them."""
    done = subprocess.run([sys.executable, "-c", AGE], capture_output=True, text=True, check=True)
    young, held = map(int, done.stdout.split())
    assert held == 100_000 and young < 1000
