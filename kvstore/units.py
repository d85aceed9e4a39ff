"""Quantities as people write and read them: bytes, times, counts, shares, money.

    parse_bytes("64GiB") -> 68719476736     exact_bytes -> "64GiB" (parses back)     format_bytes -> "64 GiB"
    parse_duration("36h") -> 129600.0       exact_duration -> "36 h"                 format_duration -> "36 h"
    parse_rate("100Gbps") -> 1.25e10        bytes a second                           format_rate -> "12.5 GB/s"

Rates have the units of data sheets, decimal ones: b is a bit, B a byte. Sizes have binary units only (KiB = 1024 bytes). "GB" is refused, not read as GiB: the two differ by 7 %, and a
capacity that is off by that much is found out late. What `format_…` returns is rounded, for people; programs
take the JSON. Beside them: text of others, without what could steer a terminal (`printable`, `harmless`).
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

from kvstore.constants import GIB, KIB, MIB, TIB
from tiers.sizes import exact_bytes, format_bytes

__all__ = [
    "NOTHING",
    "count",
    "exact_bytes",
    "exact_duration",
    "format_bytes",
    "format_duration",
    "format_rate",
    "format_time",
    "harmless",
    "money",
    "parse_bytes",
    "parse_duration",
    "parse_rate",
    "percent",
    "plural",
    "printable",
    "short_count",
]

NOTHING = "–"  # where a figure does not exist, as opposed to being 0
_NUMBER_UNIT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")
_BYTE_UNITS = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_BYTES_OF = {"": 1, "B": 1, **{name.upper(): factor for name, factor in _BYTE_UNITS}}
_SECONDS_OF = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}

_RATE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([kKMGT]?)(i?)([bB])(?:ps|/s)\s*")
_FACTORS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(text: object) -> int:
    """Bytes of an int or of a string like "64GiB". Raises ValueError saying what is allowed."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _NUMBER_UNIT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError('not a size: allowed are bytes as a number, or a string like "64GiB"')
    number, unit = match.group(1), match.group(2).upper()
    if unit in ("K", "M", "G", "T", "KB", "MB", "GB", "TB"):
        raise ValueError(f"unit {match.group(2)!r} is ambiguous: write {unit[0]}iB")
    if unit not in _BYTES_OF:
        raise ValueError(f"unknown unit {match.group(2)!r}: allowed are B, KiB, MiB, GiB, TiB")
    whole, _, fraction = number.partition(".")
    size_bytes, rest = divmod(int(whole + fraction) * _BYTES_OF[unit], 10 ** len(fraction))
    if rest:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size_bytes)


def parse_duration(text: str) -> float:
    """Seconds of "90", "90s", "15min", "36h" or "7d". Raises ValueError saying what is allowed."""
    match = _NUMBER_UNIT.fullmatch(text)
    if match is None or match.group(2) not in _SECONDS_OF:
        raise ValueError('not a time: allowed are seconds, or a number with s, min, h, d or w, like "36h"')
    return float(match.group(1)) * _SECONDS_OF[match.group(2)]


def parse_rate(text: str) -> float:
    """Bytes a second of "100Gbps" (bits), "7GBps", "7 GB/s" or "6.5GiB/s". Raises ValueError saying what is allowed."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(
            'not a rate: allowed are a number and a unit like "100Gbps" (bits), "7GBps" or "6.5GiB/s"'
        )
    number, factor, binary, unit = match.groups()
    rate = float(number) * float((1024 if binary else 1000) ** _FACTORS[factor])
    return rate / 8 if unit == "b" else rate


def format_rate(bytes_per_s: float) -> str:
    """Three digits, decimal: 1.25e10 -> "12.5 GB/s"."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= 0.9995 * factor:
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def exact_duration(seconds: float) -> str:
    """In the largest unit that leaves no rest: 5400 -> "90 min"."""
    for unit, factor in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= factor and seconds % factor == 0:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds:g} s"


def format_duration(seconds: float) -> str:
    """In the unit that suits, three digits: "0.25 s", "12 min", "3.4 h", "5.1 days"."""
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.3g} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.3g} h"
    days = seconds / 86_400
    return f"{days:.3g} days" if days < 100 else f"{count(days)} days"


def format_time(unix_s: float, with_seconds: bool = False) -> str:
    """A point in time, to the minute, in UTC: "21 Nov 2026 15:00"; or to the second."""
    at = datetime.fromtimestamp(unix_s, UTC)
    return f"{at.day} {at:%b %Y %H:%M:%S}" if with_seconds else f"{at.day} {at:%b %Y %H:%M}"


def count(number: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """(1, "block") -> "1 block"; (1234, "block") -> "1,234 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_count(number: float) -> str:
    """Three digits: 1234567 -> "1.23 M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.3g}"


def percent(ratio: float | None) -> str:
    """0.1234 -> "12.3 %". Never rounds something to nothing, nor almost all to all."""
    if ratio is None:
        return NOTHING
    if 0 < ratio < 0.0005:
        return "<0.1 %"
    if 0.9995 <= ratio < 1:
        return ">99.9 %"
    return f"{100 * ratio:.1f} %"


def money(amount: float | None, currency: str) -> str:
    """12.3456 -> "12.35 EUR"; below 1 at least two digits that count, large amounts without a fraction."""
    if amount is None:
        return NOTHING
    if abs(amount) >= 1000:
        return f"{count(amount)} {currency}"
    digits = 1 - math.floor(math.log10(abs(amount))) if amount else 0
    return f"{amount:,.{max(2, digits)}f} {currency}"


REPLACED = "\ufffd"
# Controls (C0 but for tab and line feed, DEL, C1), and what reorders or hides its neighbours: marks of direction, characters
# without a width, separators of lines and paragraphs, tags.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)


def printable(text: str) -> str:
    """A name that a client chose, on one line: without what could steer a terminal, or begin another line."""
    return "".join(char if char.isprintable() else REPLACED for char in text)


def harmless(text: str) -> str:
    """Text of several lines: line feeds and tabs stay."""
    return _HARMFUL.sub(REPLACED, text)
