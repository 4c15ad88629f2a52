"""A barrier at the end of a restore (I7): if one rank finds damage, none continues from that step.

Each rank reports how its n-th restore ended. It is answered when all have reported, or as soon as one has found damage: then
all get that damage, and ask for the next answer, which is an older step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from holdfast_formats.errors import CheckpointError, Damaged, DeadlineExceeded, NoSuchCheckpoint, from_problem
from holdfast_formats.staging.joint import Votes
from holdfast_formats.staging.messages import Answer, RestoreResult, RestoreVerdict, StepQuestion
from holdfast_service.control.control import Control
from holdfast_service.daemon.saving.rounds import Participant

log = logging.getLogger(__name__)

UNHEARD_S = 60.0  # how long to wait for ranks that never asked what to restore
UNHEARD_ELSEWHERE_S = 1800.0  # and where they may be on other nodes, and read still
REPEAT_S = 1.0  # between two tries to report damage, while the catalog is unavailable
VOTE_S, LOOK_S = 0.2, 1.0  # interval of polling other nodes, and of looking whether there are any
TURNS_MAX = 64  # of a run: the oldest are forgotten, and those of other runs are not

Look = Callable[[str, int, Damaged], Damaged | None]
Vote = Callable[[str, int, int, Collection[int], "Mapping[str, Any] | None"], Votes]  # see `OtherNodes.vote`


class _Turn:
    """The n-th restore of an attempt. `ended` has ranks whose restore ended, well or not, and ranks that are gone."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.began = time.monotonic()
        self.asked: set[int] = set()
        self.reading: set[int] = set()  # those that got a step
        self.ended: set[int] = set()
        self.spans = False  # ranks may be on other nodes
        self.voting = threading.Lock()  # one vote at a time, so that the last sent is the latest
        self.voted: set[int] | None = None  # `ended` as last sent to other nodes
        self.voted_at = 0.0
        self.elsewhere: frozenset[int] = frozenset()  # ended on other nodes, or gone there
        self.met: set[tuple[int, str]] = set()  # ranks, and copies of which they have reported a problem
        self.doubted: set[int] = set()  # ranks with an unconfirmed report of damage
        self.failed: Damaged | None = None
        self.spread = False  # other nodes know that it failed
        self.agreed = False

    def fail(self, damage: Damaged) -> bool:
        """A rank found damage: the first counts, but none after all have agreed. Returns whether the restore failed."""
        if not self.agreed:
            self.failed = self.failed or damage
        return self.failed is not None

    def verdict(self) -> RestoreVerdict:
        """That of all ranks, which agree if none found damage."""
        if self.failed is not None:
            return RestoreVerdict(problem=self.failed.problem())
        self.agreed = True
        return RestoreVerdict()

    def begin_vote(self, spans: bool, done: set[int]) -> bool:
        """Whether other nodes are to be asked now: they have ranks if it `spans`, and they do not know what is `done`."""
        self.spans = spans
        if not spans:
            self.voted = self.voted or set()
            return False
        if len(done) >= self.world:  # no rank is on another node any more
            self.spread = True
            return False
        if self.voted == done and time.monotonic() - self.voted_at < VOTE_S and self.failed is None:
            return False
        self.voted_at = time.monotonic()
        return True

    def end_vote(self, done: set[int], problem: Mapping[str, Any] | None, votes: Votes | None) -> None:
        """Other nodes were told what is `done` and the `problem`, and answered with `votes`; None: they were not met."""
        if votes is None:
            self.voted = self.voted or set()
            return
        self.voted, self.elsewhere = done, votes.ranks - done
        self.spread = self.spread or problem is not None
        heard = None if votes.problem is None else from_problem(votes.problem)
        if isinstance(heard, Damaged):
            self.fail(heard)


