"""One save's way from live memory to a sealed slot: at once, or behind the back of the training."""

from __future__ import annotations

import logging
from typing import NamedTuple

from holdfast_formats import table
from holdfast_formats.errors import CheckpointError

from . import device
from .claims import Statement
from .copier import BackgroundCopy
from .routes import Routes, Ways
from .slots import Slot
from .staging import Layout
from .tickets import SaveTicket, Tickets

log = logging.getLogger(__name__)


class Sealable(NamedTuple):
    """A leased slot and everything that goes into it; `says` what it is to say of the bytes that ranks share."""

    slot: Slot
    layout: Layout
    table: bytes
    says: Statement | None = None
    full: bool = False  # all of the live memory is compared with what was copied, not some words

    def seal(self) -> None:
        """All is in the slot: complete its table, and hand both over."""
        digests = self.says.digests(self.slot.data) if self.says is not None else b""
        self.slot.seal(table.with_digests(self.table, digests), self.layout.data_bytes)


class Handover:
    """Brings a rank's part of one save into its slot and seals it; whatever fails ends ticket and round by name."""

    def __init__(self, ticket: SaveTicket, part: Sealable, tickets: Tickets, routes: Routes) -> None:
        self._ticket, self._part, self._tickets, self._routes = ticket, part, tickets, routes
        self._copy: BackgroundCopy | None = None
        self._devices: list[device.DeviceCopy] = []
        self._waited = False
        self._stalled_s, self._told = 0.0, False
        self._failed: CheckpointError | None = None

    def complete(self) -> None:
        """Copy all with this thread and another, seal, return. Raises what went wrong, after the round was given up."""
        self._waited = True
        self.begin()
        self.join()
        if self._failed is not None:
            raise self._failed

    def begin(self) -> None:
        """Copy what may change at any time, and leave the rest to a background thread, which seals when it is done."""
        try:
            ways = self._ways()
            for lane in ways.lanes:
                self._devices.append(device.DeviceCopy(lane))
                self._devices[-1].begin(self._part.full)
            ways.copy_at_once()
            self._copy = BackgroundCopy(ways.tracks, self._end, self._devices, self._part.full)
            self._copy.start()
        except BaseException as error:
            for copy in self._devices:
                copy.settle()
            self._give_up(error if isinstance(error, CheckpointError) else CheckpointError(f"staging failed: {error!r}"))
            self._tickets.drop(self._ticket)
            raise

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

    def join(self) -> None:
        """Return when the slot is sealed, or the save has failed."""
        if self._copy is not None:
            self._copy.join()

    def _ways(self) -> Ways:
        """The way into the slot, in which the assets, which are no live memory, stand already."""
        layout, data = self._part.layout, self._part.slot.data
        for blob, content in layout.blobs:
            data[blob.slot_offset : blob.slot_offset + blob.length] = content
        return self._routes.into(self._part.slot, layout)

    def _end(self, error: CheckpointError | None) -> None:
        error = device.finish(self._devices, error)
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

    def _give_up(self, error: CheckpointError) -> None:
        try:
            self._part.slot.abandon(error)
        except CheckpointError as gone:
            log.warning("the daemon was not told that step %d is given up: %s", self._ticket.step, gone.detail)
