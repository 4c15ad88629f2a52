"""The saver: what ranks ask of it while they save, from their connection to their end.

A save (round) is one attempt to save one step. It starts with the first rank's lease, is complete when every rank has
sealed, and ends committed or aborted. Nothing of an incomplete save reaches storage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from holdfast_formats.errors import (
    ArenaFull,
    Awaited,
    CheckpointError,
    GenerationDropped,
    RoundAborted,
)
from holdfast_formats.files import Files
from holdfast_formats.staging.messages import Policy, SlotRequest
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.arena.segment import LEASE_DEADLINE_S, NO_MEMORY, ArenaSegment, SealedSlot, check_identity
from holdfast_service.daemon.averaging.averages import Averages
from holdfast_service.daemon.checking.checker import Checker, Checks
from holdfast_service.daemon.saving.active_saves import ActiveSaves
from holdfast_service.daemon.saving.other_nodes import NO_OTHER_NODES, LocalRanks, OtherNodes
from holdfast_service.daemon.saving.read_throttle import ReadThrottle
from holdfast_service.daemon.saving.restore_barrier import RestoreBarrier
from holdfast_service.daemon.saving.round_lifecycle import RoundLifecycle
from holdfast_service.daemon.saving.round_reaper import RoundReaper
from holdfast_service.daemon.saving.rounds import Participant, RoundKey, SaveRound, SlotLease, outcome_of
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.saving.slot_policy import gives_way
from holdfast_service.daemon.saving.stop_agreement import StopAgreement
from holdfast_service.daemon.writing.disk_throughput import Probe
from holdfast_service.observe import bucket_traffic

_NONE: Mapping[int, CheckpointError] = MappingProxyType({})

CLOSE_S = 5.0  # how long the catalog is waited for, so that what was saved last is checked as well


class Unwritten(NamedTuple):
    """Complete saves that are not committed yet, and how fast the disk is known to be."""

    saves: int
    bytes: int
    bytes_per_second: float | None

    def __str__(self) -> str:
        if not self.saves:
            return "no save is left to write"
        size = f"{self.saves} save{'s' * (self.saves > 1)}, {self.bytes / 1e6:.0f} MB"
        return f"waiting for {size}" + (
            f", about {self.bytes / self.bytes_per_second:.0f} s" if self.bytes_per_second else ""
        )


class Saver:
    """Owner of all saves of this node. Its methods are called from any thread."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        tier: Files,
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
        self._active = active = ActiveSaves(not others.alone, lambda: bucket_traffic.awaited(control.storage.traffic))
        self._lock, self.connected, self._given_up = active.lock, active.connected, active.given_up
        self._open, self._pending = active.open, active.pending
        self._entering: dict[str, threading.Lock] = {}
        self.history = SaveHistory(control, probe)
        checker = checker or Checker(tier, control)
        self.restores = RestoreBarrier(checker.suspect, control, vote=others.vote, spans=active.is_elsewhere)
        self.giving_way = ReadThrottle(lambda: active.staging or self.restores.under_way)
        self.spread = others.checks(checker, self.giving_way)
        self.checks = Checks(checker, self.history.verified, self.giving_way, control.record_queue.recorded, self.spread)
        self.stops = StopAgreement(self.connected, None if others.alone else self._look_at_ranks)
        self.holds = holds or MemoryCheckpoints(control.lineage_index.launch, partly=not others.alone)
        self.averages = averages
        self._rounds = RoundLifecycle(
            active,
            control,
            others,
            node=node,
            history=self.history,
            holds=self.holds,
            checks=self.checks,
            averages=averages,
        )
        self._reaper = RoundReaper(active, self._rounds)
        here = LocalRanks(active.spanning, self._reaper.waited_for, self._reaper.end_stuck_of_nodes)
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
            return len(self._pending) + sum(self._active.is_part(current) for current in self._open.values())

    def unwritten(self) -> Unwritten:
        """What a daemon that stops has to write first."""
        with self._lock:
            sizes = [sum(one.data.nbytes for one in list(current.sealed.values())) for current in self._pending.values()]
        return Unwritten(len(sizes), sum(sizes), self.history.disk.bytes_per_second)

    def entering(self, run: str) -> threading.Lock:
        """The lock to hold from the check whether a rank may join a run until it has joined."""
        with self._lock:
            return self._entering.setdefault(run, threading.Lock())

    def join(self, who: Participant) -> None:
        """A rank connected. Incomplete saves of older attempts of its run end (I6); completely sealed ones are saved."""
        with self._lock:
            self.connected.join(who)
            self.restores.join(who)
            self._reaper.end_older(who.run, who.attempt)

    def shut_out(self, run: str, newest: int) -> None:
        """A newer attempt has started on another node: incomplete saves of older ones end (I6)."""
        with self._lock:
            self._reaper.end_older(run, newest)

    def _look_at_ranks(self) -> None:
        """A rank's statement concerns other nodes."""
        self._ranks.look()

    def vacate(self, run: str) -> bool:
        """Forget the ranks of a run; False while some are connected, or a save is running."""
        with self._lock:
            if run in self.connected.runs or any(key.run == run for key in (*self._open, *self._pending)):
                return False
            self.connected.forget(run)
            self.restores.forget(run)
            return True

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
            here = self.connected.ranks(who.run, who.attempt)
        self.holds.trains(who.owner, here)
        quiet = self._active.is_reported_elsewhere(who)
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
                    raise RoundAborted(f"step {step} is being saved by ranks of several nodes, including this one")
                current = begun or SaveRound(key, round_id, who.world, time.monotonic() + LEASE_DEADLINE_S)
                current.refuse(who)
                if slot < 0:  # what cannot become complete takes no other's place
                    lost = self._active.without_a_part(current)
                    slot = self._make_room(current, who, segment, "oldest-durable" if lost else policy)
                self._open[key] = current
                current.add(who, SlotLease(segment, slot, time.monotonic() + LEASE_DEADLINE_S))
                self._reaper.end_if_never_complete(current)
                self._reaper.end_stuck(who.run, who.attempt)
        except CheckpointError as error:
            if slot >= 0:
                segment.release(slot)
            with self._lock:
                if key not in self._open and key not in self._pending:
                    self._rounds.failed.record(key, round_id, error, staging=None)
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
                self._rounds.abort(current, error)
                raise
            del current.leases[who.rank]
            count = self._rounds.take(current, who.rank, sealed)
        self._control.rounds.seal(current.id, count)
        self._rounds.taken()

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
            count = self._rounds.take(current, who.rank, sealed)
        self._control.rounds.seal(round_id, count)

    def take_over(
        self, who: Participant, awaited: Mapping[int, int], refused: Mapping[int, CheckpointError] = _NONE
    ) -> None:
        """A rank reconnected: report the steps that it waits for, given with the turns of their saves.

        Its other leases are freed. `refused` has the reasons why steps it brought may not be saved.
        """
        with self._lock:
            unknown = self._rounds.rejoin(who, set(awaited))
        for step in sorted(unknown):
            committed = self._control.lineage_index.launch(who.run, step) == (who.attempt, awaited[step])
            key = RoundKey(who.run, step, who.attempt)
            lost = self._given_up.why(
                key, f"step {step} was not sealed by rank {who.rank} when the daemon stopped, or it was given up"
            )
            error = None if committed else refused.get(step, lost)
            groups = self._control.lineage_index.groups(who.run, step) if committed else ()
            who.notify(outcome_of(key, error, groups))

    def waits(self, who: Participant, step: int | None) -> None:
        """A rank begins no other save before the one of this step has ended; without a step, none any more."""
        with self._lock:
            who.waits(step)
            self._reaper.end_stuck(who.run, who.attempt)
        self._look_at_ranks()

    def give_up(self, who: Participant, step: int, error: CheckpointError) -> None:
        """A rank cannot complete its part: the save ends for every rank, including later ones."""
        key = RoundKey(who.run, step, who.attempt)
        with self._lock:
            current = self._open.get(key)
            if current is not None:
                self._rounds.abort(current, error)
            elif key not in self._pending and self._control.lineage_index.launch(who.run, step) is None:
                self._given_up.know(key, who.rank, error)
                if len(self.connected.of(who.run)) < who.world:
                    self._rounds.refuse(key, who.world, error)

    def refuse_given_up(self, who: Participant, step: int) -> None:
        """Raise the error that ended this step for the other ranks, unless this rank has received it."""
        with self._lock:
            self._given_up.refuse(RoundKey(who.run, step, who.attempt), who.rank)

    def gone(self, who: Participant) -> None:
        """A rank's process is gone. Its unsealed saves end; with the last rank, all incomplete ones do."""
        with self._lock:
            present = self.connected.leave(who)
            if not any(other.rank == who.rank for other in present):
                self.restores.gone(who)
            if not present:
                self._control.launches.parted(who.run, who.attempt)
            self._reaper.end_left(who, present)

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
        self._reaper.end_late(now)

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
                self._rounds.abort(current, RoundAborted(f"the daemon of node {self._node} is shutting down"))
        self.restores.close()
        if self.averages is not None:
            self.averages.close()
        self._rounds.write_queue.close()
        self._ranks.close()
        self._rounds.close()
        self._control.record_queue.recorded(CLOSE_S)
        self.checks.close()
        self.spread.close()
        self.history.disk.close()
        self.history.flush(everything=True)
        self.holds.close()

    def _make_room(self, new: SaveRound, who: Participant, segment: ArenaSegment, policy: Policy) -> int:
        """Free a slot by dropping older rounds; or drop the new round, and raise its error."""
        while True:
            try:
                return segment.lease(new.key.step, who.attempt, 0.0)
            except ArenaFull as full:
                memory = full.members.get("reason") == NO_MEMORY
                complete = [r for r in self._rounds.waiting() if r.holds(segment)]
                incomplete = [r for r in self._open.values() if r is not new and r.holds(segment)]
                awaited = Awaited(full.detail, full.hint or "") if memory else self._active.awaited(segment)
            older = gives_way(policy, complete, incomplete)
            if older is None:
                error = GenerationDropped.of(new.key.step, None, policy, awaited)
                self._rounds.abort(new, error, {who.rank})
                raise error
            self._rounds.abort(older, GenerationDropped.of(older.key.step, new.key.step, policy, awaited))
