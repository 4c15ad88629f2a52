"""Brings one save from live memory into a sealed slot, at once or in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from holdfast.stage import cuda_copy
from holdfast.stage.background_copy import BackgroundCopy
from holdfast.stage.copy_plans import CopyPlan, CopyPlans
from holdfast.stage.replica_claims import Statement
from holdfast.stage.slots import Slot
from holdfast.stage.staging import AveragePart, SlotLayout
from holdfast.state.frozen import NO_GRADIENTS, GradientNotes
from holdfast.threads import at_exit, own_threads
from holdfast.threads.latch import Latch
from holdfast.tickets import SaveTicket, Tickets
from holdfast_formats.errors import CheckpointError
from holdfast_formats.staging import replica_claims, slot_table

log = logging.getLogger(__name__)

ABANDON_WAIT_S = 0.2  # so that the daemon knows of it before the next save

Until = Callable[[Latch], object]  # waits for it, and raises where it would wait in vain


class Sealable(NamedTuple):
    """A leased slot and its contents. `says` has the digests of bytes that ranks share. `check` runs before anything is
    copied, `still` once later changes would be detected; if one raises, the save fails on all ranks.
    """

    slot: Slot
    layout: SlotLayout
    table: bytes
    says: Statement | None = None
    full: bool = False  # compare all of the live memory with the copy, not only samples
    check: Callable[[], None] = lambda: None
    still: Callable[[], None] = lambda: None
    average: AveragePart | None = None
    after: Latch | None = None  # set once the daemon can see every update of the average that came before the save
    gradients: GradientNotes = NO_GRADIENTS  # of the moment of the save

    def seal(self) -> str:
        """Complete the slot's table after the copy, and seal the slot. Returns its digest for the daemon."""
        digests = self.says.digests(self.slot.data) if self.says is not None else b""
        size = self.layout.data_bytes
        if self.average is not None:
            size = self.average.handover.end
            digests += bytes(replica_claims.ROW_BYTES * self.average.boxes) if self.says is not None else b""
        if self.after is not None:
            self.after.wait()
        return self.slot.seal(slot_table.with_digests(self.table, digests), size)


class SaveTask:
    """Copies a rank's part of one save into its slot and seals it. On any failure, ticket and save fail with that error."""

    def __init__(self, ticket: SaveTicket, part: Sealable, tickets: Tickets, copy_plans: CopyPlans) -> None:
        self._ticket, self._part, self._tickets, self._copy_plans = ticket, part, tickets, copy_plans
        self._copy: BackgroundCopy | None = None
        self._devices: list[cuda_copy.DeviceCopy] = []
        self._written = Latch()  # nothing of ours writes into the slot any more
        self._waited = False
        self._stalled_s, self._told = 0.0, False
        self._failed: CheckpointError | None = None

    def begin(self, waited: bool = False) -> None:
        """Copy what may change at any time; a background thread copies the rest and seals.

        Later failures are reported by the ticket; if the save is `waited` for, by `complete`.
        """
        self._waited = waited
        try:
            self._part.check()
            plan = self._plan()
            for lane in plan.lanes:
                self._devices.append(cuda_copy.DeviceCopy(lane))
                self._devices[-1].begin(self._part.full)
            plan.copy_at_once()
            turns = self._part.says.turns if self._part.says is not None else ()
            before = [*self._devices, *turns]
            copy = BackgroundCopy(plan.tracks, self._end, before, self._part.full, not waited, plan.samples)
            self._part.still()
        except BaseException as error:
            for copying in self._devices:
                copying.settle()
            self._tickets.drop(self._ticket)  # before the daemon answers: this is the only report to the caller
            failure = error if isinstance(error, CheckpointError) else CheckpointError(f"staging failed: {error!r}")
            self._give_up(failure).wait(ABANDON_WAIT_S)
            raise
        at_exit.see_through(self)
        self._copy = copy
        try:
            copy.start()
        except BaseException:  # a signal handler may have come before it was started; a begun copy is completed
            copy.start()
            raise

    def complete(self, until: Until) -> None:
        """Wait until the daemon has it. Raises its failure, and what `until` raises for the daemon."""
        self.see_through(until)
        if self._failed is not None:
            raise self._failed

    def fence(self) -> None:
        """Return when the live state may change again. For GPUs this holds for work that is enqueued from now on."""
        if self._copy is not None:
            self._copy.fence()
            for copy in self._devices:
                copy.fence()

    def fence_step(self) -> None:
        """The same for what a step of an optimizer changes. Frozen tensors may be left, if they are still frozen."""
        if self._copy is not None:
            self._copy.fence_step(self._part.gradients.as_noted)
            for copy in self._devices:
                copy.fence()

    def held(self, seconds: float, last: bool = False) -> bool:
        """Add to the time that this save stalled training. With `last`, the sum is sent to the daemon, once; False if it
        was before.
        """
        if self._told:
            return False
        self._stalled_s += seconds
        if last:
            self._told = True
            self._part.slot.measured(self._stalled_s)
        return True

    def see_through(self, until: Until) -> None:
        if self._copy is not None:
            self.fence()
            until(self._copy.ended)

    def leave(self, until: Until) -> None:
        """Wait until nothing writes into the slot any more, and the daemon knows of a failure: told later, it would take it
        for one of the next save of that step. With an average, also until the daemon has the previous save.
        """
        if self._copy is not None:
            self.fence()
            until(self._written)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the daemon has it or it failed; False after `timeout` seconds."""
        return self._copy is None or self._copy.join(timeout)

    def __str__(self) -> str:
        return f"{self._ticket.run}@{self._ticket.step}"

    def _plan(self) -> CopyPlan:
        layout, data = self._part.layout, self._part.slot.data
        for blob, content in layout.blobs:
            data[blob.slot_offset : blob.slot_offset + blob.length] = content
        return self._copy_plans.into(self._part.slot, layout)

    def _end(self, error: CheckpointError | None) -> None:
        error = cuda_copy.finish(self._devices, error)
        try:
            if error is not None:
                raise error
            self._part.slot.trim(self._part.layout.data_bytes)
            proof = self._part.seal()
            self._written.set()
            self._part.slot.hand_over(proof)
        except CheckpointError as failure:
            self._failed = failure
            if self._waited:  # it is raised where it is waited for
                self._tickets.drop(self._ticket)
            else:
                self._tickets.fail(self._ticket, failure)
            self._give_up(failure, self._written).wait(ABANDON_WAIT_S)
        except BaseException:
            self._written.set()
            raise
        else:
            self._ticket.mark_staged()
        finally:
            at_exit.forget(self)

    def _give_up(self, error: CheckpointError, latch: Latch | None = None) -> Latch:
        """Abandon the slot in a background thread: the daemon may not answer. Returns the latch that is set then."""
        told = latch or Latch()

        def tell() -> None:
            try:
                self._part.slot.abandon(error)
            except CheckpointError as gone:
                log.warning("could not notify the daemon that step %d is given up: %s", self._ticket.step, gone.detail)
            finally:
                told.set()

        own_threads.start(tell)
        return told
