"""Tickets: what `save()` returns, and the set of open saves."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, NoReturn, Protocol

from holdfast.left_out import LeftOutNote
from holdfast.save_warning import warn
from holdfast.threads import at_exit, own_threads
from holdfast.threads.latch import Latch
from holdfast_formats.errors import (
    CheckpointError,
    DaemonGone,
    DeadlineExceeded,
    GenerationDropped,
    InvalidRequest,
    NoSuchCheckpoint,
    StateMismatch,
    Unavailable,
    from_problem,
)
from holdfast_formats.staging.messages import CopyAnswer
from holdfast_formats.staging.wire import Outcome
from holdfast_formats.timestamps import check_seconds

log = logging.getLogger(__name__)

_END = "end"
LOOK_S = 0.25  # between two questions whether a step is in a tier


class Until(Protocol):
    def __call__(self, ended: Latch, timeout: float | None, awaits: int | None) -> bool:
        """Wait for an event of the daemon. This rank begins no save before the one that it `awaits` has ended."""


class Copied(Protocol):
    def __call__(self, step: int, tier: str) -> CopyAnswer:
        """The daemon's answer whether a step is in a tier. `NoSuchResource` for a tier that there is not."""


def _wait(ended: Latch, timeout: float | None, awaits: int | None) -> bool:
    return ended.wait(timeout)


class SaveResult(NamedTuple):
    """A committed save: complete, durable, restorable.

    Attributes:
        run: The run's name.
        step: The step that was saved.
        attempt: The restart number of the launch that saved it, from 1.

    Example:
        >>> checkpointer.save(500, wait="durable").result().step
        500
    """

    run: str
    step: int
    attempt: int


