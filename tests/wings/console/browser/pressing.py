"""The list of what presses which buttons: each test of it says what it presses, so that a button without one is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .hands import Hand

Act = Callable[[Hand], None]


class Press(NamedTuple):
    """A test that presses buttons, named as `controls.buttons` does. `scripted` ones are not there without scripts."""

    act: Act
    buttons: tuple[str, ...]
    scripted: bool


PRESSES: list[Press] = []


def presses(*buttons: str, scripted: bool = False) -> Callable[[Act], Act]:
    """Note a function that presses these buttons and sees what they do."""

    def noted(act: Act) -> Act:
        PRESSES.append(Press(act, buttons, scripted))
        return act

    return noted
