"""Retention: which checkpoints stay and why. Pure: checkpoints, a policy and a clock value in, decisions with reasons out.

What is kept is the union of what the rules keep. Only verified checkpoints are counted. The newest verified one stays, and
everything newer (I10); so does the newest verified one that is not known to be unhealthy. One that is not verified takes
nobody's place, and stays wherever it would stay if it were verified.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from holdfast_formats.retention import Best, RetentionPolicy

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Candidate(NamedTuple):
    """A checkpoint that is there. `holds` says what keeps it whatever the policy says: a pin, a label, a reader."""

    step: int
    created: float  # seconds since the epoch
    verified: bool = True
    metrics: Mapping[str, float] = {}
    holds: tuple[str, ...] = ()
    healthy: bool | None = None  # None: nobody looked, and nothing speaks against it


class Judged(Protocol):
    """What is known of a checkpoint's worth."""

    @property
    def step(self) -> int: ...
    @property
    def verified(self) -> bool: ...
    @property
    def healthy(self) -> bool | None: ...


class Decision(NamedTuple):
    """Kept for every one of these reasons, or let go because each rule says why it does not keep it."""

    step: int
    keep: bool
    reasons: tuple[str, ...]


class Answer(NamedTuple):
    keeps: bool
    why: str


Rule = Callable[[Candidate], Answer]


def decide(candidates: Sequence[Candidate], policy: RetentionPolicy, now: float) -> list[Decision]:
    """What becomes of every checkpoint, newest step first; their order does not matter, and their steps differ."""
    return _decide(candidates, policy, now, newest_healthy(candidates))


def foresee(candidates: Sequence[Candidate], incoming: Candidate, policy: RetentionPolicy, now: float) -> list[int]:
    """The steps that `decide` would let go once `incoming` is verified, and that are superseded already; oldest first.

    For a save that does not fit otherwise: each of them is older than a checkpoint that is verified now (I10).
    """
    newest = max((c.step for c in candidates if c.verified), default=-1)
    others = [c for c in candidates if c.step != incoming.step]
    # How healthy it will be nobody knows: until then, no other one takes the place of the newest healthy.
    decisions = _decide([*others, incoming], policy, now, newest_healthy(others))
    return sorted(d.step for d in decisions if not d.keep and d.step < newest)


def _decide(candidates: Sequence[Candidate], policy: RetentionPolicy, now: float, healthy: int) -> list[Decision]:
    """`healthy` is the step of the newest healthy checkpoint, -1 where there is none."""
    verified = sorted((c for c in candidates if c.verified), key=_step)
    newest = verified[-1].step if verified else -1
    rules = list(_rules(policy, verified, now))
    return [_decide_one(c, (newest, healthy), policy.steps, rules) for c in sorted(candidates, key=_step, reverse=True)]


def newest_healthy(candidates: Iterable[Judged]) -> int:
    """The newest step that is verified and not known to be unhealthy; -1 where there is none."""
    return max((c.step for c in candidates if c.verified and c.healthy is not False), default=-1)


def _decide_one(c: Candidate, marks: tuple[int, int], named: Sequence[int], rules: Sequence[Rule]) -> Decision:
    newest, healthy = marks
    kept = list(c.holds)
    if c.step == newest:
        kept.append("it is the newest verified checkpoint")
    elif c.step > newest:
        kept.append("no newer checkpoint is verified")
    if c.step == healthy != newest:
        kept.append("it is the newest healthy checkpoint")
    elif healthy < c.step < newest and c.healthy is not False:  # not verified, or it would be the newest
        kept.append("no newer checkpoint is known to be healthy")
    if c.step in named:
        kept.append("the policy names its step")
    if not rules:
        kept.append("no rule limits what is kept")
    answers = [rule(c) for rule in rules]
    kept += [answer.why for answer in answers if answer.keeps]
    return Decision(c.step, True, tuple(kept)) if kept else Decision(c.step, False, tuple(a.why for a in answers))


def _rules(policy: RetentionPolicy, verified: Sequence[Candidate], now: float) -> Iterator[Rule]:
    """The rules that the policy has, each ready to judge any checkpoint; `verified` ascends by step."""
    if policy.last is not None:
        yield _last(policy.last, verified)
    if policy.every_steps is not None:
        yield _multiples(policy.every_steps)
    if policy.steps_apart is not None:
        yield _apart(policy.steps_apart, verified, lambda c: float(c.step), lambda steps: f"{steps:.0f} steps")
    if policy.every_seconds is not None:
        yield _apart(policy.every_seconds, verified, lambda c: c.created, span)
    if policy.within_seconds is not None:
        yield _within(policy.within_seconds, now)
    for best in policy.best:
        yield _best(best, verified)


def _last(count: int, verified: Sequence[Candidate]) -> Rule:
    steps = [c.step for c in verified]

    def judge(c: Candidate) -> Answer:
        newer = len(steps) - bisect_right(steps, c.step)
        if newer >= count:
            return Answer(False, f"last {count}: {newer} newer checkpoints are verified")
        if c.verified:
            return Answer(True, f"last {count}: it is number {newer + 1} of the newest verified ones")
        return Answer(True, f"last {count}: only {newer} newer checkpoints are verified")

    return judge


def _multiples(interval: int) -> Rule:
    def judge(c: Candidate) -> Answer:
        keeps = c.step % interval == 0
        return Answer(keeps, f"every {interval} steps: its step is {'a' if keeps else 'no'} multiple of that")

    return judge


def _apart(
    least: float, verified: Sequence[Candidate], place: Callable[[Candidate], float], said: Callable[[float], str]
) -> Rule:
    """A chain from the oldest on, each link at least so far from the one before, whichever way the clock was turned."""
    chain: list[Candidate] = []
    for c in verified:
        if not chain or abs(place(c) - place(chain[-1])) >= least:
            chain.append(c)
    steps = [c.step for c in chain]

    def judge(c: Candidate) -> Answer:
        before = bisect_left(steps, c.step)
        if not before:
            return Answer(True, f"one every {said(least)}: it is the oldest")
        link = chain[before - 1]
        far = abs(place(c) - place(link))
        return Answer(far >= least, f"one every {said(least)}: it comes {said(far)} after step {link.step}")

    return judge


def _within(seconds: float, now: float) -> Rule:
    def judge(c: Candidate) -> Answer:
        age = now - c.created
        return Answer(age <= seconds, f"within {span(seconds)}: it was committed {span(max(age, 0))} ago")

    return judge


def _best(best: Best, verified: Sequence[Candidate]) -> Rule:
    sign = 1 if best.mode == "min" else -1

    def key(c: Candidate) -> tuple[float, int] | None:
        value = c.metrics.get(best.metric, math.nan)
        return (sign * value, c.step) if math.isfinite(value) else None

    ranked = sorted(k for k in map(key, verified) if k is not None)
    name = f"best {best.count} by {best.mode} {best.metric}"

    def judge(c: Candidate) -> Answer:
        mine = key(c)
        if mine is None:
            return Answer(best.keep_unmeasured, f"{name}: it was saved without this metric")
        rank = bisect_left(ranked, mine)
        return Answer(rank < best.count, f"{name}: with {c.metrics[best.metric]:g} it is number {rank + 1}")

    return judge


def span(seconds: float) -> str:
    """5400 -> 1.5 h: a duration in the largest unit of which there is one."""
    unit_s, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{round(seconds / unit_s, 1):g} {unit}"


def _step(c: Candidate) -> int:
    return c.step
