"""A rank's standing with its daemon: who it is there, its attempt, its slots. Made anew when the daemon is another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from holdfast_formats import wire
from holdfast_formats.errors import CheckpointError, DaemonGone, NoSuchCheckpoint

from .place import Place, committed_steps, connect, open_checkpoint
from .slots import Slots
from .tickets import Tickets
from .transport import Transport

SETTLE_WAIT_S = 3600.0
TABLE_HEADROOM = 4  # a table may grow by this factor (JSON state, metrics) before the segment is made anew
TABLE_BYTES_MIN = 2**16


class Who(NamedTuple):
    """How a rank introduces itself."""

    run: str
    rank: int
    world: int
    launch: str
    keep_last: int | None


class Choice(NamedTuple):
    """The step to restore, None when there is none, and where it can be read."""

    step: int | None
    root: Path | None
    url: str | None


class Session:
    """Not safe for threads: its owner's lock guards it. Outcomes of saves go to `tickets`, from the link's own thread."""

    def __init__(self, who: Who, place: Place, tickets: Tickets, slots: int) -> None:
        """Nothing is contacted yet; `slots` are asked for when the first room is."""
        self._who, self._place, self._tickets, self._slot_count = who, place, tickets, slots
        self._link: Transport | None = None
        self._welcome: wire.Welcome | None = None
        self._slots: Slots | None = None
        self._turn = 0

    @property
    def attempt(self) -> int | None:
        """The attempt that a daemon has given this launch, once one has."""
        return None if self._welcome is None else self._welcome.attempt

    def connected(self, start: bool) -> wire.Welcome:
        """The daemon's welcome; connects, or connects again, where need be. `start` allows to start a daemon."""
        if self._link is not None and self._welcome is not None and self._link.alive:
            return self._welcome
        if self._link is not None:
            self._link.close()
        link = connect(self._place, start, self._tickets.outcome, self._tickets.lost)
        hello = wire.Hello(id=link.next_id(), pid=os.getpid(), **self._who._asdict())
        try:
            welcome = link.request(hello, wire.Welcome)
        except CheckpointError:
            link.close()
            raise
        self._link, self._welcome, self._slots = link, welcome, None
        return welcome

    def room_for(self, data_bytes: int, table_bytes: int) -> Slots:
        """This rank's slots, made anew when they are too small. Call `connected` first."""
        assert self._link is not None
        if self._slots is None or self._slots.link is not self._link or not self._slots.fits(data_bytes, table_bytes):
            room = max(TABLE_HEADROOM * table_bytes, TABLE_BYTES_MIN)
            self._slots = Slots(self._link, self._slot_count, data_bytes, room)
        return self._slots

    def choose(self, step: int | None, groups: tuple[str, ...]) -> Choice:
        """Which step to restore: from the daemon if one is there, else the newest in the directory that has the groups."""
        try:
            welcome = self.connected(start=False)
        except DaemonGone:
            directory = self._place.directory
            if directory is None:
                raise
            return Choice(_newest(directory, self._who.run, step, groups), directory, None)
        assert self._link is not None
        question = wire.Choose(id=self._link.next_id(), turn=self._turn, step=step, groups=groups, wait_s=SETTLE_WAIT_S)
        chosen = self._link.request(question, wire.Chosen, SETTLE_WAIT_S)
        self._turn += 1
        return Choice(chosen.step, Path(welcome.root) if welcome.root else None, welcome.url)

    def close(self) -> None:
        """Part from the daemon."""
        if self._link is not None:
            self._link.close()
            self._link = self._slots = None


def _newest(root: Path, run: str, step: int | None, groups: tuple[str, ...]) -> int | None:
    steps = committed_steps(root, run)
    if step is not None:
        if step not in steps:
            raise NoSuchCheckpoint(f"{root} has no checkpoint {run}@{step}", hint=f"there are {steps[:10]}")
        return step
    for candidate in steps:
        with open_checkpoint(root, None, run, candidate) as reader:
            if set(groups) <= set(reader.manifest.groups):
                return candidate
    return None
