"""Bodies of the REST API about groups of runs: all runs with one tag, such as those of a sweep."""

from __future__ import annotations

from pydantic import Field

from holdfast_formats.body import Body
from holdfast_formats.rest.measurements import MetricValue, RunLife


class MeasuredRun(Body):
    """A metric of one checkpoint."""

    run: str
    step: int
    value: MetricValue


class RunGroup(Body):
    """All runs with a tag, of those that may be seen. Runs that failed to start are not among them."""

    tag: str
    runs: int
    states: dict[RunLife, int] = Field(description="number of runs by what they are doing")
    metric: str | None = Field(description="the metric of `best` and `last`; null if no run has one")
    metrics: list[str] = Field(description="metrics that the newest checkpoints of its runs have, sorted")
    best: MeasuredRun | None = Field(
        description="of all checkpoints that are neither damaged, unhealthy nor abandoned, the one with the best metric"
    )
    last: MeasuredRun | None = Field(description="of its runs' newest checkpoints, the one that was committed last")
    differs: list[str] = Field(description="config keys with different values in its runs, nested ones as `optim.lr`")


class GroupMember(Body):
    """A run of a group."""

    run: str
    life: RunLife
    standing: str = Field(description="`life` in words, such as `finished with NaN since step 120`")
    newest: int | None
    best: MeasuredRun | None
    last: MetricValue | None = Field(description="the metric of the newest checkpoint")
    config: dict[str, str] = Field(description="values of the keys in `differs`, as texts; those that it has")


class GroupDetails(RunGroup):
    """A group with its runs, the best first; those without the metric come last."""

    members: list[GroupMember]
    left_out: int = Field(default=0, description="runs beyond the first by name that a group shows")
