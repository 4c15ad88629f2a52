"""Two jobs on one run's name: the second is refused by name while the first one lives, unless it says that it takes over.

What takes over, or follows a job that is gone, is fenced from the other side: the catalog gives it the next attempt, and
every older one is refused from then on (I6). So nothing here has to be certain; it keeps a mistake from ending a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from holdfast_formats.errors import RunBusy
from holdfast_formats.rest import bodies
from holdfast_formats.staging import wire
from holdfast_formats.staging.wire import Outcome
from holdfast_service.daemon.ports import Decisions
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.saver import Saver

SILENCE_MAX_S = 25.0  # a rank that speaks over HTTP asks for outcomes every 20 s at least
DYING_S, POLL_S = 3.0, 0.05  # who was killed a moment ago is still connected for as long as its memory takes to be freed
HINT = "stop the other job, or give this one a run of its own; HOLDFAST_TAKE_OVER=1 makes it take the run over"


class DistantParticipant(Participant):
    """A rank that speaks over HTTP: nobody tells when it dies, so it counts as gone once it was silent for long."""

    remote = True

    def __init__(
        self, hello: bodies.RankHello, attempt: int, notify: Callable[[Outcome], None], heard: Callable[[], float]
    ) -> None:
        """`heard` says when it last spoke, by `time.monotonic()`."""
        super().__init__(hello.run, hello.rank, hello.world, attempt, notify)
        self.process, self._heard = hello.process, heard

    def silent_s(self) -> float:
        return time.monotonic() - self._heard()


class NearParticipant(Participant):
    """A rank at the socket. It lives as long as its process: a child that it forked may hold the connection open."""

    def __init__(
        self, hello: wire.Hello, attempt: int, notify: Callable[[Outcome], None], has_ended: Callable[[], bool]
    ) -> None:
        super().__init__(hello.run, hello.rank, hello.world, attempt, notify)
        self.process, self._has_ended = hello.process, has_ended

    def is_gone(self) -> bool:
        return self._has_ended()

    def silent_s(self) -> float:
        return float("inf") if self.is_gone() else 0.0


_Made = TypeVar("_Made")


def let_in(
    saver: Saver,
    decisions: Decisions,
    hello: wire.Hello | bodies.RankHello,
    join: Callable[[int], _Made],
    tenant: str = "",
) -> _Made:
    """Declare a rank's attempt and have it `join`; `RunBusy` for the first rank of a new launch while another job's live.

    `LimitExceeded` for a new run of a `tenant` that has made too many already, and saved nothing to them.

    Looking and joining are one act, of one rank of the run at a time: of two jobs that start at once one finds the other.

    A process that makes another checkpointer of its run is the same job, also where it has closed the one before and other
    ranks have not yet. `retry_after_s` says when ranks that were last heard of over HTTP count as gone; it is 0 where a
    living process holds a connection.
    """
    limit = time.monotonic() + DYING_S
    while True:
        with saver.entering(hello.run):
            living = [] if hello.take_over else _others(saver, decisions, hello)
            if not living:
                decisions.admit_run(hello.run, tenant)
                return join(
                    decisions.hello(hello.run, hello.launch, hello.world, hello.keep_last, hello.rank, hello.session)
                )
        if all(other.remote for other in living) or time.monotonic() > limit:
            break
        time.sleep(POLL_S)
    newest = max(living, key=lambda other: other.attempt)
    raise RunBusy(
        f"{hello.run!r} is being trained already: attempt {newest.attempt}, {len(living)} of {newest.world} ranks here",
        hint=HINT,
        attempt=newest.attempt,
        ranks=len(living),
        retry_after_s=round(max(_until_gone(other) for other in living), 1) if all(o.remote for o in living) else 0.0,
    )


def _others(saver: Saver, decisions: Decisions, hello: wire.Hello | bodies.RankHello) -> list[Participant]:
    """The living ranks of another job."""
    living = [other for other in saver.present(hello.run) if other.silent_s() < SILENCE_MAX_S]
    if not living or decisions.declared(hello.run, hello.launch, hello.rank, hello.session):
        return []
    return [] if saver.belongs(hello.run, hello.process) else living


def _until_gone(other: Participant) -> float:
    return max(SILENCE_MAX_S - other.silent_s(), 0.1) if other.remote else 0.0
