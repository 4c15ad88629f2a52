"""The states of callbacks; tests/integrations/paddle/trainer has those of a real Trainer."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.integrations.paddleformers.callbacks import CallbackStates, CallbackWatch


class Keeps:
    count = 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Patient:
    def __init__(self, counter: int) -> None:
        self.early_stopping_patience_counter = counter


class Counts:
    def __init__(self) -> None:
        self.count, self.trainer = 0, object()


def test_states_go_back_to_their_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    keeps = Keeps()
    keeps.count = 5
    stored = CallbackStates([keeps, Counts(), Patient(3)]).state_dict()
    assert stored == {"Keeps": {"count": 5}, "Patient": {"early_stopping_patience_counter": 3}}
    others = CallbackStates([Keeps(), Patient(0)])
    others.load_state_dict(stored | {"Gone": {}})
    assert others.state_dict() == stored
    assert "the checkpoint has the state of a Gone" in caplog.text


def test_a_value_that_changes_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not those of callbacks that keep them, and not objects."""
    counts, keeps = Counts(), Keeps()
    watch = CallbackWatch([counts, keeps])
    counts.trainer, keeps.count = object(), 3
    watch.look()
    assert not caplog.text
    counts.count = 1
    watch.look()
    watch.look()
    assert caplog.text.count("Counts.count changes and is not saved") == 1
