"""The bodies of the REST API, shared by the service that writes them and the typed client that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
from pydantic import Field, ValidationError

from holdfast_formats.body import Body
from holdfast_formats.lineage import Rewind
from holdfast_formats.rest.measurements import Life, MetricValue, RunLife
from holdfast_formats.rest.replica_lags import BucketTraffic, ReplicaLag
from holdfast_formats.staging import messages

if TYPE_CHECKING:
    from holdfast_formats.disk.manifests import Manifest  # with numpy, which a client that lists runs need not import

Item = TypeVar("Item")


class Page(Body, Generic[Item]):
    """A page of a list; `next` is the cursor of the next page, None on the last one."""

    items: list[Item]
    next: str | None = None


class Run(Body):
    name: str
    attempt: int = Field(description="newest attempt (restart number)")
    keep_last: int | None = Field(description="retention: number of newest checkpoints to keep, None for all")
    checkpoints: int
    newest: int | None = Field(description="step of the newest checkpoint that is not known to be damaged")
    bytes: int = Field(description="of its checkpoints; files that several of them have count once")
    state: Life | None = Field(default=None, description="of its ranks: running, finished or died; null if unknown")
    life: RunLife = Field(default="idle", description="what the run is doing; `died` until it is resumed or acknowledged")
    life_since: str | None = Field(default=None, description="since when, if known")
    standing: str = Field(default="", description="`life` in words, such as `finished with NaN since step 120`")
    owner: str | None = Field(default=None, description="the contact of the run")
    tags: list[str] = Field(default=[], description="sorted; a directory alone does not contain them")


NodeState = Literal["live", "returned", "stopped", "lost"]
CheckpointState = Literal["committed", "verified", "unhealthy", "abandoned", "damaged"]
# Members of a checkpoint that are not kept with it: those of the run's file, and how far its check is.
MARKS = {"pinned", "labels", "checking"}
# Members of a checkpoint that are in no manifest, or follow from one and are not known of all that was listed earlier.
KNOWN_SINCE = {
    "verified",
    "checked",
    "check",
    "damage",
    "nonfinite",
    "healthy",
    "same_as",
    "abandoned",
    "thin_bytes",
    "small_bytes",
    "shared_bytes",
} | MARKS


class Checking(Body):
    """How many bytes of a checkpoint its nodes have proven, of how many."""

    done_bytes: int
    total_bytes: int


class ThinnedFrom(Body):
    """What a checkpoint has lost since its commit. Its weights are as they were saved."""

    at: str = Field(description="RFC 3339, UTC")
    groups: list[str] = Field(description="the removed groups")
    bytes: int = Field(description="its size before")


class CompactedFrom(Body):
    """How a checkpoint was stored in fewer bytes since its commit. Its weights are as they were saved, and masters too."""

    at: str = Field(description="RFC 3339, UTC")
    optim: str = Field(description="the rule: exact, bf16 or int8")
    bytes: int = Field(description="its size before")
    error: float = Field(
        description="the greatest error of a tensor: the norm of the difference, divided by the norm of the original values;"
        " 0 if nothing is lost"
    )
    coded: int = Field(description="number of compacted tensors")
    exact: int = Field(description="number of eligible tensors left as saved")


class CheckpointInfo(Body):
    run: str
    step: int
    attempt: int
    created: str = Field(description="time of the commit, RFC 3339, UTC")
    world: int
    groups: list[str]
    tensors: int
    files: int
    bytes: int
    metrics: dict[str, MetricValue]
    verified: bool = Field(description="read back after the commit; every byte matched its digest")
    checked: str | None = Field(default=None, description="time of the last check, whatever its result")
    check: dict[str, Any] | None = Field(
        default=None,
        description="what the last check did: seconds, bytes, layouts tested, requests to a bucket (`check_requests`, …)",
    )
    checking: Checking | None = Field(
        default=None, description="progress of several nodes verifying it together, while they do"
    )
    damage: dict[str, Any] | None = Field(default=None, description="the problem found by the last check, None if sound")
    nonfinite: int | None = Field(default=None, description="number of NaN and infinite elements; None if not counted")
    healthy: bool | None = Field(default=None, description="no new NaN or infinite values since the previous checkpoint")
    same_as: int | None = Field(default=None, description="the previous step, if this one is bit-identical to it")
    restored: int | None = Field(default=None, description="the step that its launch restored last; None if none is known")
    turn: int = Field(
        default=0, description="number of restores that its launch continued from so far, plus saves it replaced"
    )
    rewinds: list[Rewind] = Field(
        default_factory=list,
        description="rewinds on its line of training: each [attempt, turn, step] at which training continued from an older "
        "step",
    )
    thinned: ThinnedFrom | None = Field(
        default=None,
        description="thinned to its weights: for inference, exports and starting another training run, not for resuming "
        "this one; null while it is whole",
    )
    thin_bytes: int | None = Field(
        default=None, description="estimated bytes after thinning; null if it cannot be thinned or already is"
    )
    compacted: CompactedFrom | None = Field(
        default=None, description="compacted: its optimizer states and masters take fewer bytes; null if not"
    )
    small_bytes: dict[str, int] | None = Field(
        default=None,
        description="estimated bytes under each compaction rule that would save space; null if unknown",
    )
    shared_bytes: int = Field(
        default=0,
        description="the part of `bytes` in files that an older checkpoint of the run has too: they are stored once",
    )
    abandoned: bool = Field(
        default=False, description="training continued from an older step and left this checkpoint behind"
    )
    pinned: bool = Field(default=False, description="protected from removal; stored in the run's file")
    labels: list[str] = Field(default_factory=list, description="labels, sorted by name; stored in the run's file")

    @property
    def state(self) -> CheckpointState:
        """The worst known finding about it."""
        if self.damage is not None:
            return "damaged"
        if self.abandoned:
            return "abandoned"
        if self.healthy is False:
            return "unhealthy"
        return "verified" if self.verified else "committed"

    @property
    def unchecked(self) -> bool:
        """Whether it was never read back since its commit."""
        return self.checked is None and not self.verified and self.damage is None


def as_committed(checkpoint: CheckpointInfo) -> CheckpointInfo:
    """The checkpoint as its manifest describes it, without later findings."""
    stated = checkpoint.model_dump(include=set(CheckpointInfo.model_fields) - KNOWN_SINCE)
    return CheckpointInfo(**stated, verified=False)


def describe(manifest: Manifest, verified: bool = False) -> CheckpointInfo:
    """What a manifest says about its checkpoint. Whether it was verified later is not in it."""
    from holdfast_formats.disk import coded, compacting, thinning  # as above

    return CheckpointInfo(
        run=manifest.run,
        step=manifest.step,
        attempt=manifest.attempt,
        created=manifest.created,
        world=manifest.world,
        groups=list(manifest.groups),
        tensors=coded.count(manifest),
        files=len(manifest.files),
        bytes=manifest.bytes,
        metrics=manifest.all_metrics,
        verified=verified,
        restored=manifest.restored,
        turn=manifest.turn,
        rewinds=list(manifest.rewinds),
        thinned=None if manifest.thinned is None else ThinnedFrom(**msgspec.structs.asdict(manifest.thinned)),
        thin_bytes=thinning.thin_bytes(manifest),
        compacted=_compacted(manifest),
        small_bytes=compacting.small_bytes(manifest),
    )


def summary(manifest: Manifest) -> dict[str, Any]:
    """What `describe` says, for `of_summary`, without what has its default."""
    return describe(manifest).model_dump(mode="json", exclude_defaults=True, exclude={"verified"})


def of_summary(run: str, step: int, stated: dict[str, Any] | None) -> CheckpointInfo | None:
    """The reverse of `summary`; None without one, and for one that cannot be read or is of another checkpoint."""
    try:
        found = None if stated is None else CheckpointInfo.model_validate({**stated, "verified": False})
    except ValidationError:
        return None
    return found if found is not None and (found.run, found.step) == (run, step) else None


def _compacted(manifest: Manifest) -> CompactedFrom | None:
    compacted = manifest.compacted
    if compacted is None:
        return None
    coded, exact = (sum(map(len, held.values())) for held in (compacted.tensors, compacted.exact))
    return CompactedFrom(
        at=compacted.at, optim=compacted.optim, bytes=compacted.bytes, error=compacted.error, coded=coded, exact=exact
    )


class StoredAs(Body):
    """How a tensor of a compact checkpoint is stored in fewer bytes. The manifest says where its parts are."""

    coding: str = Field(description="bf16, int8, int8-log or low16")
    parts: list[str] = Field(description="the stored tensors of the group that it is decoded from")
    bytes: int = Field(description="of these parts")
    error: float = Field(
        description="the norm of the difference, divided by the norm of the original values; 0 if nothing is lost"
    )


class Tensor(Body):
    group: str
    name: str
    dtype: str
    shape: list[int]
    bytes: int
    file: str = Field(description="empty if the tensor is compacted: see `stored`")
    start: int = Field(description="first byte in the file")
    extents: int
    placement: str
    alias_of: str | None = None
    stored: StoredAs | None = Field(default=None, description="null if the tensor is stored unchanged")


class File(Body):
    name: str
    bytes: int = Field(description="length according to the manifest")
    stored: int | None = Field(description="length on storage; None if the file is missing")
    header_bytes: int = Field(description="length of a safetensors header, 0 for other files")
    digest: str | None = Field(
        description="xxh3-64 of the header or of the whole small file; None for COMMIT and the manifest"
    )
    url: str | None = Field(
        default=None, description="with `urls=true`: an address in the bucket that reads the file without a token"
    )


class ShardPart(Body):
    """Element `offset + i` of a stored tensor is element `start + Σ i·strides` of the local one, row-major."""

    tensor: str
    offset: list[int]
    shape: list[int]
    start: int
    strides: list[int]


class ShardTensor(Body):
    name: str
    dtype: str
    shape: list[int]
    start: int = Field(description="first byte in the shard's file")
    bytes: int
    padding: int = Field(description="number of elements that no part covers; they are zero")
    parts: list[ShardPart]


class StoredTensor(Body):
    dtype: str
    shape: list[int]
    file: str
    start: int = Field(description="first byte in the file; the elements follow in row-major order")


class ShardExtent(Body):
    tensor: str
    start: int = Field(description="first byte in the file")
    length: int
    digest: str = Field(description="xxh3-64 of the whole extent")


class ShardRead(Body):
    """Bytes [start, stop) of a file, to be read at once. The extents in it are needed, the gaps between them are
    not.
    """

    file: str
    start: int
    stop: int
    extents: list[ShardExtent]


class ShardPlan(Body):
    """What a rank holds in a layout and which stored bytes it consists of, a page of its tensors at a time.

    `reads` and `sources` belong to this page's tensors; counts and bytes to the whole shard.
    """

    run: str
    step: int
    manifest_sha256: str
    group: str
    layout: str = Field(description="canonical text of the layout")
    rank: int
    program: str | None = Field(None, description="the mapping program that makes the shard's tensors from the stored ones")
    etag: str = Field(description="ETag of the shard's file")
    tensors: int
    bytes: int = Field(description="length of the shard's file, including its header of `header_bytes`")
    header_bytes: int
    needed: int = Field(description="bytes of stored tensors that the shard holds, each counted once")
    read: int = Field(description="bytes of the extents that must be read for the shard")
    ratio: float = Field(description="read ÷ needed")
    notes: list[str] = Field(description="decisions of the layout: replicated, padded, split unevenly")
    items: list[ShardTensor]
    sources: dict[str, StoredTensor]
    reads: list[ShardRead]
    urls: dict[str, str] = Field(
        default_factory=dict,
        description="with `urls=true`: by the file of a read, an address in the bucket that reads any range of it "
        "without a token",
    )
    next: str | None = Field(default=None, description="cursor of the next page")


class Round(Body):
    id: int
    run: str
    step: int
    attempt: int
    world: int
    state: str = Field(description="open, sealed, committed, aborted or dropped")
    sealed: int = Field(description="number of ranks that have sealed their slot")
    opened: str
    ended: str | None
    code: str | None = Field(description="error code, when aborted or dropped")
    detail: str | None
    node: str | None = Field(default=None, description="the node that wrote it")
    measured: dict[str, float] | None = Field(
        default=None, description="seconds of each phase and bytes of the save; see `SaveTimes`"
    )


class InMemory(Body):
    """What a node holds of an in-memory checkpoint."""

    run: str
    step: int
    attempt: int
    ranks: int = Field(description="how many ranks of the save have their slots there")
    bytes: int


class KeptAverage(Body):
    """A moving average that a node keeps for the ranks of a launch: its state by now, by rank 0's."""

    run: str
    attempt: int
    of: str = Field(description="the group that is averaged")
    decay: float
    every: int = Field(description="steps from update to update")
    n: int = Field(description="number of updates in it, including those of earlier launches")
    step: int = Field(description="the step of the last one")
    left_out: int = Field(description="updates that were dropped, skipped because of their loss value, or lost")


