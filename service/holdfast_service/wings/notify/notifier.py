"""Sends alerts to people. No save ever waits for it: it reads the catalog, in its own threads.

One thread collects alerts; each target has a thread that sends, and uses only the newest collection. So nothing is queued
but rows of the catalog: one for each alert and target. Of several nodes, one is on duty.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from holdfast_formats.errors import CheckpointError, InUse, InvalidRequest, NoSuchResource
from holdfast_formats.rest.measurements import Attention
from holdfast_formats.rest.notifications import Notice, NotificationTarget, TestDelivery
from holdfast_formats.rest.operations import Level
from holdfast_formats.timestamps import utc_now
from holdfast_service.wings.notify.delivery import NotDelivered, deliver
from holdfast_service.wings.notify.delivery_records import DeliveryRecords
from holdfast_service.wings.notify.schedule import NoticeKey, as_alert, concerns, notice_id, plan
from holdfast_service.wings.notify.target_state import TargetState
from holdfast_service.wings.notify.targets import HttpTarget, MailTarget, NotifyFile, read_targets

log = logging.getLogger(__name__)

DUTY = "notifications"
LOOK_S = 5.0
LOOK_PARTS = 50  # a look takes at most one part in so many of a core, however many runs there are
UNSURE_S = 90.0  # after a start: ranks have a minute to come back, and until then a run that was lost is not known to be
RETRY_S, RETRY_MAX_S = 5.0, 600.0
CLOSE_S = 3.0
OUTCOMES = ("sent", "failed", "dropped")

AnyTarget = HttpTarget | MailTarget


class DeliveryEvents(Protocol):
    """Records the results of messages."""

    def add(self, kind: str, text: str, run: str | None = None, step: int | None = None, level: Level = "info") -> None: ...


class NotifierContext(NamedTuple):
    """A notifier's dependencies. `on_duty` returns whether this node sends."""

    notices: DeliveryRecords
    alerts: Callable[[], Mapping[NoticeKey, Attention]]
    news: DeliveryEvents
    on_duty: Callable[[], bool]
    node: str


class AlertSnapshot(NamedTuple):
    """The alerts at one moment, for a target's thread. `at` is wall-clock time, which may be set; `seen` is monotonic."""

    alerts: Mapping[NoticeKey, Attention]
    at: float
    seen: float