class SaveTicket:
    """The result of one save. You need not check it: the next `save()` and `close()` also report a failure.

    Example:
        >>> ticket = checkpointer.save(500)
        >>> ticket.staged, ticket.done
        (True, False)
    """

    def __init__(self, run: str, step: int, attempt: int, until: Until = _wait, copied: Copied | None = None) -> None:
        self.run, self.step, self.attempt = run, step, attempt
        self._until, self._copied, self._saving = until, copied, threading.current_thread()
        self.groups: tuple[str, ...] = ()  # once it has begun; without those that turned out to be missing, once it is done
        self.notes: tuple[str, ...] = ()  # what was left out, and why; once it has begun
        self.spares = ""  # what another rank stages from now on (`wire.Outcome`); once it is committed
        self.awaits = ""  # the call that must end before this save can begin: a signal handler interrupted it
        self._staged = Latch()
        self._decided = Latch()  # staged, or ended without
        self._ended = Latch()
        self._first: dict[str, object] = {}
        self._error: CheckpointError | None = None
        self._awaiting: deque[Callable[[CheckpointError | None], object]] = deque()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest(
            f"the SaveTicket of {self.run}@{self.step} cannot be copied or pickled: it belongs to the process that saves",
            hint="leave it out of the copied object; in another process, `holdfast wait` waits for the step",
        )

    def __repr__(self) -> str:
        return f"<SaveTicket {self.run}@{self.step}: {self._state()}>"

    def _state(self) -> str:
        error = self.error
        if not self.done:
            return "staged" if self.staged else f"waiting for the end of {self.awaits}" if self.awaits else "saving"
        if error is None:
            return "durable"
        return "dropped" if self.dropped else f"failed, {type(error).__name__}: {error.detail}"

    @property
    def staged(self) -> bool:
        """Whether the daemon has this rank's part.

        Once all ranks' parts are staged, the step is saved even if the trainers die, unless it is `dropped` for a newer one.

        A rank that shares no memory with its daemon stages into its own memory, which is lost if the rank dies
        before the upload. Then only `done` means that the step is safe.
        """
        return self._staged.is_set()

    @property
    def done(self) -> bool:
        """Whether the save was committed, failed or dropped: `result()` returns or raises at once."""
        return self._ended.is_set()

    @property
    def dropped(self) -> bool:
        """Whether this save was dropped for another one, because storage was slower than the saves."""
        return isinstance(self.error, GenerationDropped)

    @property
    def error(self) -> CheckpointError | None:
        """Why the save failed; None if it did not."""
        return self._error

    def result(self, timeout: float | None = None, *, tier: str | None = None) -> SaveResult:
        """Wait until the step is committed; with `tier`, until it was also copied there and read back.

        Args:
            timeout: The limit in seconds; None waits without a limit.
            tier: The name of a tier or replica of the daemon.

        Returns:
            Run, step and attempt of the checkpoint.

        Raises:
            CheckpointError: The error of the save.
            InvalidRequest: For a timeout that is NaN.
            NoSuchResource: At once, if the daemon has no such tier. It names those that it has.
            NoSuchCheckpoint: If the step was removed before it was copied to the tier.
            DeadlineExceeded: After `timeout` seconds, or if the daemon is silent for 10 s; it may still commit the step
                then, and copy it.
            DaemonGone: If the daemon ends while a copy is awaited.

        Example:
            >>> checkpointer.save(500).result(timeout=600)
            SaveResult(run='llama3-8b', step=500, attempt=1)
        """
        check_seconds(timeout, "timeout")
        self._refuse_to_wait_for_oneself()
        began = time.monotonic()
        if tier is not None and not (self.done and self.error is not None):
            self._ask(tier)
        self._await_commit(timeout)
        while tier is not None and not (found := self._ask(tier, committed=True)).copied:
            if timeout is not None and time.monotonic() - began >= timeout:
                raise DeadlineExceeded(
                    f"after {timeout:.0f} s, {found.why}",
                    hint="`holdfast nodes` shows how far each tier is behind; `holdfast wait --tier` goes on waiting",
                )
            time.sleep(LOOK_S)
        return SaveResult(self.run, self.step, self.attempt)

    def _ask(self, tier: str, committed: bool = False) -> CopyAnswer:
        """The daemon's answer; until the step is committed, it need not exist."""
        if self._copied is None:
            raise InvalidRequest("only the ticket of a save that a daemon carries out waits for a tier")
        try:
            return self._copied(self.step, tier)
        except NoSuchCheckpoint:
            if committed:
                raise
        except DaemonGone as gone:
            if committed:
                gone.hint = f"`holdfast wait {self.run}@{self.step} --tier {tier}` waits for the next daemon"
                raise
        except Unavailable as away:  # as a catalog that does not answer
            return CopyAnswer(copied=False, why=away.detail)
        return CopyAnswer(copied=False)

    def _await_commit(self, timeout: float | None) -> None:
        bare = timeout is None and threading.current_thread() is self._saving
        if not self._until(self._ended, timeout, self.step if bare else None):
            raise DeadlineExceeded(f"{self.run}@{self.step} was not committed within {timeout} s")
        if self.error is not None:
            raise self.error

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until this rank's part is staged, or the save has failed.

        Args:
            timeout: The limit in seconds; None waits without a limit.

        Returns:
            Whether it is staged.

        Raises:
            InvalidRequest: For a timeout that is NaN.
            DeadlineExceeded: If the daemon is silent for 10 s.

        Example:
            >>> ticket.wait_staged(timeout=30)
            True
        """
        check_seconds(timeout, "timeout")
        self._refuse_to_wait_for_oneself()
        self._until(self._decided, timeout, None)
        return self.staged

    def await_promise(self, wait: Literal["staged", "durable"], within_s: float | None = None) -> None:
        """Return when the save has reached `wait`. Raises the error of the save if it never will, and `DeadlineExceeded` if
        it is not committed in time.
        """
        if wait == "durable" or not self.wait_staged() or self.error is not None:
            self.result(within_s)

    def hear(self, groups: Collection[str], spares: str) -> None:
        """Take in what the daemon says of the save: groups that it lacks, and what another rank stages from now on."""
        self.spares = spares
        gone = [group for group in self.groups if group in groups]
        if gone:
            self.groups = tuple(group for group in self.groups if group not in groups)
            why = "see the event average-left-out and the daemon's log for the reason"
            self.notes = (*self.notes, LeftOutNote(f"saved without the group {', '.join(gone)}: {why}"))

    def mark_staged(self) -> None:
        self._staged.set()
        self._decided.set()

    def saved_before(self) -> None:
        """Mark as done: the step is already a checkpoint."""
        self.mark_staged()
        self.end(None)

    def end(self, error: CheckpointError | None, note: Callable[[], object] = bool) -> bool:
        """Set the outcome; only the first call counts. Returns whether this call was the first.

        `note` is called before any waiting thread wakes up.
        """
        mine = object()
        if self._first.setdefault(_END, mine) is not mine:
            return False
        self._error = error
        note()
        self._decided.set()
        self._ended.set()
        self._report_ended()
        return True

    def when_ended(self, act: Callable[[CheckpointError | None], object]) -> None:
        """Call `act` with the error, or None, when the save has ended, in any thread.

        It must not call the Checkpointer: the thread may be the one that reads from the daemon.
        """
        self._awaiting.append(act)
        if self.done:
            self._report_ended()

    def _report_ended(self) -> None:
        while self._awaiting:
            try:
                act = self._awaiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                act(self._error)
            except Exception:  # this thread has the messages of other saves to read
                log.exception("an action at the end of the save of %s@%s failed", self.run, self.step)

    def _refuse_to_wait_for_oneself(self) -> None:
        if self.awaits and threading.current_thread() is threading.main_thread():
            raise InvalidRequest(
                f"{self.run}@{self.step} is saved after {self.awaits} has returned, which this signal handler interrupted",
                hint="return from the handler, then wait for the ticket",
            )


class Tickets:
    """Open tickets by step, the first unreported failure, and the first drop.

    No lock is used: a signal handler may wait for a ticket while it interrupts one of these methods.
    """

    def __init__(self) -> None:
        self._open: dict[int, SaveTicket] = {}
        self._untold: dict[str, SaveTicket] = {}
        self._drops = itertools.count()
        self._lacking: deque[SaveTicket] = deque()  # committed without a group that they were to have
        self._left_out: dict[int, frozenset[str]] = {}  # patterns of the last save of a step, if it had some
        at_exit.report_failures_of(self)

    @contextmanager
    def beginning(self, ticket: SaveTicket) -> Iterator[None]:
        """Register a save for as long as it is open, unless the block that starts it fails.

        It may end before the block has returned: another rank may drop it. Raises `StateMismatch` if an earlier save of the
        step is still open.
        """
        if self._open.setdefault(ticket.step, ticket) is not ticket:
            raise StateMismatch(f"step {ticket.step} is already being saved", hint="wait for its ticket first")
        try:
            yield
        except BaseException:
            self.drop(ticket)
            raise

    def awaited(self, step: int, groups: Collection[str], exclude: Collection[str] | None = None) -> SaveTicket | None:
        """The open ticket for this step with at least these groups; with `exclude`, leaving out no names beyond these
        patterns.
        """
        ticket = self._open.get(step)
        if ticket is None or not set(groups) <= set(ticket.groups):
            return None
        return ticket if exclude is None or self.has_all_but(step, exclude) else None

    def leaves_out(self, step: int, patterns: Collection[str]) -> None:
        """Record the patterns that the beginning save of this step leaves out."""
        self._left_out.pop(step, None)
        if patterns:
            self._left_out[step] = frozenset(patterns)

    def has_all_but(self, step: int, patterns: Collection[str]) -> bool:
        """Whether this process's save of the step left out no names beyond these patterns."""
        return self._left_out.get(step, frozenset()) <= set(patterns)

    def drop(self, ticket: SaveTicket) -> None:
        if self._open.get(ticket.step) is ticket:
            self._open.pop(ticket.step, None)

    def fail(self, ticket: SaveTicket, error: CheckpointError) -> None:
        self.drop(ticket)
        self._end(ticket, error)

    def outcome(self, outcome: Outcome) -> None:
        """Handle the daemon's outcome of a step."""
        ticket = self._open.pop(outcome.step, None)
        if ticket is not None:
            ticket.hear(outcome.left_out, outcome.spares)
            self._lacking += [ticket] * bool(outcome.left_out)
            self._end(ticket, from_problem(outcome.problem or {}) if outcome.state == "aborted" else None)

    def lost(self, error: CheckpointError) -> None:
        """The daemon is gone, or silent for good: fail all open saves, because their outcome is unknown."""
        for ticket in self.open():
            if isinstance(error, DeadlineExceeded):
                failure: CheckpointError = DeadlineExceeded(
                    f"{error.detail}; it may still commit the staged data", hint=error.hint
                )
            else:
                failure = DaemonGone(f"{error.detail}; the next daemon may still commit the staged data", hint=error.hint)
            self.fail(ticket, failure if ticket.staged else error)

    def take_failure(self) -> SaveTicket | None:
        """The oldest failed save that was not reported yet; it counts as reported from now on."""
        return self._untold.pop("failed", None)

    def take_drop(self) -> SaveTicket | None:
        """The first dropped save, once. Later ones are only logged, because there may be one per step."""
        return self._untold.pop("dropped", None)

    def warn(self) -> None:
        """Log or raise the failure, and the drop, that were not reported yet."""
        failed, dropped = self.take_failure(), self.take_drop()
        if failed is not None:
            warn(f"the save of {failed.run}@{failed.step} failed: {failed.error}")
        if dropped is not None:
            text = f"the save of {dropped.run}@{dropped.step} was dropped, and others may be; see the log"
            warn(f"{text}: {dropped.error}")

    def take_lacking(self) -> list[SaveTicket]:
        """Committed saves that lack a group, once each."""
        return [self._lacking.popleft() for _ in range(len(self._lacking))]

    def open(self) -> list[SaveTicket]:
        return list(self._open.copy().values())

    def _end(self, ticket: SaveTicket, error: CheckpointError | None) -> None:
        def note() -> None:
            if isinstance(error, GenerationDropped):
                if next(self._drops) == 0:
                    self._untold["dropped"] = ticket
            elif error is not None:
                self._untold.setdefault("failed", ticket)

        if ticket.end(error, note) and isinstance(error, GenerationDropped):
            # Aside: the thread that a signal interrupted may be writing to the log, and its handler wait for this one.
            why = error.detail
            own_threads.start(lambda: log.info("the save of %s@%s was dropped: %s", ticket.run, ticket.step, why))


def settle(ticket: SaveTicket) -> None:
    """Wait for the end of a save, and log a failure. Raises `DeadlineExceeded` if the daemon is silent."""
    try:
        ticket.result()
    except CheckpointError as error:
        if not ticket.done:
            raise
        how = "was dropped" if ticket.dropped else "failed"
        log.warning("the save of %s@%s %s: %s", ticket.run, ticket.step, how, error.detail)
