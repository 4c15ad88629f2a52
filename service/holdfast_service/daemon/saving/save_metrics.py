"""Collects the timings of each save from ranks, saver, writer and check, and records them in the catalog.

What is known at the end of a save is written in the transaction that ends it. The rest, such as the duration of the check,
follows in one more transaction in the background.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from holdfast_files.objects.traffic import RequestCount
from holdfast_formats.errors import CheckpointError
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.checker import Committed
from holdfast_service.daemon.saving.rounds import Participant, RoundKey, SaveRound
from holdfast_service.daemon.writing.disk_throughput import DiskThroughput, Probe
from holdfast_service.observe import bucket_traffic

log = logging.getLogger(__name__)

PATIENCE_S = 10.0  # how long after its end a round waits for the check and for ranks' stall times
KEPT_MAX = 256

Measured = dict[str, float]


class _Save:
    """Timings of one save. `later` is not in the catalog yet."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.stalls: dict[int, float] = {}
        self.recorded: Measured = {}  # the stall as the transaction that ends the round keeps it
        self.round_id: int | None = None  # once it has ended
        self.checked = False
        self.due_at = 0.0
        self.later: Measured = {}

    @property
    def stall(self) -> Measured:
        return {"stall_s": max(self.stalls.values())} if self.stalls else {}

    def stalled(self, rank: int, seconds: float) -> None:
        """A rank's training stalled for so long; the longest counts."""
        self.stalls[rank] = max(seconds, self.stalls.get(rank, 0.0))
        if self.round_id is not None:
            self.later |= self.stall

    def ending(self) -> Measured:
        """The stall known so far, which the transaction that ends the round records."""
        self.recorded = self.stall
        return self.recorded

    def ended(self, round_id: int, checked: bool) -> None:
        """That transaction was committed; `checked`: no verification follows."""
        self.round_id, self.checked = round_id, self.checked or checked
        if self.stall != self.recorded:  # a rank spoke while the transaction went on
            self.later |= self.stall
        self.due_at = time.monotonic() + PATIENCE_S

    def verified(self, seconds: float, asked: Measured) -> None:
        self.checked = True
        self.later |= {"verify_s": seconds, **asked}

    def take_due(self, now: float) -> tuple[int, Measured] | None:
        """The round's ID and its timings to record, if it has ended and waits for no more; they count as recorded."""
        complete = self.checked and len(self.stalls) >= self.world
        if self.round_id is None or not self.later or not (complete or now >= self.due_at):
            return None
        later, self.later = self.later, {}
        return self.round_id, later


class SaveHistory:
    """Saves whose timings may still change; the oldest are dropped. Thread-safe."""

    def __init__(self, control: Control, probe: Probe | None = None) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._saves: OrderedDict[RoundKey, _Save] = OrderedDict()
        self.disk = DiskThroughput(probe)

    def begun(self, key: RoundKey) -> None:
        """A round begins: forget timings of the step's earlier tries."""
        with self._lock:
            if key in self._saves and self._saves[key].round_id is not None:
                del self._saves[key]

    def stalled(self, who: Participant, step: int, seconds: float) -> None:
        """Record how long a rank's training stalled for this save; the longest counts."""
        with self._lock:
            self._of(RoundKey(who.run, step, who.attempt), who.world).stalled(who.rank, seconds)

    def ending(self, current: SaveRound, **known: float) -> Measured:
        """The timings of a round that ends now, `known` with it."""
        with self._lock:
            stall = self._of(current.key, current.world).ending()
            limit = self.disk.bytes_per_second
            return current.staged | known | stall | ({} if limit is None else {"disk_bytes_per_second": limit})

    @contextmanager
    def writing(self) -> Iterator[None]:
        self.disk.writing(True)
        try:
            yield
        finally:
            self.disk.writing(False)

    def ended(self, current: SaveRound, checked: bool = False) -> None:
        """The save has ended, with the timings known so far recorded; `checked`: no verification follows."""
        asked = self._asked(current.key.run, current.key.step)
        if asked:
            log.info("%s@%s attempt %s: %s", *current.key, bucket_traffic.text(asked))
        with self._lock:
            save = self._of(current.key, current.world)
            save.later |= bucket_traffic.of_save(asked)
            save.ended(current.id, checked)

    def verified(self, checkpoint: Committed, seconds: float) -> None:
        asked = bucket_traffic.of_check(self._asked(checkpoint.run, checkpoint.step))
        with self._lock:
            save = self._saves.get(RoundKey(checkpoint.run, checkpoint.step, checkpoint.attempt))
            if save is not None:
                save.verified(seconds, asked)
        self.disk.checked(checkpoint.bytes)

    def flush(self, everything: bool = False) -> None:
        """Record later timings, of saves that wait for no more of them, or of all."""
        now = float("inf") if everything else time.monotonic()
        with self._lock:
            due = [save.take_due(now) for save in self._saves.values()]
        for round_id, later in filter(None, due):
            try:
                self._control.rounds.measure(round_id, later)
            except CheckpointError as error:
                log.warning("cannot record all timings of save %d: %s", round_id, error.detail)

    def _asked(self, run: str, step: int) -> Mapping[str, RequestCount]:
        """The requests for this step's objects since this was last asked."""
        traffic = self._control.storage.traffic
        return {} if traffic is None else traffic.take((run, step))

    def _of(self, key: RoundKey, world: int) -> _Save:
        save = self._saves.setdefault(key, _Save(world))
        while len(self._saves) > KEPT_MAX:
            self._saves.popitem(last=False)
        return save
