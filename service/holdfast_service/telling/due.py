"""Decides what a target is told now. Pure values in, values out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from holdfast_formats.moments import seconds_of, write
from holdfast_formats.rest.observed import Attention
from holdfast_formats.rest.telling import AlertLevel, NoticedAlert
from holdfast_formats.visible import visible_lines
from holdfast_service.control.database.visible import ALL, matches
from holdfast_service.telling.targets import HttpTarget, MailTarget

ALERTS_MAX = 50  # of a message; the next one has the others
SETTLED_S = 30.0  # an alert is over when it has been absent for so long
CLOCK_S = 60.0  # a time that is later than now by more was written by a clock that was wrong
DEATH = "run-lost"
AGAIN_S = (
    900.0  # after the last message, a death that came later is told: a run that is resumed and dies at once is not over
)
TEXT_MAX = 2000  # characters of a text or a hint
NO_RUN = ""


class NoticeKey(NamedTuple):
    """What tells one alert from another; `run` is empty for one about no run."""

    run: str
    code: str


class Told(NamedTuple):
    """What one target has been told of one alert, or is going to be. Times are seconds since the epoch."""

    key: NoticeKey
    level: AlertLevel
    text: str
    hint: str
    step: int | None
    since: float
    times: int = 0
    last: float | None = None


class Plan(NamedTuple):
    """What changes: alerts that are new, alerts that were over before they were told, and what the next message says."""

    added: tuple[Told, ...]
    forgotten: tuple[NoticeKey, ...]  # over, and there is nothing to tell
    dropped: int  # of these, alerts that were never told
    firing: tuple[Told, ...]
    recovered: tuple[Told, ...]
    waiting: int


def current(found: Iterable[tuple[str, Attention]]) -> dict[NoticeKey, Attention]:
    """Alerts by run and code; several of one code become one, of the highest level."""
    made: dict[NoticeKey, Attention] = {}
    for run, item in found:
        key = NoticeKey(run, item.code)
        before = made.get(key)
        if before is None:
            made[key] = item
        elif len(before.text) + len(item.text) < TEXT_MAX:
            level: AlertLevel = "error" if "error" in (before.level, item.level) else "warning"
            seen = before.acknowledged and item.acknowledged
            update = {"level": level, "text": f"{before.text}; {item.text}", "acknowledged": seen}
            made[key] = before.model_copy(update=update)
    return made


def plan(
    target: HttpTarget | MailTarget,
    alerts: Mapping[NoticeKey, Attention],
    known: Mapping[NoticeKey, Told],
    absent: Mapping[NoticeKey, float],
    now: float,
) -> Plan:
    """What `target` is told now. `known` is what it was told before, `absent` for how many seconds alerts of these are."""
    wanted = {key: item for key, item in alerts.items() if concerns(target, key, item)}
    added = {key: _said(Told(key, item.level, "", "", None, now), item) for key, item in wanted.items() if key not in known}
    firing = []
    for key, item in wanted.items():
        before = known.get(key) or added[key]
        if _is_due(target, before, item, now):
            firing.append(_said(before, item))
    over = [told for key, told in known.items() if key not in wanted and absent.get(key, 0.0) >= SETTLED_S]
    recovered = [told for told in over if told.times and target.recovery]
    forgotten = [told for told in over if not (told.times and target.recovery)]
    firing.sort(key=lambda told: (told.level != "error", told.since, told.key))
    messages = [*firing, *recovered]
    now_told, later = messages[:ALERTS_MAX], messages[ALERTS_MAX:]
    return Plan(
        added=tuple(added.values()),
        forgotten=tuple(told.key for told in forgotten),
        dropped=sum(not told.times for told in forgotten),
        firing=tuple(told for told in now_told if told.key in wanted),
        recovered=tuple(told for told in now_told if told.key not in wanted),
        waiting=len(later),
    )


def as_alert(target: str, told: Told, recovered: bool, dashboard: str | None) -> NoticedAlert:
    """An alert as a message has it."""
    run = told.key.run or None
    return NoticedAlert(
        id=alert_id(target, told),
        status="recovered" if recovered else "firing",
        level=told.level,
        code=told.key.code,
        text=told.text,
        hint=told.hint,
        run=run,
        step=told.step,
        since=write(datetime.fromtimestamp(told.since, timezone.utc)),
        told=told.times,
        url=None if dashboard is None else f"{dashboard}/runs/{run}" if run else f"{dashboard}/",
    )


def alert_id(target: str, told: Told) -> str:
    """Follows from what is stored before it is sent, so that a daemon that is started again says the same."""
    return _digest(target, *told.key, repr(told.since))


def notice_id(target: str, messages: Iterable[NoticedAlert]) -> str:
    """The same for the same alerts at the same turn."""
    return _digest(target, *(f"{one.id} {one.status} {one.told}" for one in messages))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def concerns(target: HttpTarget | MailTarget, key: NoticeKey, item: Attention) -> bool:
    """Whether a target is told of such an alert; of what is about no run, only a target for all runs."""
    if target.level == "error" and item.level != "error":
        return False
    return matches(target.runs, key.run) if key.run else target.runs == ALL


def _said(told: Told, item: Attention) -> Told:
    """An alert as its source puts it now, in a length and in characters that every receiver takes."""
    return told._replace(level=item.level, text=_text(item.text), hint=_text(item.hint), step=item.step)


def _text(text: str) -> str:
    """One control character, which a mail server or a chat refuses, would keep all alerts of its message from everybody."""
    return visible_lines(text[:TEXT_MAX])


def _is_due(target: HttpTarget | MailTarget, before: Told, item: Attention, now: float) -> bool:
    if item.acknowledged is not None:  # somebody has seen it; that it is over is still told, if it was told before
        return False
    if before.times == 0 or before.last is None:
        return _passed(before.since, now, target.after_s)
    if before.level == "warning" and item.level == "error":
        return True
    if item.code == DEATH and item.since is not None and before.last < seconds_of(item.since) <= now:
        return _passed(before.last, now, AGAIN_S)
    return target.repeat_s > 0 and _passed(before.last, now, target.repeat_s)


def _passed(since: float, now: float, seconds: float) -> bool:
    """Whether so much time has passed, as far as the clock can be believed: one that was set back holds nothing up."""
    return now - since >= seconds or since - now > CLOCK_S
