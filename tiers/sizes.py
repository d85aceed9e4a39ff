"""Sizes as people read them: "64GiB", which parses back, and "63.7 GiB", which is rounded."""

from __future__ import annotations

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def exact_bytes(size_bytes: int) -> str:
    """The shortest text that parses back to the same number: 67108864 -> "64MiB"."""
    for unit, factor in _UNITS:
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def format_bytes(size_bytes: float) -> str:
    """Three digits: 1536 -> "1.5 KiB"."""
    for unit, factor in _UNITS:
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
    return f"{size_bytes:.0f} B"
