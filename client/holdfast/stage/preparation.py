"""Prepares the first save ahead of it: its memory is reserved and touched in the background."""

from __future__ import annotations

import logging

from holdfast.stage import cuda_copy
from holdfast.stage.daemon_requests import DaemonRequest
from holdfast.stage.preallocation import Preallocation
from holdfast.stage.saves import Saves, SavingRank
from holdfast.stage.slot_contents import SlotContents
from holdfast.stage.slot_growth import Need
from holdfast.stage.slots import Slots
from holdfast.stage.staging import SaveIdentity
from holdfast_formats.errors import CheckpointError, DeadlineExceeded

log = logging.getLogger(__name__)


class Preparation:
    """Begins when it is asked for, or else once, when training begins."""

    def __init__(self, rank: SavingRank, contents: SlotContents, saves: Saves) -> None:
        self._rank, self._contents, self._saves = rank, contents, saves
        self._asked = False
        self._under_way: Preallocation | None = None

    def begin(self) -> Preallocation | None:
        """Begin in the background; None in a signal handler that interrupted another call."""
        self._asked = True
        return self._rank.calls.run("prepare()", self._begin, lambda during: None)

    def begin_unasked(self) -> None:
        """Begin unless it has begun before."""
        if not self._asked:
            try:
                self.begin()
            except CheckpointError as error:
                log.info("not prepared for saves: %s", error.detail)  # the first save reports it, if it matters

    def stop(self) -> None:
        """End early. The memory stays reserved."""
        if self._under_way is not None:
            self._under_way.stop()
            self._under_way = None

    def _begin(self) -> Preallocation:
        rank = self._rank
        need = self._contents.expected(SaveIdentity(rank.run, 0, 0, rank.launch.rank, rank.launch.world))
        self._under_way = Preallocation(lambda: self._reserved(need), cuda_copy.homes(need.leaves))
        return self._under_way

    def _reserved(self, need: Need) -> Slots:
        """Runs in a thread that no signal interrupts; a save need not wait for it."""
        calls, requests = self._rank.calls, self._rank.requests

        def begin() -> DaemonRequest:
            calls.refuse_if_closed()
            if requests.busy:
                raise DeadlineExceeded("the daemon has not answered yet")
            return requests.begin(lambda: self._saves.room_for(need))

        request = calls.run("prepare()", begin, lambda during: begin())
        slots: Slots = requests.result(request)
        calls.run("prepare()", lambda: self._saves.lay_ahead(slots), bool)
        return slots
