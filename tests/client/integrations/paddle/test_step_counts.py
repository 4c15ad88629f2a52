"""Numbers of steps of parameters that are counted together are what each would have alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.integrations.paddle.beta_powers import StepRange
from holdfast.integrations.paddle.step_counts import StepCounts

NAMES = tuple("abcd")
TOLD = st.builds(StepRange, st.integers(0, 5), st.booleans())
ACTS = st.one_of(
    st.tuples(st.just("count"), st.integers(1, 3)),
    st.tuples(st.just("restored"), st.sampled_from(NAMES), st.integers(0, 9)),
    st.tuples(st.just("alike"), TOLD),
    st.tuples(st.just("apart"), st.lists(TOLD, min_size=len(NAMES), max_size=len(NAMES)), st.integers(1, len(NAMES))),
)


@given(st.lists(ACTS, max_size=12))
def test_numbers_are_those_of_each_parameter_alone(acts: list[tuple[Any, ...]]) -> None:
    together, alone = StepCounts(), {name: StepCounts() for name in NAMES}
    kept: dict[str, Any] = {}
    for act, *more in acts:
        if act == "count":
            for _ in range(more[0]):
                for one in (together, *alone.values()):
                    one.count()
        elif act == "restored":
            together.restored(*more)
            alone[more[0]].restored(*more)
        else:
            names = NAMES if act == "alike" else NAMES[: more[1]]
            told = more * len(names) if act == "alike" else more[0][: len(names)]
            together.store(names, told)
            for name, one in zip(names, told, strict=True):
                alone[name].store((name,), [one])
                assert together.stored(name).item() == alone[name].stored(name).item() == together.known(name).item()
                assert kept.setdefault(name, together.stored(name)) is together.stored(name)
                assert together.stored(name).shape == ()
