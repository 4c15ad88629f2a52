"""The saver: collects the sealed slots of a world, has the complete ones written and committed, and tells their ranks.

A round is one attempt to save one step. It begins with the first rank's lease, is complete when every rank of the world has
sealed, and ends committed or aborted. Nothing of an incomplete round ever reaches storage.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from holdfast_formats import naming
from holdfast_formats.arena import Owner
from holdfast_formats.errors import CheckpointError, RoundAborted, StaleAttempt, StateMismatch
from holdfast_formats.manifest import Manifest
from holdfast_formats.plan import Plan
from holdfast_formats.wire import Outcome
from holdfast_service.storage import Tier

from .checking import Checks
from .holds import Holds
from .ports import Decisions
from .segment import LEASE_DEADLINE_S, SealedSlot, Segment, check_identity, find_sealed
from .writer import write

log = logging.getLogger(__name__)

ENDED_ROUNDS_MAX = 256


class RoundKey(NamedTuple):
    run: str
    step: int
    attempt: int


class Participant:
    """A rank as the saver knows it: who it is, and how to tell it what became of a save."""

    def __init__(self, run: str, rank: int, world: int, attempt: int, notify: Callable[[Outcome], None]) -> None:
        self.run, self.rank, self.world, self.attempt = run, rank, world, attempt
        self.notify = notify

    @property
    def owner(self) -> Owner:
        """Whose segments are this rank's."""
        return Owner(self.run, self.rank, self.world, self.attempt)


class _Lease(NamedTuple):
    segment: Segment
    slot: int
    deadline: float  # time.monotonic()


class _Round:
    def __init__(self, key: RoundKey, round_id: int, world: int) -> None:
        self.key, self.id, self.world = key, round_id, world
        self.deadline = time.monotonic() + LEASE_DEADLINE_S
        self.leases: dict[int, _Lease] = {}
        self.sealed: dict[int, SealedSlot] = {}
        self.participants: dict[int, Participant] = {}

    @property
    def complete(self) -> bool:
        return len(self.sealed) == self.world

    def release(self) -> None:
        for sealed in self.sealed.values():
            sealed.release()
        for lease in self.leases.values():
            lease.segment.release(lease.slot)
        self.sealed.clear()
        self.leases.clear()


