"""Ages are time that a daemon has seen pass, whatever clocks say."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, update

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import RunRow
from tests.control.published import a_row

RUN = "run"


def seen(catalog: Catalog) -> list[float]:
    return [round(proof.seen_s) for _, proof in sorted(catalog.proofs(RUN).items())]


def test_time_passes_between_commits_as_the_daemon_sees_it(database: Database) -> None:
    """What a checkpoint says of its time does not count; nor does time without a daemon."""
    now = [5000.0]
    catalog = Catalog(database, clock=lambda: now[0])
    created = ("2026-11-28T00:00:00.000Z", "9999-01-01T00:00:00.000Z", "1970-01-01T00:00:00.000Z")
    for step, at in enumerate(created):
        catalog.record_checkpoint(a_row(RUN, step).model_copy(update={"created": at}))
        now[0] += 100.0
    if not database.is_shared:
        assert seen(catalog) == [0, 100, 200]
    began = seen(catalog)
    now[0] += 10**7
    catalog = Catalog(database, clock=lambda: now[0])  # the next daemon
    now[0] += 7.0
    catalog.record_checkpoint(a_row(RUN, 9))
    assert began[-1] <= seen(catalog)[-1] <= began[-1] + 7
    catalog.record_checkpoint(a_row(RUN, 9, verified=True))  # the same one, as something is found out about it
    assert seen(catalog)[-1] <= began[-1] + 7


def test_a_save_in_the_place_of_one_begins_its_age_even_if_a_clock_stands_still(database: Database) -> None:
    now = [0.0]
    catalog = Catalog(database, clock=lambda: now[0])
    catalog.record_checkpoint(a_row(RUN, 1))
    began = seen(catalog)[-1]
    now[0] += 100.0
    catalog.record_checkpoint(a_row(RUN, 1).model_copy(update={"turn": 1}))
    if not database.is_shared:
        assert seen(catalog)[-1] == began + 100


def test_where_nodes_share_a_catalog_its_database_says_how_much_has_passed(database: Database) -> None:
    """Of two nodes neither counts more than it was up for, nor the same time twice."""
    if not database.is_shared:
        return
    now = [0.0, 0.0]
    nodes = [Catalog(database, "a", lambda: now[0]), Catalog(database, "b", lambda: now[1])]
    now[:] = [10**6, 10**6]
    for step in range(6):
        nodes[step % 2].record_checkpoint(a_row(RUN, step))
    assert 0 <= seen(nodes[0])[-1] <= 60  # what has passed in this test


@pytest.mark.parametrize(("days", "most"), [(-400, 7), (400, 0)])
def test_a_database_whose_clock_jumps_adds_no_more_than_the_node_was_up_for(
    database: Database, days: int, most: int
) -> None:
    """A clock that was set forward makes nothing old, and one that was set back makes nothing younger."""
    if not database.is_shared:
        return
    now = [0.0]
    catalog = Catalog(database, clock=lambda: now[0])
    catalog.record_checkpoint(a_row(RUN, 1))
    (began,) = seen(catalog)
    before = func.clock_timestamp() + timedelta(days=days)
    with database.write() as session:
        session.execute(update(RunRow).where(RunRow.name == RUN).values(recorded=before))
    now[0] = 7.0
    catalog.record_checkpoint(a_row(RUN, 2))
    assert seen(catalog)[-1] == began + most


def test_the_time_of_a_renamed_run_goes_on(database: Database) -> None:
    """It is not counted from the start of the daemon again."""
    now = [0.0]
    catalog = Catalog(database, clock=lambda: now[0])
    now[0] = 10**6
    catalog.record_checkpoint(a_row(RUN, 1))
    now[0] += 10
    catalog.record_checkpoint(a_row("old", 1))
    catalog.renamed("old", RUN)
    now[0] += 10
    catalog.record_checkpoint(a_row(RUN, 2))
    assert seen(catalog)[-1] <= 20
