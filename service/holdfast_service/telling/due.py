"""Decides which alerts a target is sent now. Pure values in, values out."""

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
AGAIN_S = 900.0  # after the last message, a later death is sent: a run that is resumed and dies at once is not over
TEXT_MAX = 2000  # characters of a text or a hint
NO_RUN = ""


class NoticeKey(NamedTuple):
    """Identifies an alert; `run` is empty for one about no run."""

    run: str
    code: str


class Told(NamedTuple):
    """The state of one alert for one target, sent or to be sent. Times are seconds since the epoch."""

    key: NoticeKey
    level: AlertLevel
    text: str
    hint: str
    step: int | None
    since: float
    times: int = 0
    last: float | None = None


class Plan(NamedTuple):
    """Changes: new alerts, alerts that were over before they were sent, and the contents of the next message."""

    added: tuple[Told, ...]
    forgotten: tuple[NoticeKey, ...]  # over, without a message
    dropped: int  # of these, alerts that were never sent
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
    """The next message for `target`. `known` is the state of its alerts, `absent` the seconds since each was last seen."""
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
    """Follows from what is stored before sending, so that a restarted daemon uses the same one."""
    return _digest(target, *told.key, repr(told.since))


def notice_id(target: str, messages: Iterable[NoticedAlert]) -> str:
    """The same for the same alerts at the same turn."""
    return _digest(target, *(f"{one.id} {one.status} {one.told}" for one in messages))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def concerns(target: HttpTarget | MailTarget, key: NoticeKey, item: Attention) -> bool:
    """Whether a target receives such an alert; one about no run goes only to targets for all runs."""
    if target.level == "error" and item.level != "error":
        return False
    return matches(target.runs, key.run) if key.run else target.runs == ALL


def _said(told: Told, item: Attention) -> Told:
    """An alert in its source's current words, limited in length and characters to what every receiver takes."""
    return told._replace(level=item.level, text=_text(item.text), hint=_text(item.hint), step=item.step)


def _text(text: str) -> str:
    """Replaces control characters: a mail server or chat would refuse the whole message."""
    return visible_lines(text[:TEXT_MAX])


def _is_due(target: HttpTarget | MailTarget, before: Told, item: Attention, now: float) -> bool:
    if item.acknowledged is not None:  # it was acknowledged; its end is still sent, if its begin was
        return False
    if before.times == 0 or before.last is None:
        return _passed(before.since, now, target.after_s)
    if before.level == "warning" and item.level == "error":
        return True
    if item.code == DEATH and item.since is not None and before.last < seconds_of(item.since) <= now:
        return _passed(before.last, now, AGAIN_S)
    return target.repeat_s > 0 and _passed(before.last, now, target.repeat_s)


def _passed(since: float, now: float, seconds: float) -> bool:
    """Whether so much time has passed; a clock that was set back delays nothing."""
    return now - since >= seconds or since - now > CLOCK_S
