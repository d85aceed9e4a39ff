"""A command that another process of ours has started, for somebody who is not here: `kvstore --child COMMAND …`.

    that process ── stdin: a pipe, never written ──▶ the command ── stdout: its document
                                                         ╰──────── stderr: how far it is, a line now and then; why it failed

It ends with that process, whose end is the end of the pipe, and at SIGTERM: both as at Control-C, so that what it has made
for itself is removed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from kvstore.units import count, format_bytes, printable

LINE_S = 0.5  # between two lines of progress
END_S = 2.0  # to end in good order, after its parent

is_one = False  # this process


def begin() -> None:
    """From now on it is one."""
    global is_one
    is_one = True
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def progress_lines(of_bytes: bool) -> Callable[[str, int, int], None]:
    """What bars are on a terminal."""
    words: Callable[[int], str] = format_bytes if of_bytes else count
    next_s = 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal next_s
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + LINE_S
            print(printable(f"{what}: {words(done)} of {words(total)}"), file=sys.stderr, flush=True)

    return show


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os.kill(os.getpid(), signal.SIGKILL)
