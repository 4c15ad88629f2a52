"""Records durably whether a run is running, has finished or died, for the next daemon.

Only one rule depends on a clock: after a daemon restart, known ranks have a minute to reconnect.
"""

from __future__ import annotations

import logging
import time

from holdfast_formats.errors import CheckpointError
from holdfast_service.control.control import Control
from holdfast_service.daemon.saving.adoption import RETURN_S
from holdfast_service.daemon.saving.saver import Saver

log = logging.getLogger(__name__)


class RunLifecycles:
    """The state of all runs of this root. `look` is called by one thread at a time."""

    def __init__(self, saver: Saver, control: Control, return_s: float = RETURN_S) -> None:
        self._saver, self._control = saver, control
        self._awaited = dict(control.lives.running())
        self._until = time.monotonic() + return_s

    def record(self) -> None:
        """Record changes."""
        here = self._saver.connected.lives()
        lives = dict(here)
        if time.monotonic() > self._until:
            lives |= {run: (attempt, "died") for run, attempt in self._awaited.items() if run not in here}
            self._awaited = {}
        for run, (attempt, life) in lives.items():
            try:
                self._control.lives.became(run, attempt, life)
            except CheckpointError as error:  # it is tried again at the next look
                log.warning("cannot record that %s is %s: %s", run, life, error.detail)
