"""Summaries: what the figures are, what needs attention, and that nothing that is not known is made up."""

from __future__ import annotations

import math
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.rest.measurements import Life, RunSummary
from holdfast_service.control.insight import intervals
from holdfast_service.control.insight.facts import CheckpointFacts, Facts, ReplicaCounts, Save, Warned
from holdfast_service.control.insight.summary import quantile, summarise

NOW = 1_900_000_000.0
MEASURED = {"stall_s": 0.2, "write_s": 4.0, "bytes": 8e9, "disk_bytes_per_second": 2.5e9}
CREATED = "2030-03-17T17:46:00Z"  # 40 s before NOW


def saves(count: int = 10, every_s: float = 600.0, steps: int = 100, last: float = NOW - 45) -> tuple[Save, ...]:
    """Committed saves of one attempt, the newest first; each took five seconds to become durable."""
    return tuple(
        Save(steps * (count - n), 1, "committed", last - n * every_s, last - n * every_s + 5, None, MEASURED)
        for n in range(count)
    )


def facts(**changes: object) -> Facts:
    """A run that goes well: ten saves, all verified and healthy, one restart a day ago."""
    held = CheckpointFacts(10, 80_000, 1000, 1000, 1000, newest_bytes=8000, created=CREATED, healthy=True)
    base = Facts("run", 1, NOW, held, saves(), (NOW - 86_400, NOW - 2 * 86_400), free_bytes=10**9, life="running")
    return base._replace(**changes)  # type: ignore[arg-type]


def codes(summary: RunSummary) -> list[str]:
    return [item.code for item in summary.attention]


def test_figures_of_a_run_that_goes_well() -> None:
    """Every figure follows from the rows, and nothing needs attention."""
    made = summarise(facts())
    assert (made.newest, made.last_commit_age_s, made.exposed_s, made.exposed_steps) == (1000, 40.0, 45.0, 0)
    assert (made.stall_p50_s, made.stall_p95_s, made.durable_p50_s, made.durable_p95_s) == (0.2, 0.2, 5.0, 5.0)
    assert (made.interval_s, made.interval_steps, made.saves, made.failed, made.dropped) == (600.0, 100, 10, 0, 0)
    assert made.disk_ratio == pytest.approx(8e9 / 4.0 / 2.5e9)
    assert made.failures_mean_s == 2 * 86_400
    assert made.recommended_interval_s == pytest.approx(math.sqrt(2 * 0.2 * 2 * 86_400), rel=0.01)
    assert made.goodput_lost == pytest.approx(0.2 / 600 + 305 / (2 * 86_400))
    assert codes(made) == []


def test_nothing_is_made_up() -> None:
    """Of a run without a save, a restart or a checkpoint everything that follows from those is None."""
    made = summarise(Facts("run", 0, NOW))
    unknown = {"newest", "last_commit_age_s", "stall_p50_s", "durable_p95_s", "disk_ratio", "goodput_lost", "interval_s"}
    unknown |= {"recommended_interval_s", "failures_mean_s", "quota_bytes"}
    assert {name for name in unknown if getattr(made, name) is not None} == set()
    assert codes(made) == []
    unmeasured = tuple(save._replace(measured={}) for save in saves())
    assert summarise(facts(saves=unmeasured)).recommended_interval_s is None
    assert summarise(facts(declared=(NOW - 86_400,))).recommended_interval_s is None


def test_exposure_counts_training_alone() -> None:
    """It begins when the newest commit was captured, or with an attempt that came later, and ends with the training."""
    assert summarise(facts(declared=(NOW - 20, NOW - 86_400))).exposed_s == 20.0
    ahead = (Save(1300, 1, "sealed", NOW - 10), *saves())
    made = summarise(facts(saves=ahead))
    assert (made.exposed_s, made.exposed_steps) == (45.0, 300)
    over = facts(life="finished", now=NOW + 10**6)
    assert (summarise(over).exposed_s, summarise(over).exposed_steps, codes(summarise(over))) == (0.0, 0, [])


