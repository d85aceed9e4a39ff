"""Deleting many objects, of which one may not be deleted: it takes no other one with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from tiers.errors import ObjectDamaged, ObjectRefused

REFUSED_MAX: Final = 64  # of so many in one call the place refuses, not an object


async def delete_each(
    delete: Callable[[Sequence[str]], Awaitable[None]], names: Sequence[str]
) -> dict[str, str]:
    """Delete what can be deleted, together if possible. Returns what could not be, and why. Raises ObjectUnavailable; of more than
    REFUSED_MAX the last refusal."""
    left: dict[str, str] = {}
    waiting = [names] if names else []
    while waiting:
        some = waiting.pop()
        try:
            await delete(some)
        except (ObjectDamaged, ObjectRefused) as error:
            if len(some) > 1:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]
                continue
            left[some[0]] = str(error)
            if len(left) > REFUSED_MAX:
                raise
    return left
