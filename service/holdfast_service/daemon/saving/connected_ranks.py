"""Connected ranks, the processes of their job, and ranks that disconnected without closing their Checkpointer."""

from __future__ import annotations

import threading
import time

from holdfast_formats.rest.measurements import Life
from holdfast_service.daemon.saving.rounds import Participant

BACK_S = 60.0  # how long a rank that is gone without a goodbye may take to be back


class _RankSet:
    """The ranks of an attempt. A disconnected process belongs to the job as long as another rank is connected."""

    def __init__(self) -> None:
        self.present: set[Participant] = set()
        self.processes: set[str] = set()
        self.gone: dict[int, float] = {}  # ranks that were here, and from when on they are waited for no longer (monotonic)


class ConnectedRanks:
    """Questions take the lock themselves; what changes the ranks is called with it."""

    def __init__(self, lock: threading.Condition) -> None:
        """`lock` is the saver's, which may be taken twice."""
        self.lock = lock
        self._node_ranks: dict[tuple[str, int], _RankSet] = {}  # by run and attempt; those of which a rank is here
        # By run: its newest attempt, and the ranks that left without a goodbye.
        self._missing: dict[str, tuple[int, set[int]]] = {}

        self._heard: dict[str, int] = {}  # by run: the newest attempt with a rank that connected to this daemon

    @property
    def runs(self) -> set[str]:
        with self.lock:
            return {run for run, _ in self._node_ranks}

    def of(self, run: str) -> list[Participant]:
        """The ranks of a run, of any attempt."""
        with self.lock:
            return [who for (name, _), rank_set in self._node_ranks.items() if name == run for who in rank_set.present]

    def ranks(self, run: str, attempt: int) -> set[int]:
        return {who.rank for who in self.of(run) if who.attempt == attempt}

    def counts(self) -> dict[str, tuple[int, int, int, float | None]]:
        """For each run's newest attempt with ranks here: its number, its world, how many there are, and the seconds until
        all count as gone without a sign of life; None if one certainly lives.
        """
        found: dict[str, tuple[int, int, int, float | None]] = {}
        with self.lock:
            for (run, attempt), rank_set in sorted(self._node_ranks.items()):
                left = [who.left_s() for who in rank_set.present]
                for who in rank_set.present:
                    ranks = len({other.rank for other in rank_set.present})
                    found[run] = attempt, who.world, ranks, None if None in left else max(filter(None, left), default=0.0)
        return found

    def join(self, who: Participant) -> None:
        """Add a rank. Called with the lock."""
        rank_set = self._node_ranks.setdefault((who.run, who.attempt), _RankSet())
        rank_set.present.add(who)
        rank_set.processes.add(who.process)
        rank_set.gone.pop(who.rank, None)
        if who.heard:
            self._heard[who.run] = max(who.attempt, self._heard.get(who.run, 0))
        if who.attempt > self._missing.get(who.run, (-1, set()))[0]:
            self._missing[who.run] = who.attempt, set()
        attempt, missing = self._missing[who.run]
        if who.attempt == attempt:
            missing.discard(who.rank)

    def leave(self, who: Participant) -> set[Participant]:
        """Remove a rank; returns the remaining ranks of its attempt. Called with the lock."""
        rank_set = self._node_ranks.get((who.run, who.attempt), _RankSet())
        rank_set.present.discard(who)
        attempt, missing = self._missing.get(who.run, (-1, set()))
        if all(other.rank != who.rank for other in rank_set.present):
            rank_set.gone[who.rank] = time.monotonic() + (0.0 if who.parted else BACK_S)
            if who.attempt == attempt and not who.parted:
                missing.add(who.rank)
        if not rank_set.present:
            self._node_ranks.pop((who.run, who.attempt), None)
        return rank_set.present

    def gone(self, run: str, attempt: int) -> set[int]:
        """Ranks that will not return: they closed regularly, or have been away for `BACK_S`."""
        with self.lock:
            rank_set = self._node_ranks.get((run, attempt), _RankSet())
            return {rank for rank, limit in rank_set.gone.items() if limit <= time.monotonic()}

    def lives(self) -> dict[str, tuple[int, Life]]:
        """The newest attempts of runs whose ranks connected here, and whether they run, have finished or died. Omits ranks
        known only to an earlier daemon, until they reconnect or time out.
        """
        with self.lock:
            return {
                run: (attempt, "died" if missing else "running" if (run, attempt) in self._node_ranks else "finished")
                for run, (attempt, missing) in self._missing.items()
                if self._heard.get(run) == attempt
            }

    def forget(self, run: str) -> None:
        """Forget a run without connected ranks. Called with the lock."""
        self._missing.pop(run, None)
        self._heard.pop(run, None)

    def belongs(self, run: str, process: str) -> bool:
        """Whether a process is, or was, a rank of a job that is still connected."""
        with self.lock:
            return any(process in rank_set.processes for (name, _), rank_set in self._node_ranks.items() if name == run)
