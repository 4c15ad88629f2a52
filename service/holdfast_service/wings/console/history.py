"""A run's saves as the plots need them: one entry per save, with its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from holdfast_formats import metric_values
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import FirstNonFinite, RunSummary, SaveTimes
from holdfast_service.wings.console.formatting import stamp

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
KEPT = OUTCOMES[:6]  # of which the bytes are stored
MARKS_DRAWN = 20
_PHASES = ("stage_s", "queue_s", "write_s", "commit_s")


def saves(
    checkpoints: Sequence[bodies.CheckpointInfo], rounds: Sequence[bodies.Round], complete: bool = False
) -> list[dict[str, Any]]:
    """Every save of which there is a round or a checkpoint, oldest first.

    Rounds are known only for the newest saves. For a checkpoint without one, only the time of its commit is known. If the
    checkpoints are `complete`, a committed step that is not among them was removed, however old it is. If several rounds
    committed a step, the last one's checkpoint replaced the others.
    """
    by_step = {round_.step: round_ for round_ in checkpoints}
    last = {round_.step: round_.id for round_ in sorted(rounds, key=lambda round_: round_.id) if round_.state == "committed"}
    steps: set[int] = set()
    oldest_listed = min(by_step, default=0)
    saves_shown = []
    for round_ in rounds:
        checkpoint = by_step.get(round_.step) if round_.state == "committed" else None
        if round_.state == "committed":
            if checkpoint is None and round_.step < oldest_listed and not complete:
                continue  # not removed, only not requested
            steps.add(round_.step)
            checkpoint = checkpoint if last[round_.step] == round_.id else None
        saves_shown.append(_of_round(round_, checkpoint))
    saves_shown += [_of_checkpoint(round_) for round_ in checkpoints if round_.step not in steps]
    return sorted(saves_shown, key=lambda save: (save["at"], save["step"]))


def columns(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same as one list for each value, which is a third of the bytes; `metrics` has a list for each metric."""
    names = sorted({name for save in found for name in save["metrics"]})
    listed: dict[str, Any] = {name: [save[name] for save in found] for name in (found[0] if found else ())}
    return listed | {"metrics": {name: [save["metrics"].get(name) for save in found] for name in names}}


METRICS_DRAWN = 12
GROWTH_SAVES_MIN = 5  # from fewer, no forecast is made


def marks(checkpoints: Sequence[bodies.CheckpointInfo], ill: FirstNonFinite | None) -> list[dict[str, Any]]:
    """Steps at which training was resumed, and those at which NaN began, in the weights and in the metrics."""
    resumed = {(one.attempt, one.restored) for one in checkpoints if one.restored is not None}
    found = [{"step": step, "what": "resumed from"} for step in sorted({step for _, step in resumed})][-MARKS_DRAWN:]
    found += [] if ill is None else [{"step": ill.step, "what": f"{ill.kind} from"}]
    began: dict[str, tuple[int, str]] = {}
    for checkpoint in sorted(checkpoints, key=lambda one: one.step):
        for name, value in checkpoint.metrics.items():
            if (word := metric_values.word(value)) is not None:
                began.setdefault(name, (checkpoint.step, word))
    return found + [{"step": step, "what": f"{name} is {word} at"} for name, (step, word) in began.items()][:MARKS_DRAWN]


def full_in(summary: RunSummary, drawn: Sequence[dict[str, Any]]) -> float | None:
    """Seconds until the disk or the quota is full if a training run goes on saving like its newest saves, and nothing is
    removed; None if that is not known.
    """
    newest: list[int] = [save["bytes"] for save in drawn if save["outcome"] in KEPT and save["bytes"]][-GROWTH_SAVES_MIN:]
    gone = any(save["outcome"] == "removed" for save in drawn)
    if summary.life != "training" or not summary.interval_s or gone or len(newest) < GROWTH_SAVES_MIN:
        return None
    rooms = [] if summary.free_bytes is None else [summary.free_bytes]
    if summary.quota_bytes is not None:
        rooms.append(max(summary.quota_bytes - summary.bytes, 0))
    return None if not rooms else min(rooms) / (sum(newest) / len(newest)) * summary.interval_s


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
    metrics_by_name: dict[str, list[tuple[float, int]]] = {}
    for checkpoint in checkpoints:
        for name, value in checkpoint.metrics.items():
            if isfinite(value) and checkpoint.state in ("committed", "verified"):
                metrics_by_name.setdefault(name, []).append((value, checkpoint.step))
    drawn = sorted(metrics_by_name, key=lambda name: (-len(metrics_by_name[name]), name))[:METRICS_DRAWN]
    return [MetricExtremes(name, *min(metrics_by_name[name]), *max(metrics_by_name[name])) for name in drawn]


def _of_round(save: bodies.Round, checkpoint: bodies.CheckpointInfo | None) -> dict[str, Any]:
    times = SaveTimes.model_validate(save.measured or {})
    phases = [value for value in (getattr(times, name) for name in _PHASES) if value is not None]
    opened = stamp(save.opened)
    ended = None if save.ended is None else stamp(save.ended)
    durable = sum(phases) if phases else None if ended is None else ended - opened
    size = times.bytes if times.bytes is not None else checkpoint.bytes if checkpoint else None
    size = None if size is None else size - (times.linked_bytes or 0)  # what was written
    return {
        "at": ended or opened,
        "step": save.step,
        "attempt": save.attempt,
        "outcome": _outcome(save, checkpoint),
        "why": save.code,
        "stall": times.stall_s,
        "durable": durable if save.state == "committed" else None,
        "rate": size / times.write_s if size and times.write_s else None,
        "limit": times.disk_bytes_per_second,
        "bytes": size,
        "metrics": _written(checkpoint),
    }


def _of_checkpoint(checkpoint: bodies.CheckpointInfo) -> dict[str, Any]:
    nothing = dict.fromkeys(("why", "stall", "durable", "rate", "limit"))
    known = {
        "at": stamp(checkpoint.created),
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "outcome": _standing(checkpoint),
        "bytes": checkpoint.bytes - checkpoint.shared_bytes,
    }
    return known | nothing | {"metrics": _written(checkpoint)}


def _written(checkpoint: bodies.CheckpointInfo | None) -> dict[str, float | metric_values.Word]:
    return {} if checkpoint is None else {name: metric_values.written(one) for name, one in checkpoint.metrics.items()}


def _outcome(save: bodies.Round, checkpoint: bodies.CheckpointInfo | None) -> str:
    if save.state in ("aborted", "dropped"):
        return save.state
    if save.state != "committed":
        return "under way"
    return "removed" if checkpoint is None else _standing(checkpoint)


def _standing(checkpoint: bodies.CheckpointInfo) -> str:
    """A checkpoint with a label is kept as one with a pin is."""
    kept = (checkpoint.pinned or checkpoint.labels) and checkpoint.state in ("verified", "committed")
    return "pinned" if kept else checkpoint.state
