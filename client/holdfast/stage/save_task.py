"""One save's way from live memory to a sealed slot: at once, or behind the back of the training."""

from __future__ import annotations

import logging
from typing import NamedTuple

from holdfast.stage import cuda_copy
from holdfast.stage.background_copy import BackgroundCopy
from holdfast.stage.copy_plans import CopyPlan, CopyPlans
from holdfast.stage.replica_claims import Statement
from holdfast.stage.slots import Slot
from holdfast.stage.staging import SlotLayout
from holdfast.threads import at_exit, background_requests
from holdfast.tickets import SaveTicket, Tickets
from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging import slot_table

log = logging.getLogger(__name__)


class Sealable(NamedTuple):
    """A leased slot and everything that goes into it; `says` what it is to say of the bytes that ranks share."""

    slot: Slot
    layout: SlotLayout
    table: bytes
    says: Statement | None = None
    full: bool = False  # all of the live memory is compared with what was copied, not some words

    def seal(self) -> None:
        """All is in the slot: complete its table, and hand both over."""
        digests = self.says.digests(self.slot.data) if self.says is not None else b""
        self.slot.seal(slot_table.with_digests(self.table, digests), self.layout.data_bytes)


class SaveTask:
    """Brings a rank's part of one save into its slot and seals it; whatever fails ends ticket and round by name."""

    def __init__(self, ticket: SaveTicket, part: Sealable, tickets: Tickets, routes: CopyPlans) -> None:
        self._ticket, self._part, self._tickets, self._routes = ticket, part, tickets, routes
        self._copy: BackgroundCopy | None = None
        self._devices: list[cuda_copy.DeviceCopy] = []
        self._waited = False
        self._stalled_s, self._told = 0.0, False
        self._failed: CheckpointError | None = None

    def begin(self, waited: bool = False) -> None:
        """Copy what may change at any time, and leave the rest to a background thread, which seals when it is done.

        What goes wrong later is told by the ticket; where it is `waited` for, by `complete`.
        """
        self._waited = waited
        try:
            ways = self._ways()
            for lane in ways.lanes:
                self._devices.append(cuda_copy.DeviceCopy(lane))
                self._devices[-1].begin(self._part.full)
            ways.copy_at_once()
            copy = BackgroundCopy(ways.tracks, self._end, self._devices, self._part.full)
        except BaseException as error:
            for copying in self._devices:
                copying.settle()
            self._give_up(error if isinstance(error, CheckpointError) else CheckpointError(f"staging failed: {error!r}"))
            self._tickets.drop(self._ticket)
            raise
        at_exit.see_through(self)
        self._copy = copy
        try:
            copy.start()
        except BaseException:  # a signal handler's, who may not have let it start; what has begun is completed
            copy.start()
            raise

    def complete(self) -> None:
        """Wait until it is sealed. Raises what went wrong, after the round was given up."""
        self.join()
        if self._failed is not None:
            raise self._failed

    def fence(self) -> None:
        """Return when the live state may change again: that of a GPU by what its current stream is given from now on."""
        if self._copy is not None:
            self._copy.fence()
            for copy in self._devices:
                copy.fence()

    def held(self, seconds: float, last: bool = False) -> None:
        """Training stood still for this save, so long. With the `last` time the daemon is told the sum, once."""
        if self._told:
            return
        self._stalled_s += seconds
        if last:
            self._told = True
            self._part.slot.measured(self._stalled_s)

    def join(self, timeout: float | None = None) -> bool:
        """Return when the slot is sealed, or the save has failed; whether that was within `timeout` seconds."""
        return self._copy is None or self._copy.join(timeout)

    def __str__(self) -> str:
        return f"{self._ticket.run}@{self._ticket.step}"

    def _ways(self) -> CopyPlan:
        """The way into the slot, in which the assets, which are no live memory, stand already."""
        layout, data = self._part.layout, self._part.slot.data
        for blob, content in layout.blobs:
            data[blob.slot_offset : blob.slot_offset + blob.length] = content
        return self._routes.into(self._part.slot, layout)

    def _end(self, error: CheckpointError | None) -> None:
        error = cuda_copy.finish(self._devices, error)
        try:
            if error is not None:
                raise error
            self._part.seal()
        except CheckpointError as failure:
            self._failed = failure
            if self._waited:  # it is raised where it is waited for
                self._tickets.drop(self._ticket)
            else:
                self._tickets.fail(self._ticket, failure)
            self._give_up(failure)
        else:
            self._ticket.mark_staged()
        finally:
            at_exit.forget(self)

    def _give_up(self, error: CheckpointError) -> None:
        try:
            self._part.slot.abandon(error)
        except CheckpointError as gone:
            step, why = self._ticket.step, gone.detail
            # Aside: the thread that waits for us may be writing to the log itself.
            background_requests.start(
                lambda: log.warning("could not tell the daemon that step %d is given up: %s", step, why)
            )
