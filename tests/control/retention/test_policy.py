"""Retention decides by its rules and by I10, for every history, policy and clock there can be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.lineage import ROOT
from holdfast_formats.rest.retention import Best, RetentionPolicy
from holdfast_service.control.retention.policy import Candidate, Decision, decide, foresee, span

NOW = 1_000_000.0
HOLDS = ("it is pinned", "it has the label best", "it is being read")
METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.integers(-3, 3).map(float), max_size=2)
FULL, MODEL, EMA = frozenset({"model", "optim"}), frozenset({"model"}), frozenset({"model", "ema"})
CANDIDATES = st.builds(
    Candidate,
    st.integers(0, 40),
    st.floats(NOW - 50, NOW + 5),
    st.booleans(),
    METRICS,
    st.lists(st.sampled_from(HOLDS), max_size=1).map(tuple),
    healthy=st.none(),
    groups=st.sampled_from([FULL, FULL, MODEL, EMA]),
    line=st.just(ROOT),
    abandoned=st.just(False),
)
HISTORIES = st.lists(CANDIDATES, max_size=14, unique_by=lambda c: c.step)
SMALL = st.none() | st.integers(1, 12)
BEST = st.builds(
    Best,
    metric=st.sampled_from(["loss", "accuracy", "nobody"]),
    mode=st.sampled_from(["min", "max"]),
    count=st.integers(1, 4),
    keep_unmeasured=st.booleans(),
)
POLICIES = st.builds(
    RetentionPolicy,
    last=SMALL,
    every_steps=SMALL,
    steps_apart=SMALL,
    every_seconds=SMALL,
    within_seconds=st.none() | st.floats(0.5, 60),
    best=st.lists(BEST, max_size=2).map(tuple),
    steps=st.lists(st.integers(0, 40), max_size=2).map(tuple),
)
RULES = ("last", "every_steps", "steps_apart", "every_seconds", "within_seconds", "best")


def made(*steps: int, verified: bool = True) -> list[Candidate]:
    """Checkpoints of these steps, each committed at as many seconds."""
    return [Candidate(step, float(step), verified) for step in steps]


def kept(candidates: Iterable[Candidate], now: float = NOW, **policy: Any) -> list[int]:
    """The steps that a policy keeps, ascending."""
    return sorted(d.step for d in decide(list(candidates), RetentionPolicy(**policy), now) if d.keep)


def removed(candidates: Iterable[Candidate], policy: RetentionPolicy, now: float = NOW) -> set[int]:
    return {d.step for d in decide(list(candidates), policy, now) if not d.keep}


def newest_verified(candidates: Iterable[Candidate], groups: frozenset[str] = frozenset()) -> int:
    """Of those with at least these groups."""
    return max((c.step for c in candidates if c.verified and groups <= c.groups), default=-1)


def at(history: Iterable[Candidate], step: int) -> Candidate:
    return next(c for c in history if c.step == step)


def test_every_decision_says_why() -> None:
    """What is kept says what keeps it, and all of that; what goes says why each rule does not keep it."""
    history = [Candidate(10, 10.0), Candidate(20, 20.0, metrics={"loss": 2.0}), Candidate(25, 25.0), Candidate(30, 30.0)]
    policy = RetentionPolicy(last=1, every_steps=20, best=(Best(metric="loss", count=1),))
    assert decide(history, policy, NOW) == [
        Decision(30, True, ("it is the newest verified checkpoint", "last 1: number 1 of the newest verified checkpoints")),
        Decision(
            25,
            False,
            (
                "last 1: 1 newer checkpoint is verified",
                "every 20 steps: 25 is not a multiple of 20",
                "best 1 by min loss: saved without this metric",
            ),
        ),
        Decision(20, True, ("every 20 steps: 20 is a multiple of 20", "best 1 by min loss: 2 ranks number 1")),
        Decision(
            10,
            False,
            (
                "last 1: 3 newer checkpoints are verified",
                "every 20 steps: 10 is not a multiple of 20",
                "best 1 by min loss: saved without this metric",
            ),
        ),
    ]


def test_reasons_name_distance_age_and_line() -> None:
    """Rules about distance and age state the numbers that they compared; an abandoned one names what came after it."""
    history = [Candidate(step, NOW - 100.0 + step) for step in (10, 20, 30)]
    spaced = {d.step: d.reasons for d in decide(history, RetentionPolicy(steps_apart=15), NOW)}
    assert spaced[10] == ("one every 15 steps: it is the oldest checkpoint",)
    assert spaced[20] == ("one every 15 steps: 10 steps after step 10, which this rule keeps",)
    aged = {d.step: d.reasons for d in decide(history, RetentionPolicy(within_seconds=60), NOW)}
    assert aged[20] == ("within 1 min: committed 1.3 min before the newest one",)
    unverified = [Candidate(10, 1.0, verified=False), Candidate(20, 2.0)]
    few = {d.step: d.reasons for d in decide(unverified, RetentionPolicy(last=2), NOW)}
    assert few[10] == ("last 2: only 1 newer checkpoint is verified",)
    left = Candidate(20, 2.0, abandoned=True)
    begun = Candidate(15, 3.0, line=(2, 1))
    judged = {d.step: d for d in decide([left, begun], RetentionPolicy(last=1), NOW)}
    assert judged[20].reasons == ("it is abandoned: training continued from an older step, and its step 15 is verified",)
    waiting = {d.step: d for d in decide([left], RetentionPolicy(last=1), NOW)}
    assert waiting[20].reasons == ("it is abandoned, but the new line of training has no verified checkpoint yet",)


def test_nothing_goes_before_its_successor_is_verified() -> None:
    """A newer checkpoint that was not read back takes no one's place."""
    history = [*made(10), *made(20, 30, verified=False)]
    assert kept(history, last=1) == [10, 20, 30]
    assert kept([*history, *made(40)], last=1) == [40]


