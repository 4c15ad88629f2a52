"""The loss curve twice: dots of Braille for the terminal, and a small SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille: rows of two dots, as Unicode numbers them
_SVG_WIDTH, _SVG_HEIGHT, _MARGIN = 720, 360, 44


class Series(NamedTuple):
    """A curve by step; `colour` and `width` are for the SVG."""

    title: str
    values: Mapping[int, float]
    colour: str
    width: float


class AxesFrame(NamedTuple):
    """What the axes span."""

    first: int
    last: int
    low: float
    high: float

    def across(self, step: float) -> float:
        """0 at the left edge, 1 at the right."""
        return (step - self.first) / max(self.last - self.first, 1)

    def down(self, value: float) -> float:
        """0 at the top, 1 at the bottom."""
        return (self.high - value) / max(self.high - self.low, 1e-12)


def frame(series: Sequence[Series]) -> AxesFrame:
    steps = [step for one in series for step in one.values]
    values = [value for one in series for value in one.values.values()]
    return AxesFrame(min(steps), max(steps), min(values), max(values))


def draw(values: Mapping[int, float], marks: Mapping[int, str], columns: int = 72, rows: int = 9) -> list[str]:
    """Lines of text: the curve in Braille dots, its range at the left, and a mark below each step in `marks`."""
    axes = frame([Series("", values, "", 0.0)])
    cells = [[0] * columns for _ in range(rows)]
    points = sorted(values.items())
    for (step, value), (step_after, value_after) in zip(points, points[1:] or points, strict=False):
        pieces = max(2 * columns // max(len(points), 1), 1) * 2
        for piece in range(pieces + 1):
            share = piece / pieces
            x = round(axes.across(step + share * (step_after - step)) * (2 * columns - 1))
            y = round(axes.down(value + share * (value_after - value)) * (4 * rows - 1))
            cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    lines = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
    labels = [f"{axes.high:6.3f}", *[" " * 6] * (rows - 2), f"{axes.low:6.3f}"]
    below = [" "] * columns
    for step, mark in marks.items():
        below[round(axes.across(step) * (columns - 1))] = mark
    ends = f"{axes.first:<{columns // 2}}{axes.last:>{columns - columns // 2}}"
    chart = [f"{label} │{line}" for label, line in zip(labels, lines, strict=True)]
    return [*chart, f"       └{'─' * columns}", f"        {''.join(below)}", f"        {ends}"]


def svg(title: str, series: Sequence[Series], marks: Mapping[int, str]) -> str:
    """The curves as an SVG document, with a dashed line and a word at each step in `marks`."""
    axes = frame(series)
    width, height = _SVG_WIDTH - 2 * _MARGIN, _SVG_HEIGHT - 2 * _MARGIN

    def x(step: float) -> str:
        return f"{_MARGIN + axes.across(step) * width:.1f}"

    def y(value: float) -> str:
        return f"{_MARGIN + axes.down(value) * height:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SVG_WIDTH} {_SVG_HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_MARGIN}" y="20" font-size="14">{escape(title)}</text>',
        f'<path d="M{_MARGIN} {_MARGIN}V{_MARGIN + height}H{_MARGIN + width}" fill="none" stroke="#888"/>',
    ]
    for value in (axes.low, axes.high):
        parts.append(f'<text x="{_MARGIN - 6}" y="{y(value)}" text-anchor="end">{value:.2f}</text>')
    for step in (axes.first, axes.last):
        parts.append(f'<text x="{x(step)}" y="{_MARGIN + height + 16}" text-anchor="middle">{step}</text>')
    for step, word in marks.items():
        parts.append(f'<path d="M{x(step)} {_MARGIN}v{height}" stroke="#888" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x(step)}" y="{_MARGIN - 4}" text-anchor="middle">{escape(word)}</text>')
    for position, one in enumerate(series):
        path = " ".join(f"{x(step)},{y(value)}" for step, value in sorted(one.values.items()))
        line = f'fill="none" stroke="{one.colour}" stroke-width="{one.width}"'
        parts.append(f'<polyline points="{path}" {line} stroke-linejoin="round"/>')
        at = _MARGIN + 16 + 18 * position
        parts.append(f'<path d="M{_MARGIN + width - 150} {at}h24" {line}/>')
        parts.append(f'<text x="{_MARGIN + width - 120}" y="{at + 4}">{escape(one.title)}</text>')
    return "\n".join([*parts, "</svg>", ""])
