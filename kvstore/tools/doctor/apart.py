"""A look that may hang, in a process of its own: whoever asked goes on without it after a while.

    work ─▶ fork ─▶ what it finds, a line of JSON each ─▶ a pipe ─▶ as it comes
                ╰─▶ nothing for so many seconds: killed, and not waited for

A disk that hangs stops whoever touches it in the kernel, where no signal reaches it: a thread would keep its process from
ending, so it is a process, which holds nothing of ours but the pipe. It goes when the disk answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

LOOK_S: Final = 5.0  # without a word: then it is given up

_AT_ONCE_BYTES = 1 << 16


class NoAnswer(Exception):
    """It did not come back, or ended before it was through."""


def apart(work: Callable[[], Iterable[Any]], within_s: float = LOOK_S) -> Iterator[Any]:
    """What `work` yields, each a value that JSON can have, as it comes. within_s: between two of them.

    Raises NoAnswer, and what went wrong in there as OSError.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, writing)
    os.close(writing)
    left = b""
    try:
        while more := _read(reading, within_s):
            *lines, left = (left + more).split(b"\n")
            for line in lines:
                said = msgspec.json.decode(line)
                if "failed" in said:
                    raise OSError(0, said["failed"])
                if "end" in said:
                    return
                yield said["value"]
        raise NoAnswer
    finally:
        os.close(reading)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            _reap(pid)


def _read(fd: int, within_s: float) -> bytes:
    """b"" at its end. Raises NoAnswer."""
    if not select.select([fd], [], [], within_s)[0]:
        raise NoAnswer
    return os.read(fd, _AT_ONCE_BYTES)


def _reap(pid: int) -> None:
    """Without waiting for one that cannot end: init does that."""
    give_up_s = time.monotonic() + 0.2
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < give_up_s:
        time.sleep(0.002)


def _child(work: Callable[[], Iterable[Any]], writing: int) -> None:
    """Never returns."""
    try:
        quiet = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(quiet, fd)
        os.closerange(3, writing)  # whoever reads our output waits for the end of all who have it
        os.closerange(writing + 1, min(1 << 16, os.sysconf("SC_OPEN_MAX")))
        os.setsid()
        try:
            for value in work():
                _say(writing, {"value": value})
            _say(writing, {"end": True})
        except Exception as error:  # noqa: BLE001 whoever asked says so
            text = f"{error}"
            if isinstance(error, OSError) and error.filename:
                text = f"{error.filename}: {error.strerror}"
            _say(writing, {"failed": text.splitlines()[0] if text else type(error).__name__})
    finally:
        os._exit(0)


def _say(fd: int, what: dict[str, Any]) -> None:
    data = msgspec.json.encode(what) + b"\n"
    while data:
        data = data[os.write(fd, data) :]
