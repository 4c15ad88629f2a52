"""Retention: decides which checkpoints stay, with reasons. Pure: checkpoints, a policy and the time in, decisions out.

A checkpoint stays if any rule keeps it. Only verified checkpoints are counted. The newest verified one stays, and everything
newer (I10); so does the newest verified one that is not known to be unhealthy. A checkpoint that is not verified supersedes
nothing, and stays if it would stay as a verified one.

All of that holds for each set of groups: a checkpoint is superseded only by one with at least the same groups, so a full one
stays, however many newer ones of the model alone there are. Rules count a thinned one as if it still were whole.

An abandoned checkpoint, which training left behind when it continued from an older step, supersedes nothing either. It goes
when the new line of training has a verified checkpoint.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from holdfast_formats import metric_values
from holdfast_formats.lineage import ROOT, Key
from holdfast_formats.rest.retention import Best, RetentionPolicy

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Candidate(NamedTuple):
    """An existing checkpoint. `holds` are reasons to keep it whatever the policy says: a pin, a label, a reader."""

    step: int
    created: float  # in seconds since the run's first commit, as daemons have seen them pass
    verified: bool = True
    metrics: Mapping[str, float] = {}
    holds: tuple[str, ...] = ()
    healthy: bool | None = None  # None: not checked, which counts as healthy
    groups: frozenset[str] = frozenset()
    line: Key = ROOT  # of training; a greater one was begun later
    abandoned: bool = False
    gone: frozenset[str] = frozenset()  # groups that were taken out of it
    small: frozenset[str] = frozenset()  # the rules by which it could be stored in fewer bytes
    compact: bool = False  # it was stored in fewer bytes
    proven: str | None = None  # what its files were like when it was verified, as the catalog says

    @property
    def saved(self) -> frozenset[str]:
        """The groups with which it was saved. Rules compare these, so a thinned one counts as whole."""
        return self.groups | self.gone


class JudgedCheckpoint(Protocol):
    """The facts that decide whether a checkpoint supersedes others."""

    @property
    def step(self) -> int: ...
    @property
    def verified(self) -> bool: ...
    @property
    def healthy(self) -> bool | None: ...
    @property
    def groups(self) -> Collection[str]: ...
    @property
    def abandoned(self) -> bool: ...


class Newest(NamedTuple):
    """The newest steps with at least certain groups: the verified one, and the verified one not known to be unhealthy; -1 if
    none.
    """

    verified: int
    healthy: int


class Decision(NamedTuple):
    """Whether a checkpoint is kept, with all reasons to keep it, or with the reason of each rule that does not."""

    step: int
    keep: bool
    reasons: tuple[str, ...]


class RetentionAnswer(NamedTuple):
    keeps: bool
    why: str


Rule = Callable[[Candidate], RetentionAnswer]
_Make = Callable[[Sequence[Candidate]], Rule]
_NO_RULE = "no rule limits what is kept"


def decide(candidates: Sequence[Candidate], policy: RetentionPolicy, now: float) -> list[Decision]:
    """The decision for every checkpoint, newest step first. The order of `candidates` does not matter; their steps must
    differ. `now` is when ages end, in the time of `created`: the newest commit.
    """
    return _decide(candidates, policy, now, candidates)


def foresee(candidates: Sequence[Candidate], incoming: Candidate, policy: RetentionPolicy, now: float) -> list[int]:
    """The steps that `decide` would remove once `incoming` is verified, and that are superseded already; oldest first.

    They make room for a save that does not fit otherwise. Each of them is older than a verified checkpoint (I10), or
    abandoned.
    """
    others = [c for c in candidates if c.step != incoming.step]
    # It is not known yet whether it will be healthy: until then, nothing supersedes the newest healthy checkpoint.
    decisions = _decide([*others, incoming], policy, now, others)
    by_step = {c.step: c for c in candidates}
    gone = [by_step[d.step] for d in decisions if not d.keep and d.step in by_step]
    return sorted(c.step for c in gone if c.abandoned or c.step < newest_of(candidates, c.groups).verified)


def newest_of(among: Iterable[JudgedCheckpoint], groups: Collection[str]) -> Newest:
    """The newest verified and the newest healthy checkpoint, of those with at least these groups that are not abandoned."""
    wanted = frozenset(groups)
    sound = [c for c in among if c.verified and not c.abandoned and wanted <= frozenset(c.groups)]
    healthy = max((c.step for c in sound if c.healthy is not False), default=-1)
    return Newest(max((c.step for c in sound), default=-1), healthy)


def _decide(
    candidates: Sequence[Candidate], policy: RetentionPolicy, now: float, healthy: Sequence[Candidate]
) -> list[Decision]:
    """Decide for all candidates. The newest healthy checkpoint is looked for among `healthy`."""
    held = {c.groups for c in candidates}
    marks = {groups: Newest(newest_of(candidates, groups).verified, newest_of(healthy, groups).healthy) for groups in held}
    verified = sorted((c for c in candidates if c.verified and not c.abandoned), key=_step)
    kept = {c.step for c in verified if c.step in marks[c.groups]}
    rules = [_Judge(make, verified, kept, {c.saved for c in candidates}) for make in _rules(policy, now)]
    age = _age(policy, now)
    decisions = []
    for c in sorted(candidates, key=_step, reverse=True):
        named = ("the policy names this step",) if c.step in policy.steps else ()
        if c.abandoned:
            decisions.append(_decide_abandoned(c, named, verified, policy.limits, age))
        else:
            decisions.append(_decide_one(c, named, marks[c.groups], rules))
    return decisions


def _decide_one(c: Candidate, named: Sequence[str], mark: Newest, rules: Sequence[_Judge]) -> Decision:
    kept = list(c.holds)
    if c.step == mark.verified:
        kept.append("it is the newest verified checkpoint")
    elif c.step > mark.verified:
        kept.append("no newer checkpoint is verified")
    if c.step == mark.healthy != mark.verified:
        kept.append("it is the newest healthy checkpoint")
    elif mark.healthy < c.step < mark.verified and c.healthy is not False:  # not verified, or it would be the newest
        kept.append("no newer checkpoint is known to be healthy")
    kept += named
    if not rules:
        kept.append(_NO_RULE)
    answers = [rule(c) for rule in rules]
    kept += [answer.why for answer in answers if answer.keeps]
    return Decision(c.step, True, tuple(kept)) if kept else Decision(c.step, False, tuple(a.why for a in answers))


def _decide_abandoned(
    c: Candidate, named: Sequence[str], verified: Sequence[Candidate], limited: bool, age: Rule | None
) -> Decision:
    """Decide for an abandoned checkpoint. Only the rule about age can keep it: the others are for the live line of
    training.
    """
    kept = [*c.holds, *named]
    follows = [v.step for v in verified if v.line > c.line and c.groups <= v.groups]
    healthy = [v.step for v in verified if v.line > c.line and c.groups <= v.groups and v.healthy is not False]
    after = follows if c.healthy is False else healthy
    if not after:
        kept.append("it is abandoned, but the new line of training has no verified checkpoint yet")
    if not limited:
        kept.append(_NO_RULE)
    if age is not None and (answer := age(c)).keeps:
        kept.append(answer.why)
    if kept:
        return Decision(c.step, True, tuple(kept))
    return Decision(
        c.step, False, (f"it is abandoned: training continued from an older step, and its step {after[-1]} is verified",)
    )


class _Judge:
    """Applies one rule to checkpoints of all groups, those with which they were saved.

    Each is compared with the checkpoints that may supersede it: others of exactly its groups, and those of more groups that
    stay by this rule or in any case.
    """

    def __init__(
        self, make: _Make, verified: Sequence[Candidate], kept: Collection[int], held: Iterable[frozenset[str]]
    ) -> None:
        """`verified` ascends by step; `kept` are the steps among them that stay in any case."""
        stays = set(kept)
        self._rules: dict[frozenset[str], Rule] = {}
        for groups in sorted(held, key=lambda g: (-len(g), sorted(g))):
            rule = make([v for v in verified if v.saved == groups or (v.saved > groups and v.step in stays)])
            stays.update(v.step for v in verified if v.saved == groups and rule(v).keeps)
            self._rules[groups] = rule

    def __call__(self, c: Candidate) -> RetentionAnswer:
        return self._rules[c.saved](c)


def _rules(policy: RetentionPolicy, now: float) -> Iterator[_Make]:
    """The rules of the policy. Each must be given the verified checkpoints to compare with, in ascending order of steps."""
    if (last := policy.last) is not None:
        yield lambda verified: _last(last, verified)
    if (interval := policy.every_steps) is not None:
        yield lambda verified: _multiples(interval)
    if (steps := policy.steps_apart) is not None:
        yield lambda verified: _apart(steps, verified, lambda c: float(c.step), lambda far: f"{far:.0f} steps")
    if (seconds := policy.every_seconds) is not None:
        yield lambda verified: _apart(seconds, verified, lambda c: c.created, span)
    if (age := _age(policy, now)) is not None:
        yield lambda verified: age
    for best in policy.best:
        yield partial(_best, best)


def _age(policy: RetentionPolicy, now: float) -> Rule | None:
    return None if policy.within_seconds is None else _within(policy.within_seconds, now)


def _last(count: int, verified: Sequence[Candidate]) -> Rule:
    steps = [c.step for c in verified]

    def judge(c: Candidate) -> RetentionAnswer:
        newer = len(steps) - bisect_right(steps, c.step)
        if newer >= count:
            return RetentionAnswer(False, f"last {count}: {_checkpoints(newer)}")
        if c.verified:
            return RetentionAnswer(True, f"last {count}: number {newer + 1} of the newest verified checkpoints")
        return RetentionAnswer(True, f"last {count}: only {_checkpoints(newer)}")

    return judge


def _checkpoints(newer: int) -> str:
    return "1 newer checkpoint is verified" if newer == 1 else f"{newer} newer checkpoints are verified"


def _multiples(interval: int) -> Rule:
    def judge(c: Candidate) -> RetentionAnswer:
        keeps = c.step % interval == 0
        return RetentionAnswer(
            keeps, f"every {interval} steps: {c.step} is {'' if keeps else 'not '}a multiple of {interval}"
        )

    return judge


def _apart(
    least: float, verified: Sequence[Candidate], place: Callable[[Candidate], float], span_text: Callable[[float], str]
) -> Rule:
    """Keeps the oldest, then each one at least so far from the last one kept. Distances are absolute: clocks may jump."""
    chain: list[Candidate] = []
    for c in verified:
        if not chain or abs(place(c) - place(chain[-1])) >= least:
            chain.append(c)
    steps = [c.step for c in chain]

    def judge(c: Candidate) -> RetentionAnswer:
        before = bisect_left(steps, c.step)
        if not before:
            return RetentionAnswer(True, f"one every {span_text(least)}: it is the oldest checkpoint")
        link = chain[before - 1]
        far = abs(place(c) - place(link))
        return RetentionAnswer(
            far >= least, f"one every {span_text(least)}: {span_text(far)} after step {link.step}, which this rule keeps"
        )

    return judge


def _within(seconds: float, now: float) -> Rule:
    def judge(c: Candidate) -> RetentionAnswer:
        age = now - c.created
        how = "it is the newest commit" if age <= 0 else f"committed {span(age)} before the newest one"
        return RetentionAnswer(age <= seconds, f"within {span(seconds)}: {how}")

    return judge


def _best(best: Best, verified: Sequence[Candidate]) -> Rule:
    sign = 1 if best.mode == "min" else -1

    def key(c: Candidate) -> tuple[float, int] | None:
        value = c.metrics.get(best.metric, math.nan)
        return (sign * value, c.step) if math.isfinite(value) else None

    ranked = sorted(k for k in map(key, verified) if k is not None)
    name = f"best {best.count} by {best.mode} {best.metric}"

    def judge(c: Candidate) -> RetentionAnswer:
        mine = key(c)
        if mine is None:
            known = c.metrics.get(best.metric)
            why = "saved without this metric" if known is None else f"this metric is {metric_values.text(known)}"
            return RetentionAnswer(best.keep_unmeasured, f"{name}: {why}")
        rank = bisect_left(ranked, mine)
        return RetentionAnswer(rank < best.count, f"{name}: {c.metrics[best.metric]:g} ranks number {rank + 1}")

    return judge


def span(seconds: float) -> str:
    """5400 -> 1.5 h: a duration in the largest unit that it reaches."""
    unit_s, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    return f"{round(seconds / unit_s, 1):g} {unit}"


def _step(c: Candidate) -> int:
    return c.step
