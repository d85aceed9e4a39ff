"""Deleting many objects, of which one may not be deleted: it takes no other one with it.

What was looked at for a while before it is deleted may be put again meanwhile, under the same name: whoever did so counts on it. So
`unchanged` is asked right before. Stores delete nothing on conditions, so some milliseconds remain in which that is not seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectDamaged, ObjectMissing, ObjectRefused, ObjectUnavailable
from tiers.together import together

REFUSED_MAX: Final = 64  # of so many in one call the place refuses, not an object
SAME_S: Final = 1.0  # lists say when an object was put more exactly than answers about one
AWAY_MAX: Final = 2  # the same, of those that do not answer one after the other


async def delete_each(
    delete: Callable[[Sequence[str]], Awaitable[None]], names: Sequence[str], away: set[str] | None = None
) -> dict[str, str]:
    """Delete what can be deleted, together if possible. Returns what could not be, and why. away: what did not answer since anything
    was deleted; None: nobody knows. Raises ObjectUnavailable where the place does not answer; of more than REFUSED_MAX the last refusal."""
    left: dict[str, str] = {}
    waiting = [names] if names else []
    while waiting:
        some = waiting.pop()
        try:
            await delete(some)
            if away is not None:
                away.clear()
        except (ObjectDamaged, ObjectRefused, ObjectUnavailable) as error:
            is_away = isinstance(error, ObjectUnavailable)
            if is_away and (away is None or len(away) > AWAY_MAX):
                raise
            if len(some) > 1:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]
                continue
            left[some[0]] = str(error)
            if away is not None and is_away:
                away.add(some[0])
            if len(left) > REFUSED_MAX or len(away or ()) > AWAY_MAX:
                raise
    return left


async def unchanged(objects: Objects, infos: Sequence[ObjectInfo]) -> list[str]:
    """The names of those that were not put again since. Raises ObjectUnavailable."""

    async def is_same(before: ObjectInfo) -> bool:
        try:
            info = await objects.head(before.name)
        except (ObjectMissing, ObjectDamaged, ObjectRefused):
            return True  # nothing that was put again
        return info.size_bytes == before.size_bytes and info.modified_s < before.modified_s + SAME_S

    same = await together(map(is_same, infos))
    return [info.name for info, is_one in zip(infos, same, strict=True) if is_one]
