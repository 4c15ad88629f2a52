"""Nodes agree which updates of an average count: those that every rank of the world delivers, on any node.

A node votes once on each update: all its ranks deliver it, or not. A vote does not change, because it follows from the
ranks' memory. It stays known until all nodes have processed the update: a node reports the last update that it folded, and
it cannot fold a later one before all nodes have processed this one, since all have to deliver that. So all nodes fold the
same updates, whenever they vote, whichever process dies, and without a leader. Training does not wait for it: while nodes
agree, their ranks drop what comes next, and all nodes leave it out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.staging.joint import AverageVote
from holdfast_service.daemon.averaging.rank_set import RankSetKey
from holdfast_service.wings.cluster.average_votes import AverageVotes

log = logging.getLogger(__name__)

POLL_S = 1.0  # beside what is heard (`Agreement.look`)
AWAY_S = 0.5  # between two tries, while the catalog is away


def verdict(mine: AverageVote, others: Sequence[AverageVote], world: int) -> bool | None:
    """Whether the update of this node's vote counts; None while that is open. `others`: the newest vote first."""
    if not mine.history:
        return False
    heard = set(mine.ranks)
    open_yet = False
    for vote in others:
        if not heard.isdisjoint(vote.ranks):
            continue  # of a daemon that had another name: these ranks are somewhere else now
        heard.update(vote.ranks)
        if vote.number > mine.number:
            return vote.folded == mine.number
        if vote.number < mine.number:
            open_yet = True
        elif vote.history != mine.history:
            return False
    return None if open_yet or len(heard) < world else True


class _Poll:
    """This node's vote for an attempt, and other nodes' votes since then."""

    def __init__(self, vote: AverageVote) -> None:
        self.wanted = vote
        self.reported: AverageVote | None = None
        self.others: Sequence[AverageVote] = ()
        self.ends = False  # nothing is to be heard any more

    def want(self, vote: AverageVote) -> bool:
        """This is this node's vote now. Returns whether other nodes are to be asked."""
        asks = self.wanted != vote or self.reported is None
        self.wanted, self.ends = vote, False
        return asks

    def hear(self, vote: AverageVote, others: Sequence[AverageVote]) -> bool:
        """This node's vote was stored, and these are the `others`. Returns whether one of them is new."""
        news = self.reported != vote or self.others != others
        self.reported, self.others = vote, others
        return news

    def end(self) -> None:
        """The votes of other nodes do not matter any more, but this node's last one is still reported."""
        self.ends = True

    def is_open(self, world: int) -> bool:
        """Whether a rank here waits for other nodes' votes."""
        return self.reported != self.wanted or (not self.ends and verdict(self.wanted, self.others, world) is None)


class Agreement:
    """The thread that polls other nodes. Thread-safe."""

    alone = False

    def __init__(self, votes: AverageVotes, changed: Callable[[RankSetKey], None]) -> None:
        """`changed` is called, in another thread, after votes of other nodes."""
        self._votes, self._changed = votes, changed
        self._lock = threading.Condition()
        self._polls: dict[RankSetKey, _Poll] = {}
        self._heard = self._closing = False
        self.away = False  # whether the catalog is unavailable now
        self._thread = threading.Thread(target=self._run, name="holdfast-average-votes", daemon=True)
        self._thread.start()

    def counts(self, key: RankSetKey, vote: AverageVote) -> bool | None:
        """Whether the update of this node's vote counts; None while that is open: then `changed` is called later."""
        with self._lock:
            poll = self._polls.setdefault(key, _Poll(vote))
            if poll.want(vote):
                self._lock.notify_all()
            if not vote.history:
                return False
            return verdict(vote, poll.others, key.world) if poll.reported == vote else None

    def forget(self, key: RankSetKey) -> None:
        """These ranks' averages are gone from here. Votes on them remain valid for others."""
        with self._lock:
            poll = self._polls.get(key)
            if poll is not None and poll.reported == poll.wanted:
                del self._polls[key]
            elif poll is not None:
                poll.end()

    def look(self) -> None:
        """Another node has voted."""
        with self._lock:
            self._heard = True
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        while True:
            with self._lock:
                if pause:
                    self._lock.wait_for(lambda: self._closing, pause)
                else:
                    self._lock.wait_for(lambda: self._closing or self._heard or self._untold(), self._patience())
                if self._closing:
                    return
                self._heard = False
                going = {key: poll for key, poll in self._polls.items() if poll.is_open(key.world)}
            try:
                for key, poll in going.items():
                    self._ask(key, poll)
                self.away, pause = False, 0.0
            except CatalogUnavailable as away:
                if not self.away:
                    log.info("updates of averages are paused, because other nodes cannot be reached: %s", away.detail)
                self.away, pause = True, AWAY_S
            except Exception:
                log.exception("querying other nodes about averages failed")
                self.away, pause = True, AWAY_S

    def _untold(self) -> bool:
        return any(poll.reported != poll.wanted for poll in self._polls.values())

    def _patience(self) -> float | None:
        """Seconds without work; None: until a change."""
        return POLL_S if any(poll.is_open(key.world) for key, poll in self._polls.items()) else None

    def _ask(self, key: RankSetKey, poll: _Poll) -> None:
        with self._lock:
            vote, before = poll.wanted, poll.reported
        others = self._votes.cast(key.run, key.attempt, vote)
        with self._lock:
            news = poll.hear(vote, others)
            if poll.ends and poll.reported == poll.wanted and self._polls.get(key) is poll:
                del self._polls[key]
        if before != vote and _is_awaited(vote, others):
            self._votes.notify()
        if news:
            self._changed(key)


def _is_awaited(mine: AverageVote, others: Sequence[AverageVote]) -> bool:
    """Whether this vote may let a node continue. Of those that deliver an update, the last one notifies."""
    behind = [vote for vote in others if vote.number < mine.number]
    level = any(vote.history for vote in others if vote.number == mine.number)
    return any(vote.history for vote in behind) or (level and not (mine.history and behind))
