"""Runs a program that ends with the process that asked for it, however that ended. A script, not to be imported for more
than its path:

    python -I -S tied.py PID PROGRAM ARGUMENT…     PID: of whoever asks, and whose thread starts this

The kernel kills this process when the thread that started it ends, and that stays so when it becomes the program. An
ordinary child would go on after kill -9: a copy that nobody waits for. Asking for it between fork and exec (preexec_fn) is
not safe in a process that has threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, words: list[str]) -> None:
    """Become the program. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() == parent:  # else it has ended already
        os.execv(words[0], words)  # noqa: S606 an argument list, and no shell


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