class RestoreBarrier:
    """The barriers of all launches. Thread-safe. `look` checks reported damage, and repairs or records it."""

    def __init__(
        self,
        look: Look,
        control: Control,
        unheard_s: float = UNHEARD_S,
        vote: Vote = lambda run, attempt, turn, ranks, problem: Votes(frozenset(ranks), None),
        spans: Callable[[Participant], bool] = lambda who: False,
    ) -> None:
        """`spans` returns whether ranks of a launch may be on other nodes now, to which `vote` tells what is known here."""
        self._ask, self._spans = vote, spans
        self._look, self._control, self._findings, self.unheard_s = look, control, control.findings, unheard_s
        self._changed = threading.Condition()
        self._turns: dict[tuple[str, int, int], _Turn] = {}  # oldest first
        self._gone: dict[tuple[str, int], set[int]] = {}
        self._closed = False

    def join(self, who: Participant) -> None:
        """A rank connected, for the first time or again."""
        with self._changed:
            self._gone.get((who.run, who.attempt), set()).discard(who.rank)

    def gone(self, who: Participant) -> None:
        """A rank is gone: stop waiting for it."""
        with self._changed:
            self._gone.setdefault((who.run, who.attempt), set()).add(who.rank)
            self._changed.notify_all()

    def choose(self, who: Participant, turn: int, asked: StepQuestion) -> Answer:
        """The step that this rank's attempt restores as its `turn`-th, the same for all its ranks."""
        restores, named = self._control.restores, asked.step is not None
        step = restores.choose(who.run, who.attempt, turn, asked.step, asked.groups, asked.healthy, asked.in_root)
        notes = self.answered(who, turn, step, named)
        if not named and not asked.healthy:
            notes += tuple(restores.copies.skipped(who.run, step))
        copies = () if step is None or asked.in_root else restores.copies.of(who.run, step, damaged=True)
        created = restores.copies.created(who.run, step) if copies and step is not None else ""
        return Answer(step=step, notes=notes, copies=copies, created=created)

    def answered(self, who: Participant, turn: int, step: int | None, named: bool) -> tuple[str, ...]:
        """A rank got the step of its `turn`-th restore, and has finished earlier turns. Returns notes on newer steps that
        were skipped, unless the rank named the step.
        """
        with self._changed:
            current = self._turn(who, turn)
            current.asked.add(who.rank)
            if step is not None:
                current.reading.add(who.rank)
            for (run, attempt, number), before in self._turns.items():
                if (run, attempt) == (who.run, who.attempt) and number < turn:
                    before.ended.add(who.rank)
            self._changed.notify_all()
        return () if named else tuple(self._findings.passed_over(who.run, step))

    @property
    def under_way(self) -> bool:
        """Whether a rank is restoring now."""
        with self._changed:
            return any(
                turn.reading - turn.ended - self._gone.get((run, attempt), set())
                for (run, attempt, _), turn in self._turns.items()
            )

    def moved_on(self, who: Participant) -> None:
        """A rank saves, so it has continued from its restore."""
        with self._changed:
            for (run, attempt, _), turn in self._turns.items():
                if (run, attempt) == (who.run, who.attempt):
                    turn.ended.add(who.rank)
            self._changed.notify_all()

    def judge(self, who: Participant, turn: int, end: RestoreResult, wait_s: float) -> RestoreVerdict:
        """A rank's report about its restore of a turn; returns its verdict, `DeadlineExceeded` while others are
        restoring.
        """
        error = None if end.problem is None else from_problem(end.problem)
        with self._changed:  # over HTTP a rank asks for its verdict, and reports, more than once
            met = self._turn(who, turn).met
            problems = {n: from_problem(problem) for n, problem in end.passed_over.items() if (who.rank, n) not in met}
            met |= {(who.rank, name) for name in problems}
        self._control.restores.copies.passed_over(who.run, end.step, problems)
        if isinstance(error, Damaged):
            return self.damaged(who, turn, end.step, error, end.alone)
        if end.alone or error is not None:
            self.abandoned(who, turn)
            return RestoreVerdict()
        verdict = self.ended(who, turn, end.step, wait_s)
        if verdict is None:
            raise DeadlineExceeded(f"other ranks of {who.run} are still restoring step {end.step}", hint="ask again")
        return verdict

    def ended(self, who: Participant, turn: int, step: int, wait_s: float) -> RestoreVerdict | None:
        """A rank has restored the step: its verdict once all others have reported; None after `wait_s`."""
        copied = self._control.restores.copies.of(who.run, step, damaged=True)  # in place of what is damaged in the root
        known = None if copied else self._findings.damage(who.run, step)
        with self._changed:
            current = self._turn(who, turn)
            if known is not None:  # reports to an earlier daemon count
                current.fail(known)
            current.asked.add(who.rank)
            current.ended.add(who.rank)
            self._changed.notify_all()
        limit = time.monotonic() + wait_s
        while True:
            with self._changed:
                if self._closed or current.failed or current.agreed or self._complete(who, current):
                    break
                left = limit - time.monotonic()
                if left <= 0:
                    return None
                if current.voted is not None:
                    self._changed.wait(min(left, VOTE_S if current.spans else LOOK_S))
            self._vote(who, turn, current)
        with self._changed:
            return current.verdict()

    def abandoned(self, who: Participant, turn: int) -> None:
        """A rank's restore ended for another reason than damage, which concerns only this rank: stop waiting for it."""
        with self._changed:
            current = self._turn(who, turn)
            current.ended.add(who.rank)
            self._changed.notify_all()
        self._vote(who, turn, current)  # no other rank of this node may be there to do it

    def damaged(self, who: Participant, turn: int, step: int, error: Damaged, alone: bool) -> RestoreVerdict:
        """A rank reports damage. If it is confirmed, the turn ends for all ranks, unless `alone`.

        If it is not confirmed, or was repaired, the rank reads again. A second report is believed, because a rank that
        cannot read a step cannot restore it.
        """
        try:
            damage = self._look(who.run, step, error)
        except NoSuchCheckpoint:
            damage = error
        except CheckpointError as failure:
            log.warning("%s@%s: cannot check the damage that rank %s reports: %s", who.run, step, who.rank, failure.detail)
            damage = None
        with self._changed:
            current = self._turn(who, turn)
            if damage is None and who.rank not in current.doubted:
                current.doubted.add(who.rank)
                return RestoreVerdict(again=True)
        if damage is None:
            self._findings.damaged(who.run, step, error)
        with self._changed:
            current.ended.add(who.rank)
            late = alone or not current.fail(damage or error)
            if not late:
                log.warning("no rank of %s attempt %s restores step %s", who.run, who.attempt, step)
            self._changed.notify_all()
        if not late:
            self._spread(who, turn, current)
        newest = self._findings.newest(who.run) if alone else None
        return RestoreVerdict(problem=(damage or error).problem(), late=late, newest=newest)

    def forget(self, run: str) -> None:
        """Forget a run that is no longer trained."""
        with self._changed:
            self._turns = {key: turn for key, turn in self._turns.items() if key[0] != run}
            self._gone = {key: ranks for key, ranks in self._gone.items() if key[0] != run}

    def close(self) -> None:
        """Release all waiting calls."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _turn(self, who: Participant, turn: int) -> _Turn:
        key = (who.run, who.attempt, turn)
        if key not in self._turns:
            self._turns[key] = _Turn(who.world)
            own = [known for known in self._turns if known[0] == who.run]
            for old in own[:-TURNS_MAX]:
                del self._turns[old]
        return self._turns[key]

    def _spread(self, who: Participant, turn: int, current: _Turn) -> None:
        """Report damage to other nodes, repeatedly while the catalog is unavailable: their ranks must not continue from what
        this node's did not restore, even if no rank here asks about this turn any more.
        """
        self._vote(who, turn, current)
        if current.spans and not current.spread:
            repeat = threading.Thread(target=self._repeat, args=(who, turn, current), name="holdfast-damage", daemon=True)
            repeat.start()

    def _repeat(self, who: Participant, turn: int, current: _Turn) -> None:
        while True:
            with self._changed:
                if current.spread or not current.spans or self._changed.wait_for(lambda: self._closed, REPEAT_S):
                    return
                if current not in self._turns.values():  # the run is no longer trained
                    return
            self._vote(who, turn, current)

    def _vote(self, who: Participant, turn: int, current: _Turn) -> None:
        """Send this turn's result to other nodes and get theirs; does nothing if all ranks are here."""
        with current.voting:
            self._tell(who, turn, current)

    def _tell(self, who: Participant, turn: int, current: _Turn) -> None:
        spans = self._spans(who)  # not under the lock: `spans` takes another one
        with self._changed:
            done = self._done(who, current)
            if not current.begin_vote(spans, done):
                return
            problem = None if current.failed is None else current.failed.problem()
        try:
            votes = self._ask(who.run, who.attempt, turn, done, problem)
        except CheckpointError as away:
            log.info("cannot ask other nodes how a restore of %s ended: %s", who.run, away.detail)
            votes = None
        with self._changed:
            current.end_vote(done, problem, votes)
            self._changed.notify_all()

    def _done(self, who: Participant, current: _Turn) -> set[int]:
        return current.ended | self._gone.get((who.run, who.attempt), set())

    def _complete(self, who: Participant, current: _Turn) -> bool:
        done = self._done(who, current)
        if len(done) >= current.world:
            return True
        if len(done | current.elsewhere) >= current.world and current.voted == done:
            return True
        patience_s = UNHEARD_ELSEWHERE_S if current.spans else self.unheard_s
        if current.asked <= done and time.monotonic() - current.began > patience_s:
            missing = sorted(set(range(current.world)) - done)
            log.warning("%s attempt %s: ranks %s have not requested a step to restore", who.run, who.attempt, missing)
            return True
        return False