def test_no_rule_keeps_all() -> None:
    """A policy that only grants bytes, or only names steps, lets nothing go."""
    for policy in ({}, {"quota_bytes": 1}, {"steps": (3,)}):
        assert len(kept(made(*range(100)), **policy)) == 100


def test_holds_keep_whatever_the_policy_says() -> None:
    """A pin, a label and a reader each keep a checkpoint, which counts like any other; so does a step that is named."""
    history = [
        Candidate(10, 0, holds=("it is pinned",)),
        Candidate(20, 0, False, holds=("it has the label best",)),
        Candidate(30, 0, holds=("it is being read",)),
        *made(40, 50, 60),
    ]
    assert kept(history, last=2, steps=(40,)) == [10, 20, 30, 40, 50, 60]
    assert kept(history, last=4) == [10, 20, 30, 40, 50, 60]


def test_of_equals_the_first_one_stays() -> None:
    """A checkpoint that is only as good as an earlier one does not take its place; what has no such metric is not ranked."""
    losses = {1: 3.0, 2: 2.0, 3: 2.0, 4: None, 5: 2.0, 6: 9.0}
    history = [Candidate(step, 0.0, metrics={} if loss is None else {"loss": loss}) for step, loss in losses.items()]
    assert kept(history, best=(Best(metric="loss", count=2),)) == [2, 3, 6]
    assert kept(history, best=(Best(metric="loss", mode="max", count=2),)) == [1, 6]
    assert kept(history, best=(Best(metric="loss", count=1, keep_unmeasured=True),)) == [2, 4, 6]
    assert kept(history, best=(Best(metric="nobody", count=3),)) == [6]


def test_numbers_that_are_none_are_not_ranked() -> None:
    """Whatever a manifest may say, no NaN or infinity is the best."""
    values = (float("nan"), float("-inf"), 5.0, 7.0)
    history = [Candidate(step, 0.0, metrics={"loss": value}) for step, value in enumerate(values)]
    assert kept([*history, *made(9)], best=(Best(metric="loss", count=1),)) == [2, 9]


def test_a_clock_that_jumps_breaks_no_chain() -> None:
    """After a jump of the clock, in either direction, one checkpoint is kept for it and the chain goes on from there."""
    times = {1: 0, 2: 50, 3: 100, 4: 100_000, 5: 100_050, 6: 200, 7: 250, 8: 300, 9: 310}
    history = [Candidate(step, float(at)) for step, at in times.items()]
    assert kept(history, every_seconds=100) == [1, 3, 4, 6, 8, 9]


def test_a_commit_from_the_future_is_within_any_time() -> None:
    """A checkpoint that claims to be newer than now counts as new."""
    assert kept([Candidate(1, NOW + 500), Candidate(2, NOW - 20), Candidate(3, NOW)], within_seconds=10) == [1, 3]


def test_durations_are_said_in_the_largest_unit() -> None:
    """As people say them."""
    assert [span(s) for s in (0.5, 59, 5400, 86_400, 200_000)] == ["0.5 s", "59 s", "1.5 h", "1 d", "2.3 d"]


