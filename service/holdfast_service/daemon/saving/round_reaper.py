"""Ends rounds that can no longer complete, so that their ranks do not wait for them, nor their slots."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast_formats.errors import RoundAborted, StaleAttempt
from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S, find_sealed
from holdfast_service.daemon.saving.active_saves import ActiveSaves
from holdfast_service.daemon.saving.round_lifecycle import RoundLifecycle
from holdfast_service.daemon.saving.rounds import LaunchKey, Participant, RoundKey, SaveRound
from holdfast_service.daemon.saving.stuck_rounds import OpenSaves

_EVERY_RANK = "every rank must save the same steps, and close its Checkpointer after the last one"


class RoundReaper:
    """Methods take the lock of `active` themselves, unless their docstrings say that they are called with it."""

    def __init__(self, active: ActiveSaves, rounds: RoundLifecycle) -> None:
        """What is found in `active` ends through `rounds`."""
        self._active, self._rounds = active, rounds
        self._lock, self._open = active.lock, active.open

    def end_older(self, run: str, newest: int) -> None:
        """A newer attempt has started: incomplete saves of older ones end (I6). Called with the lock."""
        for current in [r for k, r in self._open.items() if k.run == run and k.attempt < newest]:
            self._rounds.abort(current, StaleAttempt(f"attempt {newest} of {run} has started"))

    def end_left(self, who: Participant, present: Collection[Participant]) -> None:
        """A rank's process is gone: its unsealed rounds end; with the last rank, all incomplete ones do. `present` are the
        other ranks of its launch. Called with the lock.
        """
        back = any(other.rank == who.rank for other in present)
        for current in [r for k, r in self._open.items() if (k.run, k.attempt) == (who.run, who.attempt)]:
            if current.participants.get(who.rank) is who and who.rank not in current.sealed:
                self._take_left_behind(current, who)
            elif back:
                continue
            alone = not present and not self._active.is_part(current)
            if not current.complete and (alone or who.rank not in current.sealed):
                step, last = current.key.step, who.newest
                other = "" if last in (None, step) else f"; the last step that it began to save was {last}"
                error = RoundAborted(f"rank {who.rank} disconnected before step {step} was complete{other}")
                self._rounds.abort(current, error)

    def end_if_never_complete(self, current: SaveRound) -> bool:
        """End a round, for the ranks that take part, if missing ranks will not come any more. Called with the lock."""
        gone = self._active.without_a_part(current)
        if gone:
            which = f"rank {min(gone)} has" if len(gone) == 1 else f"ranks {', '.join(map(str, sorted(gone)))} have"
            error = RoundAborted(f"{which} ended without saving step {current.key.step}", hint=_EVERY_RANK)
            self._rounds.abort(current, error)
        return bool(gone)

    def end_stuck(self, run: str, attempt: int) -> bool:
        """End rounds whose ranks wait for one another. Called with the lock."""
        saves = self._active.saves(LaunchKey(run, attempt))
        stuck = saves.stuck() if saves.is_waited_for else set()
        for step in stuck:
            self._rounds.abort(self._open[RoundKey(run, step, attempt)], saves.error_of(step))
        return bool(stuck)

    def waited_for(self) -> dict[LaunchKey, OpenSaves]:
        """Saves with ranks on other nodes, for which some rank here waits."""
        with self._lock:
            keys = {LaunchKey(k.run, k.attempt) for k, current in self._open.items() if self._active.spans(current)}
            waiting = {key: self._active.saves(key) for key in keys}
        return {key: saves for key, saves in waiting.items() if saves.is_waited_for}

    def end_stuck_of_nodes(self, launch: LaunchKey, open_saves: OpenSaves, others: Sequence[OpenSaves]) -> None:
        """End the saves whose ranks on all nodes wait for one another, if this node's statement `open_saves` still holds."""
        with self._lock:
            if self._active.saves(launch) != open_saves:
                return
            whole = open_saves.joined(others)
            for step in whole.stuck():
                key, error = RoundKey(launch.run, step, launch.attempt), whole.error_of(step)
                current = self._open.get(key)
                if current is not None:
                    self._rounds.abort(current, error)
                else:  # no rank of this node brings a part of it, and none may come with one later
                    self._active.given_up.add(key, set(), error)
                    self._rounds.refuse(key, whole.world, error)

    def end_late(self, now: float) -> None:
        """End rounds that never complete, are stuck, or whose deadline has passed."""
        with self._lock:
            for current in list(self._open.values()):
                if self._open.get(current.key) is not current:
                    continue  # it ended with another one
                if self.end_if_never_complete(current) or self.end_stuck(current.key.run, current.key.attempt):
                    continue
                late = sorted(rank for rank, lease in current.leases.items() if lease.deadline < now)
                if late or current.deadline < now:
                    missing = late or sorted(set(range(current.world)) - set(current.sealed))
                    which = f"ranks {missing} did not complete step {current.key.step}"
                    self._rounds.abort(current, RoundAborted(f"{which} within {LEASE_DEADLINE_S:.0f} s"))

    def _take_left_behind(self, current: SaveRound, who: Participant) -> None:
        """Process the slot of a rank that is gone, which it may have sealed without reporting it."""
        lease = current.leases.get(who.rank)
        sealed = find_sealed(lease.segment, lease.slot) if lease else None
        if sealed is not None and sealed.table.step == current.key.step:
            del current.leases[who.rank]
            self._rounds.take(current, who.rank, sealed)
