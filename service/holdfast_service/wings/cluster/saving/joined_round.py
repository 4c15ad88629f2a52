"""A round of several nodes, from one node's view: what it has written, and when it looks again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import NamedTuple

from holdfast_formats.naming import Place
from holdfast_formats.staging.joint import JointRound, ShareHandover
from holdfast_service.daemon.saving.other_nodes import Result
from holdfast_service.daemon.saving.rounds import SaveRound
from holdfast_service.wings.cluster.saving.joint_writing import ShareWritten

POLL_S = (1.0, 5.0)  # besides notifications (`JointSaves.look_at_all`): after a change, and at most


class JoinedEnd(NamedTuple):
    """`staged` is what may be removed."""

    result: Result
    staged: Place | None


class JoinedRound:
    """A round in which ranks of this node take part."""

    def __init__(self, current: SaveRound, round_id: int, ranks: tuple[int, ...]) -> None:
        self.current, self.id, self.ranks = current, round_id, ranks
        self.writing: Future[ShareWritten] | None = None  # once it is sealed
        self.helping: Future[None] | None = None  # while this node writes the share of another one, and afterwards
        self.helped = False  # whether what came of that was looked at
        self.handover: ShareHandover | None = None  # as it was when this node committed
        self.finished = threading.Event()
        self.ended: JoinedEnd | None = None  # although it may still be written from its slots
        self.dead_since: dict[str, float] = {}
        self.absent_since: float | None = None
        self.asked = False  # whether it may commit, since it has delivered
        self.seen: JointRound | None = None  # as it was sealed
        self.node_ranks_at = self.nodes_at = time.monotonic() + POLL_S[1]  # a save is mostly over by then
        self.look_at = 0.0
        self.pause_s = POLL_S[0]
        self.state, self.written = "", False  # when it was last looked at

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
        assert self.seen is not None
        nodes, over = [one.node for one in self.seen.parts], self.handover
        return nodes if over is None else [over.helper or node if node == over.node else node for node in nodes]

    @property
    def measured(self) -> dict[str, float]:
        """Timings of this node's write, if there was one."""
        if self.writing is None or self.writing.cancelled() or self.writing.exception() is not None:
            return {}
        return self.writing.result().measured
