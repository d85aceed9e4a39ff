"""The heap: memory that nobody uses goes back to the system.

The tables of the index are split and thrown away as it grows; what the C library keeps of them is 8 MB
for each million blocks, and more after a burst.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Takes a millisecond for a million blocks. Nothing happens where the C library knows no way (it is not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
