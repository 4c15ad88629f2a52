"""Uploads sealed slots to a daemon over HTTP and receives their outcomes, through connection losses and daemon
restarts.

A slot is freed when its save has ended, not when it was uploaded. So a restarted daemon gets the bytes again, and no
step is lost.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

from holdfast.remote.chunks import ChunkSender
from holdfast.remote.own_slots import OwnSave, OwnSaves, OwnSegment
from holdfast.rest.api import Api, was_reached
from holdfast.threads import own_threads
from holdfast_formats.errors import (
    AlreadyCommitted,
    ArenaFull,
    Awaited,
    CheckpointError,
    DaemonGone,
    DeadlineExceeded,
    GenerationDropped,
    InvalidRequest,
    NoSuchResource,
    StaleAttempt,
    StorageFailed,
    from_problem,
)
from holdfast_formats.rest import bodies
from holdfast_formats.staging import messages, wire
from holdfast_formats.staging.messages import restate

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 0.5  # save() waits for whether a step may be saved; after that the answer is handled in the background
ROOM_TIMEOUT_S = 2.0  # and for a slot of its own to become free
STOPPING_TIMEOUT_S = 5.0
POLL_S = 10.0
CHOICE_WAIT_S = 2.0
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 3.0
LOST_AFTER_S = 120.0  # of tries without any answer
RESUMES_MAX = 8  # of one upload, for chunks that the daemon found wrong
CLOSE_TIMEOUT_S = 5.0

_PASSING = (DaemonGone, ArenaFull, DeadlineExceeded, StorageFailed)  # a later try may succeed

_Result = TypeVar("_Result")
# Of outcomes, of the daemon's loss, and that another rank of the launch is to stop.
LinkEvents = tuple[Callable[[wire.Outcome], None], Callable[[CheckpointError], None], Callable[[], object]]


class _Patience:
    """Increasing waits between retries."""

    def __init__(self) -> None:
        self._delay_s = BACKOFF_MIN_S

    def wait(self, unless: threading.Event) -> None:
        unless.wait(self._delay_s)
        self._delay_s = min(2 * self._delay_s, BACKOFF_MAX_S)


class _Contact:
    """Whether the daemon answers, and since when it has not."""

    def __init__(self) -> None:
        self._heard_at = time.monotonic()
        self.silent = False  # it has not answered so far
        self._unmet: str | None = None  # why the last request did not reach it

    def answered(self) -> None:
        self._heard_at, self.silent, self._unmet = time.monotonic(), False, None

    def tried(self, error: CheckpointError) -> None:
        """A short try has failed."""
        self.silent = was_reached(error)

    def failed(self, error: CheckpointError) -> None:
        if isinstance(error, ArenaFull | DeadlineExceeded):
            self.answered()
        elif was_reached(error):  # it may be frozen, and will answer: what is staged waits for it
            self.silent, self._heard_at = True, time.monotonic()
        elif isinstance(error, DaemonGone):
            self._unmet = error.detail

    @property
    def lost(self) -> bool:
        return time.monotonic() - self._heard_at > LOST_AFTER_S

    def awaited(self, url: str) -> Awaited | None:
        """What saves wait for if the daemon does not answer; None if it does."""
        if not self.silent and self._unmet is None:
            return None
        why = f"the daemon at {url} does not answer{f' ({self._unmet})' if self._unmet else ''}"
        return Awaited(why, "check that it runs, and read its log; staged saves are uploaded once it answers")


class Uploader:
    """One rank's uploads to a daemon. One thread uploads the saves in order, one polls for their outcomes."""

    def __init__(self, api: Api, rank_id: str, hello: bodies.RankHello, link_events: LinkEvents) -> None:
        self._api, self._rank_id, self._hello = api, rank_id, hello
        self.run = hello.run
        self._on_outcome, self._on_lost, self._on_stop = link_events
        self.welcome = api.join(rank_id, hello)
        self.lost: CheckpointError | None = None
        self._lock = threading.Lock()
        self._rejoining = threading.Lock()
        self._generation = 0  # how many daemons this rank has outlived
        self._room: messages.Room | None = None
        self._segment: OwnSegment | None = None
        self.saves = OwnSaves()
        self._sealed: queue.SimpleQueue[OwnSave | None] = queue.SimpleQueue()
        self._contact = _Contact()
        self._closing = threading.Event()
        self._threads = [
            own_threads.begin(partial(self._guard, loop), name, self._end_loops)
            for name, loop in (("holdfast-uploader", self._upload_loop), ("holdfast-listener", self._listen_loop))
        ]

    def reserve(self, room: messages.Room, segment: OwnSegment) -> None:
        """Make the daemon reserve as much memory as this rank has itself."""
        before, self._room = self._room, room  # noted before the request: a restarted daemon needs it, too
        try:
            self._persist(lambda: self._api.reserve(self._rank_id, room), time.monotonic())
        except CheckpointError:
            self._room = before
            raise
        self._segment = segment

    def begin(self, save: OwnSave, wanted: messages.SlotRequest) -> None:
        """Begin the save at the daemon; raises a refusal. A slow link stops no save."""
        self.saves.add(save)
        try:
            save.open = self.ask(save.number, wanted)
        except CheckpointError:
            self.saves.forget(save)
            raise

    def ask(self, number: int, wanted: messages.SlotRequest) -> bool:
        """Begin an upload at the daemon, where the policy decides if no slot is free. False if the daemon is silent."""
        if self._contact.silent:
            return False
        try:
            self._api.open_upload(self._rank_id, number, wanted, OPEN_TIMEOUT_S)
        except CheckpointError as error:
            # A restarted daemon may not know this rank yet.
            if not (isinstance(error, (*_PASSING, NoSuchResource)) or _may_go_on(error)):
                raise
            self._contact.tried(error)
            log.info("the daemon does not accept step %d yet: %s", wanted.step, error.detail)
            return False
        return True

    def take_back(self, step: int, policy: messages.Policy) -> bool:
        """Drop, for `step`, the oldest save whose upload has not begun, on all ranks; False if there is none."""
        awaited = self.awaited()
        save = self.saves.take_back(lambda save: GenerationDropped.of(save.step, step, policy, awaited).problem())
        if save is None:
            return False
        self._on_outcome(self._outcome(save))
        self._give_up_soon(save, from_problem(save.problem or {}))
        return True

    def awaited(self) -> Awaited:
        """What the oldest save that holds a slot of this rank waits for."""
        url = self._api.url
        if (silence := self._contact.awaited(url)) is not None:
            return silence
        oldest = self.saves.oldest()
        if oldest is None or not oldest.delivered:
            of = "earlier steps" if oldest is None else f"step {oldest.step}"
            return Awaited(
                f"the upload of {of} to {url} is slower than the saves",
                "save less often, give the checkpointer more slots, or use a faster network",
            )
        return Awaited(
            f"step {oldest.step} is uploaded, and the daemon at {url} has not committed it: it waits for its storage, for "
            "other ranks, or for the catalog",
            "check the saves of the run in `holdfast top`, and the daemon's log",
        )

    def deliver(self, save: OwnSave) -> bool:
        """Upload the sealed slot in the background. If the save has ended already, free its slot and return False."""
        if self.saves.staged(save):
            self.saves.free(save)
            return False
        self._sealed.put(save)
        return True

    def abandon(self, save: OwnSave, error: CheckpointError) -> None:
        """Free a slot that was not filled after all, and inform the other ranks."""
        self.saves.free(save)
        self._give_up_soon(save, error)

    def choose(self, asked: wire.Choose) -> messages.Answer:
        """Request the step to restore; polls while the daemon writes saves."""
        question = restate(asked, bodies.Question, wait_s=min(asked.wait_s, CHOICE_WAIT_S))
        limit = time.monotonic() + asked.wait_s
        return self._persist(lambda: self._api.choose(self._rank_id, asked.turn, question), limit)

    def ended(self, said: wire.Ended) -> messages.RestoreVerdict:
        """Report how a restore ended; polls until the other ranks have reported."""
        end = restate(said, bodies.RestoreEnd, wait_s=min(said.wait_s, CHOICE_WAIT_S))
        limit = time.monotonic() + said.wait_s
        return self._persist(lambda: self._api.restore_ended(self._rank_id, said.turn, end), limit)

    def stopping(self, passed_step: messages.PassedStep) -> messages.LastStep:
        """Report how far this rank is, because its launch is to stop; repeated if the daemon does not answer."""
        return self._api.stopping(self._rank_id, passed_step, STOPPING_TIMEOUT_S)

    def waits(self, waiting: messages.Waiting) -> None:
        """Report that this rank begins no other save, once it has begun all of them there. The report may be lost."""
        if self._contact.silent or not self.saves.all_open:
            return
        try:
            self._api.waits(self._rank_id, waiting, OPEN_TIMEOUT_S)
        except CheckpointError as unheard:
            log.debug("could not report to %s that this rank is waiting: %s", self._api.url, unheard.detail)

    def close(self) -> None:
        """Disconnect; saves that the daemon has not completely received are given up."""
        self._end_loops()
        self.saves.lose()
        if self.lost is None and not self._contact.silent:
            try:
                self._api.leave(self._rank_id, CLOSE_TIMEOUT_S)
            except CheckpointError as error:
                log.info("could not notify %s that this rank disconnects: %s", self._api.url, error.detail)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _end_loops(self) -> None:
        self._closing.set()
        self._sealed.put(None)

    def _tell(self, save: OwnSave, problem: dict[str, Any] | None) -> None:
        """Report a save's outcome once, and free its slot unless it is still being filled."""
        if self.saves.end(save, problem):
            self._on_outcome(self._outcome(save))

    def _outcome(self, save: OwnSave) -> wire.Outcome:
        state: Literal["committed", "aborted"] = "committed" if save.problem is None else "aborted"
        return wire.Outcome(step=save.step, attempt=self.welcome.attempt, state=state, problem=save.problem)

    def _guard(self, loop: Callable[[], None]) -> None:
        """Run a thread; if it ends early, end every pending save with an error."""
        try:
            loop()
        except CheckpointError as error:
            self._lose(error)
        except RuntimeError as error:
            if not self._closing.is_set():  # else the connection was closed under it, as intended
                raise
            log.debug("%s ended: %s", threading.current_thread().name, error)

    def _lose(self, error: CheckpointError) -> None:
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            self.lost = error
        self.saves.lose()
        self._sealed.put(None)
        log.warning("lost the daemon at %s: %s", self._api.url, error.detail)
        if self._segment is not None:
            self._segment.lose(error)
        self._on_lost(error)

    def _persist(self, act: Callable[[], _Result], limit: float) -> _Result:
        """Retry until success or refusal, but not beyond `limit` if the daemon reports that it takes longer."""
        patience = _Patience()
        while True:
            seen = self._generation
            try:
                return act()
            except CheckpointError as error:
                if isinstance(error, DeadlineExceeded) and time.monotonic() > limit:
                    raise
                self._recover(error, seen, patience)

    def _recover(self, error: CheckpointError, seen: int, patience: _Patience) -> None:
        """Prepare another try, or raise the error again."""
        if isinstance(error, NoSuchResource):
            try:
                self._rejoin(seen)
                return
            except _PASSING as failure:
                error = failure
        self._contact.failed(error)
        if not isinstance(error, _PASSING) or self._closing.is_set() or self._contact.lost:
            raise error
        patience.wait(self._closing)

    def _rejoin(self, seen: int) -> None:
        """Register again with a new daemon that does not know this rank, and upload every save whose outcome is unknown."""
        with self._rejoining:
            if self._generation != seen:
                return
            hello = self._hello.model_copy(update={"root_id": self.welcome.root_id})
            attempt = self._api.join(self._rank_id, hello).attempt
            if attempt != self.welcome.attempt:
                raise StaleAttempt(f"attempt {self.welcome.attempt} is over: this launch is attempt {attempt} now")
            if self._room is not None:
                self._api.reserve(self._rank_id, self._room)
            self._generation += 1
            for save in self.saves.bring_again():
                self._sealed.put(save)

    def _listen_loop(self) -> None:
        after, patience = 0, _Patience()
        while not self._closing.is_set():
            seen = self._generation
            try:
                outcomes = self._api.outcomes(self._rank_id, after, POLL_S)
            except CheckpointError as error:
                if self._closing.is_set():
                    return
                self._recover(error, seen, patience)
                after = after if self._generation == seen else 0
                continue
            self._contact.answered()
            patience = _Patience()
            if outcomes.stop:
                self._on_stop()
            for ended in outcomes.items:
                save = self.saves.find(ended.step)
                if save is not None and save.number == ended.number:
                    self._tell(save, _problem_of(ended))
            after = outcomes.next if self._generation == seen else 0  # another daemon counts from the beginning

    def _upload_loop(self) -> None:
        sender = ChunkSender(self._api, self._rank_id, self.welcome.chunk_bytes_max)
        try:
            while (save := self._sealed.get()) is not None:
                try:
                    self._bring(sender, save)
                except CheckpointError as error:
                    if self._closing.is_set():
                        return
                    log.warning("step %d could not be uploaded: %s", save.step, error.detail)
                    self._tell(save, error.problem())
                    self.give_up(save.number, save.step, error)
        finally:
            sender.close()

    def _give_up_soon(self, save: OwnSave, error: CheckpointError) -> None:
        """Inform the other ranks; once the daemon answers, if it does not now: it keeps a slot for an open upload."""
        if self._contact.silent or not self.give_up(save.number, save.step, error, OPEN_TIMEOUT_S):
            problem = messages.AbandonRequest(problem=error.problem())
            own_threads.start(lambda: self._give_up_later(save, problem), "holdfast-giving-up")

    def _give_up_later(self, save: OwnSave, why: messages.AbandonRequest) -> None:
        try:
            self._persist(lambda: self._api.abandon_upload(self._rank_id, save.number, why), time.monotonic())
        except CheckpointError as unheard:
            log.info("could not notify %s that step %d is given up: %s", self._api.url, save.step, unheard.detail)

    def give_up(self, number: int, step: int, error: CheckpointError, timeout_s: float | None = None) -> bool:
        """Inform the other ranks of the world at once that this step is not saved; False if another try may succeed."""
        try:
            self._api.abandon_upload(self._rank_id, number, messages.AbandonRequest(problem=error.problem()), timeout_s)
        except CheckpointError as unheard:
            log.info("could not notify %s that step %d is given up: %s", self._api.url, step, unheard.detail)
            return not isinstance(unheard, _PASSING)
        return True

    def _bring(self, sender: ChunkSender, save: OwnSave) -> None:
        """Upload a sealed slot to the daemon; an interrupted upload resumes where it stopped."""
        patience, resumes = _Patience(), 0
        while self.saves.begin_upload(save):
            seen = self._generation
            try:
                reached = sender.bring(save)
                self._contact.answered()
            except InvalidRequest as error:
                resumes += 1
                if resumes > RESUMES_MAX or not _may_go_on(error):
                    raise
                log.info("step %d: %s; continuing", save.step, error.detail)
                with self._rejoining:  # the other thread may be half-way
                    patience.wait(self._closing)
            except AlreadyCommitted:
                # The previous daemon may have committed it, and died before it reported.
                checkpoint = self._api.checkpoint(self.run, save.step)
                if (checkpoint.attempt, checkpoint.turn) != (self.welcome.attempt, save.wanted.turn):
                    raise
                self._tell(save, None)
            except CheckpointError as error:
                self._recover(error, seen, patience)
            else:
                if not self.saves.delivered(save, lambda seen=seen: self._generation == seen):  # type: ignore[misc]
                    continue  # a daemon that was restarted at this very moment has nothing of it
                if reached.state in ("committed", "aborted"):
                    self._tell(save, _problem_of(reached))
                return


def _problem_of(ended: bodies.Upload) -> dict[str, Any] | None:
    return (ended.problem or {}) if ended.state == "aborted" else None


def _may_go_on(error: CheckpointError) -> bool:
    """Whether a refusal states an upload's progress, rather than that it is not allowed."""
    return isinstance(error, InvalidRequest) and bool({"reason", "received"} & error.members.keys())