def test_room_is_foreseen_among_what_is_superseded() -> None:
    """What will go once the new one is verified may go before it, oldest first; the newest verified one never."""
    incoming = Candidate(50, NOW, metrics={"loss": 1.0})
    history = [*made(10, 20, 30), *made(40, verified=False)]
    assert foresee(history, incoming, RetentionPolicy(last=1), NOW) == [10, 20]
    assert foresee(history, incoming, RetentionPolicy(last=3), NOW) == [10]
    assert foresee(made(10, verified=False), incoming, RetentionPolicy(last=1), NOW) == []
    best = RetentionPolicy(best=(Best(metric="loss", count=1),))
    assert foresee([Candidate(5, 0, metrics={"loss": 2.0}), *made(9)], incoming, best, NOW) == [5]


@given(HISTORIES, POLICIES, st.floats(NOW - 100, NOW + 100))
def test_the_newest_verified_stays_and_everything_newer(
    history: list[Candidate], policy: RetentionPolicy, now: float
) -> None:
    """I10: whatever goes is older than a verified checkpoint of at least its groups, which stays."""
    gone = removed(history, policy, now)
    assert all(step < newest_verified(history, at(history, step).groups) for step in gone)
    assert all(newest_verified(history, groups) not in gone for groups in (FULL, MODEL, EMA))


@given(HISTORIES, POLICIES, st.floats(NOW - 100, NOW + 100))
def test_the_union_of_the_rules(history: list[Candidate], policy: RetentionPolicy, now: float) -> None:
    """With several rules goes exactly what goes with each of them alone."""
    alone = []
    for rule in RULES:
        if getattr(policy, rule) in (None, ()):
            continue
        one = RetentionPolicy(**{rule: getattr(policy, rule), "steps": policy.steps})
        alone.append(removed(history, one, now))
    assert removed(history, policy, now) == (set.intersection(*alone) if alone else set())
    assert bool(alone) == policy.limits


@given(HISTORIES, POLICIES, st.randoms(use_true_random=False), st.floats(0, 1000))
def test_once_is_enough_in_any_order(history: list[Candidate], policy: RetentionPolicy, random: Any, later: float) -> None:
    """Any order of the same checkpoints gives the same decisions, and what is left is left by a second pass."""
    first = decide(history, policy, NOW)
    shuffled = list(history)
    random.shuffle(shuffled)
    assert decide(shuffled, policy, NOW) == first
    assert [d.step for d in first] == sorted((c.step for c in history), reverse=True)
    gone = {d.step for d in first if not d.keep}
    rest = [c for c in history if c.step not in gone]
    assert removed(rest, policy, NOW) == set()
    if policy.within_seconds is None:  # only "within" looks at the clock: time alone removes nothing else
        assert removed(rest, policy, NOW + later) == set()


@given(HISTORIES, POLICIES)
def test_what_is_not_verified_goes_only_where_it_would_go_verified(
    history: list[Candidate], policy: RetentionPolicy
) -> None:
    """One that was not read back goes only if it is superseded and would go were it sound; it displaces nobody."""
    gone = removed(history, policy)
    for c in (c for c in history if not c.verified):
        others = [other for other in history if other.step != c.step]
        sound = removed([*others, c._replace(verified=True)], policy)
        assert (c.step in gone) == (c.step in sound and c.step < newest_verified(history, c.groups))
        assert removed(others, policy) == gone - {c.step}


@given(HISTORIES, POLICIES)
def test_holds_hold(history: list[Candidate], policy: RetentionPolicy) -> None:
    """Nothing that is pinned, labelled, read or named goes, and everything that goes or stays has a reason."""
    for decision in decide(history, policy, NOW):
        (c,) = (c for c in history if c.step == decision.step)
        assert decision.keep or not (c.holds or c.step in policy.steps)
        assert decision.reasons


@given(HISTORIES, POLICIES, METRICS)
def test_what_is_foreseen_is_superseded_and_goes_anyway(
    history: list[Candidate], policy: RetentionPolicy, metrics: dict[str, float]
) -> None:
    """Making room removes nothing that stays once the new checkpoint is verified, and leaves the newest verified one."""
    incoming = Candidate(41, NOW, True, metrics, groups=FULL)
    early = foresee(history, incoming, policy, NOW)
    assert early == sorted(early)
    assert set(early) <= removed([*history, incoming], policy)
    assert all(step < newest_verified(history, at(history, step).groups) for step in early)


HEALTH = st.lists(st.sampled_from([True, False, None]), min_size=14, max_size=14)