class Node(Body):
    name: str
    pid: int | None = Field(default=None, description="only shown to tokens for all runs")
    version: str
    root: str | None = Field(default=None, description="only shown to tokens for all runs")
    socket: str | None
    started: str
    arena_bytes: int = Field(description="shared memory reserved for staging; for tokens of some runs, by these runs")
    ranks: int = Field(description="connected ranks; for tokens of some runs, ranks of these runs")
    memory: list[InMemory] = Field(
        default_factory=list, description="the in-memory checkpoints it holds slots of, for the visible runs"
    )
    averages: list[KeptAverage] = Field(
        default_factory=list, description="the moving averages it keeps, for the visible runs"
    )
    busy: bool = Field(default=False, description="saves are in progress, or checkpoints are not verified yet")
    sealed: int = Field(
        default=0,
        description="saves sealed by all ranks of this node and not yet ended; only shown to tokens for all runs",
    )
    keeper: str | None = Field(default=None, description="what holds the memory of staged saves if the daemon is killed")
    arbiter: str | None = Field(
        default=None,
        description="what lets only one of two commits of a step stand: `directory`, `bucket` (conditional writes), "
        "`catalog`, or `none` (`--alone`)",
    )
    live: bool = Field(default=True, description="whether the node's heartbeat is recent")
    state: NodeState = Field(
        default="live",
        description="`stopped`: it signed off; `lost`: it did not; `returned`: live again after being lost recently",
    )
    since: str | None = Field(default=None, description="RFC 3339: when it joined the cluster, by the catalog's clock")
    heard_s: float | None = Field(
        default=None, description="seconds since its last heartbeat; data about another node is as old as this"
    )
    host: str | None = Field(default=None, description="name of its machine; only shown to tokens for all runs")
    url: str | None = Field(default=None, description="address of its API; only shown to tokens for all runs")
    exchange: str | None = Field(
        default=None,
        description="address at which other nodes read the saves of its ranks; only shown to tokens for all runs",
    )
    runs: dict[str, int] = Field(default_factory=dict, description="how many ranks are connected to it, by run")
    bucket: BucketTraffic | None = Field(
        default=None,
        description="requests to the bucket of its root; null for a directory; only shown to tokens for all runs",
    )
    lease_s: float | None = Field(
        default=None, description="seconds until the node's lease ends unless renewed; negative once it is gone"
    )
    replicas: dict[str, str | None] = Field(
        default_factory=dict,
        description="the replicas that it copies to, and why one cannot be reached, null while it can; only shown to tokens "
        "for all runs",
    )
    lags: list[ReplicaLag] = Field(
        default_factory=list,
        description="the same with how far each is behind, what is copied now, and requests to its bucket; only shown to "
        "tokens for all runs",
    )
    duties: list[str] = Field(default_factory=list, description="what this node does for all nodes of its cluster")
    socket_id: str | None = Field(
        default=None,
        description="inode and change time of the socket; a socket at that path with other values belongs to another daemon",
    )
    catalog: str | None = Field(
        default=None,
        description="why and since when the catalog does not respond, and how many records wait; None while it responds",
    )
    catalog_waiting: int = Field(
        default=0, description="records of saves and events waiting for the catalog; only shown to tokens for all runs"
    )


