"""What becomes of a round after its leases: ranks' parts, their averages, the write, other nodes, and the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, RoundAborted
from holdfast_formats.naming import Place
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.arena.segment import SealedSlot
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.checking.checker import Checks
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.saving.active_saves import ActiveSaves
from holdfast_service.daemon.saving.average_fills import AverageFills
from holdfast_service.daemon.saving.failed_rounds import FailedRounds
from holdfast_service.daemon.saving.late_saves import LateSaves
from holdfast_service.daemon.saving.other_nodes import Host, OtherNodes, Result
from holdfast_service.daemon.saving.rounds import Participant, RoundKey, SaveRound, outcome_of
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.saving.write_queue import WriteQueue


class RoundLifecycle:
    """Brings rounds to their ends. Methods are called with the lock of `active`, unless their docstrings say otherwise."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        active: ActiveSaves,
        control: Control,
        others: OtherNodes,
        *,
        node: str,
        history: SaveHistory,
        holds: MemoryCheckpoints,
        checks: Checks,
        averages: Averages | None,
    ) -> None:
        """Saves of ranks on `node` alone are written here, others jointly. `checks` reads back what is committed."""
        self._active, self._control, self._lock = active, control, active.lock
        self._history, self._holds, self._checks = history, holds, checks
        self.failed, self._late = FailedRounds(control, history), LateSaves(active, control.events)
        self.write_queue = WriteQueue(control, node, holds, lock=active.lock, ended=self._saved, history=history)
        self._fills = AverageFills(averages, self._filled)
        host = Host(
            self._ready,
            self._joint_may_give_way,
            self._joint_sealed,
            self._joint_writes,
            active.renew,
            self._joint_given_up,
            self._joint_ended,
        )
        self._joint = others.joint_saves(host, history)

    def waiting(self) -> list[SaveRound]:
        """Complete saves that are not being written yet, oldest first."""
        return [*self.write_queue.waiting(), *self._active.queued]

    def take(self, current: SaveRound, rank: int, sealed: SealedSlot) -> int:
        """Add a sealed slot; returns how many ranks have sealed. The last one starts the write."""
        current.sealed[rank] = sealed
        if current.complete:
            self._active.complete(current)
            if not self._fills.wants(current):
                self.write_queue.add(current)
        elif self._active.is_part(current):
            self._fills.wants(current)
        return len(current.sealed)

    def taken(self) -> None:
        """A rank's seal is recorded: this node's part may be complete. Called without the lock."""
        self._joint.look()

    def rejoin(self, who: Participant, awaited: Set[int]) -> set[int]:
        """A rank reconnected, and waits for these steps: its other leases are freed, and rounds that lost its part end.
        Returns the steps of which no round goes on.
        """
        unknown = set(awaited)
        for current in [*self._active.open.values(), *self._active.pending.values()]:
            step = current.key.step
            if (current.key.run, current.key.attempt) != (who.run, who.attempt):
                continue
            if who.rank not in current.participants:
                if step in unknown and (current.complete or self._active.is_open(current)):
                    self.abort(current, RoundAborted(f"rank {who.rank} has lost its part of step {step}"))
                continue
            if who.rank in current.leases and step not in unknown:  # granted, but the rank never heard of it
                lease = current.leases.pop(who.rank)
                del current.participants[who.rank]
                lease.segment.release(lease.slot)
                continue
            current.participants[who.rank] = who
            who.has_begun(step)
            unknown.discard(step)
        return unknown

    def abort(self, current: SaveRound, error: CheckpointError, knowing: Collection[int] = (), heard: bool = False) -> None:
        """End a round that is not being written. `heard`: on another node's report."""
        if not heard and self._active.spans(current):
            self._joint.refuse(current.key, current.world, error)
        if self._active.open.get(current.key) is current:
            del self._active.open[current.key]
        elif current in self._active.queued:
            self._active.queued.remove(current)
        elif current.complete:
            self.write_queue.withdraw(current)
        self._fills.leave(current)
        current.release()
        self._active.given_up.add(current.key, {*current.participants, *knowing}, error)
        self.failed.report(current, error, staging=None)
        self._announce(current, error)

    def refuse(self, key: RoundKey, world: int, error: CheckpointError) -> None:
        """No rank of this node brings a part of this round: it ends on all nodes."""
        self._joint.refuse(key, world, error)

    def close(self) -> None:
        """Wait a limited time for saves with other nodes. Called without the lock."""
        self._joint.close()

    def _filled(self, current: SaveRound, parts: Mapping[int, SealedSlot], error: CheckpointError | None) -> None:
        """The averages are in these slots, or failed; the save may have ended meanwhile."""
        with self._lock:
            current.end_averaging(parts if error is None else ())
            if not self._active.has(current):
                for sealed in parts.values():
                    sealed.release()
                return
            if error is not None:
                self.abort(current, error)
                return
            if current.complete and not self._fills.wants(current):
                self.write_queue.add(current)
        self._joint.look()

    def _ready(self) -> list[SaveRound]:
        """Saves with this node's part complete, and others on other nodes."""
        ready = []
        with self._lock:
            for current in self._active.parts():
                if self._fills.wants(current):  # that ends by itself
                    current.extend()
                else:
                    ready.append(current)
        return ready

    def _joint_sealed(self, current: SaveRound) -> bool:
        """The parts of all nodes are there. False if this node's was given up."""
        with self._lock:
            if self._active.open.get(current.key) is not current:
                return False
            self._active.complete(current)
            self._active.queued.append(current)
        self._control.rounds.seal(current.id, current.world)
        return True

    def _joint_may_give_way(self, current: SaveRound) -> bool:
        with self._lock:
            return self._active.may_give_way(current)

    def _joint_writes(self, current: SaveRound) -> bool:
        """This node's share is written from now on. False if the save was dropped meanwhile."""
        with self._lock:
            if current not in self._active.queued:
                return False
            self._active.queued.remove(current)
        return True

    def _joint_given_up(self, current: SaveRound, error: CheckpointError) -> None:
        with self._lock:
            if self._active.may_give_way(current):
                self.abort(current, error, heard=True)

    def _joint_ended(
        self, current: SaveRound, result: Result, staging: Place | None, written: Sequence[WrittenSpan] = ()
    ) -> None:
        """The end of a save of several nodes, whose parts were `written`. Frees its slots, and keeps them as this node's
        in-memory checkpoint.
        """
        if not isinstance(result, CheckpointError):
            self._holds.keep(*current.key, current.sealed)
        current.release()
        if isinstance(result, CheckpointError):
            self.failed.report(current, result, staging)
            self._announce(current, result)
            return
        self._history.ended(current, checked=result is None)
        if result is not None:
            self._checks.add(result, written)
            self._late.committed(current)
        self._announce(current, None)

    def _saved(self, current: SaveRound, result: Manifest | CheckpointError) -> None:
        if isinstance(result, CheckpointError):
            self.failed.report(current, result, Place(*current.key))
            self._announce(current, result)
            return
        self._checks.add(result)
        self._late.committed(current)
        self._announce(current, None)

    def _announce(self, current: SaveRound, error: CheckpointError | None) -> None:
        asks = error is None and current.averaged
        groups = self._control.lineage_index.groups(current.key.run, current.key.step) if asks else ()
        with self._lock:  # ranks that reconnect later ask for the committed steps
            if self._active.pending.get(current.key) is current:
                del self._active.pending[current.key]
                if current in self._active.queued:
                    self._active.queued.remove(current)
                self._lock.notify_all()
            participants = list(current.participants.values())
        outcome = outcome_of(current.key, error, groups)
        for participant in participants:
            spares = current.spares.get(participant.rank, "")
            participant.notify(outcome.model_copy(update={"spares": spares}) if spares else outcome)
