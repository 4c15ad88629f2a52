"""One save's way from live memory to a sealed slot: at once, or behind the back of the training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError

from . import staging
from .copier import BackgroundCopy, Track, lay_tracks
from .slots import Slot, Slots
from .staging import Copy, Layout
from .tickets import SaveTicket, Tickets

log = logging.getLogger(__name__)


class Sealable(NamedTuple):
    """A leased slot and everything that goes into it."""

    slot: Slot
    layout: Layout
    table: bytes


class Routes:
    """The ways from live tensors into each slot, kept from save to save while tensors and slots stay the same.

    They hold on to the memory of the tensors they lead from until a later save finds others.
    """

    def __init__(self) -> None:
        self._slots: Slots | None = None
        self._laid: dict[int, tuple[Sequence[Copy], list[Track]]] = {}

    def into(self, slot: Slot, copies: Sequence[Copy]) -> list[Track]:
        """The tracks of these copies into this slot."""
        if slot.slots is not self._slots:
            self._slots = slot.slots
            self._laid.clear()
        before, tracks = self._laid.get(slot.index, ((), []))
        if len(before) != len(copies) or any(a is not b for a, b in zip(before, copies, strict=True)):
            tracks = lay_tracks(staging.place(copies, slot.data))
            self._laid[slot.index] = copies, tracks
        return tracks


class Handover:
    """Brings a rank's part of one save into its slot and seals it; whatever fails ends ticket and round by name."""

    def __init__(self, ticket: SaveTicket, part: Sealable, tickets: Tickets, routes: Routes) -> None:
        self._ticket, self._part, self._tickets, self._routes = ticket, part, tickets, routes
        self._copy: BackgroundCopy | None = None

    def complete(self) -> None:
        """Copy all, seal, return. Raises what went wrong, after the round was given up."""
        try:
            staging.copy_in(self._part.layout, self._part.slot.data)
            self._part.slot.seal(self._part.table, self._part.layout.data_bytes)
        except BaseException as error:
            self._give_up(error if isinstance(error, CheckpointError) else CheckpointError(f"staging failed: {error!r}"))
            self._tickets.drop(self._ticket)
            raise
        self._ticket.mark_staged()

    def begin(self) -> None:
        """Copy what may change at any time, and leave the rest to a background thread, which seals when it is done."""
        layout, data = self._part.layout, self._part.slot.data
        try:
            staging.copy_now(layout, data, [copy for copy in layout.copies if copy.restless])
            tracks = self._routes.into(self._part.slot, [copy for copy in layout.copies if not copy.restless])
            self._copy = BackgroundCopy(tracks, self._end)
            self._copy.start()
        except BaseException as error:
            self._give_up(error if isinstance(error, CheckpointError) else CheckpointError(f"staging failed: {error!r}"))
            self._tickets.drop(self._ticket)
            raise

    def fence(self) -> None:
        """Return when the live state may change again."""
        if self._copy is not None:
            self._copy.fence()

    def join(self) -> None:
        """Return when the slot is sealed, or the save has failed."""
        if self._copy is not None:
            self._copy.join()

    def _end(self, error: CheckpointError | None) -> None:
        if error is None:
            try:
                self._part.slot.seal(self._part.table, self._part.layout.data_bytes)
            except CheckpointError as refused:
                self._tickets.fail(self._ticket, refused)
                return
            self._ticket.mark_staged()
            return
        self._tickets.fail(self._ticket, error)
        self._give_up(error)

    def _give_up(self, error: CheckpointError) -> None:
        try:
            self._part.slot.abandon(error)
        except CheckpointError as gone:
            log.warning("the daemon was not told that step %d is given up: %s", self._ticket.step, gone.detail)
