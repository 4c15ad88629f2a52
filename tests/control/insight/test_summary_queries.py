"""Summaries of a catalog: the rows that are taken, pages in both orders, and how many questions a page asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import event, insert

from holdfast_formats.errors import InvalidRequest, NoSuchRun
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints.run_files import RunFile, write_run_file
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow, RoundRow
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.insight import run_figures
from holdfast_service.control.insight.run_orders import WantedRuns
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.control.insight.summary_rows import SAVES
from holdfast_service.storage import PosixTier, stored_in
from tests.control.published import a_row
from tests.databases import sqlite_catalog

BEGAN = "2030-01-01T00:00:00.000Z"
BY_NEED = WantedRuns.parse(sort="attention")
NOW = seconds_of("2030-01-01T01:00:00.000Z")
QUERIES_MAX = 3  # names, figures, acknowledgements


catalog = sqlite_catalog


@pytest.fixture
def summaries(catalog: Catalog, tmp_path: Path) -> Summaries:
    return Summaries(stored_in(PosixTier(tmp_path)).store, catalog, clock=lambda: NOW)


def fill(catalog: Catalog, run: str, count: int) -> None:
    """A run of one attempt with so many committed saves, a minute apart."""
    catalog.declare_attempt(run, "launch", 2, BEGAN)
    with catalog.database.write() as session:
        for n in range(count):
            at = f"2030-01-01T00:{n % 60:02d}:00.000Z"
            row = a_row(run, n).model_dump(exclude=bodies.MARKS)
            made = row | {"created": at, "verified": n < count - 1, "bytes": 100 + n}
            session.execute(insert(CheckpointRow).values(made))
            done = {"state": "committed", "sealed": 2, "opened": at, "ended": at, "measured": {"stall_s": 0.5}}
            session.execute(insert(RoundRow).values(run=run, step=n, attempt=1, world=2, **done))


def test_rows_of_one_run(catalog: Catalog, summaries: Summaries, tmp_path: Path) -> None:
    """Counts and sums are over all checkpoints, figures over the newest saves, the quota from the run's file."""
    fill(catalog, "other", 3)
    fill(catalog, "run", 40)
    write_run_file(PosixTier(tmp_path), "run", RunFile(policy=RetentionPolicy(quota_bytes=10_000)))
    made = summaries.one("run")
    assert (made.checkpoints, made.bytes, made.newest, made.newest_verified) == (40, sum(range(100, 140)), 39, 38)
    assert (made.saves, made.stall_p50_s, made.interval_s, made.interval_steps) == (SAVES, 0.5, 60.0, 1)
    assert (made.quota_bytes, made.last_commit, made.attempt) == (10_000, "2030-01-01T00:39:00.000Z", 1)
    assert made.last_commit_age_s == 21 * 60
    assert summaries.one("other").checkpoints == 3


def test_a_policy_is_read_again_once_it_was_applied(catalog: Catalog, tmp_path: Path) -> None:
    """In a bucket each look at a run's file is a request: none for a page, one after a change, also after minutes."""
    tier = PosixTier(tmp_path)
    summaries = Summaries(stored_in(tier).store, catalog, clock=lambda: NOW, policy_known_s=480.0)
    fill(catalog, "run", 2)
    for quota in (10_000, 20_000):
        write_run_file(tier, "run", RunFile(policy=RetentionPolicy(quota_bytes=quota)))
        assert summaries.one("run").quota_bytes == 10_000
    summaries.policy_applied("run")
    assert summaries.one("run").quota_bytes == 20_000
    often = Summaries(stored_in(tier).store, catalog, clock=lambda: NOW, policy_known_s=0.0)
    for quota in (30_000, 40_000):
        write_run_file(tier, "run", RunFile(policy=RetentionPolicy(quota_bytes=quota)))
        assert often.one("run").quota_bytes == quota


def test_damage_health_and_replicas_are_seen(catalog: Catalog, summaries: Summaries) -> None:
    """What was found out since the commit is in the summary."""
    fill(catalog, "run", 6)
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("run", 4)).damage = {"code": "corrupt-extent"}
        session.get_one(CheckpointRow, ("run", 5)).healthy = False
        for step in (1, 2):
            made = {"tier": "far", "state": "present", "bytes": 1, "since": BEGAN}
            session.execute(insert(ReplicaRow).values(run="run", step=step, **made))
    made = summaries.one("run")
    assert made.newest_healthy == 3
    codes = {item.code for item in made.attention}
    assert {"checkpoint-damaged", "checkpoint-unhealthy", "replica-behind"} <= codes


