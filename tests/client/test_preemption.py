"""One rank that is told to stop: at whichever moment the signal comes, and beside whatever handles it already."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holdfast import Checkpointer, SaveWarning
from holdfast.threads.preemption import Preemption
from holdfast_formats.errors import DeadlineExceeded, InvalidRequest
from holdfast_formats.staging.wire import StopAt
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.daemons import own_daemon

GRACE_S = 360.0


daemon = own_daemon(listen="none")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every test leaves the handlers as they were, and no signal of a failed one ends the tests."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)}
    yield
    for one, handler in before.items():
        assert signal.getsignal(one) == handler, f"{one.name} is handled by another one"


def checkpointer(daemon: RunningDaemon, run: str, **more: Any) -> Checkpointer:
    return Checkpointer(run, {"model": nn.Linear(4, 4), **more}, at=daemon.socket)


def come(signum: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signum)


def stop_after(made: Checkpointer, first: int, **how: Any) -> int:
    """The step at which the loop hears of the signal, which has come before `first` ended or comes from now on."""
    limit = time.monotonic() + GRACE_S
    step = first
    while not made.should_stop(step, **how):
        assert time.monotonic() < limit, "the loop never heard of it"
        time.sleep(0.01)
        step += 1
    return step


def decided(made: Checkpointer) -> bool:
    """Whether the thread that the signal has woken knows where training stops."""
    preemption = made._training_stop._preemption
    return preemption is not None and preemption._decided.is_set()


def test_the_step_of_the_signal_is_saved_and_the_loop_told(daemon: RunningDaemon) -> None:
    """However often it comes; `preempted` says so afterwards, and nothing more is saved."""
    with checkpointer(daemon, "plain") as made:
        made.on_preemption(grace_s=GRACE_S)
        assert not made.should_stop(1) and not made.preempted
        come()
        come()
        step = stop_after(made, 2, metrics={"loss": 0.5})
        assert made.preempted and step >= 2
        assert made.should_stop(step + 1)
        assert made.restore() == step


def test_a_loop_that_saves_by_itself_is_only_told(daemon: RunningDaemon) -> None:
    """For options that only the loop knows."""
    with checkpointer(daemon, "own") as made:
        made.on_preemption((signal.SIGUSR1,), GRACE_S)
        come(signal.SIGUSR1)
        step = stop_after(made, 7, save=False)
        assert made.save(step, wait="durable").done and made.restore() == step


def test_a_step_that_the_loop_has_saved_is_not_saved_again(daemon: RunningDaemon) -> None:
    """A regular save of the same step is waited for."""
    with checkpointer(daemon, "same") as made:
        made.on_preemption(grace_s=GRACE_S)
        come()
        step, tickets = 0, []
        while not tickets or not made.should_stop(step):
            step += 1
            tickets.append(made.save(step))
            time.sleep(0.01)
        assert tickets[-1].done and tickets[-1].error is None


class Interrupted:
    """The signal comes while it is saved or restored."""

    def __init__(self) -> None:
        self.value = 1

    def state_dict(self) -> dict[str, int]:
        come()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        come()


def test_the_signal_may_come_in_a_save_or_a_restore(daemon: RunningDaemon) -> None:
    """Both end as they would have without it."""
    with checkpointer(daemon, "within", counter=Interrupted()) as made:
        made.on_preemption(grace_s=GRACE_S)
        assert made.save(1, wait="durable").done
        assert made.restore() == 1
        assert stop_after(made, 2) >= 2


def test_a_handler_that_was_set_before_is_called_too_and_put_back(daemon: RunningDaemon) -> None:
    """Several checkpointers of a process hear of the same signal, in whichever order they are closed."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    mine = signal.getsignal(signal.SIGTERM)
    try:
        first, second = checkpointer(daemon, "first"), checkpointer(daemon, "second")
        first.on_preemption(grace_s=GRACE_S)
        second.on_preemption(grace_s=GRACE_S)
        come()
        assert heard == [signal.SIGTERM]
        assert stop_after(first, 1) and stop_after(second, 1)
        second.close()
        first.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_ends_by_the_signal(daemon: RunningDaemon) -> None:
    """It inherited a handler that does nothing there: workers could not be ended any more. Python forgets signals that come
    before a child runs.
    """
    runs, says = os.pipe()
    with checkpointer(daemon, "child") as made:
        made.on_preemption(grace_s=GRACE_S)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os.write(says, b"!")
            time.sleep(180)
            os._exit(0)
        assert os.read(runs, 1) == b"!"
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not made.should_stop(1), "the parent was told nothing"
    os.close(runs)
    os.close(says)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def test_workers_that_the_signal_kills_do_not_end_the_step(daemon: RunningDaemon) -> None:
    """Torch raises in the main thread, wherever that is: the step of the signal could not be ended and saved."""
    before = signal.getsignal(signal.SIGCHLD)
    with checkpointer(daemon, "workers") as made:
        made.on_preemption(grace_s=GRACE_S)
        batches: Any = iter(DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
        next(batches)
        workers = list(batches._workers)
        come()
        for worker in workers:
            worker.kill()
        wait_until(lambda: not any(worker.is_alive() for worker in workers))
        step = stop_after(made, 1)
        assert made.restore() == step
    del batches
    installed = signal.getsignal(signal.SIGCHLD)
    assert callable(installed) and "signal_handling" in installed.__code__.co_filename
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda made: made.should_stop(1), "should_stop.. was called without on_preemption"),
        (lambda made: made.on_preemption(()), "0 signals"),
        (lambda made: made.on_preemption((signal.SIGKILL,)), "SIGKILL cannot be handled"),
        (lambda made: made.on_preemption(("TERM",)), "signals= must contain signals"),
        (lambda made: made.on_preemption(grace_s=0), "grace_s must be a number of seconds above 0"),
        (lambda made: [made.on_preemption(), made.on_preemption()], "was already called"),
        (lambda made: [made.on_preemption(), made.should_stop(5), made.should_stop(4)], "after should_stop.5."),
    ],
)
def test_what_cannot_be_is_refused_by_name(daemon: RunningDaemon, act: Callable[[Checkpointer], Any], error: str) -> None:
    with checkpointer(daemon, "refused") as made, pytest.raises(InvalidRequest, match=error):
        act(made)


