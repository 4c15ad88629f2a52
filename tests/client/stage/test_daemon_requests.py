"""A daemon that does not answer, stopped by SIGSTOP: saves cost the training next to nothing, and no wait lasts for ever."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import exchange
from holdfast.remote.uploader import OPEN_TIMEOUT_S
from holdfast.rest.api import Api
from holdfast.stage.daemon_requests import SILENCE_S, DaemonRequests, SilenceTimer
from holdfast.stage.slots import Slots
from holdfast.threads import daemon_heartbeat
from holdfast.threads.latch import Latch
from holdfast_formats.errors import DeadlineExceeded, GenerationDropped
from holdfast_formats.staging import wire
from tests.daemon.test_server import hello, link
from tests.daemons import WAIT_TIMEOUT_S, RunningDaemon, hide, running, wait_until

SAVES = 12
FROZEN = pytest.mark.filterwarnings("ignore::holdfast.save_warning.SaveWarning")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        try:
            yield daemon
        finally:
            daemon.thaw()


def be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a daemon for silent after a third of a second."""
    for name in ("SIGN_EVERY_S", "SIGN_WAIT_S", "SILENCE_MAX_S"):
        monkeypatch.setattr(daemon_heartbeat, name, 0.3)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of a method, which does what it did."""
    calls, method = [], getattr(owner, name)

    def called(*arguments: Any) -> Any:
        calls.append(arguments[1:])
        return method(*arguments)

    monkeypatch.setattr(owner, name, called)
    return calls


def trainer(at: object, slots: int = 2) -> Checkpointer:
    checkpointer = Checkpointer("r", {"x": torch.ones(1000)}, at=at, slots=slots)
    checkpointer.restore()
    checkpointer.save(1, wait="durable")
    return checkpointer


@FROZEN
@pytest.mark.parametrize("sealing", [False, True], ids=["idle", "with-a-seal-in-flight"])
def test_saves_fail_at_once_while_the_daemon_is_frozen_and_go_on_by_themselves(
    daemon: RunningDaemon, sealing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for a sign of life once, not in each of them. Their tickets name the daemon, its pid, and for how long
    it has not answered; what was sealed is committed.
    """
    checkpointer = trainer(daemon.socket)
    if not sealing:
        daemon.freeze()
    before = checkpointer.save(2)  # with a seal in flight this one is granted a slot, or the daemon is frozen already
    daemon.freeze()
    waits = counted(monkeypatch, daemon_heartbeat.DaemonHeartbeat, "answers")
    tickets = [checkpointer.save(step) for step in range(3, 3 + SAVES)]
    assert sum(within_s <= SILENCE_S for (within_s,) in waits) <= 2  # not those of threads, which wait for longer
    for ticket in tickets:
        assert isinstance(ticket.error, DeadlineExceeded)
        assert f"(pid {daemon.process.pid}) did not answer for" in ticket.error.detail and "-CONT" in ticket.error.hint
    daemon.thaw()
    assert checkpointer.save(100, wait="durable").done
    wait_until(lambda: before.done)
    assert (before.error is None) == sealing, before.error
    checkpointer.close(wait=False)


