"""Plots as inline SVG: stacked bars and lines over time, lines over capacity.

        y │  ▂ █              one scale (`Scale`) for each direction;
          │▂ █ █ ▂            axes name their unit; every shape has a <title>,
          └────────── x       which browsers show when it is pointed at

Everything is placed in the units of a fixed view box and scales with the page, down to a width
where it scrolls; what the axes are of stands outside of that, and wraps. Colours are classes of
the style sheet: `c-…` fills, `s-…` strokes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.pages.html import Html, escape

TOP, RIGHT, BOTTOM, LEFT = 10.0, 14.0, 28.0, 62.0
BAR_WIDTH_MAX = 46.0
LABEL_HEIGHT = 15.0  # of a line of text
Tell = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One colour of a plot. values: None where there is none. style: further classes of its line."""

    name: str
    colour: str
    values: Sequence[float | None]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """The place of a plot in its view box, and what its axes say.

    y: unit of the y axis. tell: a value of it in words. ticks: (position 0 to 1, text) on the x axis.
    x: unit of the x axis, where it is not time.
    """

    title: str
    describes: str
    y: str
    tell: Tell
    ticks: Sequence[tuple[float, str]]
    width: float = 960.0
    height: float = 250.0
    right: float = RIGHT
    x: str = ""

    @property
    def inner_width(self) -> float:
        return self.width - LEFT - self.right

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def at_x(self, share: float) -> float:
        return LEFT + share * self.inner_width

    def draw(self, shapes: str, grid: str) -> Html:
        ticks = "".join(
            f'<text x="{self.at_x(share):.1f}" y="{self.bottom + 18:.1f}" text-anchor="middle">{escape(text)}</text>'
            for share, text in self.ticks
        )
        below = f'<p class="unit x">{escape(self.x)}</p>' if self.x else ""
        return Html(
            f'<div class="plot"><p class="unit">{escape(self.y)}</p><div class="scroll">'
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.describes)}</desc>"
            f"{grid}{shapes}{ticks}</svg></div>{below}</div>"
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Values between low and high to places between bottom and top."""

    low: float
    high: float
    bottom: float
    top: float = TOP

    def at(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def steps(low: float, high: float, about: int = 4) -> list[float]:
    """Round values from at most `low` to at least `high`: 1, 2, 2.5 or 5 times a power of ten apart."""
    if not high > low:
        high = low + 1
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def byte_steps(high: float, about: int = 4) -> list[float]:
    """The same from 0, for bytes: round in KiB, MiB, GiB, …"""
    unit = 1024.0 ** max(0, math.floor(math.log(high, 1024))) if high >= 1 else 1.0
    return [value * unit for value in steps(0, high / unit, about)]


def stacked_bars(
    frame: Frame, series: Sequence[Series], places: Sequence[str], marks: Sequence[float]
) -> Html:
    """Bars over time, a colour on top of the other. places: what the x position of each bar is called."""
    scale = Scale(marks[0], marks[-1], frame.bottom)
    slot = frame.inner_width / max(1, len(places))
    width = min(BAR_WIDTH_MAX, slot * (0.82 if slot > 6 else 1.0))
    shapes: list[str] = []
    for number, place in enumerate(places):
        x = LEFT + number * slot + (slot - width) / 2
        total = sum(one.values[number] or 0 for one in series)
        below = 0.0
        for one in series:
            value = one.values[number] or 0
            if value <= 0:
                continue
            top, height = scale.at(below + value), scale.at(below) - scale.at(below + value)
            share = f" ({100 * value / total:.0f} %)" if len(series) > 1 else ""
            shapes.append(
                f'<rect class="c-{one.colour}" x="{x:.1f}" y="{top:.2f}" width="{width:.1f}" height="{max(height, 0.4):.2f}">'
                f"<title>{escape(f'{place}: {frame.tell(value)} {one.name}{share}')}</title></rect>"
            )
            below += value
    return frame.draw("".join(shapes), grid(frame, scale, marks))


def lines(
    frame: Frame, series: Sequence[Series], at: Sequence[float], places: Sequence[str], marks: Sequence[float]
) -> Html:
    """Lines; later series lie on top. at: x positions, 0 to 1. Names stand at the right end, where there is room."""
    scale = Scale(marks[0], marks[-1], frame.bottom)
    shapes: list[str] = []
    for one in series:
        points = [
            (frame.at_x(share), scale.at(value), value, place)
            for share, value, place in zip(at, one.values, places, strict=True)
            if value is not None
        ]
        for run in _unbroken(one.values):
            path = " ".join(
                f"{frame.at_x(at[n]):.1f},{scale.at(value):.1f}"
                for n in run
                if (value := one.values[n]) is not None
            )
            shapes.append(f'<polyline class="line s-{one.colour} {one.style}" points="{path}"/>')
        radius = (4.5 if "thick" in one.style else 3) if len(points) <= 60 else 1.5
        shapes += [
            f'<circle class="c-{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(f'{place}: {one.name} {frame.tell(value)}')}</title></circle>"
            for x, y, value, place in points
        ]
    if frame.right > RIGHT:
        shapes.append(_names(frame, series, at, scale))
    return frame.draw("".join(shapes), grid(frame, scale, marks))


def grid(frame: Frame, scale: Scale, marks: Sequence[float]) -> str:
    """Horizontal lines with their values."""
    return "".join(
        f'<line class="{"zero" if mark == 0 else "axis"}" x1="{LEFT}" x2="{frame.width - frame.right}" '
        f'y1="{scale.at(mark):.1f}" y2="{scale.at(mark):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{scale.at(mark) + 4:.1f}" text-anchor="end">{escape(frame.tell(mark))}</text>'
        for mark in marks
    )


def apart(wanted: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, in their order, at least so far from each other, within low and high."""
    order = sorted(range(len(wanted)), key=lambda n: wanted[n])
    placed = [0.0] * len(wanted)
    below = low - least
    for n in order:
        below = placed[n] = max(wanted[n], below + least)
    above = high + least
    for n in reversed(order):
        above = placed[n] = min(placed[n], above - least)
    return placed


def _names(frame: Frame, series: Sequence[Series], at: Sequence[float], scale: Scale) -> str:
    """The name of each line at its right end, moved apart, with a thin line to where it ends."""
    ends: list[tuple[Series, float, float]] = []
    for one in series:
        last = max((n for n, value in enumerate(one.values) if value is not None), default=None)
        value = one.values[last] if last is not None else None
        if last is not None and value is not None:
            ends.append((one, frame.at_x(at[last]), scale.at(value)))
    places = apart([y for _, _, y in ends], LABEL_HEIGHT, TOP, frame.bottom)
    x = frame.width - frame.right + 22
    drawn = []
    for (one, end_x, end_y), y in zip(ends, places, strict=True):
        drawn.append(
            f'<line class="s-{one.colour} thin" x1="{end_x + 6:.1f}" y1="{end_y:.1f}" x2="{x - 4:.1f}" y2="{y:.1f}"/>'
            f'<text class="{"strong" if "thick" in one.style else ""}" x="{x:.1f}" y="{y + 4:.1f}">{escape(one.name)}</text>'
        )
    return "".join(drawn)


def _unbroken(values: Sequence[float | None]) -> list[list[int]]:
    """Positions of consecutive values, where there is more than one."""
    runs: list[list[int]] = [[]]
    for number, value in enumerate(values):
        if value is None:
            runs.append([])
        else:
            runs[-1].append(number)
    return [run for run in runs if len(run) > 1]
