"""The summary of a run's checkpointing, from its newest saves. Pure; `summaries` reads the values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite
from statistics import median

from holdfast_formats.rest.measurements import FirstNonFinite, GoodCheckpoint, RunSummary, TierCopies, Trend
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.insight import intervals, run_lifecycle
from holdfast_service.control.insight.attention import attention, failing
from holdfast_service.control.insight.facts import CheckpointFacts, Facts, ReplicaCounts, Save
from holdfast_service.control.insight.summary_rows import SAVES

__all__ = ["SAVES", "age_s", "exposure", "failing", "interval", "quantile", "summarise", "training"]


METRICS_MAX = 32


def summarise(facts: Facts) -> RunSummary:
    """The summary of one run; None for every value that is unknown."""
    held = facts.held
    committed = [save for save in facts.saves if save.state == "committed"]
    stalls = _measured(committed, "stall_s")
    durable = _durations(committed)
    interval_s, interval_steps = interval(facts.saves)
    cost = sum(stalls) / len(stalls) if stalls else None
    failures = failures_mean(facts)
    exposed_s, exposed_steps = exposure(facts)
    life, life_since = run_lifecycle.state_of(facts, interval_s)
    ill = nonfinite(held)
    summary = RunSummary(
        run=facts.run,
        attempt=facts.attempt,
        state=facts.life,
        state_since=facts.since,
        owner=facts.settings.owner,
        tags=list(facts.settings.tags),
        checkpoints=held.checkpoints,
        bytes=held.bytes,
        quota_bytes=facts.quota_bytes,
        free_bytes=facts.free_bytes,
        newest=held.newest,
        newest_verified=held.newest_verified,
        newest_healthy=held.newest_healthy,
        last_commit=held.created,
        last_commit_age_s=age_s(facts),
        exposed_s=exposed_s,
        exposed_steps=exposed_steps,
        saves=len(facts.saves),
        failed=sum(save.state == "aborted" for save in facts.saves),
        dropped=sum(save.state == "dropped" for save in facts.saves),
        stall_p50_s=quantile(stalls, 0.5),
        stall_p95_s=quantile(stalls, 0.95),
        durable_p50_s=quantile(durable, 0.5),
        durable_p95_s=quantile(durable, 0.95),
        disk_ratio=_disk_ratio(committed),
        goodput_lost=intervals.lost(cost, interval_s, failures, quantile(durable, 0.5)),
        interval_s=interval_s,
        interval_steps=interval_steps,
        recommended_interval_s=intervals.recommended(cost, failures, quantile(durable, 0.95)),
        failures_mean_s=failures,
        last_verified=held.verified_created,
        good=_good(held),
        nonfinite=ill,
        copies=[_copies(tier, copied, facts.now) for tier, copied in sorted(facts.copies.items())],
        trend=trend(facts.saves),
        metrics=dict(sorted(held.metrics.items())[:METRICS_MAX]),
        life=life,
        life_since=life_since,
        standing=run_lifecycle.standing(life, ill),
    )
    sentences = {"verdict": run_lifecycle.verdict(facts, summary), "attention": attention(facts, summary, training(facts))}
    return summary.model_copy(update=sentences)


def _copies(tier: str, copied: ReplicaCounts, now: float) -> TierCopies:
    known = TierCopies(tier=tier, newest=copied.newest, damaged=copied.damaged, failing=copied.failing)
    if (lag := copied.lag) is None:
        return known
    seconds = round(lag.seconds(now), 1)
    return known.model_copy(update={"missing": lag.missing, "missing_bytes": lag.bytes, "lag_s": seconds})


def nonfinite(held: CheckpointFacts) -> FirstNonFinite | None:
    """Where NaN began, if the newest checkpoints have it."""
    return None if held.nonfinite_since is None else FirstNonFinite(**held.nonfinite_since._asdict())


def _good(held: CheckpointFacts) -> GoodCheckpoint | None:
    if held.newest_healthy is None or held.healthy_created is None:
        return None
    return GoodCheckpoint(
        step=held.newest_healthy,
        created=held.healthy_created,
        verified=held.healthy_verified,
        copies=list(held.healthy_copies),
    )


def exposure(facts: Facts) -> tuple[float | None, int | None]:
    """Seconds and steps of training that a crash now would lose; 0 when the run is not training."""
    if not training(facts):
        return 0.0, 0
    return _exposed(facts), _exposed_steps(facts)


def trend(saves: Sequence[Save]) -> Trend:
    """The ended saves, the oldest first, each with its stall and the goodput since the one before."""
    ended = [save for save in reversed(saves) if save.ended is not None]
    stalls = [save.measured.get("stall_s") for save in ended]
    goodput: list[float | None] = []
    for number, (save, stall) in enumerate(zip(ended, stalls, strict=True)):
        before = ended[number - 1] if number else save
        since = save.opened - before.opened if before.attempt == save.attempt else 0.0
        known = stall is not None and isfinite(since) and since > 0
        goodput.append(round(max(1.0 - (stall or 0.0) / since, 0.0), 5) if known else None)
    return Trend(
        steps=[save.step for save in ended],
        states=[save.state for save in ended],
        stall_s=[None if stall is None or not isfinite(stall) else round(stall, 6) for stall in stalls],
        goodput=goodput,
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed, interpolated; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def training(facts: Facts) -> bool:
    """Whether ranks are connected. A clock cannot decide that, since a step may take any time."""
    return facts.life == "running"


def failures_mean(facts: Facts) -> float | None:
    """Mean time between failures: the time trained so far over the restarts in it; None before the first restart.

    Every new attempt counts as a failure of the one before. The last interval, which no failure has ended yet, counts as
    time only: the maximum-likelihood estimate for failures that come at random.
    """
    declared = _times(facts.declared)
    if len(declared) < 2:
        return None
    last = facts.now if training(facts) else _last_sign(facts)
    whole = (last if last is not None else declared[0]) - declared[-1]
    return whole / (len(declared) - 1) if whole > 0 else None


def _times(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and isfinite(value)]


def _last_commit(facts: Facts) -> float | None:
    return next(iter(_times([seconds_of(facts.held.created)])), None) if facts.held.created else None


def age_s(facts: Facts) -> float | None:
    """Seconds since the newest commit; 0 where its time is in the future."""
    last = _last_commit(facts)
    return None if last is None else max(facts.now - last, 0.0)


def _last_sign(facts: Facts) -> float | None:
    newest = facts.saves[0] if facts.saves else None
    known: list[float | None] = [*facts.declared[:1], *([newest.opened, newest.ended] if newest else [])]
    return max(_times([*known, _last_commit(facts)]), default=None)


def _exposed(facts: Facts) -> float | None:
    """Training since the newest commit's contents were captured; since the newest attempt, if that has begun later."""
    captured = [save.opened for save in facts.saves if save.state == "committed" and save.step == facts.held.newest]
    committed: list[float | None] = [*captured[:1]] or [_last_commit(facts)]
    began = _times([*committed, *facts.declared[:1]])
    return max(facts.now - max(began), 0.0) if began else None