@given(HISTORIES, HEALTH, POLICIES, st.floats(NOW - 60, NOW + 60))
def test_the_newest_healthy_one_stays(
    history: list[Candidate], health: list[bool | None], policy: RetentionPolicy, now: float
) -> None:
    """Whatever the policy says, the newest verified one that is not unhealthy stays, also to make room for another save."""
    judged = [c._replace(healthy=h) for c, h in zip(history, health, strict=False)]
    gone = removed(judged, policy, now)
    for groups in (FULL, MODEL, EMA):
        sound = [c.step for c in judged if c.verified and c.healthy is not False and groups <= c.groups]
        assert max(sound, default=None) not in gone
        for incoming in (Candidate(99, now, groups=groups), Candidate(99, now, healthy=False, groups=groups)):
            assert max(sound, default=None) not in foresee(judged, incoming, policy, now)
    healthy = max((c.step for c in judged if c.verified and c.healthy is not False), default=None)
    if healthy is not None and healthy != newest_verified(judged, at(judged, healthy).groups):
        reasons = next(d.reasons for d in decide(judged, policy, now) if d.step == healthy)
        assert "it is the newest healthy checkpoint" in reasons
    unlabelled = [c._replace(healthy=None) for c in judged]
    assert gone <= removed(unlabelled, policy, now)


def test_only_what_has_the_same_groups_supersedes() -> None:
    """Newer saves of the model alone take no full checkpoint's place; a full one takes everybody's."""
    history = [Candidate(100, 0, groups=FULL), *(Candidate(step, 0, groups=MODEL) for step in (110, 120, 130))]
    assert kept(history, last=2) == [100, 120, 130]
    assert kept([*history, Candidate(140, 0, groups=FULL)], last=2) == [100, 130, 140]
    assert kept([*history, Candidate(140, 0, groups=FULL)], last=1) == [140]
    assert kept([*history, Candidate(140, 0, groups=EMA)], last=1) == [100, 140]
    assert kept([Candidate(0, 0, groups=MODEL), *history], steps_apart=1000) == [0, 100, 130]
    assert foresee(history, Candidate(150, NOW, groups=MODEL), RetentionPolicy(last=1), NOW) == [110, 120]
    loss = [c._replace(metrics={"loss": 200.0 - c.step}) for c in history]
    assert kept(loss, best=(Best(metric="loss", count=1),)) == [100, 130]


def test_what_is_abandoned_goes_once_the_new_line_is_verified() -> None:
    """It counts for nothing, and no rule but its age, a mark or a reader keeps it behind a verified step of the new line."""
    old = [Candidate(100, NOW - 50, groups=FULL), *(Candidate(s, NOW - 5, groups=FULL, abandoned=True) for s in (150, 200))]
    new = Candidate(110, NOW, False, groups=FULL, line=(2, 1))
    for unfit in (new, new._replace(verified=True, groups=MODEL), new._replace(verified=True, healthy=False)):
        assert kept([*old, unfit], last=1) == [100, 110, 150, 200]
    verified = new._replace(verified=True)
    assert kept([*old, verified], last=1) == [110]
    assert kept([*old, verified], last=2) == [100, 110]
    assert kept([*old, verified]) == [100, 110, 150, 200]
    assert kept([*old, verified], last=1, within_seconds=10) == [110, 150, 200]
    assert kept([*old, verified], every_steps=100) == [100, 110]
    assert kept([*old, verified], last=1, steps=(150,)) == [110, 150]
    assert kept([*old[:2], old[2]._replace(holds=("it is pinned",)), verified], last=1) == [110, 200]
    assert foresee([*old, verified], Candidate(120, NOW, groups=FULL), RetentionPolicy(last=2), NOW) == [100, 150, 200]
    bad = [*old[:2], old[2]._replace(healthy=False), verified._replace(healthy=False)]
    assert kept(bad, last=1) == [100, 110, 150]


@given(HISTORIES, st.integers(0, 40), POLICIES)
def test_abandoned_ones_change_nothing_for_the_living(history: list[Candidate], fork: int, policy: RetentionPolicy) -> None:
    """What becomes of the living line does not depend on what was left behind, nor does that go while nothing follows it."""
    left = [c._replace(abandoned=c.step > fork) for c in history]
    new = [c._replace(step=c.step + 50, line=(2, 1)) for c in history if c.step > fork]
    living = [c for c in left if not c.abandoned] + new
    gone = removed([*left, *new], policy)
    assert gone - {c.step for c in left if c.abandoned} == removed(living, policy)
    for c in (c for c in left if c.step in gone and c.abandoned):
        assert any(c.groups <= n.groups and n.verified for n in new)
    assert not removed(left, policy) & {c.step for c in left if c.abandoned}
