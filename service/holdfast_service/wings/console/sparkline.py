"""A run's newest saves as a word-sized chart: a bar for each stall, and the goodput above them."""

from __future__ import annotations

from functools import lru_cache

from markupsafe import Markup

from holdfast_formats.rest.measurements import Trend
from holdfast_service.wings.console.formatting import percent_text, seconds_text

HEIGHT = 24  # a save is one wide: whole numbers are short, and an overview has fifty of these
KEPT = 1000  # drawings
_FAILED = ("aborted", "dropped")
Values = tuple["float | None", ...]


def sparkline(trend: Trend) -> Markup:
    """The chart as SVG, with a text alternative; empty if no save has ended."""
    return _drawn(tuple(trend.states), tuple(trend.stall_s), tuple(trend.goodput), newest(trend))


@lru_cache(KEPT)  # an overview is drawn again every other second, and most runs have saved nothing new
def _drawn(states: tuple[str, ...], stall_s: Values, goodput: Values, newest_cost: str) -> Markup:
    count = len(states)
    if not count:
        return Markup()
    most = max((stall for stall in stall_s if stall is not None), default=0.0)
    tops: dict[str, list[str]] = {"bar": [], "bad": []}  # a path for each kind: an element for each bar was half of the page
    for number, (stall, state) in enumerate(zip(stall_s, states, strict=True)):
        failed = state in _FAILED
        height = max(12 * (1.0 if failed else (stall or 0.0) / most if most else 0.0), 1.0)
        tops["bad" if failed else "bar"].append(f"M{number} 0v-{height:.3g}")
    bars = "".join(f'<path class="{kind}" stroke-width=".7" d="{"".join(lines)}"/>' for kind, lines in tops.items() if lines)
    points = [(number, value) for number, value in enumerate(goodput) if value is not None]
    line = Markup("")
    if len(points) > 1:
        lowest = min(min(value for _, value in points), 0.99)
        at = " ".join(f"{n}-{14 + 8 * (v - lowest) / (1 - lowest):.3g}" for n, v in _bends(points))
        line = Markup('<polyline points="{}"/>').format(at)
    title = _said(states, newest_cost)
    drawn = Markup(
        '<svg class="spark" viewBox="-.5 -{} {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}{}</svg>'
    )
    return drawn.format(HEIGHT, count, HEIGHT, title, Markup(bars), line)


def _bends(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points without those between two equal ones, which the line meets anyway."""
    inner = zip(points, points[1:], points[2:], strict=False)
    return [points[0], *(at for one, at, other in inner if not one[1] == at[1] == other[1]), points[-1]]


def scale(trend: Trend) -> str:
    """What the tallest bar and the lowest point of the line stand for."""
    stalls = [value for value in trend.stall_s if value]
    points = [value for value in trend.goodput if value is not None]
    parts = [f"≤ {seconds_text(max(stalls))}"] if len(stalls) > 1 else []
    return " · ".join(parts + ([f"≥ {percent_text(min(points))}"] if len(points) > 1 else []))


def newest(trend: Trend) -> str:
    """Stall and goodput of the newest save that has them."""
    stall = next((value for value in reversed(trend.stall_s) if value is not None), None)
    goodput = next((value for value in reversed(trend.goodput) if value is not None), None)
    parts = [seconds_text(stall)] if stall is not None else []
    return " · ".join(parts + ([percent_text(goodput)] if goodput is not None else []))


def _said(states: tuple[str, ...], newest_cost: str) -> str:
    failed = sum(state in _FAILED for state in states)
    title = f"the newest {len(states)} saves"
    title += f": {failed} of them failed or were dropped" if failed else ""
    return f"{title}; stall and goodput of the last: {newest_cost}" if newest_cost else title
