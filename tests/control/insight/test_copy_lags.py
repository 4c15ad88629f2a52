"""How far replicas are behind: of all runs, and of one."""

from __future__ import annotations

from sqlalchemy import insert

from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.schema import ReplicaRow
from holdfast_service.control.insight.copy_lags import NO_LAG, CopyLag, CopyLags
from tests.control.published import a_row
from tests.daemons import wait_until
from tests.databases import sqlite_catalog

catalog = sqlite_catalog


def test_of_all_runs_and_of_one(catalog: Catalog) -> None:
    """What is not verified is missing, but has no bytes and no age. A replica of this node without any copy lacks all."""
    rows = {(run, step): a_row(run, step, verified=step < 3) for run in ("a", "b") for step in (1, 2, 3)}
    for row in rows.values():
        catalog.record_checkpoint(row)
    with catalog.database.write() as session:
        copied = {"tier": "far", "state": "present", "bytes": 1, "since": "2030-01-01T00:00:00.000Z"}
        session.execute(insert(ReplicaRow).values([{"run": "a", "step": 1, **copied}, {"run": "b", "step": 3, **copied}]))
    lags = CopyLags(catalog.database, ["near"])
    first, second = (seconds_of(rows["b", step].created) for step in (1, 2))
    of_b = CopyLag(2, 2 * rows["b", 1].bytes, first)
    assert lags.now()["far"] == CopyLag(4, 3 * rows["a", 2].bytes, min(first, second))
    assert lags.now()["near"].missing == 6
    assert lags.seen_of("b")["far"] == of_b and lags.seen_of("other")["far"] == NO_LAG
    assert of_b.seconds(first + 7) == 7.0 and of_b.seconds(first - 7) == NO_LAG.seconds(first) == 0.0


def test_what_is_seen_is_looked_at_beside(catalog: Catalog) -> None:
    """The first question starts the look."""
    lags = CopyLags(catalog.database, ["near"])
    wait_until(lambda: lags.seen() == {"near": NO_LAG})
