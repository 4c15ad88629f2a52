"""Problems of a run that a person should look at, with advice. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from math import isfinite

from holdfast_formats.rest.alert_order import danger
from holdfast_formats.rest.measurements import Attention, Remedy, RunSummary
from holdfast_formats.rest.replica_lags import told_lag
from holdfast_formats.timestamps import seconds_of, span, write
from holdfast_service.control.insight import run_lifecycle
from holdfast_service.control.insight.facts import Facts, ReplicaCounts, Save

LATE_INTERVALS = 3.0  # no commit for so many intervals is too long,
LATE_MIN_S, LATE_ERROR_S = 10.0, 60.0  # and for so long at least; an error only from then on
NEVER_COMMITTED_S = 3600.0  # training for so long without one commit is too long
SLOW_TIMES, SLOW_MIN_S = 3.0, 10.0  # writing a save for so many times as long as usual is too long, and for so long at least
UNVERIFIED_S = 600.0  # so long after its commit a checkpoint has been read back
OFF_BY = 3.0  # saving so many times more or less often than recommended is worth a change
SAVES_LEFT_FEW = 3
REPLICA_BEHIND = 3  # checkpoints
CLOCK_S = 60.0
DEATH = "run-died"
_OF_WHAT_IS_STORED = frozenset({"checkpoint-damaged", "checkpoint-missing", "removal-waits", "replica-damaged"})


def attention(facts: Facts, summary: RunSummary, training: bool) -> list[Attention]:
    """Everything that needs attention now, errors first, and then what puts more data in danger."""
    alerts = [*_lost(facts, summary), *_stuck(facts, summary, training), *_failing(facts), *_held(facts, summary)]
    alerts += [*_warned(facts), *_unverified(facts), *_room(facts), *_copies(facts), *_clock(facts)]
    if training:
        alerts += _pace(summary)
    if summary.life in ("archived", "failed"):  # put away, or never begun: what is stored is still watched, and nothing else
        alerts = [item for item in alerts if item.code in _OF_WHAT_IS_STORED]
    follows = _follows(facts, {item.code for item in alerts})
    return sorted((item for item in alerts if item.code not in follows), key=danger)


def _follows(facts: Facts, codes: set[str]) -> set[str]:
    """Problems that follow from another one, and are not listed themselves."""
    ended = _ended(facts.saves)
    why = ended[0].code if "saves-failing" in codes and ended else None
    follows = {"quota-nearly-full"} if why == "quota-exceeded" else {"disk-nearly-full"} if why == "no-space" else set()
    if "saves-failing" in codes:
        follows.add("no-commit")
    if DEATH in codes and why == "round-aborted":  # the save that it was killed in
        follows.add("saves-failing")
    return follows


def weight(summary: RunSummary) -> tuple[int, int]:
    """The sort key of a run: its errors, then its warnings, without acknowledged ones."""
    levels = [item.level for item in summary.attention if item.acknowledged is None]
    errors = sum(level == "error" for level in levels)
    return errors, len(levels) - errors


def _lost(facts: Facts, summary: RunSummary) -> Iterator[Attention]:
    """Listed, also when acknowledged, until the run is resumed or archived."""
    if facts.life == "died" and summary.life != "archived":
        step = summary.newest if summary.good is None else summary.good.step
        goes_on = "nothing was committed" if step is None else f"it continues from step {step}"
        if facts.held.healthy is False and step != summary.newest:
            goes_on += ", the newest healthy one, if it restores with `healthy=True`"
        yield Attention(
            level="error",
            code=DEATH,
            text="ranks were killed or ended by an exception",
            hint=f"see the trainer's log, then start it again: {goes_on}; or `holdfast acknowledge {facts.run}`",
            step=step,
            since=facts.since,
            remedy="resume",
            acknowledged=run_lifecycle.death_seen(facts),
        )


def _stuck(facts: Facts, summary: RunSummary, training: bool) -> Iterator[Attention]:
    """No commit for too long: storage does not accept the save, or no save begins."""
    if not training:
        return
    writing = min((save.opened for save in facts.saves if save.state == "sealed" and save.ended is None), default=None)
    usual = summary.durable_p95_s or 0.0
    if writing is not None and facts.now - writing > max(SLOW_TIMES * usual, SLOW_MIN_S):
        usually = f"; usually that takes {span(usual)}" if usual else ""
        yield Attention(
            level="warning",
            code="storage-slow",
            text=f"storage has been writing a save for {span(facts.now - writing)}{usually}",
            hint="training continues and committed checkpoints are safe; check the disk or network, or save less often",
            step=summary.newest,
            since=_at(writing),
        )
    elif summary.newest is None:
        yield from _never(facts)
    else:
        yield from _late(facts, summary)


def _never(facts: Facts) -> Iterator[Attention]:
    began = facts.declared[0] if facts.declared else facts.now
    if facts.now - began > NEVER_COMMITTED_S:
        yield Attention(
            level="error",
            code="no-commit",
            text=f"training for {span(facts.now - began)}, but nothing is committed yet",
            hint="check that the trainer calls save(); see its log and the saves of this run",
            since=_at(began),
        )


def _late(facts: Facts, summary: RunSummary) -> Iterator[Attention]:
    exposed, interval = summary.exposed_s, summary.interval_s
    if exposed is None or interval is None or exposed <= max(LATE_INTERVALS * interval, LATE_MIN_S):
        return
    yield Attention(
        level="error" if exposed > LATE_ERROR_S else "warning",
        code="no-commit",
        text=f"no commit for {span(exposed)} of training; usually there is one every {span(interval)}",
        hint="check whether the trainer hangs or its daemon is gone: see the newest save and the ranks' logs",
        step=summary.newest,
        since=_at(facts.now - exposed),
    )


def failing(saves: Sequence[Save]) -> int:
    """How many saves have failed in a row, up to the newest that has ended."""
    return next((n for n, save in enumerate(_ended(saves)) if save.state != "aborted"), len(_ended(saves)))


def _ended(saves: Sequence[Save]) -> list[Save]:
    return [save for save in saves if save.ended is not None]


def _failing(facts: Facts) -> Iterator[Attention]:
    ended, failed = _ended(facts.saves), failing(facts.saves)
    if failed:
        code = ended[0].code or "round-aborted"
        team = code == "quota-exceeded" and not _is_own_quota_full(facts)
        mend = _MEND.get(code, "the list of saves has the message; see also the daemon's log")
        if code == "pinned":
            mend = _unpin(facts.run, ended[0].step)
        yield Attention(
            level="error",
            code="saves-failing",
            text=f"the last {failed} saves failed: {code}" if failed > 1 else f"the last save failed: {code}",
            hint=_TEAM_QUOTA if team else mend,
            step=ended[0].step,
            since=_at(ended[failed - 1].ended),
            remedy="raise-team-quota" if team else _REMEDIES.get(code, "look"),
        )
    elif pinned := _refused_by_a_pin(ended):
        # Later steps were committed, so only this one is not replaced.
        yield Attention(
            level="warning",
            code="saves-failing",
            text=f"the save of step {pinned.step} failed: the older checkpoint of that step is pinned or labelled",
            hint=_unpin(facts.run, pinned.step),
            step=pinned.step,
            since=_at(pinned.ended),
            remedy="look",
        )
    dropped = [save for save in ended if save.state == "dropped"]
    if dropped:
        yield Attention(
            level="warning",
            code="saves-dropped",
            text=f"{len(dropped)} of the last {len(ended)} saves were dropped: no slot was free",
            hint="the list of saves shows what delayed them: storage (save less often, or use a faster disk), a rank, a "
            "node or the catalog",
            step=dropped[0].step,
            since=_at(dropped[-1].ended),
            remedy="save-interval",
        )


def _refused_by_a_pin(ended: Sequence[Save]) -> Save | None:
    """The newest save that could not replace a pinned checkpoint, unless its step was saved since."""
    saved = set()
    for save in ended:
        if save.code == "pinned" and save.step not in saved:
            return save
        saved.add(save.step)
    return None


def _unpin(run: str, step: int) -> str:
    return f"the new line of training cannot replace it before `holdfast unpin {run}@{step}`, or the removal of its labels"


def _is_own_quota_full(facts: Facts) -> bool:
    """Whether the run's own quota is full, which is checked first, rather than a team's."""
    return facts.quota_bytes is not None and facts.held.bytes + max(facts.held.newest_bytes, 1) > facts.quota_bytes


_TEAM_QUOTA = (
    "the quota of its team is used up: an admin raises it (`holdfast quota ls`), or keep fewer checkpoints of its runs"
)
_MEND = {
    "no-space": "free space on the storage, or keep fewer checkpoints: holdfast keep",
    "quota-exceeded": "raise the run's quota or keep fewer checkpoints: holdfast keep",
    "stale-attempt": "an older launch is still running: stop it",
    "storage-failed": "repair the storage; the daemon's log has the system error",
    "state-mismatch": "the ranks disagree about a tensor; the message names it",
    "replicas-differ": "ranks saved different values of a replicated tensor; see the message and its hint",
}
_REMEDIES: dict[str, Remedy] = {"no-space": "keep-fewer", "quota-exceeded": "raise-quota"}


def _held(facts: Facts, summary: RunSummary) -> Iterator[Attention]:
    held = facts.held
    if held.damaged:
        yield Attention(
            level="error",
            code="checkpoint-damaged",
            text=f"{held.damaged} of {held.checkpoints} checkpoints are damaged; the newest is step {held.newest_damaged}",
            hint="check the disk; remove what cannot be repaired. Restores take the newest sound one",
            step=held.newest_damaged,
            remedy="repair",
        )
    if held.healthy is False:
        ill = held.newest if held.unhealthy is None else held.unhealthy
        good = (
            "no earlier checkpoint is healthy"
            if held.newest_healthy is None
            else f"the newest healthy one is step {held.newest_healthy}"
        )
        since = "" if summary.nonfinite is None else f", {summary.nonfinite.place}"
        yield Attention(
            level="error",
            code="checkpoint-unhealthy",
            text=f"step {ill} has new NaN or infinite values{since}; {good}",
            hint="look at its tensors; restore `latest-healthy` if the loss is NaN too",
            step=ill,
            healthy=held.newest_healthy,
            remedy="look" if held.newest_healthy is None else "restore-healthy",
        )
    if held.same_as is not None:
        yield Attention(
            level="warning",
            code="checkpoint-frozen",
            text=f"step {held.newest} is bit-identical to step {held.same_as}",
            hint="no training happened in between: check that the optimizer steps, and that you save the trained tensors",
            step=held.newest,
            since=held.created,
        )


def _warned(facts: Facts) -> Iterator[Attention]:
    for warned in facts.warned:
        yield Attention(
            level="error",
            code=warned.kind,
            text=warned.text,
            hint=_STORED[warned.kind],
            step=warned.step,
            since=warned.at,
        )


_STORED = {
    "checkpoint-missing": "find out what removed it; copy it back from a replica with `holdfast repair RUN@STEP`, or from a "
    "backup if you need it; until then retention removes nothing",
    "removal-waits": "check the disk or network of the root and verify its checkpoints; removal continues once they are "
    "sound",
}


def _unverified(facts: Facts) -> Iterator[Attention]:
    sound = -1 if facts.held.newest_verified is None else facts.held.newest_verified
    newest = -1 if facts.held.newest is None else facts.held.newest
    waits = [
        facts.now - save.ended
        for save in facts.saves
        if save.state == "committed" and save.ended is not None and sound < save.step <= newest
    ]
    if waits and max(waits) > UNVERIFIED_S:
        yield Attention(
            level="warning",
            code="not-verified",
            text=f"committed checkpoints waiting for verification: {len(waits)}, for up to {span(max(waits))}",
            hint="retention removes nothing until then; verify one now with `holdfast verify`",
            step=facts.held.newest,
            since=_at(facts.now - max(waits)),
            remedy="verify",
        )


def _room(facts: Facts) -> Iterator[Attention]:
    size = facts.held.newest_bytes
    if not size:
        return
    rooms = [("disk", "disk-nearly-full", facts.free_bytes)] if facts.free_bytes is not None else []
    if facts.quota_bytes is not None:
        rooms.append(("quota", "quota-nearly-full", max(facts.quota_bytes - facts.held.bytes, 0)))
    for what, code, left in rooms:
        saves = left // size
        if saves < (1 if facts.makes_room else SAVES_LEFT_FEW):
            yield Attention(
                level="error" if saves < 1 else "warning",
                code=code,
                text=f"the {what} has room for {saves} more {'save' if saves == 1 else 'saves'} of this size",
                hint="keep fewer checkpoints: `holdfast keep RUN --dry-run` shows what a policy would remove"
                if what == "disk"
                else "raise the run's quota, or keep fewer checkpoints: holdfast keep",
                remedy="keep-fewer" if what == "disk" else "raise-quota",
            )


def _pace(summary: RunSummary) -> Iterator[Attention]:
    actual, wanted = summary.interval_s, summary.recommended_interval_s
    if not actual or not wanted:
        return
    if actual > OFF_BY * wanted:
        code, more, less = "saves-too-seldom", "less", "more"
    elif wanted > OFF_BY * actual:
        code, more, less = "saves-too-often", "more", "less"
    else:
        return
    yield Attention(
        level="warning",
        code=code,
        text=f"saving every {span(actual)}, {more} often than the {span(wanted)} that cost and failures suggest",
        hint=f"save {less} often" + _steps_hint(summary, wanted / actual),
        remedy="save-interval",
    )


def _steps_hint(summary: RunSummary, ratio: float) -> str:
    if summary.interval_steps is None:
        return ""
    return f": about every {max(round(summary.interval_steps * ratio), 1)} steps"


def _copies(facts: Facts) -> Iterator[Attention]:
    steps = [save.step for save in facts.saves if save.state == "committed"]
    for tier, copies in sorted(facts.copies.items()):
        behind = sum(step > (-1 if copies.newest is None else copies.newest) for step in steps)
        if copies.damaged:
            yield Attention(
                level="error",
                code="replica-damaged",
                text=f"{copies.damaged} copies in {tier} are damaged",
                hint="check that storage; damaged copies are replaced from sound ones",
                subject=tier,
                remedy="retry-replicas",
            )
        elif copies.failing:
            yield Attention(
                level="warning",
                code="replica-failing",
                text=f"{copies.failing} checkpoints could not be copied to {tier}: {copies.problem}",
                hint="the root is safe; check that storage, then copy again",
                subject=tier,
                step=copies.newest,
                remedy="retry-replicas",
            )
        if behind >= REPLICA_BEHIND:
            yield Attention(
                level="warning",
                code="replica-behind",
                text=f"{tier} lacks the newest {behind} checkpoints" + _lag(copies, facts.now),
                hint="check that this storage is reachable and fast enough",
                subject=tier,
                step=copies.newest,
                remedy="retry-replicas",
            )


def _lag(copies: ReplicaCounts, now: float) -> str:
    lag = copies.lag
    said = "" if lag is None else told_lag(lag.missing, lag.bytes, lag.seconds(now))
    return f": {said}" if said else ""


def _clock(facts: Facts) -> Iterator[Attention]:
    ahead = seconds_of(facts.held.created) - facts.now if facts.held.created else 0.0
    if CLOCK_S < ahead < float("inf"):
        yield Attention(
            level="warning",
            code="clock-differs",
            text=f"the newest commit is {span(ahead)} in the future",
            hint="synchronise the machines' clocks with NTP; until then the displayed ages are wrong",
            step=facts.held.newest,
        )


def _at(seconds: float | None) -> str | None:
    if seconds is None or not isfinite(seconds):
        return None
    return write(datetime.fromtimestamp(seconds, timezone.utc))