@pytest.mark.parametrize(
    ("changes", "code", "level"),
    [
        ({"now": NOW + 3600}, "no-commit", "error"),
        ({"held": CheckpointFacts(), "saves": (), "declared": (NOW - 7200,)}, "no-commit", "error"),
        ({"saves": (Save(1100, 1, "aborted", NOW - 9, NOW - 8, "no-space"), *saves())}, "saves-failing", "error"),
        (
            {"saves": (Save(1050, 1, "dropped", NOW - 9, NOW - 8, "generation-dropped"), *saves())},
            "saves-dropped",
            "warning",
        ),
        ({"held": facts().held._replace(damaged=2, newest_damaged=700)}, "checkpoint-damaged", "error"),
        ({"warned": (Warned("checkpoint-missing", "step 7 is gone", 7, "2030"),)}, "checkpoint-missing", "error"),
        ({"warned": (Warned("removal-waits", "nothing is removed", None, "2030"),)}, "removal-waits", "error"),
        ({"held": facts().held._replace(healthy=False, newest_healthy=900)}, "checkpoint-unhealthy", "error"),
        ({"held": facts().held._replace(same_as=900)}, "checkpoint-frozen", "warning"),
        ({"held": facts().held._replace(newest_verified=700)}, "not-verified", "warning"),
        ({"free_bytes": 17_000}, "disk-nearly-full", "warning"),
        ({"free_bytes": 7_000}, "disk-nearly-full", "error"),
        ({"quota_bytes": 97_000}, "quota-nearly-full", "warning"),
        ({"quota_bytes": 80_000, "makes_room": True}, "quota-nearly-full", "error"),
        ({"saves": saves(every_s=3600.0)}, "saves-too-seldom", "warning"),
        ({"saves": saves(every_s=60.0)}, "saves-too-often", "warning"),
        ({"copies": {"far": ReplicaCounts(600, 0)}}, "replica-behind", "warning"),
        ({"copies": {"far": ReplicaCounts(1000, 1)}}, "replica-damaged", "error"),
        ({"copies": {"far": ReplicaCounts(1000, 0, 2, "the disk is full")}}, "replica-failing", "warning"),
        ({"saves": (Save(1100, 1, "sealed", NOW - 40), *saves())}, "storage-slow", "warning"),
        ({"saves": saves(every_s=4.0), "now": NOW - 20, "declared": (NOW - 90,)}, "no-commit", "warning"),
        ({"held": facts().held._replace(healthy=False, unhealthy=950, newest_healthy=900)}, "checkpoint-unhealthy", "error"),
        ({"held": facts().held._replace(created="2030-03-17T18:46:00Z")}, "clock-differs", "warning"),
    ],
)
def test_what_needs_attention(changes: dict, code: str, level: str) -> None:
    """Each thing that goes wrong is named, alone, with a hint."""
    found = summarise(facts(**changes)).attention
    assert [(item.code, item.level) for item in found] == [(code, level)]
    assert found[0].text and found[0].hint


def test_a_pin_that_refuses_a_save_is_named() -> None:
    """Also when later steps were committed, with the command that mends it, until its step is saved."""
    refused = Save(1100, 1, "aborted", NOW - 9, NOW - 8, "pinned")
    later, again = (Save(step, 1, "committed", NOW - 5, NOW - 4) for step in (1150, 1100))
    for shown in ((refused, *saves()), (later, refused, *saves())):
        (item,) = summarise(facts(saves=shown)).attention
        assert item.code == "saves-failing" and item.step == 1100 and f"holdfast unpin {facts().run}@1100" in item.hint
    assert codes(summarise(facts(saves=(again, later, refused, *saves())))) == []


def test_what_follows_from_something_else_is_not_said_beside_it() -> None:
    """A death says of itself that its save failed, and a quota that is used up that nothing is committed."""
    killed = (Save(1100, 1, "aborted", NOW - 9, NOW - 8, "round-aborted"), *saves())
    assert codes(summarise(facts(saves=killed, life="died"))) == ["run-died"]
    full = (Save(1100, 1, "aborted", NOW - 9, NOW - 8, "quota-exceeded"), *saves())
    made = summarise(facts(saves=full, quota_bytes=80_000, now=NOW + 3600))
    assert [(item.code, item.remedy) for item in made.attention] == [("saves-failing", "raise-quota")]


def test_a_death_after_nan_resumes_from_the_newest_healthy_checkpoint() -> None:
    """Its newest one would restore the NaN that it died with."""
    held = facts().held._replace(
        newest=1000, healthy=False, unhealthy=900, newest_healthy=800, healthy_created="2030-03-17T16:00:00Z"
    )
    died = next(item for item in summarise(facts(held=held, life="died")).attention if item.code == "run-died")
    assert (died.step, died.remedy) == (800, "resume") and "healthy=True" in died.hint


@pytest.mark.parametrize("quota", [None, 10**12])
def test_a_team_s_quota_is_not_the_run_s(quota: int | None) -> None:
    """Raising the run's own mends nothing: what refuses the save is the quota of all runs of a pattern."""
    full = (Save(1100, 1, "aborted", NOW - 9, NOW - 8, "quota-exceeded"), *saves())
    (item,) = summarise(facts(saves=full, quota_bytes=quota)).attention
    assert (item.code, item.remedy) == ("saves-failing", "raise-team-quota") and "holdfast quota" in item.hint


def test_alerts_say_since_when_and_what_mends_them() -> None:
    """So that a program, or a button, can do it."""
    lost = summarise(facts(life="died", since=CREATED)).attention[0]
    assert (lost.since, lost.remedy, lost.step) == (CREATED, "resume", 1000)
    ill = facts().held._replace(healthy=False, newest_healthy=900)
    nan = summarise(facts(held=ill)).attention[0]
    assert (nan.remedy, nan.healthy) == ("restore-healthy", 900)
    assert summarise(facts(held=ill._replace(newest_healthy=None))).attention[0].remedy == "look"


