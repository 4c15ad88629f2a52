"""Parts of pages that are fetched every other second: an unchanged one is not rendered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from markupsafe import Markup

from holdfast_formats.rest.measurements import Alert, RunSummary
from holdfast_service.wings.console import alert_actions, formatting, run_status
from holdfast_service.wings.console.alert_actions import Button
from holdfast_service.wings.console.rendering import environment
from holdfast_service.wings.console.sparkline import newest, scale, sparkline

KEPT = 1000  # parts of each kind, of a few kilobytes


class _AlertPart(NamedTuple):
    run: str | None
    code: str
    subject: str | None
    text: str
    hint: str  # empty if it is shown elsewhere
    since: Markup | None
    acknowledged: bool
    seen_by: str | None
    seen_at: Markup | None
    seen_until: Markup | None
    button: Button | None
    may_mend: bool
    may_answer: bool
    back: str


class RunColumns(NamedTuple):
    """The columns that not every table of runs has: one that would be empty for most of its runs is left out."""

    state: bool
    metric: str  # empty without that column
    crash: bool
    trend: bool


class _RunPart(NamedTuple):
    run: str
    level: str  # of the dot: error, warning, or the run's status
    says: str  # the same in words
    word: str
    died: bool  # and not acknowledged
    since: Markup | None
    good: int | None  # step
    good_age: Markup | None
    marks: tuple[tuple[bool, str, str], ...]  # whether it is so, what to say then, and what otherwise
    columns: RunColumns
    measured: Markup | None
    crash: str | None
    spark: Markup
    cost: str
    scale: str
    size: Markup
    checkpoints: int
    bytes: int
    quota_bytes: int | None
    resumes: bool


def run_columns(summaries: Sequence[RunSummary], metric: str, column: str) -> RunColumns:
    """Those for these runs, which are sorted by `column`."""
    half = len(summaries) / 2
    return RunColumns(
        state=any(summary.life != "training" or summary.nonfinite for summary in summaries),
        metric=metric,
        crash=column == "exposed" or sum(run_status.cost_of_a_crash(one) is not None for one in summaries) >= half,
        trend=column in ("stall", "goodput") or sum(bool(one.trend.states) for one in summaries) >= half,
    )


def alert(one: Alert, back: str, may: Callable[..., bool], *, hint: bool = True) -> Markup:
    """An alert as an item of a list, with its button; `back` names the page to return to."""
    seen, button = one.acknowledged, alert_actions.button(one, on_its_page=back == "run")
    return _alert(
        _AlertPart(
            run=one.run,
            code=one.code,
            subject=one.subject,
            text=one.text,
            hint=one.hint if hint else "",
            since=_when(one.since),
            acknowledged=seen is not None,
            seen_by=seen.by if seen else None,
            seen_at=_when(seen.at) if seen else None,
            seen_until=_when(seen.until) if seen else None,
            button=button,
            may_mend=button is None or button.fields is None or may("admin", one.run or None),
            may_answer=may("write", one.run) if one.run else may("admin", None),
            back=back,
        )
    )


def run_line(summary: RunSummary, columns: RunColumns) -> Markup:
    """A run's line of a table of runs that has these columns."""
    stands = run_status.standing(summary.life)
    levels = [item.level for item in summary.attention if item.acknowledged is None]
    level = "error" if "error" in levels else "warning" if levels else stands.mark
    if level == "error" and not levels:
        level = "gone"  # it died, and that was acknowledged
    good = summary.good
    return _run_line(
        _RunPart(
            run=summary.run,
            level=level,
            says=f"{level}, {stands.word}" if levels else stands.word,
            word=summary.standing or stands.word,
            died=stands.mark == "error" and level == "error",
            since=_when(summary.life_since) if stands.lasts else None,
            good=good.step if good else None,
            good_age=_when(good.created) if good else None,
            marks=_marks(summary),
            columns=columns,
            measured=formatting.number(summary.metrics[columns.metric]) if columns.metric in summary.metrics else None,
            crash=run_status.cost_of_a_crash(summary),
            spark=sparkline(summary.trend),
            cost=newest(summary.trend),
            scale=scale(summary.trend),
            size=formatting.size(summary.bytes),
            checkpoints=summary.checkpoints,
            bytes=summary.bytes,
            quota_bytes=summary.quota_bytes,
            resumes=good is not None and summary.life != "training",
        )
    )


def _marks(summary: RunSummary) -> tuple[tuple[bool, str, str], ...]:
    """Of the last good checkpoint."""
    good = summary.good
    if good is None:
        return ()
    copies = ((one.tier in good.copies, one.tier, f"not in {one.tier}") for one in summary.copies)
    return (good.verified, "verified", "not verified yet"), *copies


def _when(text: str | None) -> Markup | None:
    return formatting.when(text) if text else None


@lru_cache(KEPT)
def _alert(part: _AlertPart) -> Markup:
    return _rendered("alert.html", part)


@lru_cache(KEPT)
def _run_line(part: _RunPart) -> Markup:
    return _rendered("run_line.html", part)


def _rendered(template: str, part: Any) -> Markup:
    return Markup(environment().get_template(template).render(one=part))
