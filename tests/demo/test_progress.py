"""What is shown of a run while it trains."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from holdfast.demo.progress import RunProgress


def shown(terminal: bool, steps: range) -> str:
    """What a console gets of a run that is looked at after each of `steps`."""
    console = Console(width=120, file=StringIO(), force_terminal=terminal, color_system=None)
    with RunProgress(console, "a run", 90, 15) as progress:
        for step in steps:
            progress.show(step, left_s=40.0)
    return console.file.getvalue()


def test_without_a_terminal_each_checkpoint_is_a_line() -> None:
    """A log tells how far the run is, and has no bar in it."""
    assert shown(False, range(91)).splitlines() == [f"   step {step} of 90" for step in range(15, 91, 15)]


def test_steps_of_an_earlier_launch_are_not_told_again() -> None:
    """A resumed run begins where it was restored."""
    assert shown(False, range(45, 76)).splitlines() == ["   step 60 of 90", "   step 75 of 90"]


def test_in_a_terminal_there_is_a_bar_with_the_time_that_is_left() -> None:
    """The bar names the run, its steps and the rest of the whole demo; no lines are left behind."""
    text = shown(True, range(31))
    assert "a run" in text and "30/90" in text and "demo: 40 s left" in text
    assert "step 15 of" not in text


def test_before_the_first_step_the_bar_says_that_the_run_starts() -> None:
    """Importing torch takes a while; an empty bar alone would look stuck."""
    assert "a run: starting" in shown(True, range(0))
