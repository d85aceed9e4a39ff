"""What a daemon cannot do without, and others may take away: memory, and certificates that are still good.

    limits of the machine and of cgroups │ the arena │ certificates of its doors ── looked at by an I/O thread ──▶ problems

A file system that hangs holds up nothing but the look itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from kvstore.daemon.config.config import Config
from kvstore.io_pool import Io
from kvstore.security.tls import Flaw, TlsError, flaw_of, read_pem
from kvstore.security.watched import Watched
from kvstore.units import format_bytes
from replication.problems import Level, Problem
from tiers.dram import memory_limits

LOOK_S: Final = 5.0  # between two looks
CERTIFICATES_S: Final = 30.0  # between two looks at certificates that have not changed: each is a handshake
SHORT_BYTES: Final = 64 << 20  # free: with less the kernel may kill somebody
CALM_BYTES: Final = 96 << 20  # … until so much is
CERTIFICATE_FIX: Final = "put a new one in its place: it is read without a restart"
_MEMORY_FIX: Final = "lower dram.capacity_bytes, or give it more: the kernel kills who takes the rest"


class Arena(Protocol):
    """As much as is looked at."""

    is_short: bool

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def backed_bytes(self) -> int: ...


class Surroundings:
    """Of one daemon."""

    def __init__(
        self,
        config: Config,
        arena: Arena,
        io: Io,
        clock: Callable[[], float] = time.monotonic,
        limits: Callable[[], list[memory_limits.Limit]] = memory_limits.limits,
    ) -> None:
        is_served = config.web.listen and config.web_tls is not None
        self._files = config.security.tls_files if config.grpc.listen or is_served else None
        self._watched = Watched(self._files or ())
        self._arena = arena
        self._io = io
        self._clock = clock
        self._limits = limits
        self._is_looking = False
        self._look_at_s = self._certificates_at_s = float("-inf")
        self._seen: tuple[Problem, ...] = ()
        self._flaw: Flaw | None = None  # of the certificates

    def look(self) -> None:
        """Have it looked after; returns at once."""
        now_s = self._clock()
        if not self._is_looking and now_s >= self._look_at_s:
            self._is_looking, self._look_at_s = True, now_s + LOOK_S
            self._io.submit(self._look, self._saw, failed=self._seen)

    def wrong(self) -> Iterator[Problem]:
        arena = self._arena
        if arena.is_short:
            share = f"{format_bytes(arena.backed_bytes)} of its {format_bytes(arena.capacity_bytes)}"
            text = f"there is memory for {share} only; it asks again every 10 s"
            yield Problem("memory", "arena", text, _MEMORY_FIX, is_logged=True)
        yield from self._seen

    def _saw(self, seen: tuple[Problem, ...]) -> None:
        self._is_looking, self._seen = False, seen

    def _look(self) -> tuple[Problem, ...]:
        """In an I/O thread."""
        return (*self._short(), *self._refused())

    def _short(self) -> Iterator[Problem]:
        was_short = {problem.subject for problem in self._seen if problem.kind == "memory"}
        for limit in self._limits():
            if limit.free_bytes < (CALM_BYTES if limit.what in was_short else SHORT_BYTES):
                text = f"{format_bytes(limit.free_bytes)} of {format_bytes(limit.limit_bytes)} are free"
                yield Problem("memory", limit.what, text, _MEMORY_FIX, "warning")

    def _refused(self) -> Iterator[Problem]:
        files, now_s = self._files, self._clock()
        if files is None:
            return
        if self._watched.has_changed() or now_s >= self._certificates_at_s:
            self._certificates_at_s = now_s + CERTIFICATES_S
            try:
                self._flaw = flaw_of(files, *read_pem(files))
            except TlsError as error:
                self._flaw = Flaw(
                    files.certificate, f"{error}; those that were read before stay in use", True
                )
        if flaw := self._flaw:
            level: Level = "problem" if flaw.is_refused else "warning"
            yield Problem("certificate", str(flaw.file), flaw.text, CERTIFICATE_FIX, level)
