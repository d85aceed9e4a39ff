"""The watermark of a mirror: by writer of the source, up to which segment everything is at home.

    segment 5 heard ─▶ Hold (2 jobs) ─┐                       watermark of this writer: 4
    segment 6 heard ─▶ Hold (no job)  ├─▶ let go in any order; when 5 is, it goes to 6
    sweep ───────────▶ Hold (9 jobs) ─┘   of all writers, to where the catalogue was when the sweep began

A hold is let go when each of its jobs has ended: copied, or known to be lost. So the watermark never passes what failed
or waits. After a leap (a start, a snapshot, more jobs than there is room for) what was heard does not tell everything: the
watermark stands still until a sweep that began later is let go. It never goes back: what is at home stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Hold:
    """positions: where the watermark may go when this is let go. left: jobs that have not ended, and one for whoever
    still adds some."""

    positions: Mapping[str, int]
    left: int = 1


class Watermark:
    """must_sweep: there was a leap, and no sweep has begun since."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self.must_sweep = True
        self._positions = dict(positions)
        self._heard: dict[str, int] = {}  # by writer, up to which segment
        # Of these, those that are not let go, in order, each with the number of the one before; 0: none was heard.
        self._open: dict[str, dict[Hold, int]] = {}
        self._sweep: Hold | None = None

    @property
    def positions(self) -> dict[str, int]:
        """A copy."""
        return dict(self._positions)

    @property
    def is_held(self) -> bool:
        """Whether it waits for a sweep."""
        return self.must_sweep or self._sweep is not None

    def heard(self, writer: str, number: int) -> Hold:
        """The hold of a segment, to which jobs are added, and which is then released."""
        hold = Hold({writer: number})
        if number > self._positions.get(writer, 0):
            self._open.setdefault(writer, {})[hold] = self._heard.get(writer, 0)
            self._heard[writer] = number
        return hold

    def leap(self) -> None:
        """What was heard does not tell everything."""
        self.must_sweep = True
        self._heard.clear()
        self._open.clear()

    def sweep(self, positions: Mapping[str, int]) -> Hold:
        """The hold of a sweep that begins now, over all that is announced up to these positions. As `heard`."""
        self.must_sweep = False
        self._sweep = Hold(positions)
        return self._sweep

    def release(self, hold: Hold) -> None:
        """A job of it has ended, or all are added."""
        hold.left -= 1
        if hold.left:
            return
        writers = list(hold.positions)
        if hold is self._sweep:
            self._sweep = None
            for writer, number in hold.positions.items():
                self._advance(writer, number)
            writers = list(self._heard)
        for writer in writers:
            still = self._open.get(writer, {})
            still.pop(hold, None)
            if not self.is_held and writer in self._heard:
                self._advance(writer, next(iter(still.values()), self._heard[writer]))

    def _advance(self, writer: str, number: int) -> None:
        if number > self._positions.get(writer, 0):
            self._positions[writer] = number
