"""What is kept of summaries says what would be said anew, whatever has changed meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.rest.measurements import Acknowledgement
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.run_settings import RunSettings
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey
from holdfast_service.control.insight.facts import CheckpointFacts, Facts, ReplicaCounts
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.summary import summarise
from holdfast_service.control.insight.summary_board import STILL_S, KeptSummaries, SummaryBoard
from tests.control.insight.test_summary import CREATED, NOW, facts, saves
from tests.daemons import wait_until
from tests.databases import sqlite_catalog

DIED = AlertKey("run-1", "run-died")
SEEN = Acknowledgement(by="ann", at="2030-01-01T00:00:00Z")
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "attempt": st.sampled_from([1, 2]),
        "held": st.builds(
            CheckpointFacts,
            *(st.sampled_from([9, 10]), st.just(80_000), st.just(1000), st.sampled_from([900, 1000]), st.just(1000)),
            damaged=st.sampled_from([0, 1]),
            newest_bytes=st.sampled_from([0, 8000]),
            created=st.sampled_from([CREATED, None, "2031-01-01T00:00:00Z"]),
            healthy=st.sampled_from([True, False, None]),
        ),
        "saves": st.sampled_from([saves(), saves(9), ()]),
        "copies": st.sampled_from([{}, {"far": ReplicaCounts(600, 0)}, {"far": ReplicaCounts(1000, 1)}]),
        "free_bytes": st.sampled_from([10**9, 17_000, 16_001, 7000]),
        "quota_bytes": st.sampled_from([None, 81_000]),
        "makes_room": st.booleans(),
        "life": st.sampled_from(["running", "finished", "died", None]),
        "since": st.sampled_from([None, "2030-03-17T17:00:00Z"]),
        "settings": st.sampled_from([RunSettings(), RunSettings(archived="2030-03-17T17:00:00Z"), RunSettings(owner="ann")]),
    },
)
_OF_TIME = {"verdict", "attention"}  # say how long ago something was


@given(st.lists(st.tuples(CHANGES, st.sampled_from([0.0, 1.0, STILL_S, 4000.0])), min_size=2, max_size=4))
def test_what_is_kept_says_what_would_be_said_anew(probe: list[tuple[dict[str, object], float]]) -> None:
    """But for words about the time of a run that nobody trains, which are ten seconds old at most."""
    kept, now = KeptSummaries(), NOW
    for changes, later in probe:
        now += later
        known = facts(**changes)._replace(now=now)
        said, anew = kept.of(known), summarise(known)
        recent = [known._replace(now=now - ago) for ago in range(int(STILL_S) + 1)]
        assert said.model_dump(exclude=_OF_TIME) == anew.model_dump(exclude=_OF_TIME)
        assert any((said.verdict, said.attention) == (one.verdict, one.attention) for one in map(summarise, recent))
        assert [item.code for item in said.attention] == [item.code for item in anew.attention]


def test_a_run_that_nobody_trains_is_not_summarised_again() -> None:
    """As long as nothing is known that was not known."""
    kept = KeptSummaries()
    first = kept.of(facts(life="finished"))
    again = kept.of(facts(life="finished", now=NOW + 5, free_bytes=10**9 + 1))
    assert again.attention is first.attention and (again.last_commit_age_s, again.free_bytes) == (45.0, 10**9 + 1)
    kept.forget_others({"other"})
    assert kept.of(facts(life="finished")).attention is not first.attention


catalog = sqlite_catalog


def test_acknowledgements_are_seen_at_once(catalog: Catalog) -> None:
    """Those of this daemon; those of another one soon. Each viewer sees their runs."""

    def runs() -> list[Facts]:
        return [facts(run=f"run-{n}", life="died" if n else "finished", since=CREATED) for n in range(3)]

    store = Acknowledgements(catalog.database)
    board = SummaryBoard(runs, store, KeptSummaries())
    by_need, wanted = WantedRuns.parse(sort="attention"), WantedRuns.parse(q="run", sort="storage")

    def order() -> list[str]:
        keys = board.keys(by_need)
        assert [by_need.order.run_of(key) for key in keys] == [summary.run for summary in board.all()]
        return [summary.run for summary in board.all()]

    assert order() == ["run-1", "run-2", "run-0"]
    store.set(DIED, SEEN)
    assert order() == ["run-2", "run-0", "run-1"]
    assert board.all()[-1].attention[0].acknowledged == SEEN
    with limited_to("run-1,run-0"):
        assert [summary.run for summary in board.all()] == ["run-0", "run-1"]
        assert [wanted.order.run_of(key) for key in board.keys(wanted)] == ["run-0", "run-1"]
    Acknowledgements(catalog.database).remove([DIED])
    wait_until(lambda: order() == ["run-1", "run-2", "run-0"])
