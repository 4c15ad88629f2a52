"""The ends of rounds without a checkpoint: logged, and recorded if the catalog is available."""

from __future__ import annotations

import logging

from holdfast_formats.errors import CheckpointError, GenerationDropped
from holdfast_formats.naming import Place
from holdfast_service.control.control import Control
from holdfast_service.daemon.saving.rounds import RoundKey, SaveRound
from holdfast_service.daemon.saving.save_metrics import Measured, SaveHistory
from holdfast_service.observe.logs import about

log = logging.getLogger(__name__)


class FailedRounds:
    def __init__(self, control: Control, history: SaveHistory) -> None:
        self._control, self._history = control, history

    def report(self, current: SaveRound, error: CheckpointError, staging: Place | None) -> None:
        """A round has ended: record it, and remove its staged files."""
        how = "dropped" if isinstance(error, GenerationDropped) else "aborted"
        log.warning("%s@%s attempt %s %s: %s", *current.key, how, error.detail, extra=about(error=error))
        self.record(current.key, current.id, error, staging, self._history.ending(current))
        self._history.ended(current, checked=True)

    def record(
        self, key: RoundKey, round_id: int, error: CheckpointError, staging: Place | None, measured: Measured | None = None
    ) -> None:
        """Record an end, also of a round that never had a slot."""
        try:
            self._control.saves.abort(round_id, error, staging, measured)
        except CheckpointError as failure:  # ranks must get the outcome even without the catalog
            log.error("cannot record the failure of %s@%s attempt %s: %s", *key, failure.detail)
