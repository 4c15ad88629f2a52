"""Says when the saves of a launch have become slower than the time between them, before any of them must be dropped."""

from __future__ import annotations

import time

from holdfast_service.control.catalog.events import Events
from holdfast_service.daemon.saving.active_saves import ActiveSaves
from holdfast_service.daemon.saving.rounds import SaveRound


class LateSaves:
    """Which launches' last save was late. Thread-safe."""

    def __init__(self, active: ActiveSaves, events: Events) -> None:
        self._active, self._events = active, events
        self._late: dict[str, int] = {}  # run -> attempt

    def committed(self, current: SaveRound) -> None:
        """A save is durable. It was late if the next one of its launch has begun; the first of several is an event."""
        run, step, attempt = current.key
        with self._active.lock:
            rounds = (*self._active.open, *self._active.pending)
            later = [key.step for key in rounds if (key.run, key.attempt) == (run, attempt) and key.step > step]
            said = self._late.pop(run, None) == attempt
            if later:
                self._late[run] = attempt
        if not later or said:
            return
        took = "" if current.began is None else f" {time.monotonic() - current.began:.1f} s after it began"
        text = f"step {step} of {run} was durable{took}, when step {min(later)} had begun: storage is slower than the saves"
        self._events.enqueue("save-late", text, run, step, "warning", next=min(later))
