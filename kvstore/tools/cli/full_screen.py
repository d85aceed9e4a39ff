"""The whole terminal for a while: rich draws, keys are read as they are typed, and everything is put back at the end.

    enter ─▶ draw … wait for a key, a little while ─▶ leave      however it ends: q, Control-C, a signal, an error

Control-Z puts the terminal back, too, and `fg` takes it again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from types import FrameType

from rich.console import Console, RenderableType
from rich.live import Live

RESIZE_S = 0.25  # how soon another size of the terminal is drawn for


class FullScreen:
    """Of this process's terminal. Made by `full_screen`."""

    def __init__(self, console: Console) -> None:
        self._live = Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._keys = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
        self._before = termios.tcgetattr(self._keys[0]) if self._keys else None

    def draw(self, what: RenderableType) -> None:
        self._live.update(what, refresh=True)

    def wait(self, timeout_s: float) -> str:
        """What was typed, as soon as something is; "" when the time is over, or when the size may be another one."""
        ready, _, _ = select.select(self._keys, [], [], max(0.0, min(timeout_s, RESIZE_S)))
        typed = os.read(ready[0], 1024) if ready else b""
        if ready and not typed:  # the other end of the terminal is gone
            self._keys = []
        return typed.decode(errors="replace")

    def enter(self) -> None:
        if self._keys:
            tty.setcbreak(self._keys[0], termios.TCSANOW)
        self._live.start()

    def leave(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self._live.stop()
        if self._keys and self._before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys[0], termios.TCSANOW, self._before)

    def suspend(self, number: int, _frame: FrameType | None) -> None:
        """Control-Z: stop as any other program does, and be back with `fg`."""
        self.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self.suspend)  # from here on we run again
        self.enter()


@contextlib.contextmanager
def full_screen(console: Console) -> Iterator[FullScreen]:
    """The terminal, until the block ends. SIGTERM, SIGHUP and SIGQUIT end it as Control-C does."""
    screen = FullScreen(console)

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, screen.suspend)
    try:
        screen.enter()
        yield screen
    finally:
        screen.leave()
        for number, handler in before.items():
            signal.signal(number, handler)