def test_what_nobody_has_looked_at_is_not_taken_for_healthy_after_nan(catalog: Catalog, summaries: Summaries) -> None:
    """A run that saves often always has checkpoints that are still to be looked at: the alert stays meanwhile."""
    fill(catalog, "run", 8)
    with catalog.database.write() as session:
        for step in range(6):
            session.get_one(CheckpointRow, ("run", step)).healthy = step < 4
        session.get_one(CheckpointRow, ("run", 5)).nonfinite = 3
        session.execute(insert(ReplicaRow).values(run="run", step=3, tier="far", state="present", bytes=1, since=BEGAN))
    made = summaries.one("run")
    (nan,) = [item for item in made.attention if item.code == "checkpoint-unhealthy"]
    assert (nan.step, nan.healthy, made.newest, made.newest_healthy) == (5, 3, 7, 3)
    assert "step 5 has new NaN or infinite values, first at step 4; the newest healthy one is step 3" in nan.text
    assert made.good is not None and (made.good.step, made.good.verified, made.good.copies) == (3, True, ["far"])
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("run", 6)).healthy = True
    again = summaries.one("run")
    assert again.nonfinite is None
    assert "checkpoint-unhealthy" not in {item.code for item in again.attention}
    assert again.good is not None and (again.good.step, again.good.verified) == (7, False)


def test_a_verified_checkpoint_without_statistics_is_not_taken_for_healthy_after_nan(
    catalog: Catalog, summaries: Summaries
) -> None:
    """Digests say nothing of values: the alert stays until a later checkpoint is known to be healthy."""
    fill(catalog, "run", 5)
    with catalog.database.write() as session:
        for step in range(5):
            session.get_one(CheckpointRow, ("run", step)).verified = True
        session.get_one(CheckpointRow, ("run", 3)).healthy = False
    made = summaries.one("run")
    assert (made.newest, made.newest_verified, made.newest_healthy) == (4, 4, 2)
    assert "checkpoint-unhealthy" in {item.code for item in made.attention}
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("run", 4)).healthy = True
    assert summaries.one("run").newest_healthy == 4


def test_run_without_anything_and_no_run(catalog: Catalog, summaries: Summaries) -> None:
    """A run with an attempt alone has a summary; one that does not exist has an error."""
    catalog.declare_attempt("young", "launch", 1, BEGAN)
    assert (summaries.one("young").checkpoints, summaries.one("young").newest) == (0, None)
    with pytest.raises(NoSuchRun):
        summaries.one("nope")


def test_pages_by_name_prefix_and_words(catalog: Catalog, summaries: Summaries) -> None:
    """Pages go on behind their cursor; prefix and words are text and no patterns, and words have no case."""
    for run in ("a-1", "a-2", "a-3", "A-4", "b_x"):
        fill(catalog, run, 1)
    first = summaries.page(None, 2, WantedRuns.parse("a-"))
    assert [made.run for made in first.items] == ["a-1", "a-2"]
    behind = summaries.page(first.next, 2, WantedRuns.parse("a-"))
    assert ([made.run for made in behind.items], behind.next) == (["a-3"], None)
    for wanted, names in (
        (("%",), []),
        (("", "%"), []),
        (("", "_"), ["b_x"]),
        (("", "-4 a"), ["A-4"]),
        (("a", "-", "-name"), ["a-3", "a-2", "a-1"]),
        (("", "X", "-storage"), ["b_x"]),
    ):
        assert [made.run for made in summaries.page(None, 10, WantedRuns.parse(*wanted)).items] == names, wanted
    with pytest.raises(InvalidRequest):
        summaries.page(first.next, 2, BY_NEED)


