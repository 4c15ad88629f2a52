"""Groups that only every n-th save has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.stage.save_interval import SaveInterval
from holdfast_formats.errors import InvalidRequest

HELD = ("model", "master", "optim", "extra")


def test_the_first_save_has_all_and_then_every_nth() -> None:
    """Counted by saves, whatever their steps; the note says when the turn comes."""
    rhythm = SaveInterval()
    made = [rhythm.due({"optim": 3, "master": np.int64(2)}, None, HELD) for _ in range(7)]
    assert [one.groups is None or "optim" in one.groups for one in made] == [True, False, False, True, False, False, True]
    assert [one.groups is None or "master" in one.groups for one in made] == [True, False, True, False, True, False, True]
    assert all(one.groups is None or {"model", "extra"} <= set(one.groups) for one in made)
    assert made[0] == (None, None)
    assert made[1].note == "left out until it is their turn: master (in 1 save), optim (in 2 saves)"


def test_only_among_the_groups_asked_for() -> None:
    rhythm = SaveInterval()
    assert rhythm.due({"optim": 2}, ("model", "optim"), HELD).groups == ("model", "optim")
    assert rhythm.due({"optim": 2}, ("model", "optim"), HELD).groups == ("model",)
    assert rhythm.due({"optim": 2}, ("optim",), HELD).groups == ("optim",)


@pytest.mark.parametrize("every", [{"optim": 0}, {"optim": -1}, {"optim": 2.0}, {"optim": True}, {"opt": 2}, 5, "optim"])
def test_what_makes_no_rhythm_is_refused(every: Any) -> None:
    """By name, and without counting."""
    rhythm = SaveInterval()
    with pytest.raises(InvalidRequest):
        rhythm.due(every, None, HELD)
    assert rhythm.due({"optim": 2}, None, HELD).groups is None


def test_a_save_of_nothing_is_refused() -> None:
    rhythm = SaveInterval()
    rhythm.due({"optim": 2}, ("optim",), HELD)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="leaves no group"):
            rhythm.due({"optim": 2}, ("optim",), HELD)