@FROZEN
def test_a_rank_over_http_stages_into_its_own_memory_while_the_daemon_is_frozen(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many saves as it has slots, of which one asks the daemon and waits for an answer; the newest of them are
    uploaded once the daemon answers.
    """
    hide(daemon)
    checkpointer = trainer(daemon.url)
    daemon.freeze()
    asked = counted(monkeypatch, Api, "open_upload")
    tickets = [checkpointer.save(step) for step in range(2, 2 + SAVES)]
    assert sum(arguments[-1] == OPEN_TIMEOUT_S for arguments in asked) <= 2  # not those of the uploader, which may wait
    assert all(isinstance(ticket.error, GenerationDropped) for ticket in tickets if ticket.done)
    waiting = [ticket for ticket in tickets if not ticket.done]
    assert waiting
    daemon.thaw()
    assert all(ticket.result(180).step == ticket.step for ticket in waiting)
    checkpointer.close()


@FROZEN
@pytest.mark.parametrize("wait", ["staged", "durable"])
def test_a_save_that_is_waited_for_raises_where_the_daemon_is_frozen(
    daemon: RunningDaemon, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never returns normally for a step that is not staged, and never waits for ever."""
    checkpointer = trainer(daemon.socket)
    daemon.freeze()
    be_quick(monkeypatch)
    for step in (2, 3):
        with pytest.raises(DeadlineExceeded, match=f"pid {daemon.process.pid}"):
            checkpointer.save(step, wait=wait)
    daemon.thaw()
    monkeypatch.undo()
    assert checkpointer.save(4, wait="durable").done
    checkpointer.close(wait=False)


@FROZEN
@pytest.mark.parametrize("at", ["socket", "url"])
def test_a_wait_for_the_commit_ends_where_the_daemon_is_frozen(
    daemon: RunningDaemon, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket's result, and close(), which raises for what may be lost."""
    if at == "url":
        hide(daemon)
    checkpointer = trainer(getattr(daemon, at))
    ticket = checkpointer.save(2)
    ticket.wait_staged()
    daemon.freeze()
    be_quick(monkeypatch)
    if not ticket.done:  # it is written within milliseconds
        with pytest.raises(DeadlineExceeded):
            ticket.result()
    late = checkpointer.save(3)
    assert late.done == (at == "socket"), "over HTTP it is staged in memory of the rank's own, and sent later"
    with pytest.raises(DeadlineExceeded):
        checkpointer.close()
    daemon.thaw()


@pytest.mark.parametrize("in_main", [True, False], ids=["main-thread", "other-thread"])
@pytest.mark.parametrize("call", ["first save", "first restore", "restore"])
def test_a_call_that_needs_an_answer_ends_where_the_daemon_is_frozen(
    daemon: RunningDaemon, call: str, in_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every thread of the user, also before a daemon has answered for the first time: by its silence, and not by the
    limit of an answer, which is a minute for the first one and an hour for the choice of a step.
    """
    checkpointer = trainer(daemon.socket) if call == "restore" else Checkpointer("r", {"x": torch.ones(9)}, at=daemon.socket)
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            checkpointer.save(2) if call == "first save" else checkpointer.restore()
        except BaseException as error:
            raised.append(error)

    daemon.freeze()
    be_quick(monkeypatch)
    if in_main:
        ask()
    else:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(WAIT_TIMEOUT_S)
        assert not asking.is_alive(), "it still waits"
    assert isinstance(raised[0], DeadlineExceeded) and "did not answer for" in raised[0].detail, raised
    daemon.thaw()
    monkeypatch.undo()
    assert checkpointer.save(4, wait="durable").done
    checkpointer.close()


@pytest.mark.parametrize("signs", [0, 1])
def test_a_call_waits_for_a_silent_daemon_once_over_all_that_it_asks(signs: int) -> None:
    """Not as long for each request; a sign of life, which a slow daemon gives, begins the count again."""
    ticks, asked, never = itertools.count(), [], threading.Event()

    def ping(within_s: float) -> None:
        asked.append(within_s)
        if len(asked) > signs:
            raise DeadlineExceeded("no sign of life")

    errands = DaemonRequests(lambda: daemon_heartbeat.DaemonHeartbeat(lambda: "the daemon", ping))
    silence = SilenceTimer(lambda: next(ticks) / 32)  # every wait takes this part of a second
    assert [errands.run(lambda number=number: number, silence) for number in range(3)] == [0, 1, 2]
    with pytest.raises(DeadlineExceeded, match="the daemon did not answer"):
        errands.run(never.wait, silence)
    with pytest.raises(DeadlineExceeded):  # and at once, as long as that is not answered
        errands.run(never.wait, silence)
    never.set()
    waits = (7, 1)  # four for an answer and three for the errand before; one after the sign of life
    assert asked == pytest.approx([SILENCE_S - count / 32 for count in waits[: 1 + signs]])


@pytest.mark.parametrize("answered", [True, False])
def test_a_result_is_given_back_if_its_caller_is_interrupted_meanwhile(answered: bool) -> None:
    """As by a signal handler that raises while samples are read: the slot that the daemon leases has no taker."""
    go, ended, given, left = Latch(), Latch(), [], []

    def give_back(slot: int) -> None:
        given.append(slot)
        ended.set()

    def act() -> int:
        go.wait()
        return 7

    requests = DaemonRequests(lambda: None)

    def interrupted() -> None:
        if answered:
            go.set()
            wait_until(lambda: not requests.busy)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        requests.run(act, None, give_back, lambda: left.append(True), meanwhile=interrupted)
    go.set()
    assert ended.wait(WAIT_TIMEOUT_S) and given == [7] and left == ([] if answered else [True])
    assert requests.run(lambda: 8, None, meanwhile=lambda: given.append(9)) == 8 and given == [7, 9]


def test_a_save_waits_within_its_budget_for_the_one_before_it(daemon: RunningDaemon) -> None:
    """Its part may be written only when the daemon has heard of the part before, if there is an average."""
    silent = daemon_heartbeat.DaemonHeartbeat(
        lambda: "the daemon", lambda within_s: exchange.ping(daemon.socket, min(within_s, 0.01))
    )
    daemon.freeze()
    with pytest.raises(DeadlineExceeded, match="the daemon did not answer"):
        DaemonRequests(lambda: silent).until(Latch(), SilenceTimer())


def test_a_lease_that_was_withdrawn_drops_no_other_save(daemon: RunningDaemon) -> None:
    """Both come to a daemon that was frozen at once; the only slot stays with the save that has it."""
    rank = link(daemon)
    attempt = hello(rank, run="w").attempt
    slots = Slots(rank, 1, 100, 4096)
    slots.lease(1, attempt, 0.0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(daemon.socket))
        asked = wire.Lease(id=7, step=2, policy="newest-wins")
        late = [wire.Hello(id=6, run="w", rank=0, world=1, launch="x"), asked, wire.Withdraw(id=8, step=2)]
        other.sendall(b"".join(map(wire.encode_frame, late)))
        decoder, replies = wire.FrameDecoder(wire.TO_RANK), []
        while len(replies) < 2:
            replies += decoder.feed(other.recv(65_536))
        assert replies[1].reply_to == asked.id and isinstance(replies[1], wire.Failed)
    rank.close()
