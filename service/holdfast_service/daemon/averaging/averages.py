"""The averages of all ranks here: updates are folded in the order of their numbers, and saves take the preceding ones.

An update counts if every rank of the world has sealed it: otherwise parts of an average would be of different steps. So an
update that any rank leaves out is left out for all, on all nodes (`agreement`). A save takes the average once all updates
before its seal are folded, and before any later one is. One thread does all this; ranks wait for none of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import msgspec

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.rest.bodies import KeptAverage
from holdfast_formats.staging import average
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_formats.staging.average import AverageRecord, AverageRule
from holdfast_formats.staging.average_history import history_after
from holdfast_formats.staging.joint import AverageVote
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.average_segment import PREFIX, AverageSegment
from holdfast_service.daemon.arena.segment import SealedSlot, memfd
from holdfast_service.daemon.arena.shares import ShareHolder
from holdfast_service.daemon.averaging import saved_average
from holdfast_service.daemon.averaging.agreement import OneNodeAgreement, UpdateAgreement
from holdfast_service.daemon.averaging.folding import fold
from holdfast_service.daemon.averaging.rank_set import AveragingRanks, Filled, PendingFill, RankSetKey
from holdfast_service.daemon.writing.priority import give_way

log = logging.getLogger(__name__)

LOOK_S = 1.0  # ranks notify; this is for those whose daemon died before it read the notification


class Averages:
    """All averages of this node. Thread-safe."""

    def __init__(
        self, arena: Arena, agree: Callable[[Callable[[RankSetKey], None]], UpdateAgreement] = OneNodeAgreement
    ) -> None:
        """`agree` makes the agreement with other nodes, which calls its argument after their votes."""
        self._arena = arena
        self._lock = threading.Condition()
        self._node_ranks: dict[RankSetKey, AveragingRanks] = {}
        self._rung: set[RankSetKey] = set()
        self._ending = False
        self._agreement = agree(self._ring)
        self._thread = threading.Thread(target=self._run, name="holdfast-averages", daemon=True)

    def recover(self) -> None:
        """Take over an earlier daemon's averages from the keeper, after the arena has."""
        for segment in self._arena.averages():
            self._add(segment, None)

    def start(self) -> None:
        """Begin to fold, after all saves of an earlier daemon have been adopted."""
        self._thread.start()

    def close(self) -> None:
        """Complete the saves that wait for an average, then stop."""
        with self._lock:
            self._ending = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._agreement.close()

    def reserve(
        self, owner: SegmentOwner, room: average.AverageGeometry, holder: ShareHolder, user: object
    ) -> AverageSegment:
        """Memory for a rank's average, which it may have already. `LimitExceeded`, with the numbers, if there is none."""
        known = self._known(owner)
        if known is not None and known.geometry == room:
            self._use(known, user)
            return known
        if known is not None:
            self._drop(known)
        self._end_older(owner)
        label = f"{owner.run}-rank{owner.rank}-average"

        def make() -> AverageSegment:
            return AverageSegment.make(memfd(label, room.segment_bytes), room, owner, f"{PREFIX}{uuid.uuid4().hex}")

        segment = self._arena.admit(owner, room.segment_bytes, holder, make)
        self._add(segment, user)
        return segment

    def attach(self, fd: int, owner: SegmentOwner, user: object, tenant: str = "") -> None:
        """Continue with an average that its rank brings; the descriptor stays the caller's."""
        known, holder = self._known(owner), ShareHolder(owner.run, tenant)
        if known is None or not known.is_at(fd):
            if known is not None:
                self._drop(known)
            ours = os.dup(fd)
            try:
                known = AverageSegment.adopt(ours, f"{PREFIX}{uuid.uuid4().hex}")
            except (CheckpointError, OSError, ValueError) as error:
                os.close(ours)
                raise InvalidRequest(f"the descriptor is not an average: {error}") from error
            if known.owner != owner:
                known.close()
                raise InvalidRequest(f"{owner} attached an average of {known.owner}")
            try:
                self._arena.take_in(known, holder)
            except CheckpointError:
                known.close()
                raise
            self._add(known, user)
            return
        known.count_for(holder)
        self._use(known, user)

    def wake(self, owner: SegmentOwner) -> None:
        """A rank has sealed or skipped an update."""
        self._ring(_rank_set_of(owner))

    def leave(self, owner: SegmentOwner, user: object, parted: bool) -> None:
        """A rank's connection has ended; `parted`: regularly."""
        with self._lock:
            rank_set = self._node_ranks.get(_rank_set_of(owner))
            if rank_set is None or not rank_set.leave(owner.rank, user, parted):
                return
            self._rung.add(_rank_set_of(owner))
            self._lock.notify_all()

    def fill(self, key: RankSetKey, parts: Mapping[int, SealedSlot], then: Filled) -> None:
        """Put the average into the slots of a save that all ranks here have sealed, then call `then`, in another thread."""
        with self._lock:
            self._node_ranks.setdefault(key, AveragingRanks()).add(PendingFill(parts, then))
            self._rung.add(key)
            self._lock.notify_all()

    def withdraw(self, key: RankSetKey, step: int) -> bool:
        """Stop a save's wait for the average. False if it does not wait: the slots are being filled or are filled, and
        `then` is called soon, or was.
        """
        with self._lock:
            rank_set = self._node_ranks.get(key)
            return rank_set is not None and rank_set.withdraw(step)

    def report(self) -> list[KeptAverage]:
        """The state of every started average here, by rank 0's record."""
        with self._lock:
            node_ranks = [(key, rank_set.segments.get(0)) for key, rank_set in self._node_ranks.items()]
        records = [(key, one.record) for key, one in node_ranks if one is not None]
        return [_told(key, record, record.rule) for key, record in records if record.rule is not None]

    def _ring(self, key: RankSetKey) -> None:
        with self._lock:
            self._rung.add(key)
            self._lock.notify_all()

    def _known(self, owner: SegmentOwner) -> AverageSegment | None:
        with self._lock:
            rank_set = self._node_ranks.get(_rank_set_of(owner))
            return None if rank_set is None else rank_set.segments.get(owner.rank)

    def _add(self, segment: AverageSegment, user: object) -> None:
        with self._lock:
            rank_set = self._node_ranks.setdefault(_rank_set_of(segment.owner), AveragingRanks())
            rank_set.segments[segment.owner.rank] = segment
            if user is not None:
                rank_set.users[segment.owner.rank] = user
            self._rung.add(_rank_set_of(segment.owner))
            self._lock.notify_all()

    def _use(self, segment: AverageSegment, user: object) -> None:
        with self._lock:
            self._node_ranks[_rank_set_of(segment.owner)].users[segment.owner.rank] = user
        self.wake(segment.owner)

    def _drop(self, segment: AverageSegment) -> None:
        with self._lock:
            rank_set = self._node_ranks.get(_rank_set_of(segment.owner))
            if rank_set is not None and rank_set.segments.get(segment.owner.rank) is segment:
                del rank_set.segments[segment.owner.rank]
        self._arena.let_go(segment)

    def _end_older(self, owner: SegmentOwner) -> None:
        """A newer attempt averages: drop older averages, unless a save waits for them."""
        with self._lock:
            older = [
                segment
                for key, rank_set in self._node_ranks.items()
                if key.run == owner.run and key.attempt < owner.attempt and not rank_set.fills and not rank_set.users
                for segment in rank_set.segments.values()
            ]
        for segment in older:
            self._drop(segment)

    def _run(self) -> None:
        give_way()
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._rung or self._ending, LOOK_S if self._node_ranks else None)
                self._rung.clear()
                node_ranks = list(self._node_ranks.items())
                if self._ending and not any(rank_set.fills for _, rank_set in node_ranks):
                    return
            for key, rank_set in node_ranks:
                try:
                    self._look(key, rank_set)
                except Exception:
                    log.exception("updating the average of %s, attempt %d, failed", key.run, key.attempt)
                    self._give_up(rank_set)

    def _look(self, key: RankSetKey, rank_set: AveragingRanks) -> None:
        while self._fill_first(key, rank_set) or self._next(key, rank_set):
            pass
        now = time.monotonic()
        with self._lock:
            unused = list(rank_set.segments.values()) if rank_set.unused(now) else None
            if unused is not None and self._node_ranks.get(key) is rank_set:
                del self._node_ranks[key]
        for segment in unused or ():
            self._arena.let_go(segment)
        if unused is not None:
            self._agreement.forget(key)

    def _next(self, key: RankSetKey, rank_set: AveragingRanks) -> bool:
        """Process the next update, if every rank has decided about it; False if there is none."""
        with self._lock:
            segments = dict(sorted(rank_set.segments.items()))
            fills = list(rank_set.fills)
        records = {rank: segment.record for rank, segment in segments.items()}
        for rank, segment in segments.items():
            header = segment.header
            if header.state is SlotState.SEALED and header.number <= records[rank].number:
                segment.free()  # a daemon died between the record and this
        spread = len(segments) < key.world
        if not segments or (spread and self._agreement.alone):
            return False
        number = min(record.number for record in records.values()) + 1
        behind = {rank: segment for rank, segment in segments.items() if records[rank].number < number}
        if any(segment.header.decided < number for segment in behind.values()):
            return False
        history = _history_after(behind, records, number)  # after it was looked what they have decided
        counts = history is not None
        if spread:
            folded = min(records[rank].folded for rank in behind)
            agreed = self._agreement.counts(key, AverageVote(tuple(segments), number, history or "", folded))
            if agreed is None:
                return False
            counts = agreed
        if fills and fills[0].after < number:  # the save takes what is there before this
            return False
        if counts:
            for segment in behind.values():
                fold(segment, segment.update())
            return True
        for rank, segment in behind.items():
            segment.write(msgspec.structs.replace(records[rank], number=number))
            header = segment.header
            if header.state is SlotState.SEALED and header.number <= number:
                segment.free()
        return True

    def _fill_first(self, key: RankSetKey, rank_set: AveragingRanks) -> bool:
        """Give the oldest save its average, if that is possible now; returns whether it did."""
        with self._lock:
            segments = dict(sorted(rank_set.segments.items()))
            fill = rank_set.begin_fill()
        if fill is None:
            return False
        error: CheckpointError | None = None
        done = False
        try:
            done = self._put(key, segments, fill)
        except CheckpointError as failure:
            error, done = failure, True
        finally:
            with self._lock:
                rank_set.end_fill(fill, done)
        if done:
            fill.then(error)
        return done

    def _put(self, key: RankSetKey, segments: Mapping[int, AverageSegment], fill: PendingFill) -> bool:
        average_handover = saved_average.agreed(fill.parts)
        filled = [rank for rank, sealed in fill.parts.items() if saved_average.is_filled(sealed)]
        noted_average: saved_average.NotedAverage | None = None
        if filled:  # an earlier daemon has begun, and nothing was folded since
            noted_average = saved_average.noted(fill.parts[filled[0]])
            if noted_average is not None and not fill.parts.keys() - set(filled) <= segments.keys():
                if self._waits(fill):
                    return False
                raise CheckpointError(f"the average of some ranks at step {fill.step} is lost")
        else:
            records = [segment.record for segment in segments.values()]
            whole = segments.keys() == fill.parts.keys()
            if not whole or min(record.number for record in records) < average_handover.after:
                if self._waits(fill):
                    return False
                log.warning("step %d of %s is saved without its average, which was lost", fill.step, key.run)
            elif _one(records, fill.parts):
                state = average.state_at(records[0], average_handover)
                noted_average = None if state is None else saved_average.NotedAverage(state, records[0].history)
            elif any(record.n for record in records):
                log.warning("step %d of %s is saved without its average: %s", fill.step, key.run, records)
        for rank, sealed in fill.parts.items():
            if rank in filled:
                continue
            if noted_average is None:
                saved_average.put_nothing(sealed)
            else:
                saved_average.put(sealed, segments[rank], noted_average)
        saved_average.tell(fill.parts, noted_average)
        return True

    def _waits(self, fill: PendingFill) -> bool:
        if self._agreement.away:
            fill.renew()
        return not fill.is_late and not self._ending

    def _give_up(self, rank_set: AveragingRanks) -> None:
        with self._lock:
            fills = rank_set.give_up()
        for fill in fills:
            fill.then(CheckpointError("unexpected failure of the average in the daemon", hint="see the daemon's log"))


