"""Two jobs on one run's name: the second is refused by name while the first one lives, unless it says that it takes over.

What takes over, or follows a job that is gone, is fenced from the other side: the catalog gives it the next attempt, and
every older one is refused from then on (I6). So nothing here has to be certain; it keeps a mistake from ending a training.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast_formats import rest
from holdfast_formats.errors import RunBusy
from holdfast_formats.wire import Outcome

from .ports import Decisions
from .rounds import Participant
from .saver import Saver

SILENCE_MAX_S = 25.0  # a rank that speaks over HTTP asks for outcomes every 20 s at least
DYING_S, POLL_S = 3.0, 0.05  # who was killed a moment ago is still connected for as long as its memory takes to be freed
HINT = "stop the other job, or give this one a run of its own; HOLDFAST_TAKE_OVER=1 makes it take the run over"


class DistantParticipant(Participant):
    """A rank that speaks over HTTP: nobody tells when it dies, so it counts as gone once it was silent for long."""

    remote = True

    def __init__(
        self, hello: rest.RankHello, attempt: int, notify: Callable[[Outcome], None], heard: Callable[[], float]
    ) -> None:
        """`heard` says when it last spoke, by `time.monotonic()`."""
        super().__init__(hello.run, hello.rank, hello.world, attempt, notify)
        self.process, self._heard = hello.process, heard

    def silent_s(self) -> float:
        return time.monotonic() - self._heard()


def refuse_second(saver: Saver, decisions: Decisions, run: str, launch: str, process: str) -> None:
    """`RunBusy` for the first rank of a new launch while ranks of another job live.

    A process that makes another checkpointer of its run is the same job, also where it has closed the one before and other
    ranks have not yet. `retry_after_s` says when ranks that were last heard of over HTTP count as gone; it is 0 where a
    living process holds a connection.
    """
    limit = time.monotonic() + DYING_S
    while True:
        living = [other for other in saver.present(run) if other.silent_s() < SILENCE_MAX_S]
        # Asked after that: ranks of this very launch may have come meanwhile, and were let in before they were seen.
        if not living or decisions.declared(run, launch) or saver.belongs(run, process):
            return
        if all(other.remote for other in living) or time.monotonic() > limit:
            break
        time.sleep(POLL_S)
    newest = max(living, key=lambda other: other.attempt)
    raise RunBusy(
        f"{run!r} is being trained already: attempt {newest.attempt}, {len(living)} of {newest.world} ranks here",
        hint=HINT,
        attempt=newest.attempt,
        ranks=len(living),
        retry_after_s=round(min(_until_gone(other) for other in living), 1),
    )


def _until_gone(other: Participant) -> float:
    return max(SILENCE_MAX_S - other.silent_s(), 0.1) if other.remote else 0.0
