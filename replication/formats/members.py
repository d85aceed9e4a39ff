"""Members of a folder, each read by itself: what one of them is takes nothing from the others.

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
from tiers.together import together

# Of a folder, in a row that the store failed for: the others wait for the next look.
MEMBERS_FAILED_MAX: Final = 3
MEMBERS_READ_MAX: Final = 16  # at a time: there may be thousands

T = TypeVar("T")

HEX_ID = re.compile(r"[0-9a-f]{32}")


class Members(NamedTuple, Generic[T]):
    """found: what could be read, in the order of names. unavailable: why some could not be read now, and may be later; "" if that is
    true of none. is_empty: nothing was listed."""

    found: list[tuple[ObjectInfo, T]]
    unavailable: str
    is_empty: bool

    @property
    def by_key(self) -> dict[str, T]:
        return {key_of(info): one for info, one in self.found}


def key_of(info: ObjectInfo) -> str:
    """Of a member as it is now: what is put there later has another one."""
    return f"{info.name} {info.e_tag}"


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

    async def answer(info: ObjectInfo) -> tuple[T] | Damaged | ObjectError:
        try:
            return (await read(info),)
        except (Damaged, ObjectError) as error:
            return error

    async for page in objects.list(folder):
        is_empty = is_empty and not page
        for info in page:
            if not is_name.fullmatch(info.name[len(folder) :]):
                bad.add(info.name)
                problems.note(info.name, "is no name that we give: left alone")
        new = [info for info in page if info.name not in bad and not is_known(info)]
        for at in range(0, len(new), MEMBERS_READ_MAX):
            if failures >= MEMBERS_FAILED_MAX:
                break
            some = new[at : at + MEMBERS_READ_MAX]
            for info, said in zip(some, await together(map(answer, some)), strict=True):
                if isinstance(said, tuple):
                    found.append((info, *said))
                    failures = 0
                elif not isinstance(said, ObjectMissing):  # it was removed just now
                    bad.add(info.name)
                    problems.note(info.name, str(said))
                    if isinstance(said, ObjectUnavailable):
                        unavailable, failures = str(said), failures + 1
    problems.keep(folder, bad)
    return Members(found, unavailable, is_empty)
