"""Saves that come faster than storage takes them: what each policy keeps, and that nothing is dropped in silence."""

from __future__ import annotations

import re
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast import Api, Checkpointer, Fragment, SaveWarning
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import GenerationDropped, InvalidRequest, StateMismatch
from tests.client.remote.test_http_link import check_saved, ranks
from tests.daemons import RunningDaemon, hide, running, wait_until
from tests.proxies import proxied

SIZE = 200_000  # a rank's part
PACE = 300_000  # bytes a second: a write of two ranks takes longer than all saves
PACE_WAIT = 3_000_000  # where nothing is dropped: it takes longer than one save
STEPS = 8


@pytest.fixture(params=["beside the daemon", "over http"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningDaemon]:
    """One with slow storage, whose memory the ranks share or do not."""
    pace = PACE_WAIT if request.node.callspec.params["policy"] == "wait" else PACE
    with running(tmp_path / "root", "--write-bytes-per-second", str(pace), listen="127.0.0.1:0") as made:
        if request.param == "over http":
            hide(made)
        yield made


def halves(step: int) -> list[dict[str, Fragment]]:
    return [{"x": Fragment(torch.full((SIZE,), step, dtype=torch.uint8), (2 * SIZE,), offset=(SIZE * r,))} for r in (0, 1)]


def save_all(world: list[Checkpointer], states: list[dict[str, Fragment]], steps: range) -> list[list[SaveTicket]]:
    """Both ranks save every step, without a pause; returns each step's tickets."""
    tickets = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaveWarning)
        for step in steps:
            for state in states:
                state["x"].tensor.fill_(step)
            tickets.append([checkpointer.save(step) for checkpointer in world])
    return tickets


def ended_as(tickets: list[list[SaveTicket]]) -> tuple[list[int], list[int]]:
    """The steps that were committed and those that were dropped; both ranks' tickets must say the same."""
    for pair in tickets:
        for ticket in pair:
            try:
                ticket.result(180)
            except GenerationDropped as error:
                assert ticket.dropped and error.retryable
                assert "slots" in error.hint or "is uploaded" in error.detail
    assert all(first.dropped == second.dropped for first, second in tickets)
    dropped = [first.step for first, _ in tickets if first.dropped]
    return [first.step for first, _ in tickets if not first.dropped], dropped


def recorded(url: str, run: str) -> tuple[list[int], int]:
    """The steps that the catalog calls dropped, and the metric."""
    with Api(url) as api:
        steps = sorted(found.step for found in api.rounds(run, "dropped"))
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    count = re.search(r'^holdfast_rounds_total\{state="dropped"\} (\S+)', text, re.MULTILINE)
    assert count is not None
    return steps, int(float(count[1]))


@pytest.mark.parametrize("policy", ["newest-wins", "oldest-durable", "wait"])
def test_two_ranks_on_slow_storage(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Both ranks agree on what was dropped, catalog and metric say the same, and what is kept is what was asked for."""
    monkeypatch.setattr("holdfast.remote.http_link.ROOM_TIMEOUT_S", 180.0)  # a slow daemon has the newest dropped
    states = halves(0)
    world = ranks(monkeypatch, "r", states, url=daemon.url, policy=policy)
    tickets = save_all(world, states, range(1, STEPS + 1))
    for checkpointer in world:
        checkpointer.close()
    committed, dropped = ended_as(tickets)
    wait_until(lambda: recorded(daemon.url, "r") == (dropped, len(dropped)))
    assert dropped == [] if policy == "wait" else len(dropped) > 1
    if policy == "newest-wins":  # the first is kept only if it was being written when the second came
        assert committed[-1] == STEPS
    else:
        assert committed[:2] == [1, 2]
    said = daemon.log.read_text()
    assert "ERROR" not in said and "\n    " not in said  # a drop is a warning of one line, without a traceback
    source = "directory" if daemon.socket.exists() else "http"
    expected = {"x": torch.full((2 * SIZE,), committed[-1], dtype=torch.uint8)}
    check_saved(daemon.url, "r", committed[-1], expected, source)


def test_the_first_drop_is_a_warning_and_the_rest_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning however many steps are dropped, a line in the log for each, and closing raises nothing."""
    caplog.set_level("INFO", "holdfast.tickets")
    with running(tmp_path / "root", "--write-bytes-per-second", "200000") as daemon:
        state = {"x": torch.zeros(SIZE, dtype=torch.uint8)}
        checkpointer = Checkpointer("r", state, at=daemon.socket)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            tickets = [checkpointer.save(step) for step in range(1, 9)]
        assert checkpointer.save(9, wait="durable").result().step == 9
        checkpointer.close()
    dropped = [ticket.step for ticket in tickets if ticket.dropped]
    assert len(dropped) > 1
    (warning,) = [w for w in told if w.category is SaveWarning]
    assert f"r@{dropped[0]} was dropped" in str(warning.message)
    logged = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert len(logged) == len(dropped)
    assert all(f"r@{step} was dropped" in line for step, line in zip(dropped, logged, strict=True))


def test_who_waits_is_not_dropped_in_silence(tmp_path: Path) -> None:
    """`staged` raises where there is no slot, `durable` waits for one, and a plain save says it by its ticket."""
    with running(tmp_path / "root", "--write-bytes-per-second", "200000") as daemon:
        state = {"x": torch.zeros(SIZE, dtype=torch.uint8)}
        with Checkpointer("r", state, at=daemon.socket, policy="oldest-durable") as checkpointer:
            first, second = checkpointer.save(1), checkpointer.save(2)
            third = checkpointer.save(3)
            assert third.done and third.dropped and not third.staged
            with pytest.warns(SaveWarning, match="r@3 was dropped"), pytest.raises(GenerationDropped):
                checkpointer.save(4, wait="staged")
            with pytest.raises(StateMismatch, match="already being saved"):
                checkpointer.save(2)
            checkpointer.save(5, wait="durable")
            assert first.done and second.done and not (first.dropped or second.dropped)


def test_a_slow_link_drops_what_is_not_being_uploaded(tmp_path: Path) -> None:
    """Over HTTP the rank's own slots are the limit: the newest save is brought. The catalog knows of the drops that the link
    let through in time, and of no others.
    """
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon, proxied(daemon.url) as proxy:
        hide(daemon)
        generator = torch.Generator().manual_seed(1)
        state = {"x": torch.randint(0, 256, (2_000_000,), dtype=torch.uint8, generator=generator)}
        with Checkpointer("r", state, at=proxy.url) as checkpointer:
            checkpointer.save(1, wait="durable")
            proxy.bytes_per_s, sent = 2e5, proxy.sent  # ten seconds for each, and requests pass beside it
            first = checkpointer.save(2)
            wait_until(lambda: proxy.sent > sent + 50_000)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SaveWarning)
                tickets = [checkpointer.save(step) for step in range(3, 7)]
            # On a busy machine ten seconds can pass between two saves: then the link is free again, and nothing is dropped.
            assert tickets[0].dropped and not tickets[-1].dropped
            proxy.bytes_per_s = None
        assert not first.dropped and tickets[-1].result().step == 6

        def known_are_drops() -> bool:
            steps, count = recorded(daemon.url, "r")
            return set(steps) <= {3, 4, 5} and count == len(steps)

        wait_until(known_are_drops)


def test_a_policy_that_does_not_exist_is_refused() -> None:
    """The error names those that do."""
    with pytest.raises(InvalidRequest, match="newest-wins, oldest-durable, wait"):
        Checkpointer("r", {"x": torch.ones(1)}, policy="newest")  # type: ignore[arg-type]
