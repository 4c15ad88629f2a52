"""The daemon's memory for this rank's average, and the order in which the daemon is sent what is in it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.link.session import Session
from holdfast.memory.mapping import Mapping as MappedMemory
from holdfast.stage.average_layout import AverageLayout
from holdfast.stage.save_task import SaveTask
from holdfast.state.train_state import TrainState
from holdfast.threads import own_threads
from holdfast.threads.latch import Latch
from holdfast.transport import Transport
from holdfast_formats import memory_bounds
from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest
from holdfast_formats.staging import average, wire
from holdfast_formats.staging.arena import SegmentOwner, SlotState
from holdfast_formats.staging.average import AverageGeometry, AverageRule, AverageUpdate

log = logging.getLogger(__name__)

TABLE_ENTRY_BYTES = 100  # about so many for each tensor
TABLE_ROOM = 2  # a table may grow by this factor: numbers get longer
NUMBER_MAX = 2**53  # of updates and steps, as long as they get
POLL_S = 0.01

Ask = Callable[[Callable[[], Any]], Any]  # calls what needs the daemon; `DeadlineExceeded` where that is silent


class AveragingRank(NamedTuple):
    run: str
    rank: int
    world: int
    state: TrainState
    session: Session
    fenced: bool
    file_bytes_max: int

    @property
    def owner(self) -> SegmentOwner:
        assert self.session.attempt is not None
        return SegmentOwner(self.run, self.rank, self.world, self.session.attempt)


class MappedAverage(NamedTuple):
    fd: int
    mapped: MappedMemory
    geometry: AverageGeometry

    @property
    def words(self) -> memoryview:
        return self.mapped.memory

    @property
    def update(self) -> memoryview:
        return self.words[self.geometry.update_offset : self.geometry.accumulator_offset]

    @property
    def free(self) -> bool:
        """Whether the daemon has folded the last update."""
        return average.read_rank(self.words).state is SlotState.FREE


class _Turn(NamedTuple):
    """A position in the order of reports: after the previous one, and after the save's seal."""

    before: Latch
    save: SaveTask | None
    reported: Latch


class AverageMemory:
    """Memory that is reserved at the first update, and brought to the next daemon when that one is lost.

    Reports go to the daemon in the order in which they began, and after the seal of the save that began before them.
    """

    def __init__(self, rank: AveragingRank, rule: AverageRule, ask: Ask) -> None:
        self._rank, self._rule, self._ask = rank, rule, ask
        self.mapped: MappedAverage | None = None
        self._link: Transport | None = None
        self._save: SaveTask | None = None
        self._last = Latch()
        self._last.set()

    @property
    def decided(self) -> Latch:
        """Set once every report so far has been sent."""
        return self._last

    def follow(self, save: SaveTask) -> None:
        """Send later reports only after this save has sealed."""
        self._save = save

    def turn(self) -> _Turn:
        turn = _Turn(self._last, self._save, Latch())
        self._last = turn.reported
        return turn

    def report(self, send: Callable[[], None], turn: _Turn | None = None) -> None:
        """Send a report in the background, after all earlier ones, and wake up the daemon."""
        mine = turn or self.turn()

        def act() -> None:
            try:
                mine.before.wait()
                if mine.save is not None:
                    mine.save.join()
                send()
            except Exception:
                log.exception("an update of the average could not be passed to the daemon")
            finally:
                mine.reported.set()
            self._ring()

        own_threads.start(act, "holdfast-average")

    def ready(self, layout: AverageLayout) -> MappedAverage:
        """The memory, which the present daemon knows. Raises what asking the daemon raises."""
        link, mapped = self._rank.session.link, self.mapped
        if mapped is not None and link is not None and link is self._link and link.alive:
            return mapped
        known: MappedAverage = self._ask(lambda: self._attached(layout))
        return known

    def until_free(self, mapped: MappedAverage, wait_s: float) -> bool:
        """Wait until the daemon has folded the last update; False if it has not after `wait_s`."""
        limit = time.monotonic() + wait_s
        self._last.wait(wait_s)
        while not mapped.free:
            if time.monotonic() > limit:
                return False
            self._ring()
            time.sleep(POLL_S)
        return True

    def close(self) -> None:
        """Close this process's descriptor; the daemon keeps the memory. Drop references to the save and the state."""
        self._save, self._ask = None, lambda act: act()
        if self.mapped is not None:
            os.close(self.mapped.fd)
            self.mapped = None

    def _ring(self) -> None:
        link = self._link
        if link is not None and link.alive:
            link.notify(wire.RingAverage(id=link.next_id()))

    def _attached(self, layout: AverageLayout) -> MappedAverage:
        session = self._rank.session
        session.connected(start=True)
        link = session.link
        assert link is not None
        if self.mapped is None:
            self.mapped = self._reserved(link, layout)
            link.keep_average(self.mapped.fd)
        elif link is not self._link:
            link.ask(wire.AttachAverage(id=link.next_id()), wire.Done, (self.mapped.fd,))
            link.keep_average(self.mapped.fd)
        self._link = link
        return self.mapped

    def _reserved(self, link: Transport, layout: AverageLayout) -> MappedAverage:
        largest = AverageUpdate(self._rank.owner, NUMBER_MAX, NUMBER_MAX, self._rule, layout.digest, layout.stretches)
        room = wire.ReserveAverage(
            id=link.next_id(),
            data_bytes=layout.nbytes,
            table_bytes=TABLE_ROOM * len(average.encode_update(largest)) + 4096,
            bounds=tuple(memory_bounds.of_process()),
        )
        try:
            with link.receiving:
                link.request(room, wire.Segment)
                (fd,) = link.take_fds(1)
        except InvalidRequest as error:
            error.hint = "ema= needs a daemon on the trainer's machine, of the same version as the trainer"
            raise
        try:
            mapped = MappedMemory(fd, write=True)
            superblock = average.read_superblock(mapped.memory)
        except (OSError, CheckpointError) as error:
            os.close(fd)
            raise DaemonGone(f"cannot map the daemon's memory for the average: {error}") from error
        return MappedAverage(fd, mapped, superblock)
