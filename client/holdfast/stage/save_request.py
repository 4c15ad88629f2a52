"""The arguments of one `save()` call, and how it ends if a signal handler made it during another call."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple, SupportsIndex, get_args

from holdfast.state.assets import NO_ASSETS
from holdfast.threads.reentrancy import CLOSE, RESTORE, DeferredCall
from holdfast.tickets import SaveTicket, Tickets
from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    DaemonGone,
    DeadlineExceeded,
    GenerationDropped,
    InvalidRequest,
    StateOverwritten,
    TornSnapshot,
)
from holdfast_formats.lineage import Existing

Wait = Literal["staged", "durable"]
Check = Literal["sampled", "full"]
_IN_THE_LOOP = "set a flag in the handler and save in the training loop"


class SaveRequest(NamedTuple):
    ticket: SaveTicket
    groups: Collection[str] | None
    metrics: Mapping[str, float]
    wait: Wait | None
    full: bool  # compare all copied bytes
    existing: Existing = "refuse"
    assets: Mapping[str, bytes] = NO_ASSETS  # of this step; empty on every rank but rank 0
    exclude: tuple[str, ...] = ()
    within_s: float | None = None  # how long a waited one waits for a slot, and for its end

    def ends_by(self, error: CheckpointError, attempt: int | None, tickets: Tickets) -> bool:
        """Fail this save through its ticket, because it could not begin; False if its caller must get the error at
        once.

        `attempt` is the launch's; None if no daemon was ever reached, which is a configuration error.
        """
        ticket = self.ticket
        if isinstance(error, AlreadyCommitted) and self.existing == "same" and error.members.get("same"):
            if not tickets.has_all_but(ticket.step, self.exclude):
                error.hint = "it was saved with exclude=, so it lacks names; existing='replace' saves it again"
                return False
            ticket.saved_before()
            return True
        if isinstance(error, DaemonGone | DeadlineExceeded) and attempt is not None and self.wait is None:
            # None has come for the one that died, or it does not answer: the save has failed, training goes on.
            ticket.attempt = attempt
            tickets.fail(ticket, error)
            return True
        if isinstance(error, GenerationDropped) and self.wait is None:
            tickets.fail(ticket, error)
            return True
        return False

    def put_off(self, during: str, save: Callable[[], object], tickets: Tickets) -> DeferredCall:
        """Postpone the save until the call that a signal handler interrupted has ended; raise if that is useless."""
        ticket = self.ticket
        handler = f"in a signal handler that interrupted {during}"
        if during in (RESTORE, CLOSE):
            raise StateOverwritten(f"step {ticket.step} cannot be saved {handler}", hint=_IN_THE_LOOP)
        if self.wait is not None:
            raise InvalidRequest(
                f"save(wait={self.wait!r}) {handler} would wait for itself",
                hint=f"leave wait= out: the save then runs after {during} has returned. Or {_IN_THE_LOOP}",
            )

        def make() -> None:
            ticket.awaits = ""
            try:
                save()
            except Exception as error:  # there is no caller to raise it to
                tickets.fail(
                    ticket, error if isinstance(error, CheckpointError) else CheckpointError(f"not saved: {error!r}")
                )

        def give_up() -> None:
            ticket.awaits = ""
            text = f"the save of step {ticket.step} was waiting for {during} to return, but {during} raised an exception"
            tickets.fail(ticket, TornSnapshot(text, hint=_IN_THE_LOOP))

        ticket.awaits = during
        return DeferredCall(during, make, give_up)


def check_choices(wait: object, existing: object) -> None:
    if wait not in (None, *get_args(Wait)):
        raise InvalidRequest(f"wait must be 'staged' or 'durable', not {wait!r}")
    if existing not in get_args(Existing):
        raise InvalidRequest(f"existing must be one of {', '.join(get_args(Existing))}, not {existing!r}")


def check_flags(**given: object) -> None:
    """`InvalidRequest` for options that are not bool: `cast="no"` would count as true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be True or False, not {value!r}")


def check_step(step: SupportsIndex) -> int:
    """Return the step as an int; numpy integers are accepted. Raises `InvalidRequest` for anything else."""
    try:
        return naming.check_step(step if isinstance(step, bool) else operator.index(step))
    except TypeError:
        raise InvalidRequest(f"step must be an integer, not {step!r}") from None


def check_check(check: str) -> str:
    if check not in get_args(Check):
        raise InvalidRequest(f"check must be one of {', '.join(get_args(Check))}, not {check!r}")
    return check


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics as Python floats; `InvalidRequest` for anything but numbers."""
    if not isinstance(metrics, Mapping):
        raise InvalidRequest(f"metrics must be a mapping of names to numbers, not {type(metrics).__name__}")
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"the name of a metric must be text, not {name!r}")
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            hint = "call .item() on it" if hasattr(value, "item") else "give a number, or leave it out"
            raise InvalidRequest(f"metric {name!r} must be a number, not {type(value).__name__}", hint=hint)
        try:
            kept[name] = float(value)
        except OverflowError:  # an integer or a fraction beyond what a float holds
            kept[name] = math.inf if value > 0 else -math.inf
    return kept
