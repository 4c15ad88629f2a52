"""A run's saves as the plots need them: one entry per save, with its outcome."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from holdfast_formats.rest import bodies
from holdfast_formats.rest.observed import SaveTimes

from .words import stamp

# The possible outcomes of a save, in the order of the timeline's lanes from the top.
OUTCOMES = (
    "pinned",
    "verified",
    "committed",
    "unhealthy",
    "abandoned",
    "damaged",
    "removed",
    "dropped",
    "aborted",
    "under way",
)
_PHASES = ("stage_s", "queue_s", "write_s", "commit_s")


def saves(
    checkpoints: Sequence[bodies.CheckpointInfo], rounds: Sequence[bodies.Round], pinned: set[int], complete: bool = False
) -> list[dict[str, Any]]:
    """Every save of which there is a round or a checkpoint, oldest first.

    Rounds are known only for the newest saves. For a checkpoint without one, only the time of its commit is known. If the
    checkpoints are `complete`, a committed step that is not among them was removed, however old it is. If several rounds
    committed a step, the last one's checkpoint replaced the others.
    """
    there = {made.step: made for made in checkpoints}
    last = {made.step: made.id for made in sorted(rounds, key=lambda made: made.id) if made.state == "committed"}
    told: set[int] = set()
    oldest_listed = min(there, default=0)
    found = []
    for made in rounds:
        checkpoint = there.get(made.step) if made.state == "committed" else None
        if made.state == "committed":
            if checkpoint is None and made.step < oldest_listed and not complete:
                continue  # not removed, only not requested
            told.add(made.step)
            checkpoint = checkpoint if last[made.step] == made.id else None
        found.append(_of_round(made, checkpoint, pinned))
    found += [_of_checkpoint(made, pinned) for made in checkpoints if made.step not in told]
    return sorted(found, key=lambda save: (save["at"], save["step"]))


METRICS_DRAWN = 12


class MetricExtremes(NamedTuple):
    """A metric of a run's checkpoints: its lowest and its highest value, and their steps."""

    name: str
    low: float
    low_step: int
    high: float
    high_step: int


def metrics(checkpoints: Sequence[bodies.CheckpointInfo]) -> list[MetricExtremes]:
    """The trainer's metrics, those of most checkpoints first, without infinite values, and without damaged, unhealthy or
    abandoned checkpoints.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for made in checkpoints:
        for name, value in made.metrics.items():
            if isfinite(value) and made.state in ("committed", "verified"):
                found.setdefault(name, []).append((value, made.step))
    drawn = sorted(found, key=lambda name: (-len(found[name]), name))[:METRICS_DRAWN]
    return [MetricExtremes(name, *min(found[name]), *max(found[name])) for name in drawn]


def _of_round(made: bodies.Round, checkpoint: bodies.CheckpointInfo | None, pinned: set[int]) -> dict[str, Any]:
    times = SaveTimes.model_validate(made.measured or {})
    phases = [value for value in (getattr(times, name) for name in _PHASES) if value is not None]
    opened = stamp(made.opened)
    ended = None if made.ended is None else stamp(made.ended)
    durable = sum(phases) if phases else None if ended is None else ended - opened
    size = times.bytes if times.bytes is not None else checkpoint.bytes if checkpoint else None
    return {
        "at": ended or opened,
        "step": made.step,
        "attempt": made.attempt,
        "outcome": _outcome(made, checkpoint, pinned),
        "why": made.code,
        "stall": times.stall_s,
        "durable": durable if made.state == "committed" else None,
        "rate": size / times.write_s if size and times.write_s else None,
        "limit": times.disk_bytes_per_second,
        "bytes": size,
        "metrics": _finite(checkpoint),
    }


def _of_checkpoint(made: bodies.CheckpointInfo, pinned: set[int]) -> dict[str, Any]:
    outcome = "pinned" if made.step in pinned and made.state in ("verified", "committed") else made.state
    nothing = dict.fromkeys(("why", "stall", "durable", "rate", "limit"))
    known = {"at": stamp(made.created), "step": made.step, "attempt": made.attempt, "outcome": outcome, "bytes": made.bytes}
    return known | nothing | {"metrics": _finite(made)}


def _finite(made: bodies.CheckpointInfo | None) -> dict[str, float]:
    return {} if made is None else {name: value for name, value in made.metrics.items() if isfinite(value)}


def _outcome(made: bodies.Round, checkpoint: bodies.CheckpointInfo | None, pinned: set[int]) -> str:
    if made.state in ("aborted", "dropped"):
        return made.state
    if made.state != "committed":
        return "under way"
    if checkpoint is None:
        return "removed"
    if made.step in pinned and checkpoint.state in ("verified", "committed"):
        return "pinned"
    return checkpoint.state
