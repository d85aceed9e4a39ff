"""Figures as people read them: counts, shares, spans of time, moments, money.

Byte counts have a module of their own, `kvstore.sizes`. Nothing here is meant to be parsed;
programs take the JSON.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

NOTHING = "–"  # where a figure does not exist, as opposed to being 0
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(number: float) -> str:
    """1234567 -> "1,234,567"."""
    return f"{number:,.0f}"


def short_count(number: float) -> str:
    """Three digits: 1234567 -> "1.23 M"."""
    for factor, unit in _STEPS:
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


def span(seconds: float) -> str:
    """How long something took, in the unit that suits: "0.25 s", "12 min", "3.4 h", "5.1 days"."""
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.3g} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.3g} h"
    return f"{count(seconds / 86_400) if seconds >= 8_640_000 else format(seconds / 86_400, '.3g')} days"


def moment(unix_s: float) -> str:
    """A point in time, to the minute, in UTC: "21 Nov 2026 15:00"."""
    at = datetime.fromtimestamp(unix_s, UTC)
    return f"{at.day} {at:%b %Y %H:%M}"


def money(amount: float | None, currency: str) -> str:
    """12.3456 -> "12.35 EUR"; below 1 at least two digits that count, large amounts without a fraction."""
    if amount is None:
        return NOTHING
    if abs(amount) >= 1000:
        return f"{count(amount)} {currency}"
    digits = 1 - math.floor(math.log10(abs(amount))) if amount else 0
    return f"{amount:,.{max(2, digits)}f} {currency}"