class Saver:
    """Owner of all rounds of this node. Methods are called by the ranks' conversations, from any thread."""

    def __init__(self, tier: Tier, decisions: Decisions, node: str) -> None:
        self._tier, self._decisions, self._node = tier, decisions, node
        self._lock = threading.Condition()
        self._present: dict[tuple[str, int], set[Participant]] = {}  # (run, attempt) -> ranks connected now
        self._open: dict[RoundKey, _Round] = {}
        self._given_up: dict[RoundKey, tuple[set[int], CheckpointError]] = {}  # ranks that know, why
        self._pending: dict[RoundKey, _Round] = {}  # complete, being saved
        self._jobs: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self._checks = Checks(tier, decisions)
        self.holds = Holds(decisions.committed)
        self._thread = threading.Thread(target=self._save_loop, name="holdfast-saver", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self._open or self._pending or self._checks.left or self.holds.awaiting)

    def join(self, who: Participant) -> None:
        """A rank has said hello. Incomplete rounds of older attempts of its run end (I6); what all had sealed is saved."""
        with self._lock:
            self._present.setdefault((who.run, who.attempt), set()).add(who)
            for current in [r for k, r in self._open.items() if k.run == who.run and k.attempt < who.attempt]:
                self._abort(current, StaleAttempt(f"attempt {who.attempt} of {who.run} has begun"))

    def lease(self, who: Participant, segment: Segment, step: int, wait_s: float) -> int:
        """A slot of `segment` for this rank's part of `step`. Refuses by name a step that may not be saved by this rank."""
        key = RoundKey(who.run, step, who.attempt)
        with self._lock:
            self._refuse_if_given_up(key, who.rank)
        round_id = self._decisions.begin(who.run, step, who.attempt, who.world)
        slot = segment.lease(step, who.attempt, wait_s)
        with self._lock:
            try:
                self._refuse_if_given_up(key, who.rank)
                current = self._open.setdefault(key, _Round(key, round_id, who.world))
                if current.world != who.world:
                    raise StateMismatch(f"rank {who.rank} says the world has {who.world} ranks, not {current.world}")
                if who.rank in current.participants:
                    raise StateMismatch(f"rank {who.rank} saves step {step} twice", hint="wait for its ticket first")
            except CheckpointError:
                segment.release(slot)
                raise
            current.participants[who.rank] = who
            current.leases[who.rank] = _Lease(segment, slot, time.monotonic() + LEASE_DEADLINE_S)
        return slot

    def seal(self, who: Participant, slot: int, step: int, table_digest: str) -> None:
        """Take over a slot that its rank declares complete; the last one of the world sets the round going."""
        key = RoundKey(who.run, step, who.attempt)
        with self._lock:
            current = self._open.get(key)
            if _has_taken(current or self._pending.get(key), who, slot):
                return  # the answer to its first seal was lost with a connection
            lease = current.leases.get(who.rank) if current else None
            if current is None or lease is None or lease.slot != slot:
                self._refuse_if_given_up(key, who.rank)
                if current is None and self._decisions.committed(who.run, step) == who.attempt:
                    return
                raise RoundAborted(f"rank {who.rank} holds no lease on slot {slot} for step {step}")
            try:
                sealed = lease.segment.take_sealed(slot, step, table_digest)
                check_identity(sealed, who.owner, step)
            except CheckpointError as error:
                self._abort(current, error)
                raise
            del current.leases[who.rank]
            count = self._take(current, who.rank, sealed)
        self._decisions.sealed(current.id, count)

    def adopt(self, who: Participant, step: int, round_id: int, held: tuple[Segment, int, SealedSlot | None]) -> None:
        """A slot that an earlier daemon had leased to `who`, and that may be sealed, is this saver's from now on."""
        key = RoundKey(who.run, step, who.attempt)
        segment, slot, sealed = held
        with self._lock:
            current = self._open.setdefault(key, _Round(key, round_id, who.world))
            current.participants[who.rank] = who
            if sealed is None:
                current.leases[who.rank] = _Lease(segment, slot, current.deadline)
                return
            count = self._take(current, who.rank, sealed)
        self._decisions.sealed(round_id, count)

    def take_over(self, who: Participant, awaited: Collection[int]) -> None:
        """A rank is back on a new connection: it is told of the steps it awaits; its leases for others are free again."""
        unknown = set(awaited)
        with self._lock:
            for current in [*self._open.values(), *self._pending.values()]:
                step = current.key.step
                if (current.key.run, current.key.attempt) != (who.run, who.attempt):
                    continue
                if who.rank not in current.participants:
                    if step in unknown:
                        self._abort(current, RoundAborted(f"rank {who.rank} has lost its part of step {step}"))
                    continue
                if who.rank in current.leases and step not in unknown:  # granted, but the rank never heard of it
                    lease = current.leases.pop(who.rank)
                    del current.participants[who.rank]
                    lease.segment.release(lease.slot)
                    continue
                current.participants[who.rank] = who
                unknown.discard(step)
        for step in sorted(unknown):
            attempt = self._decisions.committed(who.run, step)
            lost = RoundAborted(f"step {step} was not sealed by rank {who.rank} when the daemon ended, or was given up")
            error = None if attempt == who.attempt else lost
            who.notify(_outcome(RoundKey(who.run, step, who.attempt), error))

    def give_up(self, who: Participant, step: int, error: CheckpointError) -> None:
        """A rank cannot complete its part: the round ends, for every rank."""
        with self._lock:
            current = self._open.get(RoundKey(who.run, step, who.attempt))
            if current is not None:
                self._abort(current, error)

    def gone(self, who: Participant) -> None:
        """A rank's process is gone. Rounds it had not sealed end; with the last rank, all incomplete ones do."""
        with self._lock:
            present = self._present.get((who.run, who.attempt), set())
            present.discard(who)
            if not present:
                self._present.pop((who.run, who.attempt), None)
            for current in [r for k, r in self._open.items() if (k.run, k.attempt) == (who.run, who.attempt)]:
                back = any(other.rank == who.rank for other in present)
                if current.participants.get(who.rank) is who and who.rank not in current.sealed:
                    self._take_left_behind(current, who)
                elif back:
                    continue
                if not current.complete and (not present or who.rank not in current.sealed):
                    self._abort(
                        current, RoundAborted(f"rank {who.rank} was gone before step {current.key.step} was complete")
                    )

    def renew(self, who: Participant, step: int) -> None:
        """The rank is still bringing its part, over a slow link: its lease and its round last anew."""
        deadline = time.monotonic() + LEASE_DEADLINE_S
        with self._lock:
            current = self._open.get(RoundKey(who.run, step, who.attempt))
            if current is not None and who.rank in current.leases:
                current.leases[who.rank] = current.leases[who.rank]._replace(deadline=deadline)
                current.deadline = deadline

    def expire(self) -> None:
        """End the rounds and the holds whose deadline has passed."""
        now = time.monotonic()
        self.holds.expire(now)
        with self._lock:
            for current in list(self._open.values()):
                late = sorted(rank for rank, lease in current.leases.items() if lease.deadline < now)
                if late or current.deadline < now:
                    missing = late or sorted(set(range(current.world)) - set(current.sealed))
                    self._abort(
                        current,
                        RoundAborted(f"ranks {missing} did not seal step {current.key.step} in {LEASE_DEADLINE_S:.0f} s"),
                    )

    def settle(self, run: str, wait_s: float) -> bool:
        """Wait until every complete round of `run` has ended, so that "the newest checkpoint" is what was really saved."""
        with self._lock:
            return self._lock.wait_for(lambda: all(key.run != run for key in self._pending), wait_s)

    def close(self) -> None:
        """Save and verify what is complete, end what is not, stop."""
        with self._lock:
            for current in list(self._open.values()):
                self._abort(current, RoundAborted("the daemon is shutting down"))
        self._jobs.put(None)
        self._thread.join()
        self._checks.close()
        self.holds.close()

    def _take(self, current: _Round, rank: int, sealed: SealedSlot) -> int:
        """How many ranks have sealed, now that this one has; the last one sets the round going."""
        current.sealed[rank] = sealed
        if current.complete:
            self._pending[current.key] = self._open.pop(current.key)
            self._jobs.put(current)
        return len(current.sealed)

    def _take_left_behind(self, current: _Round, who: Participant) -> None:
        """A rank is gone that may have sealed its slot without living to say so."""
        lease = current.leases.get(who.rank)
        sealed = find_sealed(lease.segment, lease.slot) if lease else None
        if sealed is not None and sealed.table.step == current.key.step:
            del current.leases[who.rank]
            self._take(current, who.rank, sealed)

    def _refuse_if_given_up(self, key: RoundKey, rank: int) -> None:
        """A rank that comes late to a round the others have lost is told so once; after that the step may be tried anew."""
        known, error = self._given_up.get(key, (set(), None))
        if error is not None and rank not in known:
            known.add(rank)
            raise error

    def _abort(self, current: _Round, error: CheckpointError) -> None:
        self._open.pop(current.key, None)
        current.release()
        self._given_up[current.key] = (set(current.participants), error)
        while len(self._given_up) > ENDED_ROUNDS_MAX:
            del self._given_up[next(iter(self._given_up))]
        self._end_aborted(current, error, staging=None)

    def _end_aborted(self, current: _Round, error: CheckpointError, staging: str | None) -> None:
        log.warning("%s@%s attempt %s aborted: %s", *current.key, error.detail)
        try:
            self._decisions.abort(current.id, error, staging)
        except CheckpointError as failure:  # the ranks must hear of it though the catalog cannot
            log.error("the end of %s@%s attempt %s is not recorded: %s", *current.key, failure.detail)
        self._announce(current, error)

    def _announce(self, current: _Round, error: CheckpointError | None) -> None:
        with self._lock:  # who comes back after this asks for what is committed
            if self._pending.get(current.key) is current:
                del self._pending[current.key]
                self._lock.notify_all()
            participants = list(current.participants.values())
        for participant in participants:
            participant.notify(_outcome(current.key, error))

    def _save_loop(self) -> None:
        while (current := self._jobs.get()) is not None:
            self._save(current)

    def _save(self, current: _Round) -> None:
        staging = naming.staging_path(*current.key)
        try:
            plan = self._decisions.plan([sealed.table for sealed in current.sealed.values()])
            made = self._write_and_commit(current, plan, staging)
        except CheckpointError as error:
            current.release()
            self._end_aborted(current, error, staging)
            return
        except Exception as error:
            log.exception("%s@%s attempt %s failed", *current.key)
            current.release()
            wrapped = RoundAborted(f"unexpected {type(error).__name__} in the daemon", hint="see the daemon's log")
            self._end_aborted(current, wrapped, staging)
            return
        log.info("%s@%s attempt %s committed: %d bytes", *current.key, made.bytes)
        self._checks.add(made)
        self._announce(current, None)

    def _write_and_commit(self, current: _Round, plan: Plan, staging: str) -> Manifest:
        self._tier.remove_tree(staging)
        write(self._tier, plan, staging, {rank: s.data for rank, s in current.sealed.items()}, self._node)
        made = self._decisions.commit(current.id, plan)
        self.holds.keep(*current.key, current.sealed)
        current.release()  # not before: until it is committed, the next daemon may need what is in the slots
        return made


def _has_taken(current: _Round | None, who: Participant, slot: int) -> bool:
    sealed = current.sealed.get(who.rank) if current else None
    return sealed is not None and sealed.slot == slot


def _outcome(key: RoundKey, error: CheckpointError | None) -> Outcome:
    state: Literal["committed", "aborted"] = "committed" if error is None else "aborted"
    return Outcome(step=key.step, attempt=key.attempt, state=state, problem=error.problem() if error else None)
