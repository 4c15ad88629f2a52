"""Powers of beta are the float32 products that Paddle makes, and tell the number of steps as long as they change."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.integrations.paddle import beta_powers
from holdfast.integrations.paddle.beta_powers import StepRange, common, power, steps_of


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.999])
def test_a_power_tells_its_steps(beta: float) -> None:
    """The value after each step is one product more, rounded; it tells the step, until it no longer changes."""
    value, factor = np.float32(beta), np.float32(beta)
    for steps in range(3000):
        assert power(beta, steps) == float(value)
        found = steps_of(beta, float(value))
        assert found == StepRange(steps, False) or (found is not None and found.open and found.first <= steps)
        value = value * factor


def test_a_settled_power_tells_the_least_number() -> None:
    """β = 0.9 no longer changes after some 980 steps, and β = 0 at once."""
    settled = steps_of(0.9, power(0.9, 10**6))
    assert settled is not None and settled.open and 900 < settled.first < 1100
    assert not steps_of(0.9, power(0.9, settled.first - 1)).open  # type: ignore[union-attr]
    assert steps_of(0.0, 0.0) == StepRange(0, True)


@pytest.mark.parametrize("value", [0.5, 1.0, -0.9, 2.0, float("nan"), float("inf"), 0.0])
def test_a_value_that_is_no_power_tells_none(value: float) -> None:
    """Such as that of another beta, or after a beta was changed in the middle."""
    assert steps_of(0.95, value) is None


def test_two_powers_must_agree() -> None:
    """The one that still changes decides."""
    assert common(StepRange(980, True), StepRange(5000, False)) == StepRange(5000, False)
    assert common(StepRange(980, True), StepRange(2000, True)) == StepRange(2000, True)
    assert common(StepRange(980, True), StepRange(500, False)) is None
    assert common(StepRange(4, False), StepRange(5, False)) is None
    assert common(None, StepRange(5, False)) is None


def test_powers_beyond_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied on from its last."""
    expected = power(0.999, 1000)
    beta_powers._table.cache_clear()
    monkeypatch.setattr(beta_powers, "STEPS_MAX", 64)
    try:
        assert power(0.999, 1000) == expected
    finally:
        beta_powers._table.cache_clear()
