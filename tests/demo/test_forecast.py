"""The demo's forecast of its own time."""

from __future__ import annotations

import pytest

from holdfast.demo.forecast import FIRST_STEPS, STARTS, Forecast


def test_the_whole_is_known_after_the_first_steps() -> None:
    """A start of 8 s and steps of 0.25 s: what has passed, the starts to come, and the steps to come of both runs."""
    forecast = Forecast(90, now=100.0)
    forecast.launch(now=102.0)
    seen = [(step, forecast.note(step, now=110.0 + 0.25 * (step - 1))) for step in range(1, FIRST_STEPS + 4)]
    assert [step for step, known in seen if known] == [1 + FIRST_STEPS]
    passed = 10 + 0.25 * FIRST_STEPS
    assert forecast.whole_s == pytest.approx(passed + (STARTS - 1) * 8 + (2 * 90 - 1 - FIRST_STEPS) * 0.25)


def test_slow_steps_make_it_long() -> None:
    """Ten times as long a step is ten times as long for all steps."""
    wholes = []
    for step_s in (1.0, 10.0):
        forecast = Forecast(50, now=0.0)
        for step in range(1, FIRST_STEPS + 2):
            forecast.note(step, now=step * step_s)
        wholes.append(forecast.whole_s)
    assert wholes[1] == pytest.approx(10 * wholes[0])


def test_steps_that_passed_unseen_count() -> None:
    """Looking now and then, the steps between two looks share the time between them."""
    forecast = Forecast(20, now=0.0)
    assert not forecast.note(3, now=3.0)
    assert forecast.note(13, now=8.0)
    assert forecast.whole_s == pytest.approx(8 + (STARTS - 1) * 3 + (40 - 13) * 0.5)


def test_what_is_left_falls_with_the_clock_and_never_below_nothing() -> None:
    """Unknown first, then the rest of the whole, and 0 when the demo takes longer than was said."""
    forecast = Forecast(10, now=0.0)
    assert forecast.left_s(now=1.0) is None
    for step in range(FIRST_STEPS + 2):
        forecast.note(step, now=float(step))
    assert forecast.whole_s is not None
    assert forecast.left_s(now=7.0) == forecast.whole_s - 7
    assert forecast.left_s(now=forecast.whole_s + 1) == 0
