"""Bodies of the REST API for what was measured: saves, tensors, layers, runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from holdfast_formats.body import Body


class SaveTimes(Body):
    """Seconds of each phase of one save, and its bytes. Absent phases did not happen, or were not measured."""

    stall_s: float | None = Field(default=None, description="longest time for which it stalled a rank's training")
    stage_s: float | None = Field(default=None, description="from the first slot lease to the last seal")
    queue_s: float | None = Field(default=None, description="from the last seal to the first byte written")
    write_s: float | None = Field(default=None, description="writing and digesting, including fsync of the files")
    fsync_s: float | None = Field(default=None, description="the part spent in fsync, summed over files")
    commit_s: float | None = Field(default=None, description="from the last receipt until the publishing rename is durable")
    verify_s: float | None = Field(default=None, description="reading it back and verifying it")
    bytes: float | None = None
    disk_bytes_per_second: float | None = Field(default=None, description="the disk's speed when it was last measured")


class TensorStatistics(Body):
    """Statistics of one stored tensor. Norms and moments are over its finite elements; None if there is none, or no earlier
    step.
    """

    group: str
    name: str
    dtype: str
    shape: list[int]
    elements: int
    nan: int
    inf: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    rms: float | None
    zeros: float = Field(description="fraction of elements that are exactly zero")
    change: float | None = Field(default=None, description="L2 norm of the difference to the previous checkpoint")
    changed_from: int | None = Field(default=None, description="the step that `change` refers to")


class LayerHealth(Body):
    """One cell of the heat map: a layer's tensors of one step taken together."""

    step: int
    nonfinite: int
    rms: float | None
    change: float | None = Field(description="L2 norm of the change, relative to the layer's norm")


class Layers(Body):
    """Health by layer over steps; the cells of a layer are in the order of `steps`, None if unknown."""

    run: str
    group: str
    steps: list[int]
    layers: dict[str, list[LayerHealth | None]]


class Attention(Body):
    """Something that a person should look at, and what to do about it."""

    level: Literal["warning", "error"]
    code: str
    text: str
    hint: str
    step: int | None = None


# Of a run whose ranks connected to a service: some are connected; all have said goodbye; some are gone without that.
Life = Literal["running", "ended", "lost"]


class RunSummary(Body):
    """Summary of a run's checkpointing. Seconds and bytes; None if too little has happened to tell."""

    run: str
    attempt: int
    state: Life | None = Field(default=None, description="running, ended or lost: the state of its ranks; null if unknown")
    state_since: str | None = Field(default=None, description="time at which it ended or was lost")
    checkpoints: int
    bytes: int
    quota_bytes: int | None
    free_bytes: int
    newest: int | None
    newest_verified: int | None
    newest_healthy: int | None
    last_commit: str | None
    last_commit_age_s: float | None
    exposed_s: float | None = Field(description="training time that a crash now would lose")
    exposed_steps: int | None
    saves: int = Field(description="number of newest saves that the figures below are computed from")
    failed: int
    dropped: int
    stall_p50_s: float | None
    stall_p95_s: float | None
    durable_p50_s: float | None
    durable_p95_s: float | None
    disk_ratio: float | None = Field(description="median of bytes written per second, relative to the disk's speed")
    goodput_lost: float | None = Field(description="fraction of training time spent on checkpointing and on lost work")
    interval_s: float | None = Field(description="median time between saves")
    interval_steps: int | None
    recommended_interval_s: float | None = Field(description="Young/Daly: sqrt(2 × cost of a save × time between failures)")
    failures_mean_s: float | None = Field(description="mean time between attempts, which the recommendation uses")
    attention: list[Attention] = Field(default_factory=list)


DifferenceState = Literal["equal", "changed", "unknown", "missing-in-a", "missing-in-b", "reshaped", "retyped"]


class Difference(Body):
    """One tensor of two checkpoints."""

    group: str
    name: str
    state: DifferenceState
    dtype: str
    shape: list[int]
    bytes: int
    norm_a: float | None = None
    norm_b: float | None = None
    change: float | None = Field(default=None, description="L2 norm of b − a; None if not computed")
    relative: float | None = Field(default=None, description="change divided by the norm of a")
    detail: dict[str, Any] = Field(default_factory=dict)
