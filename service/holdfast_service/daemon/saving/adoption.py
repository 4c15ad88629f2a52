"""Adopts shared memory of an earlier daemon: writes sealed saves, once, and waits for the ranks to reconnect.

A sealed, complete slot belongs to a save. A save that all ranks have sealed is written at once, unless its step is already a
checkpoint; an incomplete one waits for the missing ranks, and so do leased slots. All other slots are free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging import arena
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_formats.staging.wire import Outcome
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.segment import ArenaSegment, find_sealed
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.saver import Saver

log = logging.getLogger(__name__)

RETURN_S = 60.0  # how long a rank may take to find the next daemon


class _Absent(NamedTuple):
    """A rank that has not reconnected yet, and its segments."""

    who: Participant
    segments: list[ArenaSegment]
    deadline: float  # time.monotonic()


class AdoptedSaves(NamedTuple):
    """IDs of the continued rounds, and the reasons why other steps are not continued."""

    rounds: set[int]
    refused: dict[int, CheckpointError]


class Adoption:
    """The segments found at start, until their ranks reconnect or are given up."""

    def __init__(self, arena: Arena, saver: Saver, control: Control) -> None:
        self._arena, self._saver, self._control = arena, saver, control
        self._absent: dict[SegmentOwner, _Absent] = {}
        self._settle_at = float("inf")  # time.monotonic()

    def start(self) -> Collection[int]:
        """Adopt all segments of an earlier daemon; returns the IDs of saves that continue."""
        going_on: set[int] = set()
        self._settle_at = time.monotonic() + RETURN_S
        recovered = self._arena.recover()
        for segment in recovered:
            assert segment.owner is not None
            deadline = time.monotonic() + RETURN_S
            absent = self._absent.setdefault(segment.owner, _Absent(_participant(segment.owner), [], deadline))
            absent.segments.append(segment)
            if len(absent.segments) == 1:
                self._saver.join(absent.who)
        for absent in self._absent.values():
            for segment in absent.segments:
                going_on |= self.take_up(segment, segment.taken, absent.who).rounds
        self._saver.holds.find(recovered)
        return going_on

    def take_up(self, segment: ArenaSegment, taken: Sequence[int], who: Participant) -> AdoptedSaves:
        """Make the saver continue the saves in these slots of a segment."""
        adopted_saves = AdoptedSaves(set(), {})
        headers = [(arena.read_header(segment.memory, segment.geometry, slot), slot) for slot in taken]
        for header, slot in sorted(headers, key=lambda one: one[0].step):  # older steps are saved before newer ones
            sealed = find_sealed(segment, slot)
            try:
                if header.attempt != who.attempt or (header.state is SlotState.SEALED and sealed is None):
                    raise CheckpointError(f"slot {slot} is not complete")
                intent = None if sealed is None else sealed.table.intent
                self._saver.refuse_given_up(who, header.step)
                round_id = self._control.saves.resume(who.run, header.step, who.attempt, who.world, intent)
            except CheckpointError as error:
                log.info("cannot adopt %s@%s of rank %d: %s", who.run, header.step, who.rank, error.detail)
                adopted_saves.refused[header.step] = error
                segment.release(slot)
                continue
            log.info("adopted %s@%s of rank %d, %s", who.run, header.step, who.rank, header.state.name.lower())
            self._saver.adopt(who, header.step, round_id, segment, slot, sealed)
            adopted_saves.rounds.add(round_id)
        return adopted_saves

    def back(self, who: Participant, segment: ArenaSegment) -> None:
        """A rank reconnected with its segment: stop waiting for it, and free its old segments."""
        absent = self._absent.pop(who.owner, None)
        if absent is not None:
            self._saver.gone(absent.who)
            for other in absent.segments:
                if other is not segment:
                    self._arena.drop(other)

    def expire(self, now: float) -> None:
        """Give up ranks that have not reconnected by `now`: their incomplete saves end, their memory is freed. Saves staged
        when the last daemon ended and not found since are lost.
        """
        self._give_up(now)
        if now > self._settle_at:
            self._control.staged_before.settle()

    def _give_up(self, now: float) -> None:
        for owner, absent in list(self._absent.items()):
            if absent.deadline < now and self._absent.pop(owner, None) is not None:
                log.info("rank %d of %s did not reconnect", owner.rank, owner.run)
                self._saver.gone(absent.who)
                for segment in absent.segments:
                    self._arena.drop(segment)

    def close(self) -> None:
        """Give up all missing ranks. They may bring their memory to the next daemon."""
        self._give_up(float("inf"))


class _Unheard(Participant):
    """A rank of an earlier daemon. Until it reconnects it may be dead, so it keeps no job out."""

    heard = False

    def left_s(self) -> float:
        return 0.0


def _participant(owner: SegmentOwner) -> Participant:
    return _Unheard(owner.run, owner.rank, owner.world, owner.attempt, _no_subscriber)


def _no_subscriber(outcome: Outcome) -> None:
    log.info("the trainer that saved step %d is gone and cannot be notified that it is %s", outcome.step, outcome.state)
