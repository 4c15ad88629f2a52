"""A DataLoader's worker that dies raises in the main thread, but not inside of a save, a restore or a close."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest
from torch import nn

from holdfast import Checkpointer
from holdfast.threads import child_deaths
from tests.daemons import RunningDaemon, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("workers") / "root") as daemon:
        yield daemon


class Workers:
    """Raises as torch's handler does, if a worker has died; other children of this process may end."""

    def __init__(self) -> None:
        self._dead = False
        self.heard = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self._dead:
            self._dead = False
            self.heard += 1
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    def die(self) -> None:
        self._dead = True
        send_to_main_thread(signal.SIGCHLD)


def send_to_main_thread(number: int) -> None:
    """Any thread may get what a process is sent, also while the main one has it blocked."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, number)


@pytest.fixture
def workers() -> Iterator[Workers]:
    before, installed = signal.getsignal(signal.SIGCHLD), Workers()
    signal.signal(signal.SIGCHLD, installed)
    yield installed
    signal.signal(signal.SIGCHLD, before)


class Counter:
    """Its workers die while it is saved or restored."""

    def __init__(self, workers: Workers) -> None:
        self._workers, self.value, self.deaths = workers, 3, 0

    def _die(self) -> None:
        if self.deaths > 0:
            self.deaths -= 1
            self._workers.die()

    def state_dict(self) -> dict[str, int]:
        self._die()
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._die()
        self.value = state["value"]


class Training:
    def __init__(self, daemon: RunningDaemon, run: str, workers: Workers) -> None:
        self.counter = Counter(workers)
        state = {"model": nn.Linear(4, 4), "counter": self.counter}
        self.checkpointer = Checkpointer(run, state, at=daemon.socket)


@pytest.mark.parametrize("wait", [None, "durable"])
def test_a_worker_that_dies_in_a_save_is_told_of_after_it(daemon: RunningDaemon, workers: Workers, wait: str | None) -> None:
    """It ended the save half-way: the step of a signal to the whole process group was lost."""
    training = Training(daemon, f"save-{wait}", workers)
    with training.checkpointer as checkpointer:
        training.counter.deaths = 1
        with pytest.raises(RuntimeError, match="killed by signal"):
            checkpointer.save(1, wait=wait)  # type: ignore[arg-type]
        assert workers.heard == 1 and signal.getsignal(signal.SIGCHLD) is workers
        assert checkpointer.save(2, wait="durable").done
        training.counter.value = 0
        assert checkpointer.restore(1) == 1 and training.counter.value == 3


def test_a_worker_that_dies_in_a_restore_or_in_close_is_told_of_after_it(daemon: RunningDaemon, workers: Workers) -> None:
    """Half of the state would be the checkpoint's, and saves that were under way would not be seen through."""
    training = Training(daemon, "restore", workers)
    checkpointer = training.checkpointer
    checkpointer.save(1, wait="durable")
    training.counter.value, training.counter.deaths = 0, 1
    with pytest.raises(RuntimeError, match="killed by signal"):
        checkpointer.restore()
    assert workers.heard == 1 and training.counter.value == 3
    ticket = checkpointer.save(2)
    ticket.when_ended(lambda error: workers.die())
    with pytest.raises(RuntimeError, match="killed by signal"):
        checkpointer.close()
    assert ticket.done and ticket.error is None and workers.heard == 2


def test_the_handler_is_put_back_and_hears_of_a_death_once(workers: Workers) -> None:
    """Also where calls are nested, and where the worker had died before."""
    with pytest.raises(RuntimeError, match="killed by signal"), child_deaths.delayed():
        with child_deaths.delayed():
            workers.die()
        assert workers.heard == 0
    assert workers.heard == 1 and signal.getsignal(signal.SIGCHLD) is workers
    with child_deaths.delayed():
        assert signal.getsignal(signal.SIGCHLD) is not workers
    assert workers.heard == 1 and signal.getsignal(signal.SIGCHLD) is workers


def test_a_death_that_is_pending_when_a_save_begins_does_not_keep_it_from_beginning(workers: Workers) -> None:
    """Python runs the handlers of signals that have come before it sets another one."""
    reached: list[bool] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        with child_deaths.delayed():
            reached.append(True)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(RuntimeError, match="killed by signal"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGCHLD})
            send_to_main_thread(signal.SIGUSR1)
            workers.die()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGCHLD})
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGCHLD})
        signal.signal(signal.SIGUSR1, before)
    assert reached == [True] and workers.heard == 1