def test_trend_is_of_the_newest_saves_the_oldest_first() -> None:
    """Goodput is what a stall leaves of the time since the save before; it is not known across a restart."""
    dropped = Save(1100, 2, "dropped", NOW - 10, NOW - 5, "generation-dropped", {"stall_s": 0.5})
    made = summarise(facts(saves=(Save(1200, 2, "open", NOW), dropped, *saves(3)))).trend
    assert made.steps == [100, 200, 300, 1100]
    assert made.states == ["committed"] * 3 + ["dropped"]
    assert made.stall_s == [0.2, 0.2, 0.2, 0.5]
    assert made.goodput == [None, round(1 - 0.2 / 600, 5), round(1 - 0.2 / 600, 5), None]


def test_policy_that_makes_room_is_not_called_full() -> None:
    """Where old checkpoints go for new ones, room for one more save is enough."""
    assert codes(summarise(facts(quota_bytes=89_000, makes_room=True))) == []
    assert codes(summarise(facts(quota_bytes=89_000))) == ["quota-nearly-full"]


def test_failures_are_counted_from_the_newest_save_on() -> None:
    """A save that worked ends the count; one under way does not."""
    failed = [Save(1100 + n, 1, "aborted", NOW - 9, NOW - 8, "no-space") for n in range(3)]
    going = Save(1200, 1, "open", NOW - 1)
    assert "last 3 saves" in summarise(facts(saves=(going, *failed, *saves()))).attention[0].text
    assert codes(summarise(facts(saves=(saves()[0], *failed, *saves()[1:])))) == []


def test_dalys_interval_is_youngs_where_saves_are_cheap() -> None:
    """The correction vanishes with cost over time between failures, and the interval is M where a save costs 2M."""
    assert intervals.daly(1e-6, 86_400) == pytest.approx(intervals.young(1e-6, 86_400), rel=1e-4)
    assert intervals.daly(600, 300) == 300
    assert intervals.daly(300, 86_400) == pytest.approx(6_996, rel=0.01)
    assert intervals.recommended(0.01, 1000, 60.0) == 60.0  # no save begins before the last one is durable
    assert intervals.recommended(0.0, 1000, None) is None


@given(cost=st.floats(0.001, 1000), failures=st.floats(100, 1e6), durable=st.floats(0, 100), factor=st.floats(1.2, 20))
def test_no_other_interval_loses_much_less(cost: float, failures: float, durable: float, factor: float) -> None:
    """By the expected loss that the summary states, saving more or less often than recommended is not better."""
    best = intervals.recommended(cost, failures, None)
    if best is None or best > failures / 2:  # the first-order loss says nothing so far out
        return

    def lost(interval_s: float) -> float:
        return cost / interval_s + interval_s / 2 / failures

    assert lost(best) <= min(lost(best * factor), lost(best / factor)) * 1.05


rounds = st.builds(
    Save,
    step=st.integers(0, 10**6),
    attempt=st.integers(0, 5),
    state=st.sampled_from(["open", "sealed", "committed", "aborted", "dropped"]),
    opened=st.floats(NOW - 10**6, NOW + 10**3) | st.just(inf),
    ended=st.none() | st.floats(NOW - 10**6, NOW + 10**3) | st.just(inf),
    code=st.none() | st.sampled_from(["no-space", "round-aborted"]),
    measured=st.dictionaries(st.sampled_from([*MEASURED, "queue_s"]), st.floats(0, 1e12)),
)


@given(
    made=st.lists(rounds, max_size=8),
    declared=st.lists(st.floats(NOW - 10**6, NOW) | st.just(inf), max_size=4),
    created=st.none() | st.sampled_from([CREATED, "not a time", "2040-01-01T00:00:00Z"]),
    newest=st.none() | st.integers(0, 10**6),
    life=st.sampled_from(["running", "finished", "died", None]),
)
def test_any_rows_make_a_summary(
    made: list[Save], declared: list[float], created: str | None, newest: int | None, life: Life | None
) -> None:
    """Whatever the catalog holds, the figures are None or finite, not negative, and in order."""
    held = CheckpointFacts(1, 100, newest, created=created, newest_bytes=100)
    found = summarise(Facts("run", 1, NOW, held, tuple(made), tuple(declared), free_bytes=10**6, life=life))
    for name, value in found.model_dump().items():
        if isinstance(value, (int, float)):
            assert math.isfinite(value) and value >= 0, name
    assert found.goodput_lost is None or found.goodput_lost <= 1
    assert (found.stall_p50_s or 0) <= (found.stall_p95_s or 0)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles_lie_among_the_values(values: list[float], share: float) -> None:
    """A quantile is between the extremes; the ends are the extremes."""
    found = quantile(values, share)
    assert found is not None and min(values) <= found <= max(values)
    assert (quantile(values, 0), quantile(values, 1)) == (min(values), max(values))
