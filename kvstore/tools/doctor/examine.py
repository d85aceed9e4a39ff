"""All checks, in the order in which a person would ask. Each stands alone: one that fails, or hangs, is a finding.

What touches a file, a device or a bucket runs in a process of its own, so that nothing of the machine can hold up the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import wraps

from kvstore.tools.doctor import accelerators, certificates, disks, memory, places, regions, service, software
from kvstore.tools.doctor.apart import LOOK_S, NoAnswer, apart
from kvstore.tools.doctor.findings import Case, Finding, Status

Check = Callable[[Case], Iterator[Finding]]
OfDaemon = Callable[[Status], Iterator[Finding]]


def _answered(check: OfDaemon) -> Check:
    """Of what the daemon says of itself: nothing where none answered."""

    @wraps(check)
    def look(case: Case) -> Iterator[Finding]:
        return check(case.status) if case.status is not None else iter(())

    return look


def _apart(check: Check, within_s: float = LOOK_S) -> Check:
    """The same in a process of its own, which is given up where it says nothing for so long."""

    @wraps(check)
    def look(case: Case) -> Iterator[Finding]:
        try:
            for said in apart(lambda: map(asdict, check(case)), within_s):
                yield Finding(**said)
        except NoAnswer:
            found = f"does not answer: nothing was heard for {within_s:.0f} s"
            yield Finding(_name(check), "problem", found, "a disk, a mount or a driver hangs: look at dmesg")

    return look


def _name(check: Callable[..., object]) -> str:
    return check.__name__.replace("_", " ")


DRIVER_S = 20.0  # for the first word of a driver of many accelerators
BUCKETS_S = 60.0  # each question to one has a limit of its own

CHECKS: tuple[Check, ...] = (
    software.versions, software.settings,
    *map(_apart, (
        memory.memory, memory.huge_pages, memory.swap, memory.killed, memory.arenas,
        places.data_directory, places.socket, places.descriptors, places.web, certificates.certificates,
    )),
    disks.disks, _apart(accelerators.accelerators, DRIVER_S),
    *map(_answered, (service.problems, service.damage, service.refusals, service.engines)),
    _apart(regions.region, BUCKETS_S),
)  # fmt: skip


def examine(case: Case, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """What each check finds, as it is found. Changes nothing, raises nothing."""
    for check in checks:
        try:
            yield from check(case)
        except Exception as error:  # noqa: BLE001 the others still have something to say
            said = str(getattr(error, "strerror", "") or error).splitlines()[:1] or [type(error).__name__]
            yield Finding(_name(check), "note", f"could not be looked at: {said[0]}", "please report this")
