"""All checks, in the order in which a person would ask. Each stands alone: one that fails is a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps

from kvstore.tools.doctor import accelerators, certificates, disks, memory, places, regions, service, software
from kvstore.tools.doctor.findings import Case, Finding, Status

Check = Callable[[Case], Iterator[Finding]]
OfDaemon = Callable[[Status], Iterator[Finding]]


def _answered(check: OfDaemon) -> Check:
    """Of what the daemon says of itself: nothing where none answered."""

    @wraps(check)
    def look(case: Case) -> Iterator[Finding]:
        return check(case.status) if case.status is not None else iter(())

    return look


CHECKS: tuple[Check, ...] = (
    software.versions, software.settings, software.clock,
    memory.memory, memory.huge_pages, memory.swap, memory.killed, memory.arenas,
    places.data_directory, places.socket, places.descriptors, places.web, certificates.certificates,
    disks.disks, accelerators.accelerators,
    *map(_answered, (service.problems, service.health, service.breakers, service.refusals, service.engines)),
    regions.region,
)  # fmt: skip


def examine(case: Case, checks: Iterable[Check] = CHECKS) -> Iterator[Finding]:
    """What each check finds, as it is found. Changes nothing, raises nothing."""
    for check in checks:
        try:
            yield from check(case)
        except Exception as error:  # noqa: BLE001 the others still have something to say
            said = str(error).splitlines()[:1] or [type(error).__name__]
            name = check.__name__.replace("_", " ")
            yield Finding(name, "note", f"could not be looked at: {said[0]}", "please report this")
