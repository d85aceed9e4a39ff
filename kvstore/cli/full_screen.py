"""The whole terminal for a while: the alternate screen, keys as they are typed, and everything put back at the end.

    enter ─▶ draw … wait for a key, a resize, the time ─▶ leave      however it ends: q, Control-C, a signal, an error

Control-Z puts the terminal back, too, and `fg` takes it again.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType

from kvstore.cli.streams import drawing

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"


class FullScreen:
    """Of this process's terminal. Made by `full_screen`."""

    def __init__(self) -> None:
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before = termios.tcgetattr(self._keys) if self._keys >= 0 else None
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows, as they are now."""
        return (
            os.get_terminal_size(sys.stdout.fileno()) if sys.stdout.isatty() else shutil.get_terminal_size()
        )

    def draw(self, text: str) -> None:
        screen = drawing(sys.stdout)
        screen.write(text)
        screen.flush()

    def wait(self, timeout_s: float) -> str:
        """What was typed, as soon as something is; "" after a change of size or when the time is over."""
        watched = [self._woken] + ([self._keys] if self._keys >= 0 else [])
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._keys not in ready:
            return ""
        typed = os.read(self._keys, 1024)
        if not typed:  # nobody types any more
            self._keys = -1
        return typed.decode(errors="replace")

    def enter(self) -> None:
        if self._before is not None:
            tty.setcbreak(self._keys, termios.TCSANOW)
        self.draw(ENTER)

    def leave(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self.draw(LEAVE)
        if self._before is not None and self._keys >= 0:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._before)

    def wake(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """The size has changed."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"!")

    def suspend(self, number: int, _frame: FrameType | None) -> None:
        """Control-Z: stop as any other program does, and be back with `fg`."""
        self.leave()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self.suspend)  # from here on we run again
        self.enter()
        self.wake()

    def close(self) -> None:
        os.close(self._woken)
        os.close(self._wake)


@contextlib.contextmanager
def full_screen() -> Iterator[FullScreen]:
    """The terminal, until the block ends. SIGTERM, SIGHUP and SIGQUIT end it as Control-C does."""
    screen = FullScreen()

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGWINCH: screen.wake,
        signal.SIGTSTP: screen.suspend,
        **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), end),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        screen.enter()
        yield screen
    finally:
        screen.leave()
        for number, handler in before.items():
            signal.signal(number, handler)
        screen.close()
