"""The heap: memory that nobody uses goes back to the system, and what stays is not searched for garbage.

The tables of the index are split and thrown away as it grows; what the C library keeps of them is 8 MB
for each million blocks, and more after a burst.
"""

from __future__ import annotations

import ctypes
import gc

GC_YOUNG_OBJECTS = 1000  # Python looks for cycles among the youngest objects after so many new ones
GC_MIDDLE_ROUNDS = 5  # of those rounds before it looks among the objects that stayed
GC_FULL_ROUNDS = 1_000_000  # of the middle rounds before it looks at everything: never
AGE_INTERVAL_S = 0.1  # between two times that what was made meanwhile counts as old


def give_back() -> None:
    """Takes a millisecond for a million blocks: not for the event loop. Nothing happens where the C library knows no way
    (it is not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def age() -> None:
    """Have what was made lately and is still there counted as old, every AGE_INTERVAL_S: a queue or a set that stays is walked
    while it is small, and never again. With ten million blocks the first such walk stopped the daemon for 13 ms."""
    gc.collect(1)


def freeze() -> None:
    """Have the garbage collector look at none of what is there now, and never at everything by itself.

    Before the index is filled, after it, and again when nobody is attached. Blocks hold no circles; what others
    make is found while it is young. A full collection over millions of blocks stops the daemon for 30 ms.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(GC_YOUNG_OBJECTS, GC_MIDDLE_ROUNDS, GC_FULL_ROUNDS)
