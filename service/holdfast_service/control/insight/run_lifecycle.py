"""What a run is doing, since when, and what to do about it: from goodbyes of its ranks, lost connections, and its saves.

Pure. A clock decides only whether connected ranks still train or idle.
"""

from __future__ import annotations

from datetime import datetime, timezone
from math import isfinite
from typing import NamedTuple

from holdfast_formats import timestamps
from holdfast_formats.rest.measurements import Acknowledgement, FirstNonFinite, RunLife, RunSummary
from holdfast_service.control.insight.facts import Facts

IDLE_INTERVALS = 3.0  # no save has begun for so many of the usual intervals, and at least
IDLE_MIN_S = 60.0
IDLE_UNKNOWN_S = 3600.0  # where it is not known how often it saves
STARTING_S = 3600.0  # a run that trains for longer without a commit loses work when it dies
_NOT_SEALED = frozenset({"open", "aborted"})
_OF_STORAGE = frozenset({"no-space", "quota-exceeded", "storage-failed"})


class RunState(NamedTuple):
    life: RunLife
    since: str | None


def state_of(facts: Facts, interval_s: float | None = None) -> RunState:
    """`interval_s` is the usual time between saves, if known. A live rank outweighs what people have set."""
    settings = facts.settings
    if facts.life == "running":
        last = last_sign(facts)
        if last is not None and facts.now - last > _patience(interval_s):
            return RunState("idle", _text(last))
        return RunState("training", _text(facts.declared[0]) if facts.declared else None)
    if settings.archived is not None:
        return RunState("archived", settings.archived)
    if facts.life == "died" and failed_to_start(facts):
        return RunState("failed", facts.since)
    if facts.life == "died" and death_seen(facts) is None:
        return RunState("died", facts.since)
    if facts.life == "finished":
        return RunState("finished", facts.since)
    return RunState("idle", facts.since)


def failed_to_start(facts: Facts) -> bool:
    """Whether a dead run ended before its first save, such as by an error in it."""
    if facts.held.checkpoints or any(save.state not in _NOT_SEALED or save.code in _OF_STORAGE for save in facts.saves):
        return False
    trained_s = timestamps.seconds_of(facts.since or "") - facts.declared[0] if facts.declared else 0.0
    return not trained_s > STARTING_S


def death_seen(facts: Facts) -> Acknowledgement | None:
    """The acknowledgement of its newest attempt's death."""
    settings = facts.settings
    if settings.acknowledged != facts.attempt:
        return None
    return Acknowledgement(by=settings.acknowledged_by, at=settings.acknowledged_at)


def last_sign(facts: Facts) -> float | None:
    """When the run last began an attempt or a save; seconds since 1970."""
    signs = [*facts.declared[:1], *(save.opened for save in facts.saves[:1])]
    return max((at for at in signs if isfinite(at)), default=None)


def standing(life: RunLife, ill: FirstNonFinite | None) -> str:
    """What a run is doing, in words; and since when its checkpoints have NaN, if they do."""
    word = "failed to start" if life == "failed" else life
    return word if ill is None else f"{word} with {ill.kind} since step {ill.step}"


def verdict(facts: Facts, summary: RunSummary) -> str:
    """One or two sentences for a person in a hurry."""
    goes_on = "nothing is committed yet" if summary.newest is None else f"it continues from step {summary.newest}"
    since = _ago(facts, summary.life_since)
    if summary.life == "training":
        if summary.newest is None:
            return f"Training{since}; nothing is committed yet."
        exposed = (
            "" if summary.exposed_s is None else f"; a crash now would lose {timestamps.span(summary.exposed_s)} of work"
        )
        return f"Training{since}; the newest checkpoint is step {summary.newest}{exposed}."
    if summary.life == "died":
        return (
            f"Died{since}: its ranks were killed or ended by an exception. See the trainer's log, then start it "
            f"again ({goes_on}), or acknowledge it."
        )
    if summary.life == "failed":
        return f"Failed to start{since}: its ranks ended before anything was saved. See the trainer's log."
    if summary.life == "finished":
        ill = "" if summary.nonfinite is None else f", but it has {summary.nonfinite.kind}, {summary.nonfinite.place}"
        return f"Finished{since}: its ranks closed normally; {_newest(summary)}{ill}."
    if summary.life == "archived":
        return f"Archived{since}; {_newest(summary)}. A new launch unarchives it."
    if facts.life == "running":
        return f"Idle: its ranks are connected, but none has started a save{since}. Check whether the trainer hangs."
    seen = death_seen(facts) if facts.life == "died" else None
    died = "" if seen is None else f" It died, and {seen.by or 'an unknown user'} acknowledged that."
    return f"Idle: no rank is connected.{died} When it is started again, {goes_on}."


def _patience(interval_s: float | None) -> float:
    return IDLE_UNKNOWN_S if interval_s is None else max(IDLE_INTERVALS * interval_s, IDLE_MIN_S)


def _newest(summary: RunSummary) -> str:
    return "nothing is committed" if summary.newest is None else f"the newest checkpoint is step {summary.newest}"


def _ago(facts: Facts, since: str | None) -> str:
    passed = None if since is None else facts.now - timestamps.seconds_of(since)
    if passed is None or not isfinite(passed) or passed < -timestamps.CLOCKS_APART_S:  # a clock was set back: unknown
        return ""
    for_so_long = facts.life == "running"
    return f" for {timestamps.span(max(passed, 0.0))}" if for_so_long else f" {timestamps.span(max(passed, 0.0))} ago"


def _text(at: float) -> str | None:
    return timestamps.write(datetime.fromtimestamp(at, timezone.utc)) if isfinite(at) else None
