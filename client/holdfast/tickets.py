"""What `save()` returns, and the set of saves that are still on their way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from holdfast_formats.errors import CheckpointError, DeadlineExceeded, GenerationDropped, StateMismatch, from_problem
from holdfast_formats.wire import Outcome

log = logging.getLogger(__name__)


class SaveResult(NamedTuple):
    """A committed save: complete, durable, restorable."""

    run: str
    step: int
    attempt: int


class SaveTicket:
    """The fate of one save. Training need not look at it: a failure is also told by the next `save()` and by `close()`."""

    def __init__(self, run: str, step: int, attempt: int) -> None:
        self.run, self.step, self.attempt = run, step, attempt
        self._staged = threading.Event()
        self._decided = threading.Event()  # staged, or ended without
        self._ended = threading.Event()
        self._error: CheckpointError | None = None

    @property
    def staged(self) -> bool:
        """The daemon has this rank's part; if every rank's is staged, the step is saved whatever becomes of the trainers,
        unless it is `dropped` for a newer one.

        A rank that shares no memory with its daemon has its part in memory of its own, which dies with it, until that is
        uploaded: there only `done` says that the step is safe.
        """
        return self._staged.is_set()

    @property
    def done(self) -> bool:
        """Committed, failed or dropped: `result()` returns or raises at once."""
        return self._ended.is_set()

    @property
    def dropped(self) -> bool:
        """Storage was slower than the saves, and the policy let this one go for another."""
        return isinstance(self._error, GenerationDropped)

    @property
    def error(self) -> CheckpointError | None:
        """Why the save failed, once it has."""
        return self._error

    def result(self, timeout: float | None = None) -> SaveResult:
        """Wait until the step is committed; raises what ended it instead, or `DeadlineExceeded` after `timeout` seconds."""
        if not self._ended.wait(timeout):
            raise DeadlineExceeded(f"{self.run}@{self.step} was not committed within {timeout} s")
        if self._error is not None:
            raise self._error
        return SaveResult(self.run, self.step, self.attempt)

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until this rank's part is staged, or the save has failed; whether it is staged now."""
        self._decided.wait(timeout)
        return self.staged

    def mark_staged(self) -> None:
        self._staged.set()
        self._decided.set()

    def end(self, error: CheckpointError | None) -> None:
        self._error = error
        self._decided.set()
        self._ended.set()


class Tickets:
    """The tickets whose end is awaited, by step; the first failure that nobody was told of, and the first drop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, SaveTicket] = {}
        self._untold: SaveTicket | None = None
        self._untold_drop: SaveTicket | None = None
        self._drops = 0

    @contextmanager
    def beginning(self, ticket: SaveTicket) -> Iterator[None]:
        """Await the end of this save from now on, unless the block that begins it fails.

        Its end may come before its beginning has returned: another rank may drop it. `StateMismatch` while an earlier save
        of the step is awaited.
        """
        with self._lock:
            if self._open.setdefault(ticket.step, ticket) is not ticket:
                raise StateMismatch(f"step {ticket.step} is being saved already", hint="wait for its ticket first")
        try:
            yield
        except BaseException:
            self.drop(ticket)
            raise

    def drop(self, ticket: SaveTicket) -> None:
        with self._lock:
            if self._open.get(ticket.step) is ticket:
                del self._open[ticket.step]

    def fail(self, ticket: SaveTicket, error: CheckpointError) -> None:
        """A save ends before the daemon had it."""
        self.drop(ticket)
        self._end(ticket, error)

    def outcome(self, outcome: Outcome) -> None:
        """The daemon's word on a step."""
        with self._lock:
            ticket = self._open.pop(outcome.step, None)
        if ticket is not None:
            self._end(ticket, from_problem(outcome.problem or {}) if outcome.state == "aborted" else None)

    def lost(self, error: CheckpointError) -> None:
        """The daemon is gone: what became of the open saves is not known."""
        with self._lock:
            tickets = list(self._open.values())
            self._open.clear()
        for ticket in tickets:
            self._end(ticket, error)

    def take_failure(self) -> SaveTicket | None:
        """The oldest failed save that has not been told of yet; it counts as told from now on."""
        with self._lock:
            ticket, self._untold = self._untold, None
            return ticket

    def take_drop(self) -> SaveTicket | None:
        """The first save that was dropped, once; those after it are logged alone, as there may be one a step."""
        with self._lock:
            ticket, self._untold_drop = self._untold_drop, None
            return ticket

    def open(self) -> list[SaveTicket]:
        with self._lock:
            return list(self._open.values())

    def _end(self, ticket: SaveTicket, error: CheckpointError | None) -> None:
        """The first end stands: of a drop, the daemon's word and a refused seal may both tell."""
        with self._lock:
            if ticket.done:
                return
            ticket.end(error)
            if isinstance(error, GenerationDropped):
                self._drops += 1
                self._untold_drop = ticket if self._drops == 1 else self._untold_drop
                log.info("the save of %s@%s was dropped: %s", ticket.run, ticket.step, error.detail)
            elif error is not None:
                self._untold = self._untold or ticket
