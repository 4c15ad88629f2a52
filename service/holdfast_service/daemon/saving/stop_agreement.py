"""Agreement of all ranks of a launch on the step after which it stops, because a signal has reached some of them."""

from __future__ import annotations

import threading
import time

from holdfast_formats.staging.messages import STOP_RANKS_MAX, LastStep, PassedStep
from holdfast_service.daemon.saving.connected_ranks import ConnectedRanks
from holdfast_service.daemon.saving.rounds import Participant

LAUNCHES_MAX = 256
ASK_EVERY_S = 0.5  # a rank that has not answered: its connection may have been lost


class _StoppingLaunch:
    def __init__(self) -> None:
        self.passed: dict[int, int] = {}  # by rank: the last step that it has passed, beyond which it waits
        self.step: int | None = None
        self.asked: dict[int, float] = {}  # by rank: when (monotonic)


class StopAgreement:
    """Thread-safe. Nothing is kept beyond a daemon: ranks say everything again to the next one."""

    def __init__(self, lock: threading.Condition, connected: ConnectedRanks) -> None:
        """The lock guards `connected`."""
        self._lock, self._connected = lock, connected
        self._launches: dict[tuple[str, int], _StoppingLaunch] = {}

    def report(self, who: Participant, said: PassedStep) -> LastStep:
        """A rank of a launch that is to stop has passed a step, and waits at the next one; or it knows where to stop.

        Returns the step, once all ranks have said so, and those that have not yet. These are asked.
        """
        with self._lock:
            launch = self._launches.setdefault((who.run, who.attempt), _StoppingLaunch())
            launch.passed[who.rank] = said.passed
            launch.step = said.step if launch.step is None else launch.step
            missing = set(range(who.world)) - launch.passed.keys() - self._connected.gone(who.run, who.attempt)
            if launch.step is None and not missing:
                launch.step = max(launch.passed.values()) + 1
            due = self._due(who, launch)
            answer = LastStep(step=launch.step, missing=tuple(sorted(missing))[:STOP_RANKS_MAX])
            for old in list(self._launches)[:-LAUNCHES_MAX]:
                del self._launches[old]
        for other in due:
            other.ask_to_stop()
        return answer

    def _due(self, who: Participant, launch: _StoppingLaunch) -> list[Participant]:
        now = time.monotonic()
        found = [
            other
            for other in self._connected.of(who.run)
            if other.attempt == who.attempt
            and other.rank not in launch.passed
            and launch.asked.get(other.rank, float("-inf")) + ASK_EVERY_S < now
        ]
        launch.asked.update({other.rank: now for other in found})
        return found
