"""What a run's launches said, and what is different in each."""

from __future__ import annotations

from typing import Any

from holdfast_formats.rest.runs import RunLaunch
from holdfast_service.wings.console.pages.run_settings import lifecycle


def launch(attempt: int, world: int, **info: Any) -> RunLaunch:
    return RunLaunch(attempt=attempt, at="2030-01-01T00:00:00Z", world=world, info=info)


def test_a_launch_has_the_differences_from_the_one_before() -> None:
    """Commit, ranks and each nested value of the config, whatever the order of the list; the first launch has none."""
    launches = [
        launch(3, 8, git={"commit": "b"}, config={"lr": 0.1, "data": {"path": "x"}}, user="ana"),
        launch(1, 4, git={"commit": "a"}, config={"lr": 0.2, "data": {"path": "x"}, "old": True}, user="ana"),
    ]
    newer, first = lifecycle._lines(launches)
    assert [tuple(change) for change in newer.changes] == [
        ("config.lr", "0.2", "0.1"),
        ("config.old", "true", None),
        ("git.commit", "a", "b"),
        ("ranks", "4", "8"),
    ]
    assert first.changes == []
