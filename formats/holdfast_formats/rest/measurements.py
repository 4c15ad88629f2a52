"""Bodies of the REST API for what was measured: saves, tensors, layers, runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from holdfast_formats import metric_values
from holdfast_formats.body import Body

# A metric that the trainer gave with a checkpoint.
MetricValue = Annotated[
    float,
    AfterValidator(metric_values.shared),
    PlainSerializer(metric_values.written),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": [*get_args(metric_values.Word)]}]}),
]


class SaveTimes(Body):
    """Seconds of each phase of one save, and its bytes. Absent phases did not happen, or were not measured."""

    stall_s: float | None = Field(default=None, description="longest stall of a rank's training")
    stage_s: float | None = Field(default=None, description="from the first slot lease to the last seal")
    queue_s: float | None = Field(default=None, description="from the last seal to the first byte written")
    write_s: float | None = Field(default=None, description="writing and digesting, including fsync of the files")
    fsync_s: float | None = Field(default=None, description="the part spent in fsync, summed over files")
    raised_s: float | None = Field(
        default=None, description="the part of the write at a raised priority, because it was slower than the disk"
    )
    commit_s: float | None = Field(default=None, description="from the last receipt until the publishing rename is durable")
    verify_s: float | None = Field(default=None, description="reading it back and verifying it")
    bytes: float | None = None
    linked_bytes: float | None = Field(
        default=None, description="the part in files that an earlier checkpoint has too, and that were not written again"
    )
    disk_bytes_per_second: float | None = Field(default=None, description="the disk's speed when it was last measured")
    requests: float | None = Field(
        default=None, description="to object storage for this step's objects, until its commit, retries included"
    )
    retries: float | None = Field(default=None, description="those of them that repeated one that had failed")
    sent_bytes: float | None = Field(default=None, description="of the bodies of these requests")
    received_bytes: float | None = Field(default=None, description="of the bodies of their answers")
    requests_put: float | None = Field(default=None, description="the part that put whole objects")
    requests_begin: float | None = Field(default=None, description="the part that began uploads in parts")
    requests_part: float | None = Field(default=None, description="the part that sent one part")
    requests_complete: float | None = Field(default=None, description="the part that completed uploads")
    requests_abort: float | None = Field(default=None, description="the part that gave up uploads")
    requests_copy: float | None = Field(default=None, description="the part that copied on the server")
    requests_get: float | None = Field(default=None, description="the part that read objects, or ranges of them")
    requests_head: float | None = Field(default=None, description="the part that asked for size and tag")
    requests_list: float | None = Field(default=None, description="the part that listed objects")
    requests_delete: float | None = Field(default=None, description="the part that deleted objects")
    check_requests: float | None = Field(
        default=None, description="to object storage for this step's objects from its commit until it was verified"
    )
    check_retries: float | None = Field(default=None, description="those of them that repeated one that had failed")
    check_received_bytes: float | None = Field(default=None, description="of the bodies of their answers")


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


class TensorHistogram(Body):
    """How often each value occurs in a tensor, or in the difference of two. Complex numbers count as their two parts."""

    elements: int
    nonfinite: int = Field(description="NaN and infinite values; in a difference, of either tensor")
    minimum: float | None = Field(description="smallest finite value; null without one")
    maximum: float | None
    counts: list[int] = Field(description="finite values in bins of equal width, from the minimum to the maximum")


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


# What mends it: start the training again; start it from the newest healthy checkpoint; raise the run's quota; keep fewer
# checkpoints, or free space; read a checkpoint back; mend a damaged one; copy to the replicas again; save at another pace;
# remove the node from the list; look at what is going on.
Remedy = Literal[
    "resume",
    "restore-healthy",
    "raise-quota",
    "raise-team-quota",
    "keep-fewer",
    "verify",
    "repair",
    "retry-replicas",
    "save-interval",
    "forget-node",
    "look",
]


class Acknowledgement(Body):
    """An acknowledged alert. It ends with the alert, or at `until`: then the alert counts again."""

    by: str | None = Field(description="name of the token; null if the run's file does not have it, like the time")
    at: str | None = Field(description="RFC 3339, UTC")
    until: str | None = Field(default=None, description="when it expires; null: when the alert ends")


class AcknowledgeRequest(Body):
    model_config = ConfigDict(extra="forbid")

    for_s: float | None = Field(
        default=None, gt=0, le=30 * 86_400, description="seconds to snooze it for; null: until the alert ends"
    )


class Attention(Body):
    """Something that a person should look at, and what to do about it."""

    level: Literal["warning", "error"]
    code: str
    text: str
    hint: str
    step: int | None = None
    since: str | None = Field(default=None, description="when it began, RFC 3339, if known")
    remedy: Remedy = Field(default="look", description="the remedy")
    subject: str | None = Field(default=None, description="name of the replica or node concerned")
    healthy: int | None = Field(default=None, description="the newest healthy step, if a newer one is unhealthy")
    acknowledged: Acknowledgement | None = Field(
        default=None, description="the person who acknowledged it, and for how long"
    )


class Alert(Attention):
    """What needs attention, of which run; null where it is about a node, or about a replica of all runs."""

    run: str | None = None


# Of a run whose ranks connected to a service: some are connected; all have disconnected regularly; some are gone otherwise.
Life = Literal["running", "finished", "died"]
# A run's activity: its ranks save (training); no ranks are connected, or they have not saved for long (idle); they closed
# regularly (finished); they ended otherwise, without an acknowledgement (died), or before anything was saved (failed); it
# was archived.
RunLife = Literal["training", "idle", "finished", "died", "failed", "archived"]


class GoodCheckpoint(Body):
    """The newest checkpoint of which nothing bad is known: not damaged, not unhealthy, not abandoned."""

    step: int
    created: str
    verified: bool
    copies: list[str] = Field(description="the tiers with a verified copy of it")


class FirstNonFinite(Body):
    """Where NaN or infinite values began that the newest checkpoints still have. Of the tensor, None if it is not known."""

    step: int = Field(description="the first step that has them")
    group: str | None = None
    tensor: str | None = Field(default=None, description="the first tensor of that step that has them")
    nan: int | None = Field(default=None, description="NaN in that tensor")
    inf: int | None = Field(default=None, description="infinite values in that tensor")
    tensors: int | None = Field(default=None, description="number of tensors of that step that have them")

    @property
    def kind(self) -> str:
        return "infinite values" if self.nan == 0 else "NaN"

    @property
    def place(self) -> str:
        """Such as: first at step 120, layers.2.mlp.up_proj, 1 value."""
        if self.tensor is None:
            return f"first at step {self.step}"
        values, others = (self.nan or 0) + (self.inf or 0), (self.tensors or 1) - 1
        more = f", and {others} other {'tensor' if others == 1 else 'tensors'}" if others else ""
        return f"first at step {self.step}, {self.tensor}, {values} {'value' if values == 1 else 'values'}{more}"


class TierCopies(Body):
    """A run's copies in another tier."""

    tier: str
    newest: int | None = Field(description="the newest step with a verified copy there")
    damaged: int
    failing: int = Field(default=0, description="checkpoints that could not be copied yet")
    missing: int | None = Field(default=None, description="checkpoints that have no copy there; null while unknown")
    missing_bytes: int | None = Field(default=None, description="of the verified ones of them")
    lag_s: float | None = Field(default=None, description="age in seconds of the oldest verified one; 0 if there is none")


