"""Jobs in the catalog: the same request is the same job, one node at a time runs it, and it outlasts who runs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast_formats.errors import InvalidRequest, LimitExceeded, NoSuchResource
from holdfast_formats.rest.jobs import ExportJob, VerifyJob
from holdfast_service.control.database.database import Database
from holdfast_service.control.jobs import catalog
from holdfast_service.control.jobs.catalog import Jobs
from tests.databases import sqlite_database
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
VERIFY = VerifyJob(run="a", step=1)
KINDS = ["verify", "export"]


class Clock:
    """A time that tests move on."""

    def __init__(self) -> None:
        self.minute = 0

    def __call__(self) -> str:
        return f"2030-01-01T00:{self.minute:02}:00.000Z"


database = sqlite_database


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def jobs(database: Database, clock: Clock) -> Jobs:
    return Jobs(database, "node-1", clock)


def test_the_same_request_is_the_same_job_while_it_goes_on(jobs: Jobs) -> None:
    """Queued or running, it is found again; once it has ended, the same request is new work."""
    first, new = jobs.submit(VERIFY)
    assert (new, first.state, first.tries, first.arguments) == (True, "queued", 0, {})
    assert jobs.submit(VERIFY) == (first, False)
    claimed = jobs.claim(KINDS)
    assert claimed is not None
    assert jobs.submit(VERIFY)[0].id == first.id
    other, new = jobs.submit(VerifyJob(run="a", step=1, arguments={"repair": True}))
    assert new and other.id != first.id
    assert jobs.finish(claimed, "done", {"bytes": 3}) is not None
    assert jobs.submit(VERIFY)[1]


def test_many_at_once_submit_one_job(jobs: Jobs) -> None:
    """However many ask at the same time, one of them makes the job and all are told the same."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: jobs.submit(VERIFY), range(24)))
    assert len({job.id for job, _ in found}) == 1
    assert sum(new for _, new in found) == 1


def test_each_job_is_claimed_once(database: Database, clock: Clock) -> None:
    """Two nodes that claim as fast as they can never run the same job, and leave none."""
    nodes = [Jobs(database, f"node-{n}", clock) for n in range(2)]
    for step in range(12):
        nodes[0].submit(VerifyJob(run="a", step=step))

    def claim_all(node: Jobs) -> list[int]:
        claimed = []
        while (job := node.claim(KINDS)) is not None:
            claimed.append(job.id)
        return claimed

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(claim_all, nodes)
    assert sorted(first + second) == list(range(1, 13))


def test_only_kinds_that_are_asked_for_are_claimed(jobs: Jobs) -> None:
    """A node leaves to others what it cannot do; the oldest job comes first."""
    jobs.submit(ExportJob(run="a", step=1, arguments={"to": "out"}))
    jobs.submit(VERIFY)
    assert not jobs.waiting(["scrub"])
    assert jobs.claim(["scrub"]) is None
    assert jobs.waiting(KINDS)
    claimed = jobs.claim(KINDS)
    assert claimed is not None and (claimed.kind, claimed.state, claimed.tries) == ("export", "running", 1)


def test_pages_go_from_the_newest_on(jobs: Jobs) -> None:
    """By kind, state and run; behind a cursor nothing is repeated."""
    for step in range(5):
        jobs.submit(VerifyJob(run="ab"[step % 2], step=step))
    claimed = jobs.claim(KINDS)
    assert claimed is not None
    jobs.finish(claimed, "failed", problem={"code": "corrupt-extent"})
    first = jobs.page(None, 2)
    assert [job.step for job in first.items] == [4, 3]
    assert [job.step for job in jobs.page(first.next, 10).items] == [2, 1, 0]
    assert [job.step for job in jobs.page(None, 10, state="failed").items] == [0]
    assert [job.step for job in jobs.page(None, 10, run="b", kind="verify").items] == [3, 1]
    assert jobs.page(None, 10, kind="export").items == []


def test_a_queued_job_is_cancelled_at_once(jobs: Jobs) -> None:
    """Nobody claims it any more; cancelling what has ended changes nothing."""
    job, _ = jobs.submit(VERIFY)
    cancelled = jobs.cancel(job.id)
    assert (cancelled.state, cancelled.ended is None) == ("cancelled", False)
    assert jobs.claim(KINDS) is None
    assert jobs.cancel(job.id) == cancelled


def test_who_runs_a_job_hears_that_it_is_cancelled(jobs: Jobs) -> None:
    """With its next sign of life; how far it is can be read meanwhile."""
    jobs.submit(VERIFY)
    claimed = jobs.claim(KINDS)
    assert claimed is not None
    assert not jobs.progress(claimed, 3, 10)
    assert (jobs.get(claimed.id).done_bytes, jobs.get(claimed.id).total_bytes) == (3, 10)
    assert jobs.cancel(claimed.id).state == "running"
    assert jobs.progress(claimed)
    ended = jobs.finish(claimed, "cancelled", reported=(3, 10))
    assert ended is not None and ended.state == "cancelled" and ended.done_bytes == 3


def test_a_node_that_starts_puts_its_jobs_back(database: Database, jobs: Jobs, clock: Clock) -> None:
    """Its own ones alone; after so many starts the job has failed, with a problem that says so."""
    job, _ = jobs.submit(VERIFY)
    jobs.submit(ExportJob(run="a", step=1, arguments={"to": "out"}))
    other = Jobs(database, "node-2", clock)
    assert other.claim(["export"]) is not None
    for tries in range(1, catalog.TRIES_MAX + 1):
        claimed = jobs.claim(["verify"])
        assert claimed is not None and claimed.tries == tries
        ended = jobs.recover()
        assert (jobs.get(job.id).state == "queued") == (tries < catalog.TRIES_MAX)
    assert [gone.id for gone in ended] == [job.id]
    problem = jobs.get(job.id).problem
    assert problem is not None and problem["tries"] == catalog.TRIES_MAX and problem["hint"]
    assert jobs.page(None, 10, kind="export").items[0].state == "running"


