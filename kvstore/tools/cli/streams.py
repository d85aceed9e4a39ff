"""What a command prints, without anything that could steer a terminal: the one place where text of others is made harmless.

    names of clients, of a bucket, of files, errors of servers ──▶ print() ──▶ Harmless ──▶ stdout, stderr
    colours, boxes, bars, the full screen: what we draw ourselves ──▶ drawing(stream) ─────▶ the same, as it is

A bucket, an engine or a file may name itself with an escape sequence, which would move the cursor, rename the window or
type for its reader. So every command runs with both streams wrapped, and only what draws asks for the stream below. What
is drawn takes its texts through `printable` first.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_NO_TERMINAL = "dumb"  # what every library knows as a terminal without colours


class Harmless:
    """A text stream; whatever else is asked of it, the stream below does. is_needed: a failure to write is told; else what was
    said, and all that follows, goes nowhere."""

    def __init__(self, below: TextIO, is_needed: bool = True) -> None:
        self.below = below
        self._is_needed = is_needed

    def write(self, text: str) -> int:
        from kvstore.units import harmless

        try:
            self.below.write(harmless(text))
        except OSError:
            if self._is_needed:
                raise
            leave(self.below)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def drawing(stream: TextIO) -> TextIO:
    """The stream for what we draw ourselves, with its escape sequences."""
    return stream.below if isinstance(stream, Harmless) else stream


def can_draw() -> bool:
    """Whether a terminal can do more than lines, as far as TERM says."""
    return os.environ.get("TERM") != _NO_TERMINAL


def has_colours() -> bool:
    """Whether lines may be coloured on a terminal."""
    return can_draw() and not os.environ.get("NO_COLOR")


def leave(stream: TextIO) -> None:
    """What is still to be written to it goes nowhere: the interpreter would try again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def harmless_streams() -> Iterator[None]:
    """Both streams of this process are wrapped meanwhile. A terminal of which nothing is known (TERM is not set, or empty)
    is one without colours to every library, too."""
    if os.environ.get("TERM") in ("", "unknown", None):
        os.environ["TERM"] = _NO_TERMINAL
    with (
        contextlib.redirect_stdout(cast("TextIO", Harmless(sys.stdout))),
        contextlib.redirect_stderr(cast("TextIO", Harmless(sys.stderr, is_needed=False))),
    ):
        yield
