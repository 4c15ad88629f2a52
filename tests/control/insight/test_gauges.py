"""Gauges: what is by run, and what is of all checkpoints, follow the catalog."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import insert

from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.schema import CheckpointRow, JobRow, ReplicaRow
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.control.insight.gauges import Gauges
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.storage import PosixTier, stored_in
from tests.control.published import a_row
from tests.databases import sqlite_catalog

BEGAN = "2030-01-01T00:00:00.000Z"
NOW = seconds_of("2030-01-01T00:10:00.000Z")


catalog = sqlite_catalog


@pytest.fixture
def gauges(catalog: Catalog, tmp_path: Path) -> Gauges:
    summaries = Summaries(stored_in(PosixTier(tmp_path)).store, catalog, clock=lambda: NOW)
    return Gauges(catalog, summaries, CopyLags(catalog.database, clock=lambda: NOW), clock=lambda: NOW)


def read(gauges: Gauges, name: str) -> dict[str, float]:
    return {",".join(labels): value for labels, value in gauges.now()[name]}


def test_by_run(catalog: Catalog, gauges: Gauges) -> None:
    """Ages are of the newest and of the newest verified checkpoint; what a run has not is no sample."""
    catalog.declare_attempt("run", "launch", 2, BEGAN)
    for step, verified in ((1, True), (2, False)):
        catalog.record_checkpoint(a_row("run", step, verified))
        made = catalog.rounds.open("run", step + 10, 1, 2, BEGAN)[0]
        catalog.rounds.end(made, "aborted", BEGAN, "no-space")
    catalog.rounds.open("young", 1, 1, 1, BEGAN)
    assert read(gauges, "holdfast_last_commit_age_seconds") == {"run": 598.0}
    assert read(gauges, "holdfast_last_verified_age_seconds") == {"run": 599.0}
    assert read(gauges, "holdfast_save_failures") == {"run": 2, "young": 0}
    assert read(gauges, "holdfast_run_bytes") == {"run": 4, "young": 0}
    assert read(gauges, "holdfast_run_quota_bytes") == {}


def test_runs_are_those_that_saved_last(catalog: Catalog, gauges: Gauges) -> None:
    """In the order of their newest save."""
    for step, run in enumerate(("b", "a", "b", "c")):
        catalog.rounds.open(run, step, 1, 1, BEGAN)
    assert gauges.active() == ["c", "b", "a"]


def test_of_all_checkpoints(catalog: Catalog, gauges: Gauges) -> None:
    """Each checkpoint is counted once, by the worst that is known; lag is that of the one which has waited longest."""
    for step in range(5):
        catalog.record_checkpoint(a_row("run", step, verified=step > 0))
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("run", 1)).damage = {"code": "corrupt-extent"}
        session.get_one(CheckpointRow, ("run", 1)).healthy = False
        session.get_one(CheckpointRow, ("run", 2)).healthy = False
        session.get_one(CheckpointRow, ("run", 0)).checked = "2030-01-01T00:09:00.000Z"
        for step, state in ((3, "present"), (4, "damaged")):
            session.execute(insert(ReplicaRow).values(run="run", step=step, tier="far", state=state, bytes=1, since=BEGAN))
        times = {"created": BEGAN, "cancel": False, "done_bytes": 0, "total_bytes": 0}
        session.add(JobRow(node="n", kind="verify", key="k", state="queued", request={}, tries=0, **times))
    assert read(gauges, "holdfast_checkpoints") == {
        "committed": 1,
        "verified": 2,
        "unhealthy": 1,
        "abandoned": 0,
        "damaged": 1,
    }
    assert read(gauges, "holdfast_scrub_lag_seconds") == {"": 599.0}
    assert read(gauges, "holdfast_replica_missing") == {"far": 4}
    assert read(gauges, "holdfast_replica_missing_bytes") == {"far": 2 * a_row("run", 2, verified=True).bytes}
    assert read(gauges, "holdfast_replica_lag_seconds") == {"far": NOW - seconds_of(a_row("run", 2, verified=True).created)}
    assert read(gauges, "holdfast_replica_damaged") == {"far": 1}
    assert read(gauges, "holdfast_jobs")["queued"] == 1


def test_empty_catalog(gauges: Gauges) -> None:
    """Nothing is no error, and no made-up zero where an age would stand."""
    assert read(gauges, "holdfast_checkpoints") == {
        "committed": 0,
        "verified": 0,
        "unhealthy": 0,
        "abandoned": 0,
        "damaged": 0,
    }
    assert gauges.now()["holdfast_scrub_lag_seconds"] == ()
