"""Looks at the copies in tiers before checkpoints leave the root because the catalog says that tiers have them.

No lock is held meanwhile, since a bucket may not answer: what was not seen then stays.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from holdfast_service.control.checkpoints.tiers import Tiers
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.control.retention.verdicts import Verdicts

log = logging.getLogger(__name__)

WAIT_S, ROOM_WAIT_S = 20.0, 5.0  # for the answer of a tier; while a save waits for room


class SeenCopies:
    """What may leave the root of one run. `goes` is None if the root has no tier; `unseen` are those that a look missed."""

    def __init__(self, goes: Collection[int] | None, unseen: Mapping[int, str]) -> None:
        self.goes, self.unseen = goes, unseen

    def allow(self, step: int) -> bool:
        """Whether this step was looked at, so that it may go."""
        return self.goes is None or step in self.goes


class CopyLooks:
    """The looks of one root."""

    def __init__(self, tiers: Tiers, verdicts: Verdicts) -> None:
        self._tiers, self._verdicts = tiers, verdicts

    def before_removal(self, run: str) -> SeenCopies:
        """Look at the copies of all that the policy of a run removes now."""
        if not self._tiers.names:
            return SeenCopies(None, {})
        self._tiers.forget_looks(run)
        file, candidates = self._verdicts.looked_at(run)
        _, decisions = self._verdicts.proven(run, candidates, file.in_force)
        goes = [decision.step for decision in decisions if not decision.keep]
        unseen = self._tiers.look(run, goes, WAIT_S) if goes else {}
        for step, why in unseen.items():
            log.warning("%s@%s stays in the root: %s", run, step, why)
        return SeenCopies(goes, unseen)

    def before_room(self, run: str, incoming: Candidate) -> None:
        """Look for the first checkpoint whose copy stands, of those that may go for this save. Those that were not seen are
        the last to go.
        """
        if not self._tiers.names:
            return
        self._tiers.forget_looks(run)
        awaited = self._tiers.awaited(run)
        for step in self._verdicts.for_room(run, incoming):
            if step in awaited or step not in self._tiers.look(run, [step], ROOM_WAIT_S):
                return