def test_another_thread_is_told_to_use_the_main_one(daemon: RunningDaemon) -> None:
    said: list[str] = []

    def act() -> None:
        with pytest.raises(InvalidRequest) as refused:
            made.on_preemption()
        said.append(str(refused.value))

    with checkpointer(daemon, "thread") as made:
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert "outside the main thread" in said[0]


def test_one_rank_over_http_needs_nobody_to_agree_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its last save does not come through in time, it is told so: what is not uploaded ends with the process."""
    monkeypatch.setattr("holdfast.link.own_daemon.socket_of", lambda api: None)
    with running(tmp_path / "root", listen="127.0.0.1:0") as daemon:
        with Checkpointer("alone", {"model": nn.Linear(4, 4)}, at=daemon.url) as made:
            made.on_preemption(grace_s=GRACE_S)
            come()
            assert made.restore() == 0
            step = stop_after(made, 1)
            assert made.restore() == step
        with Checkpointer("late", {"model": nn.Linear(4, 4)}, at=daemon.url) as made:
            made.on_preemption(grace_s=0.001)
            made.save(0, wait="durable")
            monkeypatch.setattr("holdfast.stage.saves.LAST_SAVE_S_MIN", 0.5)
            come()
            wait_until(lambda: decided(made))
            daemon.freeze()
            try:
                with pytest.raises(DeadlineExceeded):
                    stop_after(made, 1)
            finally:
                daemon.thaw()


def test_a_save_that_outlasts_the_time_is_told_of(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is staged: the daemon goes on with it."""
    with checkpointer(daemon, "late") as made:
        made.on_preemption(grace_s=0.001)
        made.save(0, wait="durable")
        monkeypatch.setattr("holdfast.stage.saves.LAST_SAVE_S_MIN", 0.001)
        come()
        wait_until(lambda: decided(made))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step = stop_after(made, 1)
        assert all(issubclass(one.category, SaveWarning) and "is staged" in str(one.message) for one in said)
    with checkpointer(daemon, "late") as made:
        assert made.restore() == step


