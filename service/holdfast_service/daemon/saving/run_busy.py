"""Admits ranks, over either transport: refuses another protocol, and a second job of a run while the first one is active.

A job that takes its run over, or follows a dead one, gets the next attempt, and all older attempts are shut out (I6). So
this check need not be certain; it only keeps a mistake from ending a training run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from holdfast_formats.errors import InvalidRequest, RunBusy
from holdfast_formats.staging.messages import HelloFields
from holdfast_formats.staging.wire import PROTOCOL, Outcome, Stop
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.shares import ShareRequester
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.saver import Saver

BUSY_SILENCE_MAX_S = 25.0  # a rank over HTTP polls for outcomes every 20 s at least
DYING_S, POLL_S = 3.0, 0.05  # a killed process stays connected until its memory is freed
HINT = (
    "stop the other job, or use another run name; to only read checkpoints, use holdfast.open(). "
    "HOLDFAST_TAKE_OVER=1 takes the run over and shuts the other job out. If these are ranks of one job, "
    "HOLDFAST_LAUNCH and WORLD_SIZE must be the same on all of them"
)
ALONE_HINT = "; with Checkpointer.alone(), only one rank of a job may construct a Checkpointer for this run"


class ConnectedRank(Participant):
    """A rank of this daemon. One at the socket lives as long as its process: a forked child may keep the connection open.
    The death of one over HTTP is not reported, so it counts as gone after a long silence.
    """

    def __init__(
        self,
        hello: HelloFields,
        attempt: int,
        tell: Callable[[Outcome | Stop], None],
        has_ended: Callable[[], bool] | None = None,
        heard: Callable[[], float] = float,
    ) -> None:
        """`heard` returns the time of the last request over HTTP, by `time.monotonic()`; used without `has_ended`."""
        super().__init__(hello.run, hello.rank, hello.world, attempt, tell)
        self.process, self._tell, self._has_ended, self._heard = hello.process, tell, has_ended, heard

    def ask_to_stop(self) -> None:
        self._tell(Stop())

    def is_gone(self) -> bool:
        return self._has_ended is not None and self._has_ended()

    def left_s(self) -> float | None:
        if self._has_ended is None:
            return max(BUSY_SILENCE_MAX_S - (time.monotonic() - self._heard()), 0.0)
        return 0.0 if self.is_gone() else None


_Made = TypeVar("_Made")


def check(hello: HelloFields) -> None:
    """`InvalidRequest` for a rank of another version, or outside its world."""
    if hello.protocol != PROTOCOL:
        raise InvalidRequest(
            f"the trainer uses protocol {hello.protocol}, but this daemon uses {PROTOCOL}",
            hint="use the same version of holdfast on both sides",
        )
    if not hello.rank < hello.world:
        raise InvalidRequest(f"rank {hello.rank} is not valid in a world of {hello.world}")


def let_in(saver: Saver, control: Control, hello: HelloFields, join: Callable[[int], _Made], asker: ShareRequester) -> _Made:
    """Declare a rank's attempt and let it `join`; `RunBusy` for the first rank of a new launch while another job is active.

    `LimitExceeded` for a new run of a tenant that already has too many runs without a save. `keep_last` counts only if the
    asker may remove checkpoints. Check and join are one atomic step per run: of two jobs that start at once, one finds the
    other.

    A process that creates another checkpointer for its run is the same job, even if it has closed the previous one before
    other ranks have. `retry_after_s` is the time until silent ranks over HTTP count as gone, here or on another node; 0 if a
    living process is connected.
    """
    control.launches.meet(hello.run)
    saver.giving_way.expect()
    keep_last = hello.keep_last if asker.owner else None
    limit = time.monotonic() + DYING_S
    while True:
        with saver.entering(hello.run):
            living = [] if hello.take_over else _others(saver, control, hello)
            if not living:
                control.empty_runs.admit(hello.run, asker.tenant)
                who = (hello.run, hello.launch, hello.world, keep_last, hello.rank, hello.session)
                try:
                    joined = join(attempt := control.launches.declare(*who, take_over=hello.take_over))
                    if hello.info is not None:
                        control.launches.record_info(hello.run, attempt, hello.world, hello.info)
                    return joined
                except RunBusy as busy:  # on another node, where it may be dying
                    if busy.members["retry_after_s"] or time.monotonic() > limit:
                        raise
                    time.sleep(POLL_S)
                    continue
        left = [other.left_s() for other in living]
        if None not in left or time.monotonic() > limit:
            break
        time.sleep(POLL_S)
    newest = max(living, key=lambda other: other.attempt)
    raise RunBusy(
        f"another job is training {hello.run!r}: attempt {newest.attempt}, {len(living)} of {newest.world} "
        "ranks are connected here",
        hint=HINT + (ALONE_HINT if hello.world == newest.world == 1 else ""),
        attempt=newest.attempt,
        ranks=len(living),
        retry_after_s=0.0 if None in left else round(max(0.1, *filter(None, left)), 1),
    )


def _others(saver: Saver, control: Control, hello: HelloFields) -> list[Participant]:
    living = [other for other in saver.connected.of(hello.run) if other.left_s() != 0]
    if not living or control.launches.is_declared(hello.run, hello.launch, hello.rank, hello.session, hello.world):
        return []
    return [] if saver.connected.belongs(hello.run, hello.process) else living
