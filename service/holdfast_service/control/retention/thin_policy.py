"""Which checkpoints are thinned to their weights, with reasons. Pure, as `policy` is.

A checkpoint that stays is thinned if enough newer ones are whole. These are verified, not known to be unhealthy, of the
living line, have all its groups and stay themselves. So the newest verified one, and the newest healthy one, are never
thinned (I10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast_formats.disk.thinning import can_be_thinned
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.retention.policy import Candidate, Decision


class ThinDecision(NamedTuple):
    """Whether a checkpoint is thinned next, and why, or why not; no reason where nothing is to be said."""

    step: int
    thin: bool
    why: str | None = None


def decide_thinning(
    candidates: Sequence[Candidate], decisions: Sequence[Decision], policy: RetentionPolicy
) -> dict[int, ThinDecision]:
    """The decision for every checkpoint, by step. `decisions` say which of them stay."""
    if policy.keep_full is None:
        return {c.step: ThinDecision(c.step, False) for c in candidates}
    stays = {d.step for d in decisions if d.keep}
    whole = [c for c in candidates if c.step in stays and _counts(c)]
    return {
        c.step: _decide(c, whole, policy.keep_full) if c.step in stays else ThinDecision(c.step, False) for c in candidates
    }


def _counts(c: Candidate) -> bool:
    return c.verified and c.healthy is not False and not c.abandoned and not c.gone


def _decide(c: Candidate, whole: Sequence[Candidate], keep_full: int) -> ThinDecision:
    if c.gone or not can_be_thinned(c.groups):
        return ThinDecision(c.step, False)
    if c.holds:
        return ThinDecision(c.step, False, f"whole: {'; '.join(c.holds)}")
    if not c.verified:
        return ThinDecision(c.step, False, "whole: it is not verified")
    # What training has left behind is compared with the line that has left it, whose steps may be lower.
    newer = sum(c.groups <= w.groups and (w.line > c.line if c.abandoned else w.step > c.step) for w in whole)
    if newer < keep_full:
        return ThinDecision(c.step, False, f"whole: only {newer} newer whole ones that are verified and healthy stay")
    return ThinDecision(c.step, True, f"full {keep_full}: {newer} newer whole ones that are verified and healthy stay")
