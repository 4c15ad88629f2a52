"""Whether a run trains, has ended or is lost: recorded as its ranks come and go, so that the next daemon knows it too.

Nothing here goes by a clock but one thing: ranks that an earlier daemon knew have a minute to come back to the next one.
"""

from __future__ import annotations

import logging
import time

from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.ports import Decisions
from holdfast_service.daemon.saving.adoption import RETURN_S
from holdfast_service.daemon.saving.saver import Saver

log = logging.getLogger(__name__)


class RunLives:
    """Of all runs of this root. `look` is called by one thread at a time."""

    def __init__(self, saver: Saver, decisions: Decisions, return_s: float = RETURN_S) -> None:
        self._saver, self._decisions = saver, decisions
        self._awaited = dict(decisions.running())
        self._until = time.monotonic() + return_s

    def look(self) -> None:
        """Record what has changed."""
        here = self._saver.lives()
        found = dict(here)
        if time.monotonic() > self._until:
            found |= {run: (attempt, "lost") for run, attempt in self._awaited.items() if run not in here}
            self._awaited = {}
        for run, (attempt, life) in found.items():
            try:
                self._decisions.became(run, attempt, life)
            except CheckpointError as error:  # it is tried again at the next look
                log.warning("that %s is %s is not recorded: %s", run, life, error.detail)
