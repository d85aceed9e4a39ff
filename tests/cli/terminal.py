"""Running the real command on a terminal of its own, so many characters wide."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.running import TIMEOUT_S, environment

STYLE = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(
    columns: int, *words: str | Path, answer: str = "", term: str = "xterm", with_styles: bool = False
) -> tuple[int, str]:
    """The exit code, and all that was shown. answer: what is typed. term: what the terminal is called."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environ = environment(TERM=term)
        environ.pop("COLUMNS", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *map(str, words)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
        )
        os.close(theirs)
        os.write(ours, answer.encode())
        shown = b""
        while piece := _read(ours):
            shown += piece
        text = shown.decode().replace("\r\n", "\n")
        return process.wait(TIMEOUT_S), text if with_styles else STYLE.sub("", text)
    finally:
        os.close(ours)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side is closed
        return b""
