"""What a run is doing follows from its ranks, from people, and, where ranks are connected, from its saves."""

from __future__ import annotations

import pytest

from holdfast_formats import timestamps
from holdfast_formats.rest.measurements import Life, RunLife
from holdfast_service.control.catalog.run_settings import RunSettings
from holdfast_service.control.insight.facts import CheckpointFacts, Facts, Save
from holdfast_service.control.insight.run_lifecycle import IDLE_MIN_S, IDLE_UNKNOWN_S, state_of
from holdfast_service.control.insight.summary import summarise

NOW = timestamps.seconds_of("2030-01-31T12:00:00Z")
NOTHING = RunSettings()
THEN = "2030-01-31T11:48:00.000Z"


def facts(life: Life | None, settings: RunSettings = NOTHING, begun: float = 5.0, every: float | None = None) -> Facts:
    """Of attempt 3, whose newest save began so many seconds ago; usually there is one `every` so many seconds."""
    count = 0 if every is None else 4
    begins = [NOW - begun - i * (every or 0) for i in range(count)]
    saves = tuple(Save(9 - i, 3, "committed", at, at) for i, at in enumerate(begins))
    return Facts(
        "r",
        3,
        NOW,
        held=CheckpointFacts(checkpoints=count, newest=9 if count else None, created=THEN if count else None),
        saves=saves,
        declared=(NOW - 50_000.0 if count else NOW - begun,),
        life=life,
        since=None if life in (None, "running") else THEN,
        settings=settings,
    )


ARCHIVED = RunSettings(archived="2030-01-31T11:59:00Z")
SEEN, SEEN_BEFORE = RunSettings(acknowledged=3), RunSettings(acknowledged=2)


@pytest.mark.parametrize(
    ("life", "settings", "state"),
    [
        ("running", RunSettings(), "training"),
        ("running", ARCHIVED, "training"),
        ("died", RunSettings(), "died"),
        ("died", SEEN, "idle"),
        ("died", SEEN_BEFORE, "died"),
        ("died", ARCHIVED, "archived"),
        ("finished", RunSettings(), "finished"),
        ("finished", SEEN, "finished"),
        ("finished", ARCHIVED, "archived"),
        (None, RunSettings(), "idle"),
        (None, ARCHIVED, "archived"),
    ],
)
def test_states(life: Life | None, settings: RunSettings, state: RunLife) -> None:
    """A death that was seen in an earlier attempt says nothing of a later one; a living rank is stronger than an archive."""
    found = summarise(facts(life, settings, every=60.0))
    assert found.life == state and found.verdict
    counted = {item.code for item in found.attention if item.acknowledged is None}
    assert ("run-died" in counted) == (state == "died")
    assert found.life_since is not None or (life is None and state == "idle")


def test_ranks_that_begin_no_save_are_idle() -> None:
    """After three of the usual intervals, a minute at least; or an hour where it is not known how often there is a save."""
    for every, begun, state in (
        (60.0, 3 * 60.0 - 1, "training"),
        (60.0, 3 * 60.0 + 1, "idle"),
        (2.0, IDLE_MIN_S - 1, "training"),
        (2.0, IDLE_MIN_S + 1, "idle"),
        (None, IDLE_UNKNOWN_S - 1, "training"),
        (None, IDLE_UNKNOWN_S + 1, "idle"),
    ):
        found = summarise(facts("running", begun=begun, every=every))
        assert found.life == state, (every, begun)
        assert ("hangs" in found.verdict) == (state == "idle")


def test_verdicts_say_what_to_do() -> None:
    died = summarise(facts("died", every=60.0)).verdict
    assert "12 min ago" in died and "step 9" in died and "start it again" in died
    assert summarise(facts("finished", every=60.0)).verdict.startswith("Finished 12 min ago")
    lost = facts("died", every=60.0)
    assert summarise(lost._replace(since="2030-01-31T12:00:01.000Z")).verdict.startswith("Died 0 s ago:")
    ahead = lost._replace(since="2030-01-31T13:00:00.000Z")
    assert summarise(ahead).verdict.startswith("Died: its ranks")  # the clock was set back: nobody knows when
    assert "A new launch unarchives it" in summarise(facts("finished", ARCHIVED)).verdict
    assert "would lose" in summarise(facts("running", every=60.0)).verdict
    assert "an unknown user acknowledged that" in summarise(facts("died", SEEN, every=60.0)).verdict
    assert "ann acknowledged that" in summarise(facts("died", SEEN._replace(acknowledged_by="ann"), every=60.0)).verdict


def test_an_archived_run_raises_no_alert_but_for_what_is_damaged() -> None:
    """Its checkpoints are kept, so they are watched."""
    put_away = facts("died", ARCHIVED, every=60.0)
    assert not summarise(put_away).attention
    broken = put_away._replace(held=put_away.held._replace(damaged=1, newest_damaged=9, healthy=False))
    assert [item.code for item in summarise(broken).attention] == ["checkpoint-damaged"]
    assert state_of(broken).life == "archived"


@pytest.mark.parametrize(
    ("saves", "state", "codes"),
    [
        ((), "failed", []),  # refused before a save began: a step, or a value in the state
        ((Save(1, 3, "aborted", NOW - 730, NOW - 720, "state-mismatch"),), "failed", []),
        ((Save(1, 3, "aborted", NOW - 730, NOW - 720, "round-aborted"),), "failed", []),  # another rank's was refused
        ((Save(1, 3, "open", NOW - 730),), "failed", []),  # and it has not ended yet
        ((Save(1, 3, "aborted", NOW - 730, NOW - 720, "no-space"),), "died", ["saves-failing", "run-died"]),
        ((Save(1, 3, "sealed", NOW - 730),), "died", ["run-died"]),  # it is being written
    ],
)
def test_a_run_that_failed_to_start_needs_nobody(saves: tuple[Save, ...], state: RunLife, codes: list[str]) -> None:
    """Nothing of it is lost. A storage that refuses saves, and a run that has trained for long, are something else."""
    lost = facts("died")._replace(saves=saves, declared=(NOW - 740,))
    found = summarise(lost)
    assert (found.life, [item.code for item in found.attention]) == (state, codes)
    assert found.verdict.startswith("Failed to start 12 min ago") == (state == "failed")
    assert summarise(lost._replace(settings=ARCHIVED)).life == "archived"
    for trained in (
        lost._replace(declared=(NOW - 8000,)),
        lost._replace(held=CheckpointFacts(checkpoints=1, newest=1, created=THEN)),
    ):
        assert summarise(trained).life == "died" and "run-died" in {item.code for item in summarise(trained).attention}
