"""Queue of complete saves: one is written and committed at a time, waiting ones can be withdrawn."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, RoundAborted
from holdfast_formats.naming import Place
from holdfast_service.control.checkpoints import planner
from holdfast_service.control.checkpoints.spared_replicas import spared
from holdfast_service.control.control import Control
from holdfast_service.daemon.arena.memory_checkpoints import MemoryCheckpoints
from holdfast_service.daemon.arena.segment import same_user
from holdfast_service.daemon.saving.rounds import SaveRound
from holdfast_service.daemon.saving.save_metrics import SaveHistory
from holdfast_service.daemon.writing.fsync_timer import FsyncTimed
from holdfast_service.daemon.writing.unchanged_files import UnchangedFiles
from holdfast_service.daemon.writing.write_threads import Schedule
from holdfast_service.daemon.writing.writer import write

log = logging.getLogger(__name__)

_END = None


class WriteQueue:
    """The thread that writes saves in order of completion, and calls `ended` for each."""

    def __init__(
        self,
        control: Control,
        node: str,
        holds: MemoryCheckpoints,
        *,
        lock: threading.Condition,
        ended: Callable[[SaveRound, Manifest | CheckpointError], None],
        history: SaveHistory,
    ) -> None:
        """`lock` is the saver's: its state and this queue change together. `ended` is called without it."""
        self._control, self._node, self._holds = control, node, holds
        self._lock, self._ended, self._history = lock, ended, history
        self._unchanged = UnchangedFiles(control)
        self._waiting: deque[SaveRound | None] = deque()
        self._thread = threading.Thread(target=self._loop, name="holdfast-write-queue", daemon=True)
        self._thread.start()

    def add(self, current: SaveRound) -> None:
        with self._lock:
            self._waiting.append(current)
            self._lock.notify_all()

    def waiting(self) -> list[SaveRound]:
        """The saves that are not being written yet, oldest first."""
        with self._lock:
            return [current for current in self._waiting if current is not _END]

    def withdraw(self, current: SaveRound) -> None:
        """Remove a save that waits here, or for an average before that."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(current)

    def close(self) -> None:
        with self._lock:
            self._waiting.append(_END)
            self._lock.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while (current := self._next()) is not _END:
            self._ended(current, self._save(current))

    def _next(self) -> SaveRound | None:
        with self._lock:
            self._lock.wait_for(lambda: self._waiting)
            return self._waiting.popleft()

    def _save(self, current: SaveRound) -> Manifest | CheckpointError:
        """Write and commit (I3); the slots are free when this returns."""
        try:
            return self._write_and_commit(current)
        except CheckpointError as error:
            return error
        except Exception as error:
            log.exception("%s@%s attempt %s failed", *current.key)
            return RoundAborted(f"unexpected {type(error).__name__} in the daemon", hint="see the daemon's log")
        finally:
            current.release()  # not before: until it is committed, the next daemon may need what is in the slots

    def _write_and_commit(self, current: SaveRound) -> Manifest:
        began = time.monotonic()
        plan = planner.plan([sealed.table for sealed in current.sealed.values()])
        planned = time.monotonic()
        timed = FsyncTimed(self._control.store.begin(Place(*current.key)))
        slots = {rank: sealed.data for rank, sealed in current.sealed.items()}
        taking = time.monotonic()
        taken = self._unchanged.take(timed, plan, slots)
        linked = sum(file.layout.bytes for file in plan.files if file.layout.name in taken)
        self._control.admission.admit(plan)
        writing = time.monotonic()
        schedule = Schedule(plan.bytes - linked, self._history.disk.bytes_per_second)
        with self._history.writing():
            write(timed, plan, slots, self._node, schedule, taken)
        written = time.monotonic()
        self._history.disk.wrote(plan.bytes - linked, written - writing)
        measured = self._history.ending(
            current,
            write_s=written - taking,
            fsync_s=timed.seconds,
            queue_s=taking - current.completed,
            raised_s=schedule.raised_s,
        )
        if linked:
            measured["linked_bytes"] = float(linked)
        manifest = self._control.saves.commit(current.id, plan, measured)
        self._history.ended(current)
        if self._holds.keep(*current.key, current.sealed) and same_user(current.sealed.values()):
            current.spare(spared(plan, [sealed.table for sealed in current.sealed.values()]))
        published = time.monotonic()
        size = f"{manifest.bytes} bytes" + f", of which {linked} were not written again" * bool(linked)
        text = "%s@%s attempt %s committed: %s, planned in %.3f s, written in %.3f, published in %.3f"
        log.info(text, *current.key, size, planned - began, written - planned, published - written)
        return manifest
