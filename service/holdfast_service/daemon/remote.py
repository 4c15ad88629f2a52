"""Ranks that share no memory with this daemon: it reserves slots for them, and they upload chunks over HTTP.

For the saver such a rank is a participant like any other. A silent rank counts as dead after a while; its sealed slots are
still saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast_formats.errors import (
    CheckpointError,
    DeadlineExceeded,
    InvalidRequest,
    LimitExceeded,
    NoSuchResource,
    RoundAborted,
    WrongRoot,
    from_problem,
)
from holdfast_formats.rest import bodies
from holdfast_formats.staging.messages import Answer
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.arena import Arena
from holdfast_service.daemon.arena.shares import ADMIN, ShareHolder, ShareRequester, left
from holdfast_service.daemon.saving.rounds import Participant
from holdfast_service.daemon.saving.run_busy import check, let_in
from holdfast_service.daemon.saving.saver import Saver

from .remote_rank import RemoteRank

log = logging.getLogger(__name__)

SILENCE_MAX_S = 60.0
RANKS_MAX = 2144  # all but a few of them may be one run's, and half of them those of the tokens for one pattern: `shares`
UNUSED_S = 60.0  # a reservation into which nothing has come for so long is given back, until its rank saves
DEPARTED_MAX = 1024  # ranks that count as dead and would be told so
REAP_INTERVAL_S = 1.0


class _Departed(NamedTuple):
    """A rank that is gone: its run, and the error for its later requests."""

    run: str
    problem: dict[str, Any]


class RemoteRanks:
    """All ranks over HTTP, by their IDs. Silent ones count as dead."""

    def __init__(
        self,
        arena: Arena,
        saver: Saver,
        control: Control,
        silence_max_s: float = SILENCE_MAX_S,
        root_id: str = "",
    ) -> None:
        self._arena, self._saver, self._control = arena, saver, control
        self.root_id = root_id
        self.restores = self._saver.restores
        self.silence_max_s = silence_max_s
        self._lock = threading.Lock()
        self._ranks: dict[str, RemoteRank] = {}
        self._departed: dict[str, _Departed] = {}
        self._closing = threading.Event()
        self._reaper = threading.Thread(target=self._reap_loop, name="holdfast-remote-reaper", daemon=True)
        self._reaper.start()

    @property
    def count(self) -> int:
        with self._lock:
            return len(self._ranks)

    def notices(self, hello: bodies.RankHello, owner: bool) -> tuple[str, ...]:
        return self._control.wishes.denied(hello.run, hello.keep_last, owner)

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def hello(self, rank_id: str, hello: bodies.RankHello, asker: ShareRequester = ADMIN) -> RemoteRank:
        """Register the rank of this ID, new or known. A restarted rank replaces its old entry. `asker`: see `shares`."""
        check(hello)
        if hello.root_id not in (None, self.root_id):
            hint = "this address now belongs to another daemon: restart the trainer"
            raise WrongRoot("the daemon serves a different root than the trainer expects", hint=hint)
        known = self._known(rank_id, hello)
        if known is not None:
            return known

        def join(attempt: int) -> RemoteRank:
            return self._joined(rank_id, RemoteRank(self._arena, self._saver, hello, attempt, asker.tenant))

        return let_in(self._saver, self._control, hello, join, asker)

    def _joined(self, rank_id: str, remote_rank: RemoteRank) -> RemoteRank:
        hello = remote_rank.hello
        place = (hello.run, remote_rank.who.attempt, hello.rank)
        with self._lock:
            self._refuse_too_many(remote_rank.holder)
            if rank_id in self._departed:
                raise from_problem(self._departed[rank_id].problem)
            if rank_id in self._ranks:  # the same hello, sent again, was faster
                return self._ranks[rank_id]
            before = [i for i, r in self._ranks.items() if (r.who.run, r.who.attempt, r.who.rank) == place]
            self._ranks[rank_id] = remote_rank
        for replaced in before:
            self._part(replaced, RoundAborted(f"rank {hello.rank} has restarted"))
        self._saver.join(remote_rank.who)
        return remote_rank

    def _refuse_too_many(self, who: ShareHolder) -> None:
        held = [(rank.holder, 1) for rank in self._ranks.values()]
        share = left(self._arena.shares, RANKS_MAX, held, who)
        if self._closing.is_set() or len(held) >= RANKS_MAX or not share.bytes_left:
            hint = "wait until some have ended, or let ranks on the daemon's machine use its socket"
            raise LimitExceeded(
                f"{len(held)} ranks are already connected over HTTP, of {RANKS_MAX}, {share.name}", hint=hint
            )

    def _known(self, rank_id: str, hello: bodies.RankHello) -> RemoteRank | None:
        with self._lock:
            known = self._ranks.get(rank_id)
        if known is not None:
            if known.hello.model_copy(update={"root_id": hello.root_id}) != hello:
                raise InvalidRequest(f"the ID {rank_id} belongs to another rank")
            known.hear()
        return known

    def find(self, rank_id: str, sees: Callable[[str], bool] = lambda run: True) -> RemoteRank:
        """The rank of this id, marked as alive; `RoundAborted` if it was given up, `NoSuchResource` if it is not registered,
        or of a run that the caller may not see.
        """
        with self._lock:
            rank_found = self._ranks.get(rank_id)
            departed = self._departed.get(rank_id)
        if rank_found is not None and sees(rank_found.who.run):
            rank_found.hear()
            return rank_found
        if departed is not None and sees(departed.run):
            raise from_problem(departed.problem)
        raise NoSuchResource(f"no rank has the ID {rank_id}", hint="register the rank first: PUT /v1/ranks/{id}")

    def leave(self, rank_id: str) -> None:
        """Disconnect the rank; its sealed slots are saved."""
        self._part(rank_id, RoundAborted("this rank has disconnected"), parted=True)

    def choose(self, who: Participant, turn: int, question: bodies.Question) -> Answer:
        """The step that this rank's attempt restores; `DeadlineExceeded` while earlier sealed saves are being written."""
        if not self._saver.settle(who.run, question.wait_s):
            raise DeadlineExceeded(f"saves of {who.run} are still being written", hint="ask again")
        return self.restores.choose(who, turn, question)

    def expire(self) -> None:
        """Give up ranks that have been silent for too long, and free unused reservations."""
        limit = time.monotonic() - self.silence_max_s
        with self._lock:
            silent = [rank_id for rank_id, rank in self._ranks.items() if rank.heard < limit]
            ranks = list(self._ranks.values())
        for rank in ranks:
            rank.give_back_unused(UNUSED_S)
        for rank_id in silent:
            error = RoundAborted(f"this rank has not been heard from for {self.silence_max_s:g} s; it counts as dead")
            log.warning("%s: %s", rank_id, error.detail)
            self._part(rank_id, error)

    def _excuse(self, seconds: float) -> None:
        """Extend all deadlines by the time that this daemon was suspended, during which it received nothing."""
        with self._lock:
            for rank in self._ranks.values():
                rank.excuse(seconds)

    def close(self) -> None:
        """Answer all waiting requests and stop waiting."""
        self._closing.set()
        self._reaper.join()
        with self._lock:
            ranks = list(self._ranks.values())
        for rank in ranks:
            rank.wake()

    def _part(self, rank_id: str, error: CheckpointError, parted: bool = False) -> None:
        with self._lock:
            rank = self._ranks.pop(rank_id, None)
            if rank is None:
                return
            self._departed[rank_id] = _Departed(rank.who.run, error.problem())
            while len(self._departed) > DEPARTED_MAX:
                del self._departed[next(iter(self._departed))]
        if parted:
            rank.who.part()
        rank.depart()

    def _reap_loop(self) -> None:
        interval_s = min(REAP_INTERVAL_S, self.silence_max_s / 4)
        looked = time.monotonic()
        while not self._closing.wait(interval_s):
            now = time.monotonic()
            stood_still_s, looked = now - looked - interval_s, now
            try:
                self._excuse(stood_still_s)
                self.expire()
            except Exception:  # the next look tries again
                log.exception("supervising the ranks over HTTP failed")