def _exposed_steps(facts: Facts) -> int | None:
    """Steps that the newest attempt has begun to save after the newest commit."""
    known = [save.step for save in facts.saves if save.attempt == facts.attempt]
    return max(max(known) - (facts.held.newest or 0), 0) if known else None


def _measured(saves: Iterable[Save], phase: str) -> list[float]:
    return _times(save.measured.get(phase) for save in saves)


def _durations(committed: Iterable[Save]) -> list[float]:
    spans = (save.ended - save.opened for save in committed if save.ended is not None)
    return [span for span in spans if isfinite(span) and span >= 0]


def interval(saves: Sequence[Save]) -> tuple[float | None, int | None]:
    """Median time and steps between the begins of saves of one attempt, one after the other."""
    seconds: list[float] = []
    steps: list[int] = []
    for newer, older in pairwise(saves):
        if newer.attempt == older.attempt and newer.step > older.step:
            steps.append(newer.step - older.step)
            seconds.append(newer.opened - older.opened)
    seconds = [span for span in _times(seconds) if span > 0]
    return (median(seconds) if seconds else None), (round(median(steps)) if steps else None)


def _disk_ratio(committed: Iterable[Save]) -> float | None:
    ratios: list[float] = []
    for save in committed:
        size, seconds, limit = (save.measured.get(name) for name in ("bytes", "write_s", "disk_bytes_per_second"))
        if size and seconds and limit:
            ratios += _times([size / seconds / limit])
    return median(ratios) if ratios else None
