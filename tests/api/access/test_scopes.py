"""What the door alone says of a request, by its path and query; each route checks what it declares once more."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import Forbidden, NoSuchRun
from holdfast_service.api.access import scopes
from holdfast_service.control.access.tokens import Principal

TEAM = Principal("ci", "admin", "team-*", 1)


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/v1/runs/other", b""),
        ("/v1/runs/other/checkpoints/1", b""),
        ("/v1/runs/other/checkpoints/1", b"run=team-a"),
        ("/v1/runs/team-a/checkpoints/1", b"run=other"),
        ("/v1/rounds", b"run=team-a&run=other"),
    ],
)
def test_other_runs_end_at_the_door(path: str, query: bytes) -> None:
    """Wherever a request names one: to read it is as if there were none, to change it is forbidden."""
    with pytest.raises(NoSuchRun):
        scopes.check(TEAM, "GET", path, query)
    with pytest.raises(Forbidden):
        scopes.check(TEAM, "DELETE", path, query)


def test_own_runs_pass_the_door() -> None:
    scopes.check(TEAM, "GET", "/v1/runs/team-a/checkpoints/1", b"")
    scopes.check(TEAM, "DELETE", "/v1/runs/team-a/checkpoints/1", b"run=team-b")
