"""The retention policy as everybody states it: what it takes, and when it limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.retention import Best, RetentionPolicy, check_label


@given(
    st.builds(
        RetentionPolicy,
        last=st.none() | st.integers(1, 10**9),
        every_seconds=st.none() | st.floats(0.001, 10.0**11),
        best=st.lists(st.builds(Best, metric=st.text(min_size=1, max_size=128), count=st.integers(1, 9)), max_size=3).map(
            tuple
        ),
        steps=st.lists(st.integers(0, 10**15 - 1), max_size=5).map(tuple),
    )
)
def test_it_survives_json(policy: RetentionPolicy) -> None:
    """What is written is read, whatever order the steps were given in."""
    assert RetentionPolicy.model_validate_json(policy.model_dump_json()) == policy
    assert list(policy.steps) == sorted(set(policy.steps))


@pytest.mark.parametrize(
    "rules",
    [
        {"last": 0},
        {"last": True},
        {"last": 1.5},
        {"every_steps": "10"},
        {"every_seconds": 0},
        {"within_seconds": float("inf")},
        {"quota_bytes": 2**63},
        {"steps": [-1]},
        {"best": [{"metric": "loss"}]},
        {"best": [{"metric": "loss", "count": 1}] * 17},
        {"keep": "all"},
    ],
)
def test_what_is_no_rule_is_refused(rules: dict[str, object]) -> None:
    """Numbers out of range, of another kind, and unknown members."""
    with pytest.raises(ValidationError):
        RetentionPolicy.model_validate(rules)


def test_what_limits() -> None:
    """Named steps and a quota let nothing go by themselves; every other rule may."""
    assert not RetentionPolicy(steps=(5,), quota_bytes=1).limits
    for rule in ({"last": 1}, {"every_steps": 1}, {"steps_apart": 1}, {"every_seconds": 1}, {"within_seconds": 1}):
        assert RetentionPolicy.model_validate(rule).limits
    assert RetentionPolicy(best=(Best(metric="loss", count=1),)).limits


def test_labels_are_names() -> None:
    """Letters, digits and a little more; never a path."""
    assert check_label("best.v1_2-x") == "best.v1_2-x"
    for label in ("", ".", "../x", "a/b", "a b", "x" * 65, "é"):
        with pytest.raises(InvalidRequest, match="label"):
            check_label(label)
