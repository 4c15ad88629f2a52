"""The status of runs in words: the only place that interprets the API's states, and the summary sentences."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from holdfast_formats import timestamps
from holdfast_formats.rest.measurements import Overview, RunSummary
from holdfast_service.wings.console.formatting import age_text, percent_text, seconds_text


class RunStatus(NamedTuple):
    """A state of a run in one word; `mark` is the class of its dot, `lasts` whether its duration matters."""

    word: str
    mark: str
    lasts: bool = True


TRAINING = RunStatus("training", "fine", lasts=False)
DIED = RunStatus("died", "error")
FINISHED = RunStatus("finished", "gone")
IDLE = RunStatus("idle", "gone", lasts=False)
_STANDINGS: Mapping[str, RunStatus] = {
    "training": TRAINING,
    "died": DIED,
    "finished": FINISHED,
    "idle": IDLE,
    "failed": RunStatus("failed to start", "gone"),
    "archived": RunStatus("archived", "gone"),
}


def standing(state: str) -> RunStatus:
    """The status of an API state; an unknown state is shown as it is."""
    return _STANDINGS.get(state, RunStatus(state, "gone"))


def counted(overview: Overview) -> dict[str, int]:
    """The number of runs of each status."""
    counts: dict[str, int] = {}
    for state, count in overview.states.items():
        word = standing(state).word
        counts[word] = counts.get(word, 0) + count
    return counts


class Clause(NamedTuple):
    """A part of the overview's sentence, and the run that it is about, if any."""

    text: str
    level: str = ""
    run: str | None = None


def strip(overview: Overview) -> list[Clause]:
    """The whole service in a sentence or two."""
    runs = counted(overview)
    clauses = [Clause(f"{_runs(runs.get('training', 0))} training", "fine" if runs.get("training") else "")]
    if died := runs.get("died", 0):
        ago = f" {ago_text(overview.newest_died_since)}" if overview.newest_died_since else ""
        clauses.append(Clause(f"{died} died{', the last' if died > 1 and ago else ''}{ago}", "error", overview.newest_died))
    if failed := runs.get("failed to start", 0):
        clauses.append(Clause(f"{failed} failed to start"))
    if overview.exposed_s is not None and runs.get("training"):
        clauses.append(
            Clause(f"Oldest unprotected work: {seconds_text(round(overview.exposed_s))}", "", overview.exposed_run)
        )
    if overview.cost is not None:
        clauses.append(Clause(f"Checkpointing costs {percent_text(overview.cost)}"))
    return clauses


def cost_of_a_crash(summary: RunSummary) -> str | None:
    """What a crash now would lose, in time and steps; None unless the run is training."""
    if standing(summary.life) is not TRAINING or summary.exposed_s is None:
        return None
    steps = steps_at_risk(summary)
    return seconds_text(round(summary.exposed_s)) + (f", {steps}" if steps else "")


def steps_at_risk(summary: RunSummary) -> str:
    """About how many steps a crash now would lose, by the time since the last save where no rank says more; "" for none."""
    steps = summary.exposed_steps or 0
    if summary.exposed_s and summary.interval_s and summary.interval_steps:
        steps = max(steps, round(summary.exposed_s * summary.interval_steps / summary.interval_s))
    return f"about {steps} step{'s' * (steps != 1)}" if steps else ""


def verdict(summary: RunSummary) -> Clause:
    """A run in one sentence: whether its work is safe, and what to do if it is not."""
    worst = next((item for item in summary.attention if item.acknowledged is None), None)
    safe = _safe(summary)
    word = summary.standing or standing(summary.life).word
    lasts = summary.life_since and standing(summary.life).lasts and summary.nonfinite is None
    since = f" {ago_text(summary.life_since)}" if summary.life_since and lasts else ""
    if worst is not None:  # which is listed below
        return Clause(f"{_upper(word)}{since}. {safe}", worst.level)
    if summary.life in ("idle", "failed", "archived"):
        return Clause(f"{summary.verdict} {safe}", "fine")
    crash = cost_of_a_crash(summary)
    return Clause(f"{_upper(word)}{since}. {safe}" + (f" A crash now would cost {crash}." if crash else ""), "fine")


def _safe(summary: RunSummary) -> str:
    good = summary.good
    if good is None:
        return "There is no good checkpoint yet."
    copies = f", also in {' and '.join(good.copies)}" if good.copies else ""
    checked = "verified" if good.verified else "not verified yet"
    return f"The last good checkpoint is step {good.step}, {ago_text(good.created)}, {checked}{copies}."


def ago_text(text: str) -> str:
    """How long ago a time of the API was; the text itself if it is invalid or in the future, as after a clock change."""
    try:
        passed = (datetime.now(timezone.utc) - timestamps.read(text)).total_seconds()
    except ValueError:
        return text
    return text if passed < -timestamps.CLOCKS_APART_S else age_text(max(passed, 0.0))


def _runs(count: int) -> str:
    return f"{count or 'No'} {'run' if count == 1 else 'runs'}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
