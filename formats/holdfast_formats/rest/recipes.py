"""Makes merge recipes from a run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_formats.errors import NoSuchCheckpoint
from holdfast_formats.rest.bodies import CheckpointInfo


def average_of_last(run: str, listed: Iterable[CheckpointInfo], count: int, dtype: str | None = None) -> str:
    """A recipe for the mean of the newest checkpoints of a run; it names their steps, so that it does not change later.

    Abandoned, damaged and unhealthy checkpoints do not count. `NoSuchCheckpoint` if there are fewer than `count`.
    """
    usable = [one for one in listed if not one.abandoned and one.damage is None and one.healthy is not False]
    steps = sorted((one.step for one in usable if "model" in one.groups), reverse=True)[:count]
    if len(steps) < count:
        raise NoSuchCheckpoint(
            f"{run} has {len(steps)} sound checkpoints with a model, not {count}", hint=f"`holdfast ls {run}`"
        )
    models = "".join(f"  - model: {run}@{step}\n" for step in steps)
    dtype_line = "" if dtype is None else f"dtype: {dtype}\n"
    return f"merge_method: linear\nmodels:\n{models}parameters: {{weight: 1.0}}\n{dtype_line}"
