"""Retention: which checkpoints stay and why. Pure; the deciding rule is I10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest


class Kept(NamedTuple):
    """A checkpoint that is there: whether it was read back and found sound, and whether somebody pinned it."""

    step: int
    verified: bool
    pinned: bool


class Policy(NamedTuple):
    """How many verified checkpoints stay; None for all."""

    keep_last: int | None


class Decision(NamedTuple):
    step: int
    keep: bool
    reason: str


def decide(checkpoints: Sequence[Kept], policy: Policy) -> list[Decision]:
    """What becomes of every checkpoint, newest step first.

    A checkpoint may go when `keep_last` verified ones are newer than it. So the newest verified one always stays (I10), and
    one that is not verified takes nobody's place and stays until enough verified ones are newer. A pinned one stays.
    """
    keep_last = policy.keep_last
    if keep_last is not None and keep_last < 1:
        raise InvalidRequest(f"keep_last must be at least 1, not {keep_last}", hint="leave it out to keep all")
    decisions = []
    newer = 0  # verified ones newer than the one at hand
    for checkpoint in sorted(checkpoints, key=lambda c: c.step, reverse=True):
        decisions.append(_decide_one(checkpoint, newer, keep_last))
        newer += checkpoint.verified
    return decisions


def _decide_one(checkpoint: Kept, newer: int, keep_last: int | None) -> Decision:
    step = checkpoint.step
    if checkpoint.pinned:
        return Decision(step, True, "it is pinned")
    if keep_last is None:
        return Decision(step, True, "no limit is set")
    if newer >= keep_last:
        return Decision(step, False, f"{newer} newer checkpoints are verified, {keep_last} are kept")
    if checkpoint.verified:
        return Decision(step, True, f"it is number {newer + 1} of the {keep_last} newest verified ones that are kept")
    return Decision(step, True, f"only {newer} of {keep_last} newer checkpoints are verified")
