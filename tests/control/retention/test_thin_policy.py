"""Which checkpoints are thinned: those with enough newer whole ones, and never one that somebody may need whole."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.rest.bodies import CheckpointInfo, CompactedFrom
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.retention.policy import Candidate, decide
from holdfast_service.control.retention.thin_policy import ThinEstimate, could_save, decide_thinning

NOW = 1000.0
FULL, WEIGHTS = frozenset({"model", "optim", "extra"}), frozenset({"model"})


def full(step: int, **facts: object) -> Candidate:
    return Candidate(step, NOW - 1000 + step, groups=FULL)._replace(**facts)


def thinned(step: int) -> Candidate:
    return full(step, groups=WEIGHTS, gone=FULL - WEIGHTS)


def thin_steps(candidates: Sequence[Candidate], **rules: object) -> list[int]:
    policy = RetentionPolicy(**rules)
    found = decide_thinning(candidates, decide(candidates, policy, NOW), policy)
    return sorted(step for step, one in found.items() if one.thin)


def kept(candidates: Sequence[Candidate], **rules: object) -> list[int]:
    return sorted(d.step for d in decide(candidates, RetentionPolicy(**rules), NOW) if d.keep)


def test_the_newest_stay_whole() -> None:
    """All older ones that stay are thinned, oldest or not; without the rule none is."""
    run = [full(step) for step in range(10, 70, 10)]
    assert thin_steps(run, keep_full=2) == [10, 20, 30, 40]
    assert thin_steps(run, keep_full=1, last=3) == [40, 50]
    assert thin_steps(run, keep_full=6) == [] == thin_steps(run, last=3)


def test_what_goes_is_neither_thinned_nor_counted() -> None:
    """A newer whole one counts only if it stays itself."""
    run = [full(step) for step in (100, 110, 120)]
    assert thin_steps(run, keep_full=2, last=1, every_steps=100) == []
    assert thin_steps(run, keep_full=1, last=1, every_steps=100) == [100]


def test_marks_readers_and_unverified_ones_stay_whole() -> None:
    """With the reason; so does one that holds nothing but weights, or optimizer state."""
    run = [
        full(1, holds=("it is pinned",)),
        full(2, verified=False),
        full(3, groups=WEIGHTS),
        full(4, groups=frozenset({"optim"})),
        full(5),
        full(6),
        full(7),
    ]
    assert thin_steps(run, keep_full=2) == [5]
    policy = RetentionPolicy(keep_full=2)
    found = decide_thinning(run, decide(run, policy, NOW), policy)
    assert found[1].why == "whole: it is pinned" and found[2].why == "whole: it is not verified"
    assert found[5].why == "full 2: 2 newer whole ones that are verified and healthy stay"
    assert found[6].why == "whole: only 1 newer whole ones that are verified and healthy stay" and found[3].why is None


def test_unhealthy_unverified_and_thinned_ones_do_not_count() -> None:
    """I10: what comes after has to be sound, whole, and on the way of training."""
    assert thin_steps([full(1), full(2, verified=False), full(3, healthy=False)], keep_full=1) == []
    assert thin_steps([full(1), full(2, healthy=False), full(3)], keep_full=1) == [1, 2]
    assert thin_steps([full(1), thinned(2)], keep_full=1) == []
    assert thin_steps([full(1), full(2, groups=frozenset({"model", "extra"}))], keep_full=1) == []
    assert thin_steps([full(1), full(2, abandoned=True)], keep_full=1) == []


def test_what_training_left_behind_waits_for_the_new_line() -> None:
    """Its steps are higher than those that count; it stays where no rule limits, or a mark holds it."""
    left = [full(step, abandoned=True) for step in (50, 60)]
    new = [full(step, line=(2, 1)) for step in (30, 40)]
    assert thin_steps([*left, full(20), *new], keep_full=2) == [20, 50, 60]
    assert thin_steps([*left, full(20), *new[:1]], keep_full=2) == []


def test_rules_count_what_is_thinned_as_if_it_were_whole() -> None:
    """Thinning changes nothing of what the other rules keep."""
    steps = range(10, 110, 10)
    whole = [full(step, metrics={"loss": 1 / step}) for step in steps]
    mixed = [c if c.step > 80 else c._replace(groups=WEIGHTS, gone=FULL - WEIGHTS) for c in whole]
    for rules in ({"last": 4}, {"steps_apart": 25}, {"every_seconds": 35.0}, {"best": [{"metric": "loss", "count": 2}]}):
        assert kept(mixed, **rules) == kept(whole, **rules)


histories = st.lists(
    st.builds(
        lambda verified, healthy, gone, held, abandoned: full(
            0,
            verified=verified,
            healthy=healthy,
            groups=WEIGHTS if gone else FULL,
            gone=FULL - WEIGHTS if gone else frozenset(),
            holds=("it is pinned",) if held else (),
            abandoned=abandoned,
        ),
        st.booleans(),
        st.sampled_from([True, False, None]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
).map(lambda found: [c._replace(step=step, created=float(step)) for step, c in enumerate(found)])


@given(histories, st.integers(1, 4), st.none() | st.integers(1, 4))
def test_enough_whole_ones_are_always_left(run: list[Candidate], keep_full: int, last: int | None) -> None:
    """Whatever the history: the newest verified and the newest healthy whole one stay whole, and applying it once more, to
    what is left then, thins nothing more.
    """
    rules = {"keep_full": keep_full, "last": last}
    thin = set(thin_steps(run, **rules))
    sound = [c for c in run if c.verified and not c.abandoned and not c.gone and c.healthy is not False]
    assert not thin & {c.step for c in sound[-1:]}
    assert not thin & {c.step for c in run if c.holds or c.gone or not c.verified}
    left = [c._replace(groups=WEIGHTS, gone=FULL - WEIGHTS) if c.step in thin else c for c in run]
    assert thin_steps(left, **rules) == []
    assert set(kept(left, **rules)) >= set(kept(run, **rules)) & thin


def listed(step: int, size: int, after: int | None = None, **small: int) -> CheckpointInfo:
    """One of these bytes; compact by the rule int8, if it is told how many it has `after` that."""
    about = {"run": "r", "attempt": 1, "created": "2030-01-01T00:00:00Z", "world": 1, "groups": [], "tensors": 1, "files": 1}
    made = CompactedFrom(at="2030-01-01T00:00:00Z", optim="int8", bytes=size, error=0.1, coded=1, exact=0)
    return CheckpointInfo(
        **about,
        step=step,
        bytes=size if after is None else after,
        metrics={},
        verified=True,
        compacted=None if after is None else made,
        small_bytes=small,
    )


def test_what_a_rule_has_saved_of_others_is_what_it_will_save() -> None:
    """Of the same size, the newest counts: more tensors may have stayed as they were than their names say."""
    whole = [listed(step, 1000, bf16=600, int8=400) for step in (40, 50)]
    seen = [listed(10, 1000, after=420), listed(20, 1000, after=560), listed(30, 5000, after=900)]
    unseen, known = ThinEstimate(whole), ThinEstimate([*whole, *seen])
    assert [of.bytes_after(whole[0], "int8") for of in (unseen, known)] == [400, 560]
    assert known.bytes_after(whole[0], "bf16") == 600
    assert known.bytes_after(listed(60, 1004, int8=404), "int8") == 564
    assert known.bytes_after(listed(60, 3000, int8=404), "int8") == 404  # another state
    assert known.bytes_after(listed(60, 1000), "int8") == 1000 == ThinEstimate([]).bytes_after(listed(60, 1000), "exact")
    assert could_save(whole, known) == {"bf16": 800, "int8": 880}
