"""What a process of ours that runs for long does first, and what it does about signals.

    begin() ─▶ output handed over (kvstore/output.py) ─▶ descriptors: as many as the system gives
           ╰▶ signals: those that have a meaning are handled, all others are named in the log and ignored

A signal that nobody expects would end the process without a word, and with it the cache of a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore import output
from kvstore.constants import DOOR_TOOLS_MAX, MIB
from kvstore.errors import StartError, TooFewDescriptors
from kvstore.units import format_bytes

DESCRIPTORS_MAX = 1 << 20  # that a process asks for; some systems give a thousand times as many
ADDRESSES_LEAST_BYTES = 256 * MIB  # with less, libraries fail here and there, in words of their own
DESCRIPTORS_LEAST = 32  # with fewer, libraries end the process without a word
DOOR_CONNECTIONS_LEAST = 4  # with descriptors for fewer, no daemon starts

log = logging.getLogger("kvstore.daemon.process")

# The kernel's own, those that end nothing, and those of a crash, which leave a traceback and a core.
_LEFT_ALONE: Final = frozenset(
    {
        *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGCHLD, signal.SIGURG),
        *(signal.SIGWINCH, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT),
        *(signal.SIGTERM, signal.SIGINT),
    }
)
# What is written to a pipe without a reader, or beyond a limit, is an error of that write; a terminal is no reason to stop.
_SILENT: Final = frozenset({signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU, signal.SIGTTIN})
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Signals:
    """What comes before the event loop runs is kept for it; `attach` says what has a meaning."""

    def __init__(self) -> None:
        self._came: list[int] = []

    def keep(self) -> None:
        """Nothing that comes from now on ends the process, but SIGTERM and SIGINT."""
        for number in signal.valid_signals() - _LEFT_ALONE:
            with contextlib.suppress(OSError, ValueError):  # two belong to the C library
                signal.signal(number, signal.SIG_IGN if number in _SILENT else self._keep)

    def attach(self, meant: Mapping[int, Callable[[], Any]]) -> None:
        """Handle these from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.valid_signals() - _LEFT_ALONE - _SILENT - {signal.SIGQUIT}) | meant.keys():
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                loop.add_signal_handler(number, meant.get(number) or self._ignored(number))
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # the stacks, each time
            faulthandler.register(signal.SIGQUIT, sys.stderr.fileno())
        for number in self._came:
            (meant.get(number) or self._ignored(number))()
        self._came.clear()

    def _keep(self, number: int, _frame: object) -> None:
        if number not in self._came:
            self._came.append(number)

    @staticmethod
    def _ignored(number: int) -> Callable[[], None]:
        what = signal.strsignal(number) or "of no name"
        said = f"signal {number} ({what}) means nothing here, and is ignored"  # a wording of each: none hides another

        def ignore() -> None:
            log.warning(said)
            # A flood fills the pipe that wakes a loop, and SIGTERM finds no room there.
            signal.signal(number, signal.SIG_IGN)

        return ignore


def begin() -> Signals:
    """Raises StartError where there are next to no descriptors or addresses, or not even a thread."""
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < ADDRESSES_LEAST_BYTES:
        least = f"{format_bytes(ADDRESSES_LEAST_BYTES)} are needed at least"
        raise StartError(f"too little memory{memory_limits_in_words()}; {least}")
    if (most := raise_descriptors()) < DESCRIPTORS_LEAST:
        raise TooFewDescriptors(_too_few_descriptors(most))
    try:
        output.hand_over()
    except RuntimeError as error:
        raise StartError(too_few_threads()) from error
    faulthandler.enable(sys.stderr.fileno())
    logging.captureWarnings(capture=True)
    signals = Signals()
    signals.keep()
    return signals


def raise_descriptors() -> int:
    """As many as may be had without asking anybody; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_MAX)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft
    return wanted


def connections_room(kept: int) -> int:
    """How many connections this process has descriptors for. kept: of those that are free now, for other things.

    Raises StartError where that is next to none.
    """
    most = raise_descriptors()
    free = most - len(os.listdir("/proc/self/fd"))
    room = (max(free - kept, free // 2) - DOOR_TOOLS_MAX) // 2  # a socket, and a lock of its own for a writer
    if room < DOOR_CONNECTIONS_LEAST:
        raise TooFewDescriptors(_too_few_descriptors(most))
    return room


def _too_few_descriptors(most: int) -> str:
    return f"this process may have {most} open files, which is too few; ulimit -n or LimitNOFILE allows more"


def require_threads(count: int) -> None:
    """Raises StartError where so many more threads cannot run at once: some libraries end the process then, without a word."""
    stop = threading.Event()
    started = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=stop.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise StartError(too_few_threads(count, len(started))) from error
    finally:
        stop.set()
        for thread in started:
            thread.join()


def too_few_threads(wanted: int = 1, had: int = 0) -> str:
    """One line, with the limits that there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [] if soft == resource.RLIM_INFINITY else [f"{soft} for this user (ulimit -u, LimitNPROC)"]
    with contextlib.suppress(OSError, IndexError):
        group = Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition(":")[2].lstrip("/")
        limits.append(f"{(_CGROUPS / group / 'pids.max').read_text().strip()} in this cgroup (TasksMax)")
    said = f"; the limits are {' and '.join(limits)}" if limits else ""
    return f"too few threads: {wanted} are needed, and the system gives {had}{said}{memory_limits_in_words()}"


def memory_limits_in_words() -> str:
    """Those that a shell or a unit sets, for the end of a line; "" without any."""
    kinds = {"RLIMIT_AS": "ulimit -v, LimitAS", "RLIMIT_DATA": "ulimit -d, LimitDATA"}
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in kinds}
    said = [
        f"{kinds[name]}: {limit} bytes" for name, limit in soft.items() if limit != resource.RLIM_INFINITY
    ]
    return f"; memory is limited ({'; '.join(said)})" if said else ""
