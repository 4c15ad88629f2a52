"""The saves of one rank, one after the other: each begins once the copy of the one before has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from holdfast.launch import Launch
from holdfast.link.session import Session
from holdfast.save_warning import warn
from holdfast.stage.averaging import Averaging
from holdfast.stage.background_safe import StepHooks
from holdfast.stage.copy_plans import CopyPlans
from holdfast.stage.daemon_requests import DaemonRequests, SilenceTimer
from holdfast.stage.reservation import Reservation
from holdfast.stage.save_request import SaveRequest, Wait
from holdfast.stage.save_task import SaveTask, Sealable
from holdfast.stage.slot_contents import SlotContents
from holdfast.stage.slot_growth import Need
from holdfast.stage.slots import Slot, Slots
from holdfast.stage.staging import SaveIdentity
from holdfast.state.train_state import Snapshot, TrainState
from holdfast.threads import child_deaths
from holdfast.threads.reentrancy import CallGuard, OtherSteps
from holdfast.tickets import SaveTicket, Tickets, settle
from holdfast_formats.errors import CheckpointError, DeadlineExceeded
from holdfast_formats.staging.messages import Policy
from holdfast_formats.staging.wire import Welcome, Withdraw

SLOT_WAIT_S = 3600.0
LAST_SAVE_S_MIN = 1.0  # for the save at the end of a training, if the time was over before


class SavingRank(NamedTuple):
    """The rank that saves, and how its calls reach the daemon."""

    run: str
    launch: Launch
    state: TrainState
    session: Session
    tickets: Tickets
    requests: DaemonRequests
    calls: CallGuard


class Saves:
    """Begins saves, and sees them through. Not thread-safe, except for what runs in the rank's `calls`."""

    def __init__(
        self,
        rank: SavingRank,
        contents: SlotContents,
        reservation: Reservation,
        averaging: Averaging | None,
        hooks: StepHooks,
        policy: Policy,
    ) -> None:
        """`policy` decides which save is dropped where storage is slower than the saves."""
        self._rank, self._contents, self._reservation = rank, contents, reservation
        self._averaging, self._hooks, self._policy = averaging, hooks, policy
        self._copy_plans, self._other_steps = CopyPlans(), OtherSteps()
        self._last: SaveTask | None = None
        self._noted = frozenset[str]()

    def carry_out(self, asked: SaveRequest) -> SaveTicket:
        """Make the save, and wait for what it promises. Returns another ticket if the step is being saved already."""
        with child_deaths.delayed():
            ticket = asked.ticket
            if asked.existing == "same":
                groups = self._rank.state.groups() if asked.groups is None else asked.groups
                under_way = self._rank.tickets.awaited(ticket.step, groups, asked.exclude)
                if under_way is not None:
                    if asked.wait is not None:
                        under_way.await_promise(asked.wait, asked.within_s)
                    return under_way
            if asked.existing == "replace":
                self._contents.origin.replaces()
            task = self._begin(asked)
            if task is not None and asked.wait is not None:
                self._see_through(task, asked, asked.wait)
            return ticket

    def carry_out_last(self, step: int, metrics: Mapping[str, float], left_s: float) -> None:
        """Save the step after which training stops, within the remaining time."""
        rank = self._rank
        ticket = SaveTicket(rank.run, step, 0, rank.session.until, rank.session.copied)
        within_s = max(left_s, LAST_SAVE_S_MIN)
        try:
            self.carry_out(SaveRequest(ticket, None, metrics, "durable", False, "same", within_s=within_s))
        except DeadlineExceeded as late:
            under_way = rank.tickets.awaited(step, ())
            link = rank.session.link
            if under_way is None or not under_way.staged or link is None or not link.near:  # the process is about to end
                raise
            warn(f"{rank.run}@{step} is staged, and the daemon continues with it: {late}")

    def fence(self) -> None:
        """Return when neither the last save nor the last update of the average reads the live state."""
        self._fence(SaveTask.fence)

    def fence_step(self) -> None:
        """Return when neither reads what a step of the state's optimizers changes. Frozen tensors may still be read."""
        self._fence(SaveTask.fence_step)

    def step_begins(self) -> None:
        """Hook before each step of an optimizer in the state."""
        self._other_steps.begins()

    def step_ends(self) -> None:
        """Hook after each step of an optimizer in the state."""
        self._other_steps.ends()

    def restored(self) -> None:
        """The state is another one: compare weights and masters again, and everything with the slots."""
        self._contents.restored()
        self._copy_plans.forget()

    def room_for(self, need: Need) -> Slots:
        """Reserve the memory for saves that need so much. Connects first, and starts a daemon where there is none."""
        self._rank.session.connected(start=True)
        return self._reservation.room_for(need, self._last)

    def lay_ahead(self, slots: Slots) -> None:
        """Prepare the copy of the layout that was made last into these slots. A save that came meanwhile may have outgrown
        them, and has others.
        """
        if self._contents.layout.data_bytes <= slots.geometry.data_bytes:
            self._copy_plans.lay_ahead(slots, self._contents.layout)

    def warn_of_lacking(self) -> None:
        """Report committed saves that lack a group, once each."""
        for ticket in self._rank.tickets.take_lacking():
            self._rank.session.warn_of(f"save of {self._rank.run}@{ticket.step}", ticket.notes[-1:])

    def leave_last(self) -> None:
        """Return when the daemon has the last save, or it has failed, or the daemon is silent; drop its memory."""
        if self._last is not None:
            self.fence()
            with suppress(DeadlineExceeded):
                self._last.see_through(self._rank.session.until)
            self._last = None

    def see_all_through(self) -> None:
        """Wait for the end of every save; those of a silent daemon count as failed."""
        rank = self._rank
        try:
            rank.requests.wait()
            rank.session.waits()
            for ticket in rank.tickets.open():
                settle(ticket)
        except DeadlineExceeded as silent:
            rank.tickets.lost(silent)

    def _fence(self, wait: Callable[[SaveTask], None]) -> float:
        """Returns the seconds that no save has told the daemon of."""
        fenced, untold = None, 0.0
        while (task := self._last) is not fenced and task is not None:  # a signal handler may begin another one
            began = time.monotonic()
            wait(task)
            seconds = time.monotonic() - began
            untold += 0.0 if task.held(seconds, last=True) else seconds
            fenced = task
        if self._averaging is not None:
            self._averaging.fence()
        return untold

    def _begin(self, asked: SaveRequest) -> SaveTask | None:
        return self._rank.calls.run_between_steps(
            "save()", lambda: self._save(asked), lambda during: self._put_off(asked, during)
        )

    def _put_off(self, asked: SaveRequest, during: str) -> None:
        """A signal handler saves during another call of this thread: save right after that call."""
        calls = self._rank.calls
        calls.refuse_if_closed()
        calls.later(asked.put_off(during, lambda: self._begin(asked), self._rank.tickets))

    def _save(self, asked: SaveRequest) -> SaveTask | None:
        """Begin a save; None if it has ended already, as its ticket states."""
        rank, ticket = self._rank, asked.ticket
        rank.calls.refuse_if_closed()
        untold = self._fence(SaveTask.fence)
        began, moment = time.monotonic(), self._other_steps.between()
        rank.tickets.warn()
        self.warn_of_lacking()
        rank.state.wholeness.check()
        self._hooks.renew()
        snapshot = self._contents.lay_out(asked)
        self._note(ticket, snapshot.notes)
        try:
            silence = SilenceTimer() if asked.wait is None else None
            ticket.attempt = self._reached(silence).attempt
            task = self._in_slot(asked, snapshot, silence, partial(self._other_steps.check, moment))
        except CheckpointError as error:
            if not asked.ends_by(error, rank.session.attempt, rank.tickets):
                raise
            return None
        self._last = task
        if self._averaging is not None:
            self._averaging.saving(task)
        task.begin(waited=asked.wait is not None)
        task.held(time.monotonic() - began + untold)
        return task

    def _see_through(self, task: SaveTask, asked: SaveRequest, wait: Wait) -> None:
        began = time.monotonic()
        task.complete(self._rank.session.until)
        asked.ticket.await_promise(wait, asked.within_s)
        task.held(time.monotonic() - began, last=True)

    def _note(self, ticket: SaveTicket, notes: Sequence[str]) -> None:
        """Report what a save leaves out, the first time."""
        ticket.notes = (*ticket.notes, *notes)
        news = [note for note in notes if note not in self._noted]
        self._noted |= set(news)
        self._rank.session.warn_of(f"save of {self._rank.run}@{ticket.step}", news)

    def _reached(self, silence: SilenceTimer | None) -> Welcome:
        """The daemon's welcome; an errand reconnects after a loss."""
        session, requests = self._rank.session, self._rank.requests
        if self._last is not None:  # a slot that was given back may be leased again: nothing still writes into it
            self._last.leave(lambda written: requests.until(written, silence))
        requests.wait(silence)
        if session.link is not None and session.link.alive:
            return session.connected(start=True)
        return requests.run(lambda: session.connected(start=True), silence)

    def _in_slot(
        self, asked: SaveRequest, snapshot: Snapshot, silence: SilenceTimer | None, still: Callable[[], None]
    ) -> SaveTask:
        """Lease a slot for the snapshot, which `still` checks once it is copied."""
        ticket, rank = asked.ticket, self._rank
        who = SaveIdentity(rank.run, ticket.step, ticket.attempt, rank.launch.rank, rank.launch.world)
        part = self._contents.part(who, asked, snapshot)
        self._note(ticket, part.notes)
        policy: Policy = "wait" if asked.wait == "durable" else self._policy
        last, wait_s = self._last, (asked.within_s or SLOT_WAIT_S) if policy == "wait" else 0.0
        unwritten = len(rank.tickets.open())

        def lease() -> Slot:
            slots = self._reservation.room_for(part.need, last)
            slot = slots.lease(ticket.step, ticket.attempt, wait_s, policy, part.intent, unwritten)
            self._reservation.leased(slots, slot.index, ticket, alone=asked.wait == "durable")
            return slot

        with rank.tickets.beginning(ticket):
            sample, withdraw = partial(self._copy_plans.sample, part.layout), partial(self._withdraw, ticket.step)
            slot = rank.requests.run(lease, silence, self._give_back, withdraw, wait_s, sample)
            rank.tickets.leaves_out(ticket.step, asked.exclude)
        masters = self._contents.check_masters
        sealed = Sealable(
            slot,
            part.layout,
            part.table,
            part.says,
            full=asked.full,
            check=masters,
            still=still,
            average=part.average,
            after=part.after,
            gradients=rank.state.gradients,
        )
        return SaveTask(ticket, sealed, rank.tickets, self._copy_plans)

    def _withdraw(self, step: int) -> None:
        link = self._rank.session.link
        if link is not None:
            link.notify(Withdraw(id=link.next_id(), step=step))

    def _give_back(self, slot: Slot) -> None:
        """The daemon granted a slot too late: the save has failed, for all ranks."""
        rank = self._rank.launch.rank
        slot.abandon(DeadlineExceeded(f"rank {rank} got no answer from its daemon in time, and saved no part"))