def _rank_set_of(owner: SegmentOwner) -> RankSetKey:
    return RankSetKey(owner.run, owner.attempt, owner.world)


def _history_after(behind: Mapping[int, AverageSegment], records: Mapping[int, AverageRecord], number: int) -> str | None:
    """The averages' history with this update; None if not all deliver it, each fitting its average."""
    histories = {
        record.history if record.folded == number else None for record in records.values() if record.number >= number
    }
    for rank, segment in behind.items():
        if not segment.brings(number):
            return None
        try:
            update = segment.update()
        except InvalidRequest as error:
            log.warning("update %d of an average was skipped: %s", number, error.detail)
            return None
        record = records[rank]
        if update.seed is None and record.n and update.layout != record.layout:
            log.warning("update %d of the average of %s was skipped: its tensors differ", number, segment.owner)
            return None
        histories.add(history_after(record.history, update))
    if len(histories) > 1:
        log.warning("update %d of an average was skipped: ranks sent it for different steps", number)
    return histories.pop() if len(histories) == 1 else None


def _told(key: RankSetKey, record: AverageRecord, rule: AverageRule) -> KeptAverage:
    left_out = record.dropped + record.skipped + record.lost + record.number - record.seeded - record.own
    return KeptAverage(
        run=key.run,
        attempt=key.attempt,
        of=rule.of,
        decay=rule.decay,
        every=rule.every,
        n=record.n,
        step=record.step,
        left_out=left_out,
    )


def _one(records: list[AverageRecord], parts: Mapping[int, SealedSlot]) -> bool:
    """Whether all ranks have the same average, of the updates before a save, with the tensors that the save states. Both are
    in the order of ranks.
    """
    first = records[0]
    handovers = [saved_average.handover(sealed) for _, sealed in sorted(parts.items())]
    return first.n > 0 and all(
        (one.folded, one.seeded, one.n, one.own, one.history)
        == (first.folded, first.seeded, first.n, first.own, first.history)
        and one.layout == place.layout
        and one.folded <= place.after
        for one, place in zip(records, handovers, strict=True)
    )
