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

    y: unit of the y axis. text: of a value. marks: values with a line, from 0 up.
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
    x: str = ""

    @property
    def inner_width(self) -> float:
        return self.width - LEFT - RIGHT

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def at_x(self, share: float) -> float:
        return LEFT + share * self.inner_width

    def at_y(self, value: float) -> float:
        return self.bottom - value / self.marks[-1] * (self.bottom - TOP)

    def draw(self, shapes: Sequence[str]) -> Html:
        """The shapes over horizontal lines with their values."""
        grid = "".join(
            f'<line class="{"zero" if mark == 0 else "axis"}" x1="{LEFT}" x2="{self.width - RIGHT}" '
            f'y1="{self.at_y(mark):.1f}" y2="{self.at_y(mark):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{self.at_y(mark) + 4:.1f}" text-anchor="end">{escape(self.text(mark))}</text>'
            for mark in self.marks
        )
        ticks = "".join(
            f'<text x="{self.at_x(share):.1f}" y="{self.bottom + 18:.1f}" text-anchor="middle">{escape(text)}</text>'
            for share, text in self.ticks
        )
        plot = boxed(
            "scroll" if self.x else "scroll newest",
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img"><title>{escape(self.title)}</title>'
            f"<desc>{escape(self.describes)}</desc>{grid}{''.join(shapes)}{ticks}</svg>",
        )
        below = f'<p class="unit x">{escape(self.x)}</p>' if self.x else ""
        return boxed("plot", f'<p class="unit">{escape(self.y)}</p>{plot}{below}')


def steps(high: float, about: int = 4) -> list[float]:
    """Round values from 0 to at least `high`: 1, 2, 2.5 or 5 times a power of ten apart."""
    high = high if high > 0 else 1.0
    rough = high / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    return [round(n * step, 12) for n in range(math.ceil(high / step - 1e-9) + 1)]


def byte_steps(high: float, about: int = 4) -> list[float]:
    """The same for bytes: round in KiB, MiB, GiB, …"""
    unit = 1024.0 ** max(0, math.floor(math.log(high, 1024))) if high >= 1 else 1.0
    return [value * unit for value in steps(high / unit, about)]


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
    """Lines; later series lie on top. at: x positions, 0 to 1."""
    shapes: list[str] = []
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
    return frame.draw(shapes)
