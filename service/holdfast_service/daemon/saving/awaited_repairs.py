"""Repairs for restores: one thread for each checkpoint. A restore waits with a progress answer every few seconds, or reads a
copy, and the repair follows behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from holdfast_formats.errors import CheckpointError, Damaged, DeadlineExceeded
from holdfast_formats.naming import CheckpointId
from holdfast_service.daemon.writing.priority import give_way

log = logging.getLogger(__name__)

ASK_S = 1.5  # interval of telling a rank that the repair continues
ASKED_MAX = 1000
LOOK_S = 0.5  # interval of looking whether ranks are restoring
LIMIT_S = 900.0  # after so long a restore goes on without it

Repair = Callable[[str, int, Damaged | None], object]


Question = tuple[str, int, int]  # run, attempt and turn of a launch's question


class _Repair:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.over = threading.Event()
        self.awaited = threading.Event()


class AwaitedRepairs:
    """Thread-safe. `repair` repairs a checkpoint with this damage, or copies back a missing one. `busy` returns whether
    ranks are restoring now, and `due` whether a missing one that no restore waits for is to be copied back.
    """

    def __init__(
        self,
        repair: Repair,
        ask_s: float = ASK_S,
        limit_s: float = LIMIT_S,
        *,
        busy: Callable[[], bool] = lambda: False,
        due: Callable[[str, int], bool] = lambda run, step: True,
    ) -> None:
        self._repair, self._ask_s, self._limit_s = repair, ask_s, limit_s
        self._busy, self._due = busy, due
        self._lock = threading.Lock()
        self._going: dict[CheckpointId, _Repair] = {}
        self._asked: dict[tuple[Question, int], _Repair] = {}  # the newest questions last: nothing is tried twice for one

    def settle(self, question: Question, step: int, error: Damaged | None) -> None:
        """Return when the repair has ended, well or not, or timed out. `DeadlineExceeded` while it continues."""
        run = question[0]
        place = CheckpointId(run, step)
        with self._lock:
            current = self._asked.get((question, step)) or self._going.get(place)
            if current is None:
                current = self._going[place] = _Repair()
                begin = (place, error, current)
                threading.Thread(target=self._run, args=begin, name="holdfast-awaited-repair", daemon=True).start()
            current.awaited.set()
            self._asked[question, step] = current
            while len(self._asked) > ASKED_MAX:
                del self._asked[next(iter(self._asked))]
        if current.over.wait(self._ask_s):
            return
        took_s = time.monotonic() - current.began
        what = "is being copied back from a replica" if error is None else "is damaged and is being repaired"
        if took_s > self._limit_s:
            log.warning("%s@%s %s for %.0f s already: the restore continues without it", run, step, what, took_s)
            return
        detail = f"step {step} of {run} {what}, for {took_s:.0f} s so far"
        raise DeadlineExceeded(detail, hint="ask again", repairing=step)

    def behind(self, run: str, step: int, error: Damaged | None) -> None:
        """Repair it at idle priority once no rank restores any more, or as soon as a restore waits for it."""
        place = CheckpointId(run, step)
        with self._lock:
            if place in self._going:
                return
            current = self._going[place] = _Repair()
        begin = (place, error, current)
        threading.Thread(target=self._run_behind, args=begin, name="holdfast-repair-behind", daemon=True).start()

    def _run_behind(self, place: CheckpointId, error: Damaged | None, current: _Repair) -> None:
        while not current.awaited.wait(LOOK_S) and self._busy():
            pass
        if not current.awaited.is_set():
            give_way()
        self._run(place, error, current)

    def _run(self, place: CheckpointId, error: Damaged | None, current: _Repair) -> None:
        try:
            if error is not None or current.awaited.is_set() or self._due(*place):
                self._repair(*place, error)
        except CheckpointError as failure:
            log.warning("%s@%s could not be repaired for a restore: %s", *place, failure.detail)
        except Exception:
            log.exception("the repair of %s@%s for a restore failed", *place)
        finally:
            with self._lock:
                self._going.pop(place, None)
            current.over.set()