def test_pages_by_a_column(catalog: Catalog, summaries: Summaries) -> None:
    """Behind their cursor in that order; one of another order, or one that is made up, is refused."""
    for run, count in (("a", 2), ("b", 5), ("c", 3)):
        fill(catalog, run, count)
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("c", 2)).metrics = {"loss": 0.5, "n": 3}
        session.get_one(CheckpointRow, ("a", 1)).metrics = {"loss": 1.5}
        session.get_one(CheckpointRow, ("b", 4)).metrics = {"other": 1}
    for sort, names in (("-storage", "bca"), ("checkpoints", "acb"), ("metric:loss", "cab"), ("-metric:loss", "acb")):
        listed, cursor = "", None
        while True:
            found = summaries.names(cursor, 1, WantedRuns.parse(sort=sort))
            listed += "".join(found.items)
            if (cursor := found.next) is None:
                break
            with pytest.raises(InvalidRequest):
                summaries.names(cursor, 1, WantedRuns.parse(sort="age"))
        assert listed == names, sort
    assert summaries.one("c").metrics == {"loss": 0.5, "n": 3.0}
    with limited_to("c"):
        assert summaries.names(None, 10, WantedRuns.parse(sort="-storage")).items == ["c"]


def test_order_by_attention(catalog: Catalog, summaries: Summaries) -> None:
    """Errors come first, then warnings, then names; pages go on in that order, and what they say is new."""
    for run in ("calm", "failing", "frozen", "quiet"):
        fill(catalog, run, 4)
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("frozen", 3)).same_as = 2
        session.get_one(CheckpointRow, ("failing", 3)).healthy = False
    listed, cursor = [], None
    while True:
        found = summaries.page(cursor, 1, BY_NEED)
        listed += [made.run for made in found.items]
        if (cursor := found.next) is None:
            break
    assert listed == ["failing", "frozen", "calm", "quiet"]
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, ("failing", 3)).healthy = True
    Events(catalog.database, "node", lambda: BEGAN).add("checkpoint-verified", "as a check does", "failing", 3)
    newest = summaries.page(None, 1, BY_NEED).items[0]
    assert (newest.run, "checkpoint-unhealthy" in {item.code for item in newest.attention}) == ("failing", False)


def test_a_page_asks_few_questions(catalog: Catalog, summaries: Summaries) -> None:
    """The number of queries does not grow with the page."""
    for n in range(20):
        fill(catalog, f"run-{n}", 3)
    while run_figures.renew(catalog.database):
        pass
    asked: list[str] = []
    event.listen(catalog.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    assert len(summaries.page(None, 20).items) == 20
    assert len([statement for statement in asked if statement.startswith("SELECT")]) <= QUERIES_MAX


def test_unreadable_run_file_is_no_obstacle(catalog: Catalog, summaries: Summaries, tmp_path: Path) -> None:
    """A run whose file is damaged has a summary without a quota."""
    fill(catalog, "run", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    assert summaries.one("run").quota_bytes is None


def test_where_nan_began(catalog: Catalog, summaries: Summaries) -> None:
    """From the event of the first step of this line of training; the state says it in words, whatever the run does."""
    fill(catalog, "run", 8)
    events = Events(catalog.database, "node", lambda: BEGAN)
    named = {"group": "model", "nan": 1, "inf": 0}
    for step, name in ((2, "left.behind"), (4, "layers.2.mlp.up_proj"), (5, "lm_head")):
        events.add(
            "checkpoint-unhealthy",
            "",
            "run",
            step,
            "error",
            tensors=[{"name": name, **named}, {"name": "b", **named}],
            count=2,
        )
    with catalog.database.write() as session:
        for step in range(8):
            row = session.get_one(CheckpointRow, ("run", step))
            row.healthy, row.abandoned = step < 2 or step == 3, step == 2
            if step >= 4:
                row.healthy = False
    made = summaries.one("run")
    assert made.nonfinite is not None
    assert made.nonfinite.place == "first at step 4, layers.2.mlp.up_proj, 1 value, and 1 other tensor"
    assert made.standing == f"{made.life} with NaN since step 4"
    assert summaries.runs(["run"])[0].standing == made.standing
    (nan,) = [item for item in made.attention if item.code == "checkpoint-unhealthy"]
    assert made.nonfinite.place in nan.text
    with catalog.database.write() as session:  # back to a healthy step, and NaN again: the first time does not count
        for step in (4, 5, 6):
            session.get_one(CheckpointRow, ("run", step)).abandoned = True
    again = summaries.one("run")
    assert again.nonfinite is not None and again.nonfinite.place == "first at step 7"
