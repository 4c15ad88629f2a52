"""Which checkpoints are thinned to their weights, and which are compacted, with reasons. Pure, as `policy` is.

A checkpoint that stays is thinned if enough newer ones are whole, and compacted if enough newer ones are exact. These are
verified, not known to be unhealthy, not abandoned, have all its groups and stay themselves. So the newest verified one, and
the newest healthy one, are never touched (I10). A compact one counts as whole, but not as exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from holdfast_formats.disk.compacting import RULES, OptimRule
from holdfast_formats.disk.thinning import can_be_thinned
from holdfast_formats.rest.bodies import CheckpointInfo
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.retention.policy import Candidate, Decision

_COUNTED = "that are verified and healthy stay"


class ThinDecision(NamedTuple):
    """Whether a checkpoint is thinned next, or compacted by a rule (`small`), and why, or why neither; `why` is
    None where no rule applies.
    """

    step: int
    thin: bool
    why: str | None = None
    small: OptimRule | None = None

    @property
    def acts(self) -> bool:
        return self.thin or self.small is not None


def decide_thinning(
    candidates: Sequence[Candidate], decisions: Sequence[Decision], policy: RetentionPolicy
) -> dict[int, ThinDecision]:
    """The decision for every checkpoint, by step. `decisions` say which of them stay."""
    if policy.keep_full is None and policy.optim is None:
        return {c.step: ThinDecision(c.step, False) for c in candidates}
    stays = {d.step for d in decisions if d.keep}
    whole = [c for c in candidates if c.step in stays and _counts(c)]
    return {c.step: _decide(c, whole, policy) if c.step in stays else ThinDecision(c.step, False) for c in candidates}


def _counts(c: Candidate) -> bool:
    return c.verified and c.healthy is not False and not c.abandoned and not c.gone


def _decide(c: Candidate, whole: Sequence[Candidate], policy: RetentionPolicy) -> ThinDecision:
    thins = policy.keep_full is not None and not c.gone and can_be_thinned(c.groups)
    shrinks = policy.optim in c.small and not c.gone and not c.compact
    if not thins and not shrinks:
        return ThinDecision(c.step, False)
    if c.holds:
        return ThinDecision(c.step, False, f"whole: {'; '.join(c.holds)}")
    if not c.verified:
        return ThinDecision(c.step, False, "whole: it is not verified")
    newer = _newer(c, whole)
    if thins and policy.keep_full is not None and newer >= policy.keep_full:
        return ThinDecision(c.step, True, f"full {policy.keep_full}: {newer} newer whole ones {_COUNTED}")
    exact = _newer(c, [one for one in whole if not one.compact])
    if shrinks and policy.optim_full is not None and exact >= policy.optim_full:
        why = f"optim {policy.optim}, {policy.optim_full} exact: {exact} newer exact ones {_COUNTED}"
        return ThinDecision(c.step, False, why, policy.optim)
    count, kind = (exact, "exact") if shrinks else (newer, "whole")
    return ThinDecision(c.step, False, f"whole: only {count} newer {kind} ones {_COUNTED}")


def older_of(candidates: Sequence[Candidate], decisions: Sequence[Decision]) -> list[Candidate]:
    """Unmarked ones that stay, and are older than the newest that no rule touches."""
    stays = {d.step for d in decisions if d.keep}
    whole = [c for c in candidates if c.step in stays and _counts(c)]
    return [c for c in candidates if c.step in stays and c.verified and not c.holds and _newer(c, whole)]


class ThinEstimate:
    """About how many bytes a rule leaves of a checkpoint: as many as it has left of others of that size, or as if it took
    all tensors that it is for. Some may be excluded by their values, which are not read here.
    """

    def __init__(self, listed: Iterable[CheckpointInfo]) -> None:
        """`listed`: all checkpoints of the run."""
        self._seen: dict[str, list[tuple[int, int]]] = {}  # by rule: bytes before, bytes that were saved
        for checkpoint in sorted(listed, key=lambda one: one.step, reverse=True):
            if checkpoint.compacted is not None and checkpoint.thinned is None:
                seen = self._seen.setdefault(checkpoint.compacted.optim, [])
                if len(seen) < _SEEN_MAX and self._saved(checkpoint.compacted.optim, checkpoint.compacted.bytes) is None:
                    seen.append((checkpoint.compacted.bytes, checkpoint.compacted.bytes - checkpoint.bytes))

    def bytes_after(self, checkpoint: CheckpointInfo, rule: str) -> int:
        """The expected bytes after the rule; unchanged if it saves nothing."""
        if rule not in (checkpoint.small_bytes or {}):
            return checkpoint.bytes
        saved = self._saved(rule, checkpoint.bytes)
        return (checkpoint.small_bytes or {})[rule] if saved is None else checkpoint.bytes - saved

    def _saved(self, rule: str, size: int) -> int | None:
        near = (saved for before, saved in self._seen.get(rule, ()) if abs(before - size) * _NEAR <= before)
        return next(near, None)


_SEEN_MAX = 8  # sizes: all groups, and some of them
_NEAR = 100  # sizes that differ by less than one in so many are those of the same state


def could_save(listed: Sequence[CheckpointInfo], foresight: ThinEstimate) -> dict[str, int]:
    """About how many bytes each form would save of these checkpoints; only forms that save any."""
    saved = {"weights": sum(c.bytes - c.thin_bytes for c in listed if c.thin_bytes is not None)}
    for rule in RULES:
        saved[rule] = sum(c.bytes - foresight.bytes_after(c, rule) for c in listed)
    return {form: size for form, size in saved.items() if size > 0}


def _newer(c: Candidate, among: Sequence[Candidate]) -> int:
    """How many of these are newer and have its groups. An abandoned one is compared with the line that has replaced its own,
    whose steps may be lower.
    """
    return sum(c.groups <= w.groups and (w.line > c.line if c.abandoned else w.step > c.step) for w in among)
