"""Bases removals on the present storage, not on the catalog.

A checkpoint that supersedes others is checked first: one that was removed by hand, or lacks a file, supersedes nothing, and
one whose files are not those that were read back is read back again before it counts. Results are recorded, for lists and
alerts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from holdfast_formats.errors import Damaged, NoSuchCheckpoint
from holdfast_service.control.catalog.catalog import ANY_FILES, Catalog, CommitProof
from holdfast_service.control.checkpoints.storage_probe import StorageProbe
from holdfast_service.control.retention.policy import Candidate, Decision
from holdfast_service.control.signals import Signal

log = logging.getLogger(__name__)

UNKNOWN = CommitProof(None, 0.0)
Decide = Callable[[Sequence[Candidate]], list[Decision]]


class ProbeEvents:
    """What looks find of checkpoints that counted as verified, by run and step; `proven` as which files they were."""

    def __init__(self) -> None:
        self.missing: Signal[[str, int]] = Signal()
        self.damaged: Signal[[str, int, Damaged, str]] = Signal()
        self.changed: Signal[[str, int, str]] = Signal()
        self.put_back: Signal[[str, int]] = Signal()


class ProvenDecisions(NamedTuple):
    """Candidates as they are in storage, and the decisions about them."""

    candidates: list[Candidate]
    decisions: list[Decision]


class RemovalProbe:
    """The checks of one root that precede a removal."""

    def __init__(self, probe: StorageProbe, catalog: Catalog) -> None:
        self.probe, self._catalog = probe, catalog
        self.discoveries = ProbeEvents()

    def decided(self, run: str, candidates: Sequence[Candidate], decide: Decide) -> ProvenDecisions:
        """The decisions of `decide` about the existing candidates. All that stay and count were checked, so that nothing is
        removed because of a missing one. Raises the storage's errors.
        """
        looked: set[int] = set()
        listed = list(candidates)
        while True:
            decisions = decide(listed)
            stays = {decision.step for decision in decisions if decision.keep}
            counts = [c for c in listed if c.verified and c.step in stays and c.step not in looked]
            if not counts:
                return ProvenDecisions(listed, decisions)
            looked.update(c.step for c in counts)
            seen = {c.step: self.as_it_stands(run, c, c.proven) for c in counts}
            listed = [now for c in listed if (now := seen.get(c.step, c)) is not None]

    def stands(self, run: str, step: int) -> bool:
        """Whether a checkpoint is verified, with the files that were read back."""
        known = self._catalog.proofs(run).get(step, UNKNOWN).proven
        return known is not None and (stamp := self.probe.proof(run, step)) != "" and known in (stamp, ANY_FILES)

    def look(self, run: str, step: int) -> None:
        """Check a verified checkpoint's files, and record any damage."""
        known = self._catalog.proofs(run).get(step, UNKNOWN)
        if self._catalog.checkpoint(run, step).verified:
            self.as_it_stands(run, Candidate(step, known.seen_s), known.proven)

    def as_it_stands(self, run: str, c: Candidate, proven: str | None) -> Candidate | None:
        """A verified candidate: marked unverified if its files are not those read back, None if it is gone."""
        try:
            stamp = self.probe.probe(run, c.step)
        except NoSuchCheckpoint:
            self.discoveries.missing.publish(run, c.step)
            return None
        except Damaged as error:
            self.discoveries.damaged.publish(run, c.step, error, proven or "")
            return c._replace(verified=False)
        if proven is None:  # damage was found since it was listed as verified
            return c._replace(verified=False)
        if stamp != proven != ANY_FILES:
            self.discoveries.changed.publish(run, c.step, proven)
            return c._replace(verified=False)
        return c