class Launch:
    """The daemon's answers to a rank, in order; the last one is repeated."""

    def __init__(self, *answers: StopAt) -> None:
        self._answers = list(answers)
        self.told: list[tuple[int, int | None]] = []

    def __call__(self, passed: int, step: int | None) -> StopAt:
        self.told.append((passed, step))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def preempted(report: Launch, grace_s: float = GRACE_S) -> Preemption:
    made = Preemption((signal.SIGUSR1,), grace_s, report)
    made.begin()
    return made


def test_a_rank_that_waits_goes_on_to_the_step_of_all() -> None:
    """It waits at the step after the one that it has told, and at no other."""
    launch = Launch(StopAt(reply_to=0, missing=(1,)), StopAt(reply_to=0, missing=(1,)), StopAt(reply_to=0, step=9))
    made = preempted(launch)
    assert not made.reached(5)
    made.asked()
    wait_until(lambda: bool(launch.told))
    assert [made.reached(step) for step in (5, 6, 7, 8, 9, 10)] == [False, False, False, False, True, True]
    assert set(launch.told) == {(5, None)}
    wait_until(lambda: launch.told[-1] == (5, 9))  # the next daemon hears of it
    made.close()


def test_steps_that_are_not_asked_about_are_passed_over() -> None:
    """A loop that asks every 10 steps stops at the first of these that all ranks can reach."""
    made = preempted(Launch(StopAt(reply_to=0, step=21)))
    assert not made.reached(10)
    made.asked()
    wait_until(lambda: made._pending)  # its thread has heard
    assert [made.reached(step) for step in (20, 30)] == [False, True]
    made.close()


def test_ranks_that_do_not_answer_are_named_when_half_of_the_time_is_over() -> None:
    made = preempted(Launch(StopAt(reply_to=0, missing=(2, 5))), grace_s=0.4)
    made.asked()
    wait_until(lambda: bool(made._missing))
    with pytest.raises(DeadlineExceeded, match="ranks 2, 5 have not answered"):
        made.reached(1)
    made.close()


def test_a_rank_that_has_given_up_stops_at_no_step_that_it_hears_of_later() -> None:
    """The others may have given up as well, or stop where this one has trained on."""
    launch = Launch(*[StopAt(reply_to=0, missing=(1,))] * 4, StopAt(reply_to=0, step=6))
    made = preempted(launch, grace_s=0.2)
    assert not made.reached(5)
    made.asked()
    wait_until(lambda: bool(made._missing))
    for step in (6, 7, 8):
        with pytest.raises(DeadlineExceeded, match="rank 1 has not answered"):
            made.reached(step)
        time.sleep(0.2)
    made.close()


def test_a_rank_that_was_away_when_the_others_agreed_stops_nowhere() -> None:
    """It has trained on, past the step after which they stop."""
    made = preempted(Launch(StopAt(reply_to=0, step=9)))
    assert not made.reached(12)
    made.asked()
    wait_until(lambda: made._pending)  # its thread has heard
    with pytest.raises(DeadlineExceeded, match="the other ranks stop after step 9, but this rank has passed step 12"):
        made.reached(13)
    made.close()


def test_a_handler_that_stays_behind_close_does_what_was_done_before() -> None:
    """Another one was set after it, and calls it."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    try:
        made = preempted(Launch(StopAt(reply_to=0)))
        ours = signal.getsignal(signal.SIGUSR1)
        assert callable(ours)

        def later(signum: int, frame: FrameType | None) -> None:
            ours(signum, frame)  # type: ignore[operator]

        signal.signal(signal.SIGUSR1, later)
        made.close()
        come(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
