"""Members of a folder, read one by one: what one of them is takes nothing from the others.

    LIST ─▶ a name of ours? ─▶ known already? ─▶ read ─▶ found
              │ no                                 ╰▶ damaged, refused, not to be had now ─▶ noted, and on to the next
              ╰▶ noted, and on to the next

A store that fails for MEMBERS_FAILED_MAX in a row is not asked for the rest: each would take its whole deadline.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final, Generic, NamedTuple, TypeVar

from replication.errors import Damaged
from replication.problems import Problems
from tiers.bucket.objects import ObjectInfo, Objects
from tiers.errors import ObjectError, ObjectMissing, ObjectUnavailable

# Of a folder, in a row that the store failed for: the others wait for the next look.
MEMBERS_FAILED_MAX: Final = 3

T = TypeVar("T")

HEX_ID = re.compile(r"[0-9a-f]{32}")


class Members(NamedTuple, Generic[T]):
    """found: what could be read, in the order of names. unavailable: why some could not be read now, and may be later; "" if that is
    true of none. is_empty: nothing was listed."""

    found: list[tuple[ObjectInfo, T]]
    unavailable: str
    is_empty: bool


async def read_members(
    objects: Objects,
    folder: str,
    is_name: re.Pattern[str],
    read: Callable[[ObjectInfo], Awaitable[T]],
    problems: Problems,
    is_known: Callable[[ObjectInfo], bool] = lambda info: False,
) -> Members[T]:
    """What is in a folder ("a/"). is_name: of what is behind it. read: raises Damaged, ObjectError. Raises ObjectError where there
    is no list."""
    found: list[tuple[ObjectInfo, T]] = []
    bad: set[str] = set()
    unavailable, failures, is_empty = "", 0, True
    async for page in objects.list(folder):
        for info in page:
            is_empty = False
            if not is_name.fullmatch(info.name[len(folder) :]):
                bad.add(info.name)
                problems.note(info.name, "is no name that we give: left alone")
            elif not is_known(info) and failures < MEMBERS_FAILED_MAX:
                try:
                    found.append((info, await read(info)))
                    failures = 0
                except ObjectMissing:
                    continue  # it was removed just now
                except (Damaged, ObjectError) as error:
                    bad.add(info.name)
                    problems.note(info.name, str(error))
                    if isinstance(error, ObjectUnavailable):
                        unavailable, failures = str(error), failures + 1
    problems.keep(folder, bad)
    return Members(found, unavailable, is_empty)
