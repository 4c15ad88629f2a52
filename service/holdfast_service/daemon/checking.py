"""Every checkpoint is read back after its commit, behind the back of the next save: only then may older ones go (I10)."""

from __future__ import annotations

import logging
import queue
import threading

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, Damaged
from holdfast_formats.manifest import Manifest
from holdfast_service.storage import Tier

from .ports import Decisions
from .verifier import verify

log = logging.getLogger(__name__)


class Checks:
    """A thread that verifies committed checkpoints one after the other, and the count of those it has still to do."""

    def __init__(self, tier: Tier, decisions: Decisions) -> None:
        self._tier, self._decisions = tier, decisions
        self._lock = threading.Lock()
        self._left = 0
        self._queue: queue.SimpleQueue[Manifest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="holdfast-verifier", daemon=True)
        self._thread.start()

    @property
    def left(self) -> int:
        return self._left

    def add(self, made: Manifest) -> None:
        with self._lock:
            self._left += 1
        self._queue.put(made)

    def close(self) -> None:
        """Verify what is left, stop."""
        self._queue.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (made := self._queue.get()) is not None:
            self._check(made)
            with self._lock:
                self._left -= 1

    def _check(self, made: Manifest) -> None:
        try:
            with self._decisions.reading(made.run, made.step):
                verify(self._tier, naming.checkpoint_path(made.run, made.step))
            self._decisions.verified(made.run, made.step)
        except Damaged as error:
            log.error("%s@%s is damaged right after its commit: %s", made.run, made.step, error.detail)
        except CheckpointError as error:
            log.warning("%s@%s could not be verified: %s", made.run, made.step, error.detail)
        except Exception:
            log.exception("verification of %s@%s failed", made.run, made.step)
