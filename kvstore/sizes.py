"""Byte counts as people write them: "64GiB" in, 68719476736 out, and back.

Binary units only (KiB = 1024 bytes): "GB" is refused and not silently read as GiB, since
the two differ by 7 % and a capacity that is off by that much is found out late.
"""

from __future__ import annotations

import re

from kvstore.constants import GIB, KIB, MIB, TIB

_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_DECIMAL = {
    "K": "KiB",
    "M": "MiB",
    "G": "GiB",
    "T": "TiB",
    "KB": "KiB",
    "MB": "MiB",
    "GB": "GiB",
    "TB": "TiB",
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: object) -> int:
    """Bytes of an int or of a string like "64GiB". Raises ValueError saying what is allowed."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError('not a size: allowed are bytes as a number, or a string like "64GiB"')
    number, unit = match.group(1), match.group(2).upper()
    if unit in _DECIMAL:
        raise ValueError(f"unit {match.group(2)!r} is ambiguous: write {_DECIMAL[unit]}")
    if unit not in _UNITS:
        raise ValueError(f"unknown unit {match.group(2)!r}: allowed are B, KiB, MiB, GiB, TiB")
    if "." not in number:
        return int(number) * _UNITS[unit]
    whole, fraction = number.split(".")
    divisor: int = 10 ** len(fraction)
    scaled, rest = divmod(int(whole + fraction) * _UNITS[unit], divisor)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return scaled


def exact_size(size_bytes: int) -> str:
    """The shortest text that parses back to the same number: 67108864 -> "64MiB"."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def short_size(size_bytes: float) -> str:
    """For reading, three digits: 1536 -> "1.5 KiB". Not exact."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return (
                f"{size_bytes / factor:.3g} {unit}"
                if size_bytes < 1000 * factor
                else f"{size_bytes / factor:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"