def test_a_job_that_was_to_be_cancelled_is_not_started_again(jobs: Jobs) -> None:
    """The service ended before who ran it had stopped."""
    job, _ = jobs.submit(VERIFY)
    assert jobs.claim(KINDS) is not None
    jobs.cancel(job.id)
    assert [ended.state for ended in jobs.recover()] == ["cancelled"]
    assert jobs.claim(KINDS) is None


def test_a_lost_nodes_job_goes_to_another(database: Database, jobs: Jobs, clock: Clock) -> None:
    """Without a sign of life for long it is put back, and who ran it before can report on it no more. What clocks say, of
    which that of the other machine may be hours behind, does not matter.
    """
    passed = [0.0]
    jobs = Jobs(database, "node-1", lambda: "2031-01-01T00:00:00.000Z", clock=lambda: passed[0])
    jobs.submit(VERIFY)
    other = Jobs(database, "node-2", clock)
    lost = other.claim(KINDS)
    assert lost is not None
    for _ in range(3):  # it lives
        assert jobs.recover_lost() == []
        assert jobs.claim(KINDS) is None
        passed[0] += catalog.LOST_S - 1
        clock.minute += 1
        assert not other.progress(lost)
    assert jobs.recover_lost() == []
    passed[0] += catalog.LOST_S
    assert jobs.recover_lost() == []
    again = jobs.claim(KINDS)
    assert again is not None and (again.id, again.node, again.tries) == (lost.id, "node-1", 2)
    assert other.progress(lost)
    assert other.finish(lost, "done", {}) is None
    other.release(lost)
    assert jobs.get(again.id).state == "running"
    assert jobs.finish(again, "done", {"bytes": 1}) is not None


def test_a_closing_node_gives_its_job_back(jobs: Jobs) -> None:
    """It is queued as it was, and that start is not counted."""
    jobs.submit(VERIFY)
    claimed = jobs.claim(KINDS)
    assert claimed is not None
    jobs.release(claimed)
    again = jobs.claim(KINDS)
    assert again is not None and (again.id, again.tries) == (claimed.id, 1)


def test_what_is_too_much_is_refused(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long requests, long queues and numbers that are none, by name and with nothing stored."""
    with pytest.raises(LimitExceeded, match="bytes"):
        jobs.submit(ExportJob(run="a", step=1, arguments={"to": "x" * catalog.ARGUMENTS_BYTES_MAX}))
    with pytest.raises(NoSuchResource):
        jobs.get(7)
    with pytest.raises(InvalidRequest):
        jobs.cancel(2**63)
    monkeypatch.setattr(catalog, "QUEUED_MAX", 1)
    jobs.submit(VERIFY)
    with pytest.raises(LimitExceeded, match="waiting"):
        jobs.submit(VERIFY.model_copy(update={"step": 2}))
    assert jobs.submit(VERIFY)[1] is False
    assert len(jobs.page(None, 10).items) == 1


def test_old_jobs_are_forgotten(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have ended, beyond so many; what waits is never forgotten."""
    monkeypatch.setattr(catalog, "KEPT_MAX", 3)
    monkeypatch.setattr(catalog, "TRIM_EVERY", 5)
    jobs.submit(ExportJob(run="a", step=1, arguments={"to": "out"}))
    for step in range(9):
        jobs.submit(VERIFY.model_copy(update={"step": step}))
        claimed = jobs.claim(["verify"])
        assert claimed is not None
        jobs.finish(claimed, "done", {})
    assert [job.id for job in jobs.page(None, 20).items] == [10, 9, 8, 7, 1]


def test_jobs_of_one_run_push_out_no_others(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has one run checked again and again finds fewer of its own."""
    monkeypatch.setattr(catalog, "KEPT_MAX", 6)
    monkeypatch.setattr(catalog, "TRIM_EVERY", 5)
    for run, count in (("quiet", 2), ("loud", 18)):
        for step in range(count):
            jobs.submit(VerifyJob(run=run, step=step))
            claimed = jobs.claim(["verify"])
            assert claimed is not None
            jobs.finish(claimed, "done", {})
    kept = [job.run for job in jobs.page(None, 100).items]
    assert kept.count("quiet") == 2 and kept.count("loud") < 10


def test_jobs_of_a_node_that_is_gone_by_the_databases_clock(nodes: Nodes, clock: Clock) -> None:
    """However much the nodes' own clocks differ: a job stays while the boot that runs it is a member, and is done by another
    node once it is not; what the first one says then counts no more.
    """
    a, b = nodes.add("a"), nodes.add("b")
    slow, fast = Clock(), Clock()
    fast.minute = 59
    first, second = Jobs(a.database, "a", slow, a), Jobs(b.database, "b", fast, b)
    job, _ = first.submit(VERIFY)
    claimed = first.claim(KINDS)
    assert claimed is not None and claimed.id == job.id
    assert second.recover_lost() == [] and second.claim(KINDS) is None
    nodes.lapse(a)
    assert second.recover_lost() == []
    again = second.claim(KINDS)
    assert again is not None and again.id == job.id and again.tries == 2
    assert first.progress(claimed) and first.finish(claimed, "done") is None
    b.membership.me = b.membership.me._replace(boot="0" * 32)  # it has joined anew, and does not know it
    nodes.lapse(b)
    b.membership.join(0.0)
    assert first.recover_lost() == [] and first.get(job.id).state == "queued"