class Health(Body):
    status: str
    version: str | None = Field(default=None, description="only shown to callers with scope `read`")
    root: str | None = Field(default=None, description="only shown to tokens for all runs")


class RankHello(messages.HelloFields):
    """The identity of a rank that shares no memory with the daemon."""

    root_id: str | None = Field(
        default=None, max_length=64, description="ID of the expected root; a daemon of another root refuses"
    )


class RankWelcome(messages.WelcomeFields):
    root_id: str
    silence_max_s: float = Field(description="a rank silent for this long counts as dead")
    chunk_bytes_max: int = Field(description="maximum size of one chunk, before compression")


class Upload(Body):
    """Progress of the upload of one slot. `data_bytes` and `table_bytes` are received and verified, and need not
    be sent again.
    """

    number: int
    step: int
    attempt: int
    state: Literal["open", "sealed", "committed", "aborted"]
    data_bytes: int
    table_bytes: int
    problem: dict[str, Any] | None = Field(default=None, description="the problem, if aborted")


class SealRequest(Body):
    """What a complete slot contains; `table_digest` is the xxh3-64 of its table, which states everything else."""

    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)
    table_digest: str
    stall_s: float | None = Field(
        default=None, ge=0, le=86_400, description="seconds that this save stalled the rank's training, if known"
    )


class Outcomes(Body):
    """Uploads that have ended, in order; pass `next` as `after` to get the later ones."""

    items: list[Upload]
    next: int
    stop: bool = Field(default=False, description="another rank of the launch must stop: report how far this one is")


class Question(messages.StepQuestion):
    """Which step to restore; saves that are being written are waited for, up to `wait_s` seconds."""

    wait_s: float = Field(default=0.0, ge=0.0, le=20.0)


class RestoreEnd(messages.RestoreResult):
    """How a rank's restore ended; the other ranks are waited for, up to `wait_s` seconds."""

    wait_s: float = Field(default=0.0, ge=0.0, le=20.0)
