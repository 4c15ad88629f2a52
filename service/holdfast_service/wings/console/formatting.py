"""Formats numbers and times for the pages: short, with the exact value as a tooltip and for screen readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from holdfast_formats import metric_values, timestamps
from holdfast_formats.rest import job_labels
from holdfast_formats.rest.columns import CellPart, Column, Listing
from holdfast_formats.rest.job_labels import Fact

NONE = Markup('<span class="quiet" title="unknown">–</span>')
_DECIMALS_FROM = 100
TAIL = 14  # characters of a long name that stay where it is cut in the middle
_SHARE_MIN = 0.0001  # smaller ones are shown as "< 0.01 %"
_GAP = "\u00a0"  # a number and its unit stay on one line
_AGES = ((86_400 * 2, 86_400, "d"), (3600 * 2, 3600, "h"), (60 * 2, 60, "min"))


def bytes_text(count: float) -> str:
    """Bytes in decimal units, as disks are sold and `holdfast ls` prints them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000:
            return f"{count:.0f}{_GAP}{unit}" if unit == "B" or abs(count) >= _DECIMALS_FROM else f"{count:.1f}{_GAP}{unit}"
        count /= 1000
    return f"{count:.1f}{_GAP}PB"


def seconds_text(seconds: float) -> str:
    """A duration: 380 µs, 12 ms, 1.4 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    if seconds < 0:
        return f"−{seconds_text(-seconds)}"
    if seconds == 0:
        return f"0{_GAP}s"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f}{_GAP}µs"
    if seconds < 1:
        return f"{seconds * 1000:.3g}{_GAP}ms"
    if seconds < 60:
        return f"{seconds:.3g}{_GAP}s"
    for large, name, small, rest in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= large:
            whole, left = divmod(seconds, large)
            return f"{whole:.0f}{_GAP}{name}" + (f" {left // small:.0f}{_GAP}{rest}" if left >= small else "")
    return f"{seconds:.3g}{_GAP}s"


def number_text(value: float) -> str:
    """A measured value in four digits; whole numbers with thin spaces between thousands."""
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    return metric_values.word(value) or f"{value:.4g}"


def size(count: float | None) -> Markup:
    return NONE if count is None else _titled(bytes_text(count), f"{number_text(int(count))} bytes")


def seconds(value: float | None) -> Markup:
    return NONE if value is None else _titled(seconds_text(value), f"{value:.6g} seconds")


def number(value: float | None) -> Markup:
    return NONE if value is None else _titled(number_text(value), repr(value))


def percent_text(value: float) -> str:
    """A share in three digits; near 100 %, as many as distinguish it from that."""
    if 0.99 < value < 1:
        return f"{100 * value:.2f} %"
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.3g} %"


def percent(value: float | None) -> Markup:
    if value is None:
        return NONE
    small = 0 < value < _SHARE_MIN
    return _titled(f"< {100 * _SHARE_MIN:g} %" if small else f"{100 * value:.3g} %", repr(value))


def when(text: str | None) -> Markup:
    """A time of the API as an age, with the time itself as a tooltip."""
    if not text:
        return NONE
    try:
        moment = timestamps.read(text)
    except ValueError:
        return Markup(escape(text))
    passed = (datetime.now(timezone.utc) - moment).total_seconds()
    at = escape(text)
    return Markup(f'<time datetime="{at}" title="{at}">{age_text(passed)}</time>')


def age_text(passed: float) -> str:
    if passed < 0:
        return f"in {seconds_text(-passed)}"
    for least, unit, name in _AGES:
        if passed >= least:
            return f"{passed / unit:.0f} {name} ago"
    return f"{passed:.0f} s ago"


def prose(text: str) -> Markup:
    """A sentence of the service; text in backquotes is shown as code."""
    parts = text.split("`")
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def name(text: str) -> Markup:
    """A name that its style cuts in the middle where it is longer than its place: runs of a sweep differ at their ends."""
    if len(text) <= 2 * TAIL:
        return escape(text)
    return Markup('<span class="head">{}</span><span class="end">{}</span>').format(text[:-TAIL], text[-TAIL:])


class PageTable(NamedTuple):
    """A list as a page shows it."""

    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[Markup]]  # a cell for each column


def table(listing: Listing[Any], rows: Iterable[Any]) -> PageTable:
    """The list's columns and cells, without columns that say nothing of any row."""
    every = listing.shown("page")
    cells = [[_cell(column.parts(row)) for column in every] for row in rows]
    shown = [at for at in range(len(every)) if not at or not cells or any(row[at] != NONE for row in cells)]
    return PageTable([every[at] for at in shown], [[row[at] for at in shown] for row in cells])


def _cell(parts: Sequence[CellPart]) -> Markup:
    return Markup(" ").join(map(_part, parts))


def _part(part: CellPart) -> Markup:
    if part.value is None:
        return NONE
    shown = _SHOWN.get(part.form, escape)(part.value)
    if part.form == "more":
        return Markup("<details><summary class='long'>{}</summary>{}</details>").format(part.title, shown)
    if part.title:
        shown = Markup('<abbr title="{}">{}</abbr>').format(part.title, shown)
    if not part.link:
        return shown
    if part.form == "text" and not part.title and len(str(part.value)) > 2 * TAIL:
        return Markup('<a class="cut" href="{}" title="{}" aria-label="{}">{}</a>').format(
            part.link, part.value, part.value, name(part.value)
        )
    return Markup('<a href="{}">{}</a>').format(part.link, shown)


def _progress(part: Sequence[Any]) -> Markup:
    done, total, state = part
    bar = Markup('<progress max="{}" value="{}">{} of {} bytes</progress> ').format(total, done, done, total)
    bar = (bar if total else Markup("<progress>started</progress> ")) if state == "running" else Markup()
    of = Markup(' <span class="quiet">of {}</span>').format(bytes_text(total)) if total else Markup()
    return bar + size(done) + of


def _meter(part: tuple[int, int]) -> Markup:
    text = '<meter min="0" max="{}" high="{}" optimum="0" value="{}"></meter> '
    return Markup(text).format(part[1], part[1] * 0.9, part[0]) + percent(part[0] / part[1])


def _badge(state: str) -> Markup:
    return Markup('<span class="badge s-{}">{}</span>').format(state.replace(" ", "-"), state)


def _more(values: Mapping[str, str]) -> Markup:
    pairs = (Markup("<dt>{}</dt><dd class='code'>{}</dd>").format(name, text) for name, text in values.items())
    return Markup('<dl class="facts">{}</dl>').format(Markup().join(pairs))


def facts(values: Mapping[str, Any] | None) -> list[Fact]:
    """The facts about a job or an event, in words and units."""
    return job_labels.facts(values or {}, bytes_text, seconds_text)


def stamp(text: str) -> float:
    """A time of the API as seconds since 1970, for plots."""
    return timestamps.read(text).timestamp()


def _titled(text: str, title: str) -> Markup:
    return Markup(f'<span title="{escape(title)}">{escape(text)}</span>')


_SHOWN: Mapping[str, Callable[[Any], Markup]] = {
    "quiet": Markup('<span class="quiet">{}</span>').format,
    "code": Markup('<span class="code">{}</span>').format,
    "error": lambda text: Markup('<span class="error">{}</span>').format(prose(text)),
    "warning": Markup('<span class="badge s-warning">{}</span>').format,
    "state": _badge,
    "number": number,
    "bytes": size,
    "share": percent,
    "duration": seconds,
    "age": when,
    "moment": when,
    "progress": _progress,
    "meter": _meter,
    "more": _more,
}