class Trend(Body):
    """The newest saves of a run, the oldest first; one value of each list for a save."""

    steps: list[int] = Field(default_factory=list)
    states: list[str] = Field(default_factory=list, description="states of the saves, as those of rounds")
    stall_s: list[float | None] = Field(default_factory=list, description="how long it stalled training")
    goodput: list[float | None] = Field(
        default_factory=list, description="fraction of the time since the previous save in which training did not stall"
    )


class RunSummary(Body):
    """Summary of a run's checkpointing. Seconds and bytes; None if too little has happened to tell."""

    run: str
    attempt: int
    state: Life | None = Field(default=None, description="of its ranks: running, finished or died; null if unknown")
    state_since: str | None = Field(default=None, description="time at which it finished or died")
    life: RunLife = Field(default="idle", description="what the run is doing")
    life_since: str | None = Field(default=None, description="since when, if that is known")
    standing: str = Field(default="", description="`life` in words, such as `finished with NaN since step 120`")
    verdict: str = Field(default="", description="the same in a sentence, with what to do")
    owner: str | None = Field(default=None, description="the contact of the run")
    tags: list[str] = Field(default=[], description="sorted")
    checkpoints: int
    bytes: int
    quota_bytes: int | None
    free_bytes: int | None = Field(description="on the storage of the root; null if it states no limit")
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
    last_verified: str | None = Field(default=None, description="time of the commit of the newest verified checkpoint")
    good: GoodCheckpoint | None = Field(default=None, description="the newest checkpoint without a known problem")
    nonfinite: FirstNonFinite | None = Field(
        default=None, description="where NaN or infinite values began, if the newest checkpoints have them"
    )
    copies: list[TierCopies] = Field(default_factory=list, description="copies in other tiers, by tier")
    trend: Trend = Field(default_factory=Trend, description="stall and goodput of the newest saves")
    metrics: dict[str, MetricValue] = Field(
        default_factory=dict, description="metrics that the trainer gave with the newest checkpoint, the first 32 by name"
    )
    attention: list[Attention] = Field(default_factory=list)


class Overview(Body):
    """All runs that may be seen, in a few figures. It is a few seconds old."""

    runs: int
    states: dict[RunLife, int] = Field(description="number of runs by what they are doing")
    errors: int = Field(description="alerts that are not acknowledged")
    warnings: int
    acknowledged: int
    newest_died: str | None = Field(
        default=None, description="the run that died most recently, of those whose `life` is died"
    )
    newest_died_since: str | None = None
    exposed_s: float | None = Field(
        default=None, description="the largest training time that a crash now would cost one run"
    )
    exposed_run: str | None = None
    cost: float | None = Field(default=None, description="mean fraction of time that saves stall the runs in training")
    checkpoints: int
    bytes: int
    free_bytes: int | None


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
