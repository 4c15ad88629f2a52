"""Experts that differ among ranks are stored under their numbers in the whole model, or refused."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.paddle.test_fleet import act

SCRIPT = "tests.integrations.paddle.experts"


def test_experts_have_the_names_of_the_whole_model(tmp_path: Path) -> None:
    """One process has all of them."""
    act("make", tmp_path, 2, SCRIPT)
    for world in (2, 1):
        act("read", tmp_path, world, SCRIPT)
    assert len(list(tmp_path.glob("read.*"))) == 3


def test_different_experts_of_one_name_are_refused(tmp_path: Path) -> None:
    act("collide", tmp_path, 2, SCRIPT)
