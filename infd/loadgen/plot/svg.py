"""Charts in SVG: axes with ticks, lines, bars. Colours and fonts are the page's, by class."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WIDTH: Final = 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 36
_SMALLEST: Final = 1e-3  # on a logarithmic axis
_LOADS: Final = 10  # with a tick each


class Axis(Struct, frozen=True):
    """One axis: its ends, its label, whether it is logarithmic, and its ticks; None: round values."""

    label: str
    low: float
    high: float
    log: bool = False
    marks: tuple[float, ...] | None = None

    @classmethod
    def over(cls, label: str, values: Iterable[float]) -> Axis:
        """Return an axis over the values: from 0, or logarithmic if they span more than two decades."""
        known = [value for value in values if math.isfinite(value)]
        low, high = max(min(known, default=1.0), _SMALLEST), max(known, default=1.0)
        return cls(label, low, high, log=True) if high > 100 * low else cls(label, 0.0, high * 1.05 or 1.0)

    @classmethod
    def of_loads(cls, label: str, loads: Iterable[float]) -> Axis:
        """Return a logarithmic axis with a tick at each load, if these are few."""
        ordered = sorted(set(loads))
        low, high = ordered[0], max(ordered[-1], 1.01 * ordered[0])
        return cls(label, low, high, log=True, marks=tuple(ordered) if len(ordered) <= _LOADS else None)

    def place(self, value: float) -> float:
        """Return where a value is between the axis' ends, from 0 to 1."""
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Return `marks`, or four to eight round values."""
        if self.marks is not None:
            return list(self.marks)
        if self.log and self.high / self.low > 4:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [step * 10**decade for decade in decades for step in steps]
                found = [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]
                if len(found) <= 8:
                    break
            return found
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next((factor for factor in (1, 2, 5) if (self.high - self.low) / (factor * step) <= 6), 10)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Chart:
    """A drawing of a size, with two axes. `y_ticks` false: the vertical axis has a label alone."""

    def __init__(self, title: str, x: Axis, y: Axis, *, height: int = 240, y_ticks: bool = True) -> None:
        self._title = title
        self._x, self._y = x, y
        self._height = height
        self._marks: list[str] = []
        self._axes(y_ticks=y_ticks)

    def line(self, points: Sequence[tuple[float, float]], style: str, title: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{self._at_x(x):.1f},{self._at_y(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline class="line {style}" points="{path}"><title>{escape(title)}</title></polyline>')

    def dots(self, points: Sequence[tuple[float, float]], style: str, title: str) -> None:
        """Draw a dot with its values at each point."""
        for x, y in points:
            text = escape(f"{title}: {short(y)} at {short(x)}")
            self._marks.append(
                f'<circle class="dot {style}" cx="{self._at_x(x):.1f}" cy="{self._at_y(y):.1f}" r="3">'
                f"<title>{text}</title></circle>"
            )

    def bar(self, x: tuple[float, float], y: tuple[float, float], style: str, title: str) -> None:
        """Draw a bar between two values of each axis; at least half a pixel wide."""
        left, right = self._at_x(x[0]), self._at_x(x[1])
        top, bottom = sorted((self._at_y(y[0]), self._at_y(y[1])))
        self._marks.append(
            f'<rect class="{style}" x="{left:.1f}" y="{top:.2f}" width="{max(right - left, 0.5):.1f}"'
            f' height="{bottom - top:.2f}"><title>{escape(title)}</title></rect>'
        )

    def svg(self) -> str:
        label = escape(self._title)
        size = f'viewBox="0 0 {WIDTH} {self._height}"'
        return f'<svg {size} role="img" aria-label="{label}">' + "".join(self._marks) + "</svg>"

    def _axes(self, *, y_ticks: bool) -> None:
        bottom, right = self._height - _BOTTOM, WIDTH - _RIGHT
        for tick in self._x.ticks():
            x = self._at_x(tick)
            self._marks.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>')
            self._marks.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{short(tick)}</text>')
        for tick in self._y.ticks() if y_ticks else ():
            y = self._at_y(tick)
            self._marks.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
            self._marks.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{short(tick)}</text>')
        middle = (_TOP + bottom) / 2
        self._marks += [
            f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>',
            _label(self._x.label, f'x="{(_LEFT + right) / 2}" y="{self._height - 6}"'),
            _label(self._y.label, f'x="11" y="{middle}" transform="rotate(-90 11 {middle})"'),
        ]

    def _at_x(self, value: float) -> float:
        return _LEFT + self._x.place(value) * (WIDTH - _LEFT - _RIGHT)

    def _at_y(self, value: float) -> float:
        return _TOP + (1 - self._y.place(value)) * (self._height - _TOP - _BOTTOM)


def _label(text: str, place: str) -> str:
    return f'<text class="label" text-anchor="middle" {place}>{escape(text)}</text>'


def short(value: float) -> str:
    """Return a number in few characters."""
    if value and abs(value) < 0.01:
        return f"{value:.1g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
