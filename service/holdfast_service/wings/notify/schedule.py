"""Decides which alerts a target is sent now. Pure values in, values out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import NamedTuple

from holdfast_formats.printable import visible_lines
from holdfast_formats.rest.access import ALL, matches
from holdfast_formats.rest.measurements import Attention
from holdfast_formats.rest.notifications import AlertLevel, NoticedAlert
from holdfast_formats.timestamps import seconds_of, write
from holdfast_service.wings.notify.targets import HttpTarget, MailTarget

ALERTS_MAX = 50  # of a message; the next one has the others
SETTLED_S = 30.0  # an alert is over when it has been absent for so long
CLOCK_S = 60.0  # a time that is later than now by more was written by a clock that was wrong
DEATH = "run-died"
AGAIN_S = 900.0  # after the last message, a later death is sent: a run that is resumed and dies at once is not over
TEXT_MAX = 2000  # characters of a text or a hint
NO_RUN = ""


class NoticeKey(NamedTuple):
    """Identifies an alert; `run` is empty for one about no run."""

    run: str
    code: str


class NotifiedAlert(NamedTuple):
    """The state of one alert for one target, sent or to be sent. Times are seconds since the epoch: `since` is when it
    began, `last` when it was last sent, and until the first message when it was first seen.
    """

    key: NoticeKey
    level: AlertLevel
    text: str
    hint: str
    step: int | None
    since: float
    times: int
    last: float


class Plan(NamedTuple):
    """Changes: new alerts, alerts that were over before they were sent, and the contents of the next message."""

    added: tuple[NotifiedAlert, ...]
    forgotten: tuple[NoticeKey, ...]  # over, without a message
    dropped: int  # of these, alerts that were never sent
    firing: tuple[NotifiedAlert, ...]
    recovered: tuple[NotifiedAlert, ...]
    waiting: int


def current(found: Iterable[tuple[str, Attention]]) -> dict[NoticeKey, Attention]:
    """Alerts by run and code; several of one code become one, of the highest level."""
    alerts: dict[NoticeKey, Attention] = {}
    for run, item in found:
        key = NoticeKey(run, item.code)
        before = alerts.get(key)
        if before is None:
            alerts[key] = item
        elif len(before.text) + len(item.text) < TEXT_MAX:
            level: AlertLevel = "error" if "error" in (before.level, item.level) else "warning"
            seen = before.acknowledged and item.acknowledged
            update = {"level": level, "text": f"{before.text}; {item.text}", "acknowledged": seen}
            alerts[key] = before.model_copy(update=update)
    return alerts


def plan(
    target: HttpTarget | MailTarget,
    alerts: Mapping[NoticeKey, Attention],
    known: Mapping[NoticeKey, NotifiedAlert],
    absent: Mapping[NoticeKey, float],
    now: float,
) -> Plan:
    """The next message for `target`. `known` is the state of its alerts, `absent` the seconds since each was last seen."""
    wanted = {key: item for key, item in alerts.items() if concerns(target, key, item)}
    added = {
        key: _said(NotifiedAlert(key, item.level, "", "", None, _began(item, now), 0, now), item)
        for key, item in wanted.items()
        if key not in known
    }
    firing = []
    for key, item in wanted.items():
        before = known.get(key) or added[key]
        if _is_due(target, before, item, now):
            firing.append(_said(before, item))
    over = [notified for key, notified in known.items() if key not in wanted and absent.get(key, 0.0) >= SETTLED_S]
    recovered = [notified for notified in over if notified.times and target.recovery]
    forgotten = [notified for notified in over if not (notified.times and target.recovery)]
    firing.sort(key=lambda notified: (notified.level != "error", notified.since, notified.key))
    messages = [*firing, *recovered]
    now_told, later = messages[:ALERTS_MAX], messages[ALERTS_MAX:]
    return Plan(
        added=tuple(added.values()),
        forgotten=tuple(notified.key for notified in forgotten),
        dropped=sum(not notified.times for notified in forgotten),
        firing=tuple(notified for notified in now_told if notified.key in wanted),
        recovered=tuple(notified for notified in now_told if notified.key not in wanted),
        waiting=len(later),
    )


def as_alert(target: str, notified_alert: NotifiedAlert, recovered: bool, dashboard: str | None) -> NoticedAlert:
    run = notified_alert.key.run or None
    return NoticedAlert(
        id=alert_id(target, notified_alert),
        status="recovered" if recovered else "firing",
        level=notified_alert.level,
        code=notified_alert.key.code,
        text=notified_alert.text,
        hint=notified_alert.hint,
        run=run,
        step=notified_alert.step,
        since=write(datetime.fromtimestamp(notified_alert.since, timezone.utc)),
        told=notified_alert.times,
        url=None if dashboard is None else f"{dashboard}/runs/{run}" if run else f"{dashboard}/",
    )


def alert_id(target: str, notified_alert: NotifiedAlert) -> str:
    """Follows from what is stored before sending, so that a restarted daemon uses the same one."""
    return _digest(target, *notified_alert.key, repr(notified_alert.since))


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


def _began(item: Attention, now: float) -> float:
    """When the alert began, or `now` if that is unknown; a clock that is ahead delays nothing."""
    return now if item.since is None else min(seconds_of(item.since), now)


def _said(notified_alert: NotifiedAlert, item: Attention) -> NotifiedAlert:
    """An alert in its source's current words, limited in length and characters to what every receiver takes."""
    return notified_alert._replace(level=item.level, text=_text(item.text), hint=_text(item.hint), step=item.step)


def _text(text: str) -> str:
    """Replaces control characters: a mail server or chat would refuse the whole message."""
    return visible_lines(text[:TEXT_MAX])


def _is_due(target: HttpTarget | MailTarget, before: NotifiedAlert, item: Attention, now: float) -> bool:
    if item.acknowledged is not None:  # it was acknowledged; its end is still sent, if its begin was
        return False
    if before.times == 0:
        return _passed(before.last, now, target.after_s)
    if before.level == "warning" and item.level == "error":
        return True
    if item.code == DEATH and item.since is not None and before.last < seconds_of(item.since) <= now:
        return _passed(before.last, now, AGAIN_S)
    return target.repeat_s > 0 and _passed(before.last, now, target.repeat_s)


def _passed(since: float, now: float, seconds: float) -> bool:
    """Whether so much time has passed; a clock that was set back delays nothing."""
    return now - since >= seconds or since - now > CLOCK_S
