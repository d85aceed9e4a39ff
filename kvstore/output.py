"""What a process that runs for long says: written by a thread of its own, so that nobody waits for whoever reads it.

    any thread ── write ──▶ what waits, bounded: the oldest lines go, and are counted ──▶ a thread ──▶ stdout, stderr

A pipe that is not read, a terminal that is stopped and a collector that hangs stop no engine and no stop. `sys.stdout` and
`sys.stderr` themselves are replaced, so this holds for all that Python writes: logs, warnings, tracebacks. What libraries
write past them goes to a descriptor that does not block, either. The order is kept; where lines are missing, one says so.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import stat
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from kvstore.constants import MIB

OUTPUT_WAITING_BYTES_MAX = 4 * MIB  # of log lines that nobody takes; beyond it the oldest go
OUTPUT_END_S = 1.0  # at the end of a process, for what was not written yet


def hand_over() -> None:
    """From now on this process waits for no reader of its stdout and stderr; at its end, for a moment. Idempotent."""
    fd = 0
    while fd <= 2:  # one that is closed would be the number of the next file that is opened
        fd = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(handed_over(stream), HandedOver):
            continue
        stream.flush()
        if hasattr(stream, "below"):
            stream.below = HandedOver(stream.fileno())
        else:
            setattr(sys, name, HandedOver(stream.fileno()))
    sys.excepthook = partial(_report, handed_over(sys.stderr))  # the interpreter's last words, too


def handed_over(stream: Any) -> Any:
    """What a stream writes to, if something is wrapped around it that makes its text harmless."""
    return getattr(stream, "below", stream)


def _report(
    stream: Any, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    traceback.print_exception(kind, error, trace, file=stream)


class HandedOver(io.TextIOBase):
    """A text stream in front of a descriptor. `write` returns at once, whatever becomes of it.

    note: makes the line that says how many are missing.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, waiting_bytes_max: int = OUTPUT_WAITING_BYTES_MAX) -> None:
        self.note: Callable[[int], str] = "kvstore: {} lines were lost here: nobody took them".format
        self._fd = fd
        self._bytes_max = waiting_bytes_max
        self._changed = (
            threading.Condition()
        )  # of the thread that holds it, too: a finaliser may warn meanwhile
        self._waiting = deque[bytes]()
        self._waiting_bytes = 0
        self._lost = 0
        self._is_writing = False
        _never_block(fd)
        threading.Thread(target=self._run, name=f"kvstore-output-{fd}", daemon=True).start()
        atexit.register(self.end, OUTPUT_END_S)

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, self.errors)
        with self._changed:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            while self._waiting_bytes > self._bytes_max and len(self._waiting) > 1:
                oldest = self._waiting.popleft()
                self._waiting_bytes -= len(oldest)
                self._lost += oldest.count(b"\n")
            self._changed.notify_all()
        return len(text)

    def end(self, within_s: float) -> None:
        """Wait so long at most for what was handed over to be written."""
        give_up_s = time.monotonic() + within_s
        with self._changed:
            while self._waiting or self._is_writing:
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                while not self._waiting:
                    self._changed.wait()
                lost, self._lost = self._lost, 0
                content = b"".join(self._waiting)
                self._waiting.clear()
                self._waiting_bytes = 0
                self._is_writing = True
            if lost:
                content = f"{self.note(lost)}\n".encode(self.encoding, self.errors) + content
            try:
                self._write(memoryview(content))
            except OSError:  # a full disk, a reader that went: there may be room for the next ones
                with self._changed:
                    self._lost += lost + content.count(b"\n") - bool(lost)

    def _write(self, content: memoryview) -> None:
        room = select.poll()
        room.register(self._fd, select.POLLOUT)
        while content:
            try:
                content = content[os.write(self._fd, content) :]
            except BlockingIOError:
                room.poll()


def _never_block(fd: int) -> None:
    """Have writes to this descriptor fail where they would wait, without changing what others share with us."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return
    try:
        ours = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:  # a socket, such as journald's, or a pipe of another user
        if stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind):
            with contextlib.suppress(OSError):
                os.set_blocking(fd, False)
        return
    os.dup2(ours, fd)
    os.close(ours)
