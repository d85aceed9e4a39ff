"""Plots as inline SVG: stacked bars and lines over time, lines over capacity.

        y │  ▂ █              the marks of a `Frame` are its scale from below to above;
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

from kvstore.pages.html import Html, boxed, escape

TOP, RIGHT, BOTTOM, LEFT = 10.0, 14.0, 28.0, 62.0
BAR_WIDTH_MAX = 46.0
LABEL_HEIGHT = 15.0  # of a line of text


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

    y: unit of the y axis. text: of a value. marks: values with a line, from the lowest to the highest.
    ticks: (position 0 to 1, text) on the x axis. places: what the x position of each value is called.
    x: unit of the x axis, where it is not time.
    """

    title: str
    describes: str
    y: str
    text: Callable[[float], str]
    marks: Sequence[float]
    ticks: Sequence[tuple[float, str]]
    places: Sequence[str]
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

    def at_y(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        return self.bottom - (value - low) / (high - low) * (self.bottom - TOP)

    def draw(self, shapes: Sequence[str]) -> Html:
        """The shapes over horizontal lines with their values."""
        grid = "".join(
            f'<line class="{"zero" if mark == 0 else "axis"}" x1="{LEFT}" x2="{self.width - self.right}" '
            f'y1="{self.at_y(mark):.1f}" y2="{self.at_y(mark):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{self.at_y(mark) + 4:.1f}" text-anchor="end">{escape(self.text(mark))}</text>'
            for mark in self.marks
        )
        ticks = "".join(
            f'<text x="{self.at_x(share):.1f}" y="{self.bottom + 18:.1f}" text-anchor="middle">{escape(text)}</text>'
            for share, text in self.ticks
        )
        plot = boxed(
            "scroll",
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img"><title>{escape(self.title)}</title>'
            f"<desc>{escape(self.describes)}</desc>{grid}{''.join(shapes)}{ticks}</svg>",
        )
        below = f'<p class="unit x">{escape(self.x)}</p>' if self.x else ""
        return boxed("plot", f'<p class="unit">{escape(self.y)}</p>{plot}{below}')


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


def stacked_bars(frame: Frame, series: Sequence[Series]) -> Html:
    """Bars over time, one colour on top of the other."""
    slot = frame.inner_width / max(1, len(frame.places))
    width = min(BAR_WIDTH_MAX, slot * (0.82 if slot > 6 else 1.0))
    shapes: list[str] = []
    for number, place in enumerate(frame.places):
        x = LEFT + number * slot + (slot - width) / 2
        total = sum(one.values[number] or 0 for one in series)
        below = 0.0
        for one in series:
            value = one.values[number] or 0
            if value <= 0:
                continue
            top, height = frame.at_y(below + value), frame.at_y(below) - frame.at_y(below + value)
            share = f" ({100 * value / total:.0f} %)" if len(series) > 1 else ""
            shapes.append(
                f'<rect class="c-{one.colour}" x="{x:.1f}" y="{top:.2f}" width="{width:.1f}" height="{max(height, 0.4):.2f}">'
                f"<title>{escape(f'{place}: {frame.text(value)} {one.name}{share}')}</title></rect>"
            )
            below += value
    return frame.draw(shapes)


def lines(frame: Frame, series: Sequence[Series], at: Sequence[float]) -> Html:
    """Lines; later series lie on top. at: x positions, 0 to 1. Names stand at the right end, where there is room."""
    shapes: list[str] = []
    ends: list[tuple[Series, float, float]] = []
    for one in series:
        runs: list[list[str]] = [[]]
        circles: list[str] = []
        radius = 4.5 if "thick" in one.style else 3
        if sum(value is not None for value in one.values) > 60:
            radius = 1.5
        for share, value, place in zip(at, one.values, frame.places, strict=True):
            if value is None:
                runs.append([])
                continue
            x, y = frame.at_x(share), frame.at_y(value)
            runs[-1].append(f"{x:.1f},{y:.1f}")
            circles.append(
                f'<circle class="c-{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
                f"<title>{escape(f'{place}: {one.name} {frame.text(value)}')}</title></circle>"
            )
        shapes += [
            f'<polyline class="line s-{one.colour} {one.style}" points="{" ".join(run)}"/>'
            for run in runs
            if len(run) > 1
        ]
        shapes += circles
        if circles:
            ends.append((one, x, y))
    return frame.draw(shapes + (_names(frame, ends) if frame.right > RIGHT else []))


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


def _names(frame: Frame, ends: Sequence[tuple[Series, float, float]]) -> list[str]:
    """The name of each line at its right end, moved apart, with a thin line to where it ends."""
    places = apart([y for _, _, y in ends], LABEL_HEIGHT, TOP, frame.bottom)
    x = frame.width - frame.right + 22
    return [
        f'<line class="s-{one.colour} thin" x1="{end_x + 6:.1f}" y1="{end_y:.1f}" x2="{x - 4:.1f}" y2="{y:.1f}"/>'
        f'<text class="{"strong" if "thick" in one.style else ""}" x="{x:.1f}" y="{y + 4:.1f}">{escape(one.name)}</text>'
        for (one, end_x, end_y), y in zip(ends, places, strict=True)
    ]