class Notifier:
    """Sends alerts to the targets of a file, while this node is on duty. Thread-safe."""

    def __init__(self, path: Path, of: NotifierContext, look_s: float = LOOK_S) -> None:
        """Raises `InvalidRequest` for an invalid file."""
        self._path, self._look_s = path, look_s
        self._notices, self._alerts, self._news, self._on_duty, self._node = of
        self.counts = {outcome: 0 for outcome in OUTCOMES}  # of this process
        self._stamp = self._stamp_seen = _stamp(path)
        self.file = read_targets(path)
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._testing: set[str] = set()
        self._renamed = True
        self._closing = threading.Event()
        self._take_over(self.file)
        self._thread = threading.Thread(target=self._run, name="holdfast-notify", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the next daemon repeats a message whose delivery was not confirmed."""
        self._closing.set()
        with self._lock:
            senders = list(self._senders.values())
            self._senders = {}
        for sender in senders:
            sender.stop()
        limit = time.monotonic() + CLOSE_S
        for thread in (self._thread, *(sender.thread for sender in senders)):
            thread.join(max(limit - time.monotonic(), 0.0))

    def targets(self) -> list[NotificationTarget]:
        """The targets, and the results of deliveries, over all nodes; `CatalogUnavailable`."""
        listed = self.file.target
        fared = self._notices.delivered([one.name for one in listed])
        return [
            NotificationTarget(
                name=one.name,
                kind=one.kind,
                to=one.shown,
                runs=one.runs,
                level=one.level,
                after_s=one.after_s,
                repeat_s=one.repeat_s or None,
                recovery=one.recovery,
                firing=fared[one.name].firing,
                sent=fared[one.name].sent,
                failed=fared[one.name].failed,
                dropped=fared[one.name].dropped,
                last_sent=fared[one.name].last_sent,
                last_node=fared[one.name].node,
                problem=fared[one.name].problem,
                problem_since=fared[one.name].problem_since,
            )
            for one in listed
        ]

    def test(self, name: str) -> TestDelivery:
        """Send a test message now, from this node. `NoSuchResource`; `InUse` while another one is being sent."""
        target = next((one for one in self.file.target if one.name == name), None)
        if target is None:
            raise NoSuchResource(f"there is no target {name!r}", hint="list targets with `holdfast notify ls`")
        with self._lock:
            if name in self._testing:
                raise InUse(f"a test message to {name} is being sent", hint="wait for it")
            self._testing.add(name)
        try:
            at = utc_now()
            message = Notice(
                kind="test", id=notice_id(f"test {name} {at}", ()), at=at, target=name, node=self._node, alerts=[]
            )
            deliver(target, message)
        except NotDelivered as error:
            with suppress(CheckpointError):
                self.not_sent(target, error)
            return TestDelivery(target=name, delivered=False, problem=error.problem, hint=error.hint)
        finally:
            with self._lock:
                self._testing.discard(name)
        self.counts["sent"] += 1
        with suppress(CheckpointError):
            self._notices.tested(name)
        with self._lock:
            sender = self._senders.get(name)
        if sender is not None:
            sender.hurry()
        return TestDelivery(target=name, delivered=True)

    def ledger(self, target: AnyTarget) -> TargetState:
        return TargetState(self._notices, target.name)

    def deliver(
        self, target: AnyTarget, ledger: TargetState, look: AlertSnapshot, absent: Mapping[NoticeKey, float]
    ) -> bool:
        """Send a target's due alerts; True if there are more. Raises `NotDelivered`, and `CatalogUnavailable`."""
        changes = plan(target, look.alerts, ledger.known(), absent, look.at)
        ledger.prepare(changes)
        self.counts["dropped"] += changes.dropped
        if not (changes.firing or changes.recovered) or self._closing.is_set() or not self._on_duty():
            return False
        dashboard = self.file.dashboard
        alerts = [as_alert(target.name, notified, False, dashboard) for notified in changes.firing]
        alerts += [as_alert(target.name, notified, True, dashboard) for notified in changes.recovered]
        message = Notice(
            kind="alerts",
            id=notice_id(target.name, alerts),
            at=utc_now(),
            target=target.name,
            node=self._node,
            alerts=alerts,
            waiting=changes.waiting,
        )
        deliver(target, message)
        ledger.sent(changes, look.at)
        self.counts["sent"] += 1
        notified = [f"of {_alerts(len(changes.firing))}"] if changes.firing or not changes.recovered else []
        notified += [f"that {_alerts(len(changes.recovered))} ended"] if changes.recovered else []
        text = f"{target.name} was sent {', and '.join(notified)}"
        log.info("%s", text)
        self._news.add("notification-sent", text)
        return changes.waiting > 0

    def not_sent(self, target: AnyTarget, error: NotDelivered) -> None:
        """A message was not accepted: recorded once until one is accepted again."""
        self.counts["failed"] += 1
        text = f"{target.name} ({target.kind}) could not be reached: {error.problem}"
        log.warning("%s; %s", text, error.hint)
        if self._notices.failed(target.name, error.problem):
            self._news.add("notification-failed", text, level="warning")

    def _run(self) -> None:
        took_s = 0.0
        while not self._closing.wait(max(self._look_s, LOOK_PARTS * took_s)):
            began = time.thread_time()
            try:
                self._reread()
                with self._lock:
                    senders = list(self._senders.values())
                if not self._on_duty():
                    for sender in senders:
                        sender.receive(None)
                    continue
                if self._renamed:
                    self._notices.keep_only([sender.target.name for sender in senders])
                    self._renamed = False
                look = AlertSnapshot(self._alerts(), time.time(), time.monotonic())
                for sender in senders:
                    sender.receive(look)
            except CheckpointError as away:  # nothing is known, so that nothing is over
                log.info("alerts cannot be sent: %s", away.detail)
            except Exception:
                log.exception("alerts cannot be sent")
            took_s = time.thread_time() - began

    def _reread(self) -> None:
        """Take over a changed file, unless it is invalid; one that is still changing may be incomplete, and waits for the
        next look.
        """
        stamp, seen = _stamp(self._path), self._stamp_seen
        self._stamp_seen = stamp
        if stamp == self._stamp or stamp != seen:
            return
        try:
            notify_file = read_targets(self._path)
        except InvalidRequest as error:
            self._stamp = stamp
            log.error("%s; keeping the previous targets", error.detail)
            self._news.add("notification-failed", f"{error.detail}; keeping the previous targets", level="error")
            return
        if _stamp(self._path) != stamp:
            return
        self._stamp = stamp
        log.info("%s now lists %d targets", self._path, len(notify_file.target))
        self._take_over(notify_file)

    def _take_over(self, notify_file: NotifyFile) -> None:
        self.file, self._renamed = notify_file, True
        wanted = {one.name: one for one in notify_file.target}
        with self._lock:
            before, self._senders = self._senders, {}
            for name, target in wanted.items():
                old = before.get(name)
                self._senders[name] = old if old is not None and old.target == target else _Sender(self, target)
            ended = [old for name, old in before.items() if self._senders.get(name) is not old]
        for old in ended:
            old.stop()


class _Sender:
    """The thread of one target. It sees only the newest alerts; while its target does not answer it retries at increasing
    intervals.
    """

    def __init__(self, notifier: Notifier, target: AnyTarget) -> None:
        self.target = target
        self._notifier = notifier
        self._changed = threading.Condition()
        self._look: AlertSnapshot | None = None
        self._gone: dict[NoticeKey, float] = {}
        self._sure: float | None = None  # from when on what is absent is over, by the monotonic clock
        self._ledger = notifier.ledger(target)
        self._stopped = self._hurried = self._off_duty = False
        self.thread = threading.Thread(target=self._run, name=f"holdfast-notify-{target.name}", daemon=True)
        self.thread.start()

    def receive(self, look: AlertSnapshot | None) -> None:
        """Set the present alerts; None: another node is on duty."""
        with self._changed:
            self._look = look
            self._off_duty |= look is None
            self._changed.notify_all()

    def hurry(self) -> None:
        """Try again at once: the target has just accepted something."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        tries = 0
        while (look := self._next()) is not None:
            try:
                while self._notifier.deliver(self.target, self._ledger, look, self._absent(look)) and not self._stopped:
                    pass
                tries = 0
            except NotDelivered as error:
                tries += 1
                self._wait(error, max(min(RETRY_S * 2 ** min(tries - 1, 20), RETRY_MAX_S), error.again_s))
            except CheckpointError as away:
                log.info("cannot send alerts to %s: %s", self.target.name, away.detail)
            except Exception as error:
                log.exception("sending alerts to %s failed", self.target.name)
                self._wait(NotDelivered(f"internal error in the daemon: {type(error).__name__}", "see its log"), RETRY_MAX_S)

    def _wait(self, error: NotDelivered, seconds: float) -> None:
        with self._changed:
            self._hurried = False
        try:
            self._notifier.not_sent(self.target, error)
        except CheckpointError as away:
            log.info("cannot record that %s was not reached: %s", self.target.name, away.detail)
        except Exception:  # whatever it is, this thread goes on
            log.exception("recording that %s was not reached failed", self.target.name)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._hurried, seconds * random.uniform(0.8, 1.2))

    def _next(self) -> AlertSnapshot | None:
        """The newest alerts that were not processed yet; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._look is not None)
            if self._off_duty:
                self._gone, self._sure, self._off_duty = {}, None, False
                self._ledger.hand_over()
            look, self._look = self._look, None
            return None if self._stopped else look

    def _absent(self, look: AlertSnapshot) -> dict[NoticeKey, float]:
        """Seconds for which alerts are absent, since this process started: an alert unknown at the start is not over."""
        if self._sure is None:
            self._sure = look.seen + UNSURE_S
        since = max(look.seen, self._sure)
        present = {key for key, item in look.alerts.items() if concerns(self.target, key, item)}
        self._gone = {key: self._gone.get(key, since) for key in self._ledger.known() if key not in present}
        return {key: look.seen - since for key, since in self._gone.items()}


def _alerts(count: int) -> str:
    return f"{count} {'alert' if count == 1 else 'alerts'}"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
