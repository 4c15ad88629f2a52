"""Agreement of all ranks of a launch on the step after which it stops, because a signal has reached some of them.

A rank that has reported its last step passes no other before it knows where to stop. So the step after the last one passed
by any rank follows from the reports, whichever daemon has them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from holdfast_formats.staging.messages import STOP_RANKS_MAX, LastStep, PassedStep
from holdfast_service.daemon.saving.connected_ranks import ConnectedRanks
from holdfast_service.daemon.saving.rounds import LaunchKey, Participant

LAUNCHES_MAX = 256
ASK_EVERY_S = 0.5  # a rank that has not answered: its connection may have been lost
GOES_ON_S = 60.0  # ranks without a report for so long have given up


class _StoppingLaunch:
    def __init__(self, world: int) -> None:
        self.world = world
        self.passed: dict[int, int] = {}  # by rank: the last step that it has passed, beyond which it waits
        self.step: int | None = None
        self.asked: dict[int, float] = {}  # by rank: when (monotonic)
        self.elsewhere: frozenset[int] = frozenset()  # ranks on other nodes that have reported, or are gone
        self.apart = False  # other nodes cannot be met
        self.heard = time.monotonic()

    def report(self, rank: int, passed_step: PassedStep) -> bool:
        """A rank's report, or its repetition. Returns whether it says something new."""
        new = self.passed.get(rank) != passed_step.passed
        self.heard, self.passed[rank] = time.monotonic(), passed_step.passed
        self.decide(passed_step.step)
        return new

    def remember(self, passed: Mapping[int, int]) -> None:
        """What ranks reported to an earlier daemon; newer reports count."""
        self.passed = {**passed, **self.passed}

    def decide(self, step: int | None) -> None:
        """The first step that is agreed counts."""
        self.step = step if self.step is None else self.step

    def meet(self, reported: frozenset[int]) -> bool:
        """Other nodes were met, and these ranks have reported, or are gone. Returns whether these are all."""
        self.elsewhere, self.apart = reported, False
        return set(range(self.world)) <= reported

    def separate(self) -> None:
        """Other nodes cannot be met."""
        self.apart = True


class StopAgreement:
    """Thread-safe. Nothing is stored: ranks repeat their reports to the next daemon."""

    def __init__(self, connected: ConnectedRanks, news: Callable[[], object] | None = None) -> None:
        """`news`, if ranks may be on other nodes, is called for reports that these nodes need."""
        self._lock, self._connected, self._news = connected.lock, connected, news
        self._launches: dict[LaunchKey, _StoppingLaunch] = {}

    def report(self, who: Participant, passed_step: PassedStep) -> LastStep:
        """A rank of a launch that is to stop has passed a step, and waits at the next one; or it knows where to stop.

        Returns the step, once all ranks have reported, and the missing ranks, which are asked.
        """
        key = LaunchKey(who.run, who.attempt)
        with self._lock:
            launch = self._launch(key, who.world)
            new = launch.report(who.rank, passed_step)
            missing = set(range(who.world)) - launch.passed.keys() - self._connected.gone(*key) - launch.elsewhere
            if launch.step is None and not missing and (self._news is None or len(launch.passed) == who.world):
                launch.decide(max(launch.passed.values()) + 1)
            due = self._due(key, launch)
            named = tuple(sorted(missing))[:STOP_RANKS_MAX]
            answer = LastStep(step=launch.step, missing=named, apart=launch.apart and launch.step is None)
        for other in due:
            other.ask_to_stop()
        if new and answer.step is None and self._news is not None:
            self._news()
        return answer

    def ask(self, key: LaunchKey) -> None:
        """Ranks of this launch on another node are to stop: ask those here."""
        with self._lock:
            here = [who for who in self._connected.of(key.run) if who.attempt == key.attempt]
            due = self._due(key, self._launch(key, here[0].world)) if here else []
        for other in due:
            other.ask_to_stop()

    def undecided(self) -> dict[LaunchKey, dict[str, Any]]:
        """Launches that are to stop without an agreed step, and their ranks' reports here, for other nodes."""
        now = time.monotonic()
        with self._lock:
            return {
                key: {"passed": {str(rank): step for rank, step in launch.passed.items()}, "gone": sorted(gone)}
                for key, launch in self._launches.items()
                if launch.step is None and now - launch.heard < GOES_ON_S and self._connected.ranks(*key)
                for gone in [self._connected.gone(*key)]
            }

    def remember(self, key: LaunchKey, report: Mapping[str, Any]) -> None:
        """Load ranks' reports to an earlier daemon."""
        with self._lock:
            launch = self._launches.get(key) or self._launch(key, 0)
            launch.remember({int(rank): step for rank, step in report["passed"].items()})

    def hear(self, key: LaunchKey, words: Collection[Mapping[str, Any]]) -> int | None:
        """Process all nodes' reports; the step, if they are complete."""
        passed = {int(rank): step for word in words for rank, step in word["passed"].items()}
        gone = {rank for word in words for rank in word["gone"]}
        with self._lock:
            complete = self._launches[key].meet(frozenset(passed.keys() | gone))
        return max(passed.values()) + 1 if passed and complete else None

    def decide(self, key: LaunchKey, step: int) -> None:
        """Record the step agreed by all nodes."""
        with self._lock:
            self._launches[key].decide(step)

    def apart(self) -> None:
        """Other nodes cannot be reached."""
        with self._lock:
            for launch in self._launches.values():
                launch.separate()

    def _launch(self, key: LaunchKey, world: int) -> _StoppingLaunch:
        launch = self._launches.setdefault(key, _StoppingLaunch(world))
        for old in list(self._launches)[:-LAUNCHES_MAX]:
            del self._launches[old]
        return launch

    def _due(self, key: LaunchKey, launch: _StoppingLaunch) -> list[Participant]:
        now = time.monotonic()
        due = [
            other
            for other in self._connected.of(key.run)
            if other.attempt == key.attempt
            and other.rank not in launch.passed
            and launch.asked.get(other.rank, float("-inf")) + ASK_EVERY_S < now
        ]
        launch.asked.update({other.rank: now for other in due})
        return due
