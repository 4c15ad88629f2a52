"""Records of saves: opened once, ended once, listed and counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast_formats.errors import InvalidRequest, NoSuchResource, NoSuchRun
from holdfast_service.control.catalog.catalog import Catalog
from tests.control.published import a_row

NOW, LATER = "2030-01-01T00:00:00.000Z", "2030-01-01T00:00:09.000Z"


class TestRounds:
    """A round is opened once, ends once, and only for the newest attempt."""

    def test_a_round_goes_on_until_it_ends(self, catalog: Catalog) -> None:
        """Opening again finds the round while it is open or sealed, and makes a new one afterwards."""
        first = catalog.rounds.open("run", 5, 1, 2, NOW)[0]
        assert catalog.rounds.open("run", 5, 1, 2, LATER)[0] == first
        catalog.rounds.update(first, sealed=1)
        assert catalog.rounds.page().items[0].state == "open"
        catalog.rounds.update(first, sealed=2)
        sealed = catalog.rounds.page().items[0]
        assert (sealed.state, sealed.sealed, sealed.opened, sealed.ended) == ("sealed", 2, NOW, None)
        assert catalog.rounds.open("run", 5, 1, 2, LATER)[0] == first
        catalog.rounds.end(first, "aborted", LATER, "no-space", "the disk is full")
        ended = catalog.rounds.page().items[0]
        assert (ended.state, ended.ended, ended.code, ended.detail) == ("aborted", LATER, "no-space", "the disk is full")
        assert catalog.rounds.open("run", 5, 1, 2, LATER)[0] > first

    def test_the_first_end_stands(self, catalog: Catalog) -> None:
        """A committed round is never aborted, and no rank seals in it any more."""
        made = catalog.rounds.open("run", 5, 1, 2, NOW)[0]
        catalog.rounds.end(made, "committed", NOW)
        catalog.rounds.end(made, "aborted", LATER, "round-aborted", "too late")
        catalog.rounds.update(made, sealed=1)
        kept = catalog.rounds.page().items[0]
        assert (kept.state, kept.ended, kept.code, kept.sealed) == ("committed", NOW, None, 0)

    def test_unknown_round(self, catalog: Catalog) -> None:
        """A round that never was is named."""
        with pytest.raises(NoSuchResource):
            catalog.rounds.update(99, sealed=1)
        with pytest.raises(NoSuchResource):
            catalog.rounds.end(99, "committed", NOW)

    def test_attempt_of_a_lost_catalog_is_taken_over(self, catalog: Catalog) -> None:
        """A sealed slot of an attempt that the catalog has lost is saved, and its number is not given out again."""
        catalog.rounds.open("run", 5, 3, 2, NOW)
        assert catalog.declare_attempt("run", "next", 2, NOW) == 4

    def test_what_was_published_before_the_daemon_ended_is_committed(self, catalog: Catalog) -> None:
        """Whatever clocks said; but not where it was to take the place of another one, which may be what stands there."""
        catalog.declare_attempt("run", "launch", 2, NOW)
        published = catalog.rounds.open("run", 1, 1, 2, "2031-01-01T00:00:00.000Z")[0]
        replaced = catalog.rounds.open("run", 2, 1, 2, NOW)[0]
        catalog.rounds.end(replaced, "committed", NOW)
        catalog.rounds.open("run", 2, 1, 2, "2031-01-01T00:00:00.000Z")
        catalog.rounds.end(catalog.rounds.open("run", 4, 1, 2, NOW)[0], "committed", NOW)
        catalog.rounds.open("run", 4, 1, 2, "1999-01-01T00:00:00.000Z")  # the clock was ahead when the first one was made
        catalog.rounds.open("run", 3, 1, 2, NOW)
        for step in (1, 2, 4):
            catalog.record_checkpoint(a_row("run", step))
        assert [found.id for found in catalog.rounds.settle_committed(LATER)] == [published]

    def test_abort_open_rounds(self, catalog: Catalog) -> None:
        """Only rounds going on are aborted, but for those to keep, and for those that all ranks have staged."""
        done = catalog.rounds.open("run", 1, 1, 2, NOW)[0]
        catalog.rounds.end(done, "committed", NOW)
        old = catalog.rounds.open("run", 2, 1, 2, NOW)[0]
        sealed = catalog.rounds.open("run", 3, 2, 1, NOW)[0]
        catalog.rounds.update(sealed, sealed=1)
        other = catalog.rounds.open("other", 2, 1, 2, NOW)[0]
        assert catalog.rounds.abort_open(LATER, "stale-attempt", "superseded", keep=[other]) == [old]
        assert catalog.rounds.abort_open(LATER, "round-aborted", "the daemon ended") == [other]
        assert catalog.rounds.abort_open(LATER, "round-aborted", "the daemon ended") == []
        assert catalog.rounds.counts() == {"open": 0, "sealed": 1, "committed": 1, "aborted": 2, "dropped": 0}
        codes = {made.id: made.code for made in catalog.rounds.page().items}
        assert codes == {done: None, old: "stale-attempt", sealed: None, other: "round-aborted"}
        assert [found.id for found in catalog.rounds.staged()] == [sealed]

    def test_rounds_are_listed_by_run_and_state(self, catalog: Catalog) -> None:
        """The newest first, filtered, page by page."""
        ids = [catalog.rounds.open(run, step, 1, 2, NOW)[0] for step in range(3) for run in ("a", "b")]
        catalog.rounds.end(ids[0], "committed", NOW)
        assert [made.id for made in catalog.rounds.page("a").items] == [ids[4], ids[2], ids[0]]
        assert [made.id for made in catalog.rounds.page("a", "open").items] == [ids[4], ids[2]]
        first = catalog.rounds.page(limit=4)
        assert [made.id for made in first.items] == ids[:1:-1]
        second = catalog.rounds.page(cursor=first.next, limit=4)
        assert ([made.id for made in second.items], second.next) == ([ids[1], ids[0]], None)
        with pytest.raises(InvalidRequest):
            catalog.rounds.page(state="finished")
        with pytest.raises(NoSuchRun):
            catalog.rounds.page("c")

    def test_many_threads_open_one_round(self, catalog: Catalog) -> None:
        """Ranks that begin the same save at once share its round."""
        with ThreadPoolExecutor(8) as pool:
            ids = set(pool.map(lambda _: catalog.rounds.open("run", 5, 1, 8, NOW)[0], range(24)))
        assert len(ids) == 1
