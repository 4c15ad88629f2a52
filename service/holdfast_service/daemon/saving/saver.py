"""The saver: collects the sealed slots of all ranks, has complete saves written and committed, and informs the ranks.

A save (round) is one attempt to save one step. It starts with the first rank's lease, is complete when every rank has
sealed, and ends committed or aborted. Nothing of an incomplete save reaches storage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import (
    ArenaFull,
    CheckpointError,
    GenerationDropped,
    RoundAborted,
    StaleAttempt,
)
from holdfast_formats.naming import Place
from holdfast_formats.rest.measurements import Life
from holdfast_formats.staging.messages import Policy, SlotRequest
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S, ArenaSegment, SealedSlot, check_identity, find_sealed
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.checking.checker import Checker, Checks
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.saving.active_saves import ActiveSaves
from holdfast_service.daemon.saving.average_fills import AverageFills
from holdfast_service.daemon.saving.failed_rounds import FailedRounds
from holdfast_service.daemon.saving.other_nodes import NO_OTHER_NODES, Host, LocalRanks, OtherNodes, Result
from holdfast_service.daemon.saving.read_throttle import ReadThrottle
from holdfast_service.daemon.saving.restore_barrier import RestoreBarrier
from holdfast_service.daemon.saving.rounds import GivenUp, LaunchKey, Participant, RoundKey, SaveRound, SlotLease, outcome_of
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.saving.slot_policy import gives_way
from holdfast_service.daemon.saving.stop_agreement import StopAgreement
from holdfast_service.daemon.saving.stuck_rounds import OpenSaves
from holdfast_service.daemon.saving.write_queue import WriteQueue
from holdfast_service.daemon.writing.disk_throughput import Probe
from holdfast_service.storage import Tier

log = logging.getLogger(__name__)

_EVERY_RANK = "every rank must save the same steps, and close its Checkpointer after the last one"
_NONE: Mapping[int, CheckpointError] = MappingProxyType({})

CLOSE_S = 5.0  # how long the catalog is waited for, so that what was saved last is checked as well


class Saver:
    """Owner of all saves of this node. Its methods are called from any thread."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        tier: Tier,
        control: Control,
        node: str,
        checker: Checker | None = None,
        others: OtherNodes = NO_OTHER_NODES,
        *,
        holds: MemoryCheckpoints | None = None,
        averages: Averages | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Ranks of a save may be on `others`; `probe` measures the disk."""
        self._control, self._node = control, node
        self._going = ActiveSaves(jointly=not others.alone)
        self._lock, self._connected = self._going.lock, self._going.connected
        self._entering: dict[str, threading.Lock] = {}
        self._open, self._pending = self._going.open, self._going.pending
        self._given_up = GivenUp()
        self.history = SaveHistory(control, probe)
        self._ends = FailedRounds(control, self.history)
        checker = checker or Checker(tier, control)
        self.giving_way = ReadThrottle(lambda: self._staging or self.restores.under_way)
        self.spread = others.checks(checker, self.giving_way)
        self.checks = Checks(checker, self.history.verified, self.giving_way, control.record_queue.recorded, self.spread)
        self.restores = RestoreBarrier(checker.suspect, control, vote=others.vote, spans=self._going.is_elsewhere)
        self.stops = StopAgreement(self._lock, self._connected, None if others.alone else self._look_at_ranks)
        self.holds = holds or MemoryCheckpoints(control.lineage_index.launch, partly=not others.alone)
        self.averages = averages
        self._write_queue = WriteQueue(control, node, self.holds, lock=self._lock, ended=self._saved, history=self.history)
        self._fills = AverageFills(averages, self._filled)
        going = self._going
        host = Host(self._ready, going.is_open, self._joint_sealed, going.renew, self._joint_given_up, self._joint_ended)
        self._joint = others.joint_saves(host, self.history)
        here = LocalRanks(going.spanning, self._waited_for, self._end_stuck_of_nodes)
        self._ranks = others.rank_news(here, self.stops)

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self._open or self._pending or self.checks.pending or self.holds.awaiting)

    @property
    def writing(self) -> bool:
        with self._lock:
            return bool(self._pending)

    @property
    def working(self) -> bool:
        with self._lock:
            return bool(self._open or self._pending or self.checks.pending)

    @property
    def sealed(self) -> int:
        """Number of saves, waiting or being written, whose ranks here have all sealed."""
        with self._lock:
            return len(self._pending) + sum(self._going.is_part(current) for current in self._open.values())

    def entering(self, run: str) -> threading.Lock:
        """The lock to hold from the check whether a rank may join a run until it has joined."""
        with self._lock:
            return self._entering.setdefault(run, threading.Lock())

    @property
    def _staging(self) -> bool:
        with self._lock:
            return any(current.leases for current in self._open.values())

    @property
    def runs(self) -> set[str]:
        with self._lock:
            return self._connected.runs

    def lives(self) -> dict[str, tuple[int, Life]]:
        """The ranks that connected to this daemon, by run: their newest attempt and its state."""
        with self._lock:
            return self._connected.lives()

    def join(self, who: Participant) -> None:
        """A rank connected. Incomplete saves of older attempts of its run end (I6); completely sealed ones are saved."""
        with self._lock:
            self._connected.join(who)
            self.restores.join(who)
            self._end_older(who.run, who.attempt)

    def node_ranks(self) -> dict[str, tuple[int, int, int, float | None]]:
        """For each run's newest attempt with ranks here: its number, its world, how many there are, and when they count as
        gone.
        """
        with self._lock:
            return self._connected.counts()

    def shut_out(self, run: str, newest: int) -> None:
        """A newer attempt has started on another node: incomplete saves of older ones end (I6)."""
        with self._lock:
            self._end_older(run, newest)

    def _look_at_ranks(self) -> None:
        """A rank's statement concerns other nodes."""
        self._ranks.look()

    def _ready(self) -> list[SaveRound]:
        """Saves with this node's part complete, and others on other nodes."""
        ready = []
        with self._lock:
            for current in self._going.parts():
                if self._fills.wants(current):  # that ends by itself
                    current.extend()
                else:
                    ready.append(current)
        return ready

    def _joint_sealed(self, current: SaveRound) -> bool:
        """The parts of all nodes are there. False if this node's was given up."""
        with self._lock:
            if self._open.get(current.key) is not current:
                return False
            self._going.complete(current)
        self._control.rounds.seal(current.id, current.world)
        return True

    def _joint_given_up(self, current: SaveRound, error: CheckpointError) -> None:
        with self._lock:
            if self._open.get(current.key) is current:
                self._abort(current, error, heard=True)

    def _joint_ended(
        self, current: SaveRound, result: Result, staging: Place | None, written: Sequence[WrittenSpan] = ()
    ) -> None:
        """The end of a save of several nodes, whose parts were `written`. Frees its slots, and keeps them as this node's
        in-memory checkpoint.
        """
        if not isinstance(result, CheckpointError):
            self.holds.keep(*current.key, current.sealed)
        current.release()
        if isinstance(result, CheckpointError):
            self._ends.report(current, result, staging)
            self._announce(current, result)
            return
        self.history.ended(current, checked=result is None)
        if result is not None:
            self.checks.add(result, written)
        self._announce(current, None)

    def _end_older(self, run: str, newest: int) -> None:
        for current in [r for k, r in self._open.items() if k.run == run and k.attempt < newest]:
            self._abort(current, StaleAttempt(f"attempt {newest} of {run} has started"))

    def vacate(self, run: str) -> bool:
        """Forget the ranks of a run; False while some are connected, or a save is running."""
        with self._lock:
            if run in self._connected.runs or any(key.run == run for key in (*self._open, *self._pending)):
                return False
            self._connected.forget(run)
            self.restores.forget(run)
            return True

    def present(self, run: str) -> list[Participant]:
        with self._lock:
            return self._connected.of(run)

    def belongs(self, run: str, process: str) -> bool:
        """Whether a process is, or was, a rank of a job with connected ranks."""
        with self._lock:
            return self._connected.belongs(run, process)

    def lease(self, who: Participant, segment: ArenaSegment, wanted: SlotRequest, wait_s: float) -> int:
        """Lease a slot of `segment` for this rank's part of a step. Refuses a step that this rank may not save.

        If no slot is free, the policy decides for all ranks: an older save is dropped for this one, or this one is dropped,
        with `GenerationDropped`; or it waits for a slot, for `wait_s` seconds, then `ArenaFull`.
        """
        step, policy, intent = wanted.step, wanted.policy, wanted.intent
        key = RoundKey(who.run, step, who.attempt)
        who.begins(step)
        self.restores.moved_on(who)
        with self._lock:
            self._given_up.refuse(key, who.rank)
            here = self._connected.ranks(who.run, who.attempt)
        self.holds.trains(who.owner, here)
        quiet = self._going.is_reported_elsewhere(who)
        round_id = self._control.saves.begin(*key, who.world, intent, quiet=quiet)
        slot = -1
        try:
            if policy == "wait":
                slot = segment.lease(step, who.attempt, wait_s, who.is_gone)
            with self._lock:
                self._given_up.refuse(key, who.rank)
                begun = self._open.get(key) or self._pending.get(key)
                if begun is None:
                    # It may have ended, or been fenced off, since.
                    round_id = self._control.saves.begin(*key, who.world, intent, quiet=quiet)
                    self.history.begun(key)
                if begun is not None and key in self._pending and not begun.complete:
                    raise RoundAborted(f"step {step} is being saved by ranks of several nodes, this one's among them")
                current = begun or SaveRound(key, round_id, who.world, time.monotonic() + LEASE_DEADLINE_S)
                current.refuse(who)
                if slot < 0:  # what cannot become complete takes no other's place
                    lost = self._without_a_part(current)
                    slot = self._make_room(current, who, segment, "oldest-durable" if lost else policy)
                self._open[key] = current
                current.add(who, SlotLease(segment, slot, time.monotonic() + LEASE_DEADLINE_S))
                self._end_if_never_complete(current)
                self._end_stuck(who.run, who.attempt)
        except CheckpointError as error:
            if slot >= 0:
                segment.release(slot)
            with self._lock:
                if key not in self._open and key not in self._pending:
                    self._ends.record(key, round_id, error, staging=None)
            raise
        return slot

    def seal(self, who: Participant, slot: int, step: int, table_digest: str, turn: int = 0) -> None:
        """Accept a slot that its rank has sealed; the last rank's seal starts the write."""
        key = RoundKey(who.run, step, who.attempt)
        with self._lock:
            current = self._open.get(key)
            known = current or self._pending.get(key)
            if known is not None and known.has_taken(who.rank, slot):
                return  # the answer to its first seal was lost with a connection
            lease = current.leases.get(who.rank) if current else None
            if current is None or lease is None or lease.slot != slot:
                self._given_up.refuse(key, who.rank)
                if current is None and self._control.lineage_index.launch(who.run, step) == (who.attempt, turn):
                    return
                raise self._given_up.why(key, f"rank {who.rank} has no lease on slot {slot} for step {step}")
            try:
                sealed = lease.segment.take_sealed(slot, step, table_digest)
                check_identity(sealed, who.owner, step)
            except CheckpointError as error:
                self._abort(current, error)
                raise
            del current.leases[who.rank]
            count = self._take(current, who.rank, sealed)
        self._control.rounds.seal(current.id, count)
        self._joint.look()

    def adopt(
        self, who: Participant, step: int, round_id: int, segment: ArenaSegment, slot: int, sealed: SealedSlot | None
    ) -> None:
        """Take over a slot that an earlier daemon leased to `who`, sealed or not."""
        key = RoundKey(who.run, step, who.attempt)
        with self._lock:
            current = self._open.setdefault(key, SaveRound(key, round_id, who.world, time.monotonic() + LEASE_DEADLINE_S))
            current.adopt(who)
            if sealed is None:
                current.add(who, SlotLease(segment, slot, current.deadline))
                return
            count = self._take(current, who.rank, sealed)
        self._control.rounds.seal(round_id, count)

    def take_over(
        self, who: Participant, awaited: Mapping[int, int], refused: Mapping[int, CheckpointError] = _NONE
    ) -> None:
        """A rank reconnected: report the steps that it waits for, given with the turns of their saves.

        Its other leases are freed. `refused` has the reasons why steps it brought may not be saved.
        """
        unknown = set(awaited)
        with self._lock:
            for current in [*self._open.values(), *self._pending.values()]:
                step = current.key.step
                if (current.key.run, current.key.attempt) != (who.run, who.attempt):
                    continue
                if who.rank not in current.participants:
                    if step in unknown and (current.complete or self._going.is_open(current)):
                        self._abort(current, RoundAborted(f"rank {who.rank} has lost its part of step {step}"))
                    continue
                if who.rank in current.leases and step not in unknown:  # granted, but the rank never heard of it
                    lease = current.leases.pop(who.rank)
                    del current.participants[who.rank]
                    lease.segment.release(lease.slot)
                    continue
                current.participants[who.rank] = who
                who.has_begun(step)
                unknown.discard(step)
        for step in sorted(unknown):
            committed = self._control.lineage_index.launch(who.run, step) == (who.attempt, awaited[step])
            key = RoundKey(who.run, step, who.attempt)
            lost = self._given_up.why(
                key, f"step {step} was not sealed by rank {who.rank} when the daemon ended, or was given up"
            )
            error = None if committed else refused.get(step, lost)
            groups = self._control.lineage_index.groups(who.run, step) if committed else ()
            who.notify(outcome_of(key, error, groups))

    def waits(self, who: Participant, step: int | None) -> None:
        """A rank begins no other save before the one of this step has ended; without a step, none any more."""
        with self._lock:
            who.waits(step)
            self._end_stuck(who.run, who.attempt)
        self._look_at_ranks()

    def give_up(self, who: Participant, step: int, error: CheckpointError) -> None:
        """A rank cannot complete its part: the save ends for every rank, including later ones."""
        key = RoundKey(who.run, step, who.attempt)
        with self._lock:
            current = self._open.get(key)
            if current is not None:
                self._abort(current, error)
            elif key not in self._pending and self._control.lineage_index.launch(who.run, step) is None:
                self._given_up.know(key, who.rank, error)
                if len(self._connected.of(who.run)) < who.world:
                    self._joint.refuse(key, who.world, error)

    def refuse_given_up(self, who: Participant, step: int) -> None:
        """Raise the error that ended this step for the other ranks, unless this rank has received it."""
        with self._lock:
            self._given_up.refuse(RoundKey(who.run, step, who.attempt), who.rank)

    def gone(self, who: Participant) -> None:
        """A rank's process is gone. Its unsealed saves end; with the last rank, all incomplete ones do."""
        with self._lock:
            present = self._connected.leave(who)
            if not any(other.rank == who.rank for other in present):
                self.restores.gone(who)
            if not present:
                self._control.launches.parted(who.run, who.attempt)
            for current in [r for k, r in self._open.items() if (k.run, k.attempt) == (who.run, who.attempt)]:
                back = any(other.rank == who.rank for other in present)
                if current.participants.get(who.rank) is who and who.rank not in current.sealed:
                    self._take_left_behind(current, who)
                elif back:
                    continue
                if not current.complete and (
                    (not present and not self._going.is_part(current)) or who.rank not in current.sealed
                ):
                    self._abort(
                        current, RoundAborted(f"rank {who.rank} disconnected before step {current.key.step} was complete")
                    )

    def renew(self, who: Participant, step: int) -> None:
        """The rank is still uploading its part over a slow link: extend the deadlines of its lease and its save."""
        with self._lock:
            current = self._open.get(RoundKey(who.run, step, who.attempt))
            if current is not None and who.rank in current.leases:
                current.extend(who.rank)

    def expire(self) -> None:
        """End saves, and drop in-memory checkpoints, whose deadline has passed."""
        now = time.monotonic()
        self.holds.expire(now)
        self.history.flush()
        with self._lock:
            for current in list(self._open.values()):
                if self._open.get(current.key) is not current:
                    continue  # it ended with another one
                if self._end_if_never_complete(current) or self._end_stuck(current.key.run, current.key.attempt):
                    continue
                late = sorted(rank for rank, lease in current.leases.items() if lease.deadline < now)
                if late or current.deadline < now:
                    missing = late or sorted(set(range(current.world)) - set(current.sealed))
                    self._abort(
                        current,
                        RoundAborted(
                            f"ranks {missing} did not complete step {current.key.step} within {LEASE_DEADLINE_S:.0f} s"
                        ),
                    )

    def settle(self, run: str, wait_s: float) -> bool:
        """Wait until every complete save of `run` has ended, on all nodes, so that the newest checkpoint is known."""
        limit = time.monotonic() + wait_s
        with self._lock:
            if not self._lock.wait_for(lambda: all(key.run != run for key in self._pending), wait_s):
                return False
        return self._control.attempts.settled_elsewhere(run, max(limit - time.monotonic(), 0.0))

    def close(self) -> None:
        """Write and verify complete saves, end the others, stop."""
        with self._lock:
            for current in list(self._open.values()):
                self._abort(current, RoundAborted(f"the daemon of node {self._node} is shutting down"))
        self.restores.close()
        if self.averages is not None:
            self.averages.close()
        self._write_queue.close()
        self._ranks.close()
        self._joint.close()
        self._control.record_queue.recorded(CLOSE_S)
        self.checks.close()
        self.spread.close()
        self.history.disk.close()
        self.history.flush(everything=True)
        self.holds.close()

    def _take(self, current: SaveRound, rank: int, sealed: SealedSlot) -> int:
        """Add a sealed slot; returns how many ranks have sealed. The last one starts the write."""
        current.sealed[rank] = sealed
        if current.complete:
            self._going.complete(current)
            if not self._fills.wants(current):
                self._write_queue.add(current)
        elif self._going.is_part(current):
            self._fills.wants(current)
        return len(current.sealed)

    def _filled(self, current: SaveRound, parts: Mapping[int, SealedSlot], error: CheckpointError | None) -> None:
        """The averages are in these slots, or failed; the save may have ended meanwhile."""
        with self._lock:
            current.end_averaging(parts if error is None else ())
            if current not in (self._open.get(current.key), self._pending.get(current.key)):
                for sealed in parts.values():
                    sealed.release()
                return
            if error is not None:
                self._abort(current, error)
                return
            if current.complete and not self._fills.wants(current):
                self._write_queue.add(current)
        self._joint.look()

    def _take_left_behind(self, current: SaveRound, who: Participant) -> None:
        """Process the slot of a rank that is gone, which it may have sealed without reporting it."""
        lease = current.leases.get(who.rank)
        sealed = find_sealed(lease.segment, lease.slot) if lease else None
        if sealed is not None and sealed.table.step == current.key.step:
            del current.leases[who.rank]
            self._take(current, who.rank, sealed)

    def _end_if_never_complete(self, current: SaveRound) -> bool:
        """End a round, for the ranks that take part, if missing ranks will not come any more."""
        gone = self._without_a_part(current)
        if gone:
            which = f"rank {min(gone)} has" if len(gone) == 1 else f"ranks {', '.join(map(str, sorted(gone)))} have"
            self._abort(current, RoundAborted(f"{which} ended without saving step {current.key.step}", hint=_EVERY_RANK))
        return bool(gone)

    def _end_stuck(self, run: str, attempt: int) -> bool:
        """End rounds whose ranks wait for one another. Called with the lock."""
        saves = self._going.saves(LaunchKey(run, attempt))
        stuck = saves.stuck() if saves.is_waited_for else set()
        for step in stuck:
            self._abort(self._open[RoundKey(run, step, attempt)], saves.error_of(step))
        return bool(stuck)

    def _waited_for(self) -> dict[LaunchKey, OpenSaves]:
        """Saves with ranks on other nodes, for which some rank here waits."""
        with self._lock:
            keys = {LaunchKey(k.run, k.attempt) for k, current in self._open.items() if self._going.spans(current)}
            waiting = {key: self._going.saves(key) for key in keys}
        return {key: saves for key, saves in waiting.items() if saves.is_waited_for}

    def _end_stuck_of_nodes(self, launch: LaunchKey, open_saves: OpenSaves, others: Sequence[OpenSaves]) -> None:
        """End the saves whose ranks on all nodes wait for one another, if this node's statement `open_saves` still holds."""
        with self._lock:
            if self._going.saves(launch) != open_saves:
                return
            whole = open_saves.joined(others)
            for step in whole.stuck():
                key, error = RoundKey(launch.run, step, launch.attempt), whole.error_of(step)
                current = self._open.get(key)
                if current is not None:
                    self._abort(current, error)
                else:  # no rank of this node brings a part of it, and none may come with one later
                    self._given_up.add(key, set(), error)
                    self._joint.refuse(key, whole.world, error)

    def _without_a_part(self, current: SaveRound) -> set[int]:
        """Ranks that are gone without their part, so that the round can never complete."""
        return self._connected.gone(current.key.run, current.key.attempt) - set(current.sealed)

    def _make_room(self, new: SaveRound, who: Participant, segment: ArenaSegment, policy: Policy) -> int:
        """Free a slot by dropping older rounds; or drop the new round, and raise its error."""
        while True:
            try:
                return segment.lease(new.key.step, who.attempt, 0.0)
            except ArenaFull:
                complete = [r for r in self._write_queue.waiting() if r.holds(segment)]
                incomplete = [r for r in self._open.values() if r is not new and r.holds(segment)]
            older, awaited = gives_way(policy, complete, incomplete), self._going.awaited(segment)
            if older is None:
                error = GenerationDropped.of(new.key.step, None, policy, awaited)
                self._abort(new, error, {who.rank})
                raise error
            self._abort(older, GenerationDropped.of(older.key.step, new.key.step, policy, awaited))

    def _abort(self, current: SaveRound, error: CheckpointError, knowing: Collection[int] = (), heard: bool = False) -> None:
        """End a round that is not being written. `heard`: on another node's report."""
        if not heard and self._going.spans(current):
            self._joint.refuse(current.key, current.world, error)
        if self._open.get(current.key) is current:
            del self._open[current.key]
        elif current.complete:
            self._write_queue.withdraw(current)
        self._fills.leave(current)
        current.release()
        self._given_up.add(current.key, {*current.participants, *knowing}, error)
        self._ends.report(current, error, staging=None)
        self._announce(current, error)

    def _announce(self, current: SaveRound, error: CheckpointError | None) -> None:
        asks = error is None and current.averaged
        groups = self._control.lineage_index.groups(current.key.run, current.key.step) if asks else ()
        with self._lock:  # ranks that reconnect later ask for the committed steps
            if self._pending.get(current.key) is current:
                del self._pending[current.key]
                self._lock.notify_all()
            participants = list(current.participants.values())
        for participant in participants:
            participant.notify(outcome_of(current.key, error, groups))

    def _saved(self, current: SaveRound, result: Manifest | CheckpointError) -> None:
        if isinstance(result, CheckpointError):
            self._ends.report(current, result, Place(*current.key))
            self._announce(current, result)
            return
        self.checks.add(result)
        self._announce(current, None)
