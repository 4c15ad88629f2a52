"""A round of several nodes, from one node's view: what it has written, and when it looks again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

from holdfast_formats.naming import Place
from holdfast_formats.staging.joint import JointRound, RoundState, ShareHandover
from holdfast_service.daemon.saving.other_nodes import Result
from holdfast_service.daemon.saving.rounds import SaveRound
from holdfast_service.wings.cluster.saving.joint_writing import ShareWritten

POLL_S = (1.0, 5.0)  # besides notifications (`JointSaves.look_at_all`): after a change, and at most


class JoinedEnd(NamedTuple):
    """`staged` is what may be removed; `handover` is as it was when this node committed."""

    result: Result
    staged: Place | None
    handover: ShareHandover | None


class JoinedRound:
    """A round in which ranks of this node take part."""

    def __init__(self, current: SaveRound, round_id: int, ranks: tuple[int, ...]) -> None:
        self.current, self.id, self.ranks = current, round_id, ranks
        self.writing: Future[ShareWritten] | None = None  # once it is sealed
        self.helping: Future[None] | None = None  # while this node writes the share of another one, and afterwards
        self.helped = False  # whether what came of that was looked at
        self.finished = threading.Event()
        self.ended: JoinedEnd | None = None  # although it may still be written from its slots
        self._gone_since: dict[str, float] = {}  # by what is gone (monotonic)
        self._due_at: dict[str, float] = {}  # by what is looked at
        self._begins_at = time.monotonic() + POLL_S[1]  # a save is mostly over by then
        self.asked = False  # whether it may commit, since it has delivered
        self.seen: JointRound | None = None  # as it was sealed
        self.look_at = 0.0
        self._pause_s = POLL_S[0]
        self._state, self.written = "", False  # when it was last looked at

    def bring(self, ranks: tuple[int, ...]) -> None:
        """These ranks are in this node's part, which the catalog has."""
        self.ranks = ranks

    def observe(self, seen: RoundState) -> None:
        """It was looked at: the next look follows soon after a change, and later each time after none."""
        self._pause_s = POLL_S[0] if seen.state != self._state else min(self._pause_s * 1.5, POLL_S[1])
        self._state, self.written, self.look_at = seen.state, seen.written, time.monotonic() + self._pause_s

    def postpone(self) -> None:
        """Another node commits it now: there is nothing to see for a while."""
        self.look_at = time.monotonic() + POLL_S[1]

    def seal(self, seen: JointRound) -> None:
        """All parts are there, as `seen`."""
        self.seen = seen

    def begin_writing(self, writing: Future[ShareWritten]) -> None:
        """This node's share is being written."""
        self.writing = writing

    @property
    def waits(self) -> bool:
        """Whether it is sealed, and this node's share is not being written."""
        return self.seen is not None and self.writing is None and self.ended is None

    def is_after(self, other: JoinedRound) -> bool:
        """Whether the other round is an earlier step of the same launch."""
        mine, its = self.current.key, other.current.key
        return (mine.run, mine.attempt) == (its.run, its.attempt) and its.step < mine.step

    def begin_helping(self, helping: Future[None]) -> None:
        """Another node's share is being written from here."""
        self.helping = helping

    def end_helping(self) -> BaseException | None:
        """The error of that write, which has ended and is processed now."""
        assert self.helping is not None
        self.helped = True
        return self.helping.exception()

    def ask(self) -> bool:
        """Whether this node's share is written: True only once."""
        first = self.delivered and not self.asked
        self.asked = self.asked or first
        return first

    def end(self, result: Result, left: bool, handover: ShareHandover | None) -> None:
        """It has ended, or is `left` to other nodes. Writes that go on stop at their next piece."""
        self.finished.set()
        self.ended = JoinedEnd(result, None if left else self.place, handover)
        for one in (self.writing, self.helping):
            if one is not None:
                one.cancel()

    def is_due(self, what: str, every_s: float) -> bool:
        """Whether `what` was not looked at for so long; then it is looked at now."""
        now = time.monotonic()
        if now < self._due_at.get(what, self._begins_at):
            return False
        self._due_at[what] = now + every_s
        return True

    def is_gone(self, what: str, now_gone: bool, grace_s: float) -> bool:
        """Whether `what` is gone now, and was at all looks for longer than the grace."""
        if not now_gone:
            self._gone_since.pop(what, None)
            return False
        now = time.monotonic()
        return now - self._gone_since.setdefault(what, now) > grace_s

    @property
    def news(self) -> bool:
        """Whether one of its writes has ended and was not processed yet."""
        written = self.writing is not None and self.writing.done() and not self.asked
        return written or (self.helping is not None and self.helping.done() and not self.helped)

    @property
    def at_work(self) -> bool:
        """Whether its slots are being written from."""
        return any(one is not None and not one.done() for one in (self.writing, self.helping))

    @property
    def delivered(self) -> bool:
        """Whether this node's share is written, and its receipt is in the catalog."""
        return self.writing is not None and self.writing.done() and self.writing.exception() is None

    @property
    def place(self) -> Place:
        return Place(*self.current.key, self.id)

    @property
    def slots(self) -> dict[int, memoryview]:
        """The sealed slots of its ranks."""
        return {rank: sealed.data for rank, sealed in self.current.sealed.items()}

    @property
    def writers(self) -> list[str]:
        """The writer of each node's share, in the order of the nodes' numbers."""
        assert self.seen is not None and self.ended is not None
        nodes, over = [one.node for one in self.seen.parts], self.ended.handover
        return nodes if over is None else [over.helper or node if node == over.node else node for node in nodes]

    @property
    def measured(self) -> dict[str, float]:
        """Timings of this node's write, if there was one."""
        if self.writing is None or self.writing.cancelled() or self.writing.exception() is not None:
            return {}
        return self.writing.result().measured
