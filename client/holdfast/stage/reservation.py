"""Holds the shared memory reserved for a rank's saves, and replaces it if it is too small or the daemon changed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from holdfast.link.session import Session
from holdfast.stage import cuda_copy, next_slot, slot_growth
from holdfast.stage.preallocation import Preallocation
from holdfast.stage.save_task import SaveTask
from holdfast.stage.slots import AverageRoom, Slots
from holdfast.tensors.leaves import Leaf
from holdfast.tickets import SaveTicket

log = logging.getLogger(__name__)

TABLE_HEADROOM = 4  # a table may grow by this factor (JSON state, metrics) before the segment is made again
TABLE_BYTES_MIN = 2**16


class Reservation:
    """The reserved memory. Not thread-safe: guarded by its owner's lock. The session passes its notices to the user."""

    def __init__(self, session: Session, count: int, peers: int) -> None:
        """Reserve `count` slots with the first call of `room_for`. `peers` ranks, including this one, are on this
        machine.
        """
        self._session, self._count, self._peers = session, count, peers
        self._slots: Slots | None = None
        self._leaves: tuple[Leaf, ...] = ()  # the room that was requested last
        self._touching: list[Preallocation] = []
        self._begun: dict[int, int] = {}  # slots that are prepared, or will be soon, with `emptied` of that time
        self._ahead: Preallocation | None = None  # of the slot after that of the last save
        self._pace = next_slot.SavePace()
        self._spared, self._most_bytes = 0, 0  # what saves need since another rank stages so many tensors

    @property
    def slots(self) -> Slots | None:
        """This rank's slots at the current daemon, if any."""
        return self._slots if self._slots is not None and self._slots.link is self._session.link else None

    def room_for(self, need: slot_growth.Need, last: SaveTask | None = None) -> Slots:
        """This rank's slots; larger ones, with a notice, if the state has outgrown them. The session must be connected.

        `last` is the save that may still be writing into the old slots.
        """
        link = self._session.link
        assert link is not None
        known = self.slots
        change, self._leaves = slot_growth.compare(self._leaves, need.leaves), need.leaves
        if known is not None and known.fits(need.data_bytes, need.table_bytes):
            self._use(known, need)
            if any(change):
                log.info("this save has other tensors than the last one and still fits its slots (%s)", change)
            return known
        if known is not None and last is not None:
            last.join()  # once it is sealed the daemon can save it, and gets the old memory back
        if known is not None:
            cuda_copy.unpin(known)
        self._slots = None  # the old slots are given back, whether or not there is room for new ones
        room = max(TABLE_HEADROOM * need.table_bytes, TABLE_BYTES_MIN)
        averages = AverageRoom(need.average_bytes, self._peers)
        slots = self._slots = Slots(link, self._count, need.data_bytes + need.spare_bytes, room, averages)
        assets_grew = need.spare_bytes > 0 and not need.expected
        if known is not None and (any(change) or assets_grew or need.table_bytes > known.geometry.table_bytes_max):
            self._session.warn(slot_growth.outgrown(change, known.slot_bytes, slots.slot_bytes))
        if slots.notice:
            self._session.warn(slots.notice)
        self._stop_touching()
        self._prepare(slots, slots.first)
        return slots

    def _use(self, slots: Slots, need: slot_growth.Need) -> None:
        """Use as much of the slots as saves need while other ranks stage tensors for this one."""
        if need.spared:
            before = self._most_bytes if need.spared == self._spared else 0
            self._spared, self._most_bytes = need.spared, max(before, need.data_bytes + need.spare_bytes)
            slots.use(self._most_bytes)

    def leased(self, slots: Slots, slot: int, ticket: SaveTicket, alone: bool) -> None:
        """A save begins in this slot: if it had no memory, its pages are prepared while they are filled. If the save takes
        long, and the next one does not wait for it (`alone`), the next slot is prepared as well.
        """
        cuda_copy.unpin_emptied(slots)
        if slots is not self._slots:
            return
        if self._ahead is not None:
            self._ahead.stop()  # at low priority, which this save must not wait for
        if self._begun.get(slot) != slots.emptied(slot):
            self._prepare(slots, [slot])
        looms_s = self._pace.begins()
        if slots.geometry.slots > 1 and not (alone or slots.spilled):
            with suppress(RuntimeError):  # no thread can start any more
                which = partial(next_slot.foreseen, looms_s)
                self._ahead = ahead = Preallocation(lambda: slots, cuda_copy.homes(self._leaves), which)
                ticket.when_ended(lambda error: ahead.stop())

    def close(self) -> None:
        """Stop touching memory, and unlock its pages. The memory itself is freed when the session ends."""
        self._stop_touching()
        if self._slots is not None:
            cuda_copy.unpin(self._slots)
            self._slots = None

    def _prepare(self, slots: Slots, which: Sequence[int]) -> None:
        self._begun |= {slot: slots.emptied(slot) for slot in which}
        with suppress(RuntimeError):  # no thread can start any more
            self._touching.append(Preallocation(lambda: slots, cuda_copy.homes(self._leaves), lambda slots, stop: which))

    def _stop_touching(self) -> None:
        for touching in self._touching:
            touching.stop()
        if self._ahead is not None:
            self._ahead.stop()
        self._touching, self._begun, self._ahead = [], {}, None
