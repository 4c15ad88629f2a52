"""The Checkpointers of this process for saves through DCP, one for each run."""

from __future__ import annotations

import atexit
import os
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.checkpointer import Checkpointer
from holdfast.config import launch_info
from holdfast.integrations.dcp.contents import ChunkFragments
from holdfast.launch import Launch, assigned
from holdfast.link import address
from holdfast.state.named_entries import NamedSnapshot
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import CheckpointError
from holdfast_formats.lineage import Existing

LAST_S = 60.0  # the other ranks have heard of the last save's end already


class RankPart(NamedTuple):
    """A rank's part in a save, as the coordinator distributes it with the plans.

    `loaded` is the step that training continues from, and the number of loads.
    """

    rank: int
    world: int
    launch: str
    groups: frozenset[str]
    loaded: tuple[int, int] | None


class Asked(NamedTuple):
    """A save's options. Without `existing`, a step of this launch is replaced."""

    step: int
    existing: Existing | None
    metrics: Mapping[str, float] | None
    assets: Mapping[str, Any] | None


class RunOfProcess:
    """One run, saved through DCP by this process: its Checkpointer, and how the next step is saved."""

    def __init__(self, run: str, at: str | os.PathLike[str] | None) -> None:
        self._run, self._at = run, at
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {}
        self._checkpointer: Checkpointer | None = None
        self._launch = ""
        self._last: SaveTicket | None = None
        self._saved: set[int] = set()
        self._committed: int | None = None  # the last step that was saved since one was loaded
        self._goes_on: tuple[int, int] | None = None  # as `loaded`, for a launch after one that failed
        self._noted: tuple[int, int] | None = None
        self.parts = ChunkFragments()
        self.groups: frozenset[str] = frozenset()  # that the coordinator gave out last
        self.loaded: tuple[int, int] | None = None

    def note_loaded(self, step: int, whole: bool) -> None:
        """Record that training continues from a step, unless it is only a part that is loaded later, such as a teacher."""
        if whole or (self.loaded is None and not self._saved):
            self.take_loaded((step, (self.loaded[1] if self.loaded else 0) + 1))

    def take_loaded(self, loaded: tuple[int, int]) -> None:
        """Take over the newest load, of this process or of the training process."""
        if loaded != self.loaded:
            self.loaded, self._committed, self._goes_on = loaded, None, None

    @property
    def origin(self) -> tuple[int, int] | None:
        """The step that training continues from, and the number of loads, for the coordinator to distribute."""
        return self._goes_on or self.loaded

    def launch(self) -> str:
        """The launch of the next save, for the coordinator to distribute. If the last save failed on any rank, a new
        one that continues from the committed steps.
        """
        with self._lock:
            failed = self._last is not None and not self._settled(self._last)
            if failed and self._committed is not None:
                self._goes_on = self._committed, 0
            return uuid.uuid4().hex if failed or not self._launch else self._launch

    def save(self, part: RankPart, contents: NamedSnapshot, asked: Asked, keep_last: int | None) -> SaveTicket:
        """Stage this rank's part, and return. Raises what `Checkpointer.save` raises."""
        with self._lock:
            checkpointer = self._checkpointer_of(part, keep_last)
            if self._last is not None:
                with suppress(CheckpointError):
                    self._last.result(LAST_S)
                self._settled(self._last)
            if part.loaded is not None and part.loaded != self._noted:
                checkpointer.goes_on_from(part.loaded[0])
                self._noted = part.loaded
            own = asked.step in self._saved or (part.loaded is not None and asked.step == part.loaded[0])
            existing: Existing = asked.existing or ("replace" if own else "refuse")
            self._state["dcp"] = contents
            ticket = checkpointer.save(
                asked.step, metrics=asked.metrics, assets=asked.assets, existing=existing, wait="staged"
            )
            self._last = ticket
            if ticket.error is not None:
                raise ticket.error
            self._saved.add(asked.step)
            return ticket

    def close(self) -> None:
        """Disconnect from the daemon. The next save connects again, as another launch."""
        with self._lock:
            self._part()

    def _settled(self, ticket: SaveTicket) -> bool:
        if not ticket.done or ticket.error is not None:
            return False
        self._committed = ticket.step
        return True

    def _checkpointer_of(self, part: RankPart, keep_last: int | None) -> Checkpointer:
        if self._checkpointer is None or self._launch != part.launch:
            self._part()
            peers = min(launch_info().local_world or part.world, part.world)
            with assigned(lambda: Launch(part.rank, part.world, part.launch, peers)):
                self._checkpointer = Checkpointer(self._run, self._state, at=self._at, keep_last=keep_last, policy="wait")
            self._launch = part.launch
        return self._checkpointer

    def _part(self) -> None:
        if self._checkpointer is not None:  # a save that another rank failed has no end to wait for
            with suppress(CheckpointError):  # DCP has raised it already
                self._checkpointer.close(wait=self._last is None or self._last.done)
        self._checkpointer, self._launch, self._last, self._noted = None, "", None, None
        self._saved, self._state = set(), {}


_runs: dict[tuple[str, address.DaemonAddress], RunOfProcess] = {}


def of(run: str, at: str | os.PathLike[str] | None) -> RunOfProcess:
    return _runs.setdefault((run, address.place(at)), RunOfProcess(run, at))


def close_all() -> None:
    """Disconnect from all daemons. Staged saves are still committed."""
    while _runs:
        _runs.popitem()[1].close()


atexit.register(close_all)
os.register_at_fork(after_in_child=_runs.clear)  # connections and threads stay with the parent
