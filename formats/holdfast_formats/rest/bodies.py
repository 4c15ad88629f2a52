"""The bodies of the REST API, shared by the service that writes them and the typed client that reads them."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from holdfast_formats.disk.manifest import Manifest
from holdfast_formats.lineage import Existing, Intent, Rewind
from holdfast_formats.rest.observed import Life
from holdfast_formats.staging.wire import Policy

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """A page of a list; `next` is the cursor of the page behind it, None on the last one."""

    items: list[Item]
    next: str | None = None


class Run(BaseModel):
    name: str
    attempt: int = Field(description="newest declared attempt (restart number)")
    keep_last: int | None = Field(description="retention: how many checkpoints are kept, None for all")
    checkpoints: int
    newest: int | None = Field(description="step of the newest checkpoint that is not known to be damaged")
    bytes: int
    state: Life | None = Field(default=None, description="what became of its ranks; null where nothing is known of them")


CheckpointState = Literal["committed", "verified", "unhealthy", "abandoned", "damaged"]
MARKS = {"pinned", "labels"}  # members of a checkpoint that the run's file states
# Members of a checkpoint that no manifest states.
KNOWN_SINCE = {"verified", "checked", "check", "damage", "nonfinite", "healthy", "same_as", "abandoned"} | MARKS


class CheckpointInfo(BaseModel):
    run: str
    step: int
    attempt: int
    created: str = Field(description="time of the commit, RFC 3339, UTC")
    world: int
    groups: list[str]
    tensors: int
    files: int
    bytes: int
    metrics: dict[str, float]
    verified: bool = Field(description="read back after the commit and found equal to every digest")
    checked: str | None = Field(default=None, description="when it was last read back, whatever came of it")
    check: dict[str, Any] | None = Field(default=None, description="what the last check did: seconds, bytes, layouts tried")
    damage: dict[str, Any] | None = Field(
        default=None, description="the problem that the last check found, None while sound"
    )
    nonfinite: int | None = Field(default=None, description="NaN and infinite elements; None when nobody counted")
    healthy: bool | None = Field(default=None, description="no new non-finite values since the checkpoint before")
    same_as: int | None = Field(default=None, description="the step before, where this one is bit-identical to it")
    restored: int | None = Field(
        default=None, description="the step that its launch had restored last; None for none that is known"
    )
    turn: int = Field(default=0, description="how many restores its launch had gone on from by then, and saves it made anew")
    rewinds: list[Rewind] = Field(
        default_factory=list,
        description="on the way to it: each [attempt, turn, step] in which training went on from an older step",
    )
    abandoned: bool = Field(default=False, description="training went on from an older step, and left it behind")
    pinned: bool = Field(default=False, description="nothing removes it; by the run's file")
    labels: list[str] = Field(default_factory=list, description="those of the run's file, by name")

    @property
    def state(self) -> CheckpointState:
        """The worst that is known of it."""
        if self.damage is not None:
            return "damaged"
        if self.abandoned:
            return "abandoned"
        if self.healthy is False:
            return "unhealthy"
        return "verified" if self.verified else "committed"

    @property
    def unchecked(self) -> bool:
        """Nobody has read it back yet: nothing but its commit speaks for it, and nothing against it."""
        return self.checked is None and not self.verified and self.damage is None


def as_committed(checkpoint: CheckpointInfo) -> CheckpointInfo:
    """The checkpoint as its manifest describes it, without what was found out since."""
    stated = checkpoint.model_dump(include=set(CheckpointInfo.model_fields) - KNOWN_SINCE)
    return CheckpointInfo(**stated, verified=False)


def describe(manifest: Manifest, verified: bool = False) -> CheckpointInfo:
    """What a manifest says of its checkpoint; whether it was read back since is not in it."""
    return CheckpointInfo(
        run=manifest.run,
        step=manifest.step,
        attempt=manifest.attempt,
        created=manifest.created,
        world=manifest.world,
        groups=list(manifest.groups),
        tensors=sum(len(tensors) for tensors in manifest.tensors.values()),
        files=len(manifest.files),
        bytes=manifest.bytes,
        metrics=dict(manifest.metrics),
        verified=verified,
        restored=manifest.restored,
        turn=manifest.turn,
        rewinds=list(manifest.rewinds),
    )


class Tensor(BaseModel):
    group: str
    name: str
    dtype: str
    shape: list[int]
    bytes: int
    file: str
    start: int = Field(description="first byte in the file")
    extents: int
    placement: str
    alias_of: str | None = None


class File(BaseModel):
    name: str
    bytes: int = Field(description="length that the manifest states")
    stored: int | None = Field(description="length on storage; None when the file is missing")
    header_bytes: int = Field(description="length of a safetensors header, 0 for other files")
    digest: str | None = Field(
        description="xxh3-64 of the header or of the whole small file; None for COMMIT and the manifest"
    )


class ShardPart(BaseModel):
    """Element `offset + i` of a stored tensor stands at element `start + Σ i·strides` of the local one, row-major."""

    tensor: str
    offset: list[int]
    shape: list[int]
    start: int
    strides: list[int]


class ShardTensor(BaseModel):
    name: str
    dtype: str
    shape: list[int]
    start: int = Field(description="first byte in the shard's file")
    bytes: int
    padding: int = Field(description="elements that no part covers: zeros")
    parts: list[ShardPart]


class StoredTensor(BaseModel):
    dtype: str
    shape: list[int]
    file: str
    start: int = Field(description="first byte in the file; its elements follow, row-major")


class ShardExtent(BaseModel):
    tensor: str
    start: int = Field(description="first byte in the file")
    length: int
    digest: str = Field(description="xxh3-64 of the whole extent")


class ShardRead(BaseModel):
    """Bytes [start, stop) of a file in one read; the extents in it are wanted, what lies between them is not."""

    file: str
    start: int
    stop: int
    extents: list[ShardExtent]


class ShardPlan(BaseModel):
    """What a rank holds in a layout and which stored bytes it is made of, a page of its tensors at a time.

    `reads` and `sources` are of this page's tensors; counts and bytes are of the whole shard.
    """

    run: str
    step: int
    manifest_sha256: str
    group: str
    layout: str = Field(description="the layout's one canonical text")
    rank: int
    etag: str = Field(description="of the shard's file")
    tensors: int
    bytes: int = Field(description="length of the shard's file, of which the first `header_bytes` are its header")
    header_bytes: int
    needed: int = Field(description="bytes of stored tensors that the shard holds, each counted once")
    read: int = Field(description="bytes of the extents that must be read for them")
    ratio: float = Field(description="read ÷ needed")
    notes: list[str] = Field(description="what the layout decided on the way: replicated, padded, cut unevenly")
    items: list[ShardTensor]
    sources: dict[str, StoredTensor]
    reads: list[ShardRead]
    next: str | None = Field(default=None, description="the cursor of the page behind this one")


class Round(BaseModel):
    id: int
    run: str
    step: int
    attempt: int
    world: int
    state: str = Field(description="open, sealed, committed, aborted or dropped")
    sealed: int = Field(description="ranks that have sealed their slot")
    opened: str
    ended: str | None
    code: str | None = Field(description="error code, when aborted or dropped")
    detail: str | None
    node: str | None = Field(default=None, description="the node that wrote it")
    measured: dict[str, float] | None = Field(
        default=None, description="seconds of each phase and bytes of the save; `SaveTimes` names them"
    )


class Node(BaseModel):
    name: str
    pid: int | None = Field(default=None, description="for tokens of all runs")
    version: str
    root: str | None = Field(default=None, description="for tokens of all runs")
    socket: str | None
    started: str
    arena_bytes: int = Field(description="held for staging; for tokens of some runs, by these")
    ranks: int = Field(description="connected; for tokens of some runs, of these")
    busy: bool = Field(default=False, description="saves are under way, or checkpoints are still to be read back")
    socket_id: str | None = Field(
        default=None, description="inode and change time of the socket: a socket of that path without them is another's"
    )
    catalog: str | None = Field(
        default=None, description="why the catalog is away, since when, and what waits for it; None while it answers"
    )


class Health(BaseModel):
    status: str
    version: str | None = Field(default=None, description="for those who may read")
    root: str | None = Field(default=None, description="for tokens of all runs")


class RankHello(BaseModel):
    """Who a rank is that shares no memory with the daemon. Ranks with the same `launch` share an attempt."""

    protocol: int
    run: str
    rank: int = Field(ge=0)
    world: int = Field(ge=1)
    launch: str = Field(min_length=1, max_length=256)
    keep_last: int | None = Field(default=None, ge=1)
    process: str = Field(default="", max_length=64, description="which process speaks; the same one is the same job")
    session: str = Field(default="", max_length=64, description="which checkpointer speaks, whatever its id is by now")
    root_id: str | None = Field(
        default=None, max_length=64, description="the root that is meant; another one's daemon refuses"
    )
    take_over: bool = Field(default=False, description="begin although another job of this run lives, which is fenced off")


class RankWelcome(BaseModel):
    attempt: int
    node: str
    root: str
    root_id: str
    version: str
    silence_max_s: float = Field(description="a rank that is not heard of for this long is taken for dead")
    chunk_bytes_max: int = Field(description="most bytes of one chunk, before compression")
    notices: tuple[str, ...] = Field(default=(), description="what was asked for and is not so, such as keep_last")


class Room(BaseModel):
    """What the daemon keeps for a rank: so many slots of so many bytes, within its arena."""

    slots: int = Field(ge=1, le=64)
    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)


class UploadRequest(BaseModel):
    step: int = Field(ge=0)
    policy: Policy = Field(default="wait", description="what gives way where no slot is free; `wait`: ask again")
    restored: int | None = Field(default=None, ge=0, description="the step that this launch has restored and goes on from")
    turn: int = Field(default=0, ge=0, description="how many restores this launch has gone on from, and saves it made anew")
    again: int = Field(default=0, ge=0, description="how many of them are saves since the last restore")
    existing: Existing = Field(default="refuse", description="what becomes of a save whose step is a checkpoint already")
    groups: tuple[str, ...] = Field(default=(), description="what the save is of")

    @property
    def intent(self) -> Intent:
        return Intent(self.restored, self.turn, self.existing, self.groups, self.again)


class Upload(BaseModel):
    """How far the upload of one slot is. `data_bytes` and `table_bytes` are received, proven and need not be sent again."""

    number: int
    step: int
    attempt: int
    state: Literal["open", "sealed", "committed", "aborted"]
    data_bytes: int
    table_bytes: int
    problem: dict[str, Any] | None = Field(default=None, description="why, when aborted")


class SealRequest(BaseModel):
    """What a complete slot holds; `table_digest` is the xxh3-64 of its table, which states everything else."""

    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)
    table_digest: str
    stall_s: float | None = Field(
        default=None, ge=0, le=86_400, description="how long the rank's training stood still for it, where that is known"
    )


class AbandonRequest(BaseModel):
    problem: dict[str, Any]


class Outcomes(BaseModel):
    """Uploads that have ended, in the order in which they did; `next` is the `after` that asks for those behind them."""

    items: list[Upload]
    next: int


class Question(BaseModel):
    """Which step does this attempt restore? The newest with all of `groups` unless a step is named."""

    step: int | None = Field(default=None, ge=0)
    groups: tuple[str, ...] = ()
    healthy: bool = Field(default=False, description="the newest that is verified and not unhealthy")
    wait_s: float = Field(default=0.0, ge=0.0, le=20.0)


class Answer(BaseModel):
    step: int | None
    notes: tuple[str, ...] = Field(default=(), description="newer checkpoints that were passed over, and why")


class RestoreEnd(BaseModel):
    """How the restore of a turn's step ended for this rank: well, or with this problem."""

    step: int = Field(ge=0)
    problem: dict[str, Any] | None = None
    alone: bool = Field(default=False, description="the answer is for this rank only: it named the step itself")
    wait_s: float = Field(default=0.0, ge=0.0, le=20.0)


class RestoreVerdict(BaseModel):
    """Whether this rank goes on from what it restored; see the wire's `Judged`."""

    again: bool = Field(default=False, description="read once more: it is well now")
    problem: dict[str, Any] | None = Field(default=None, description="no rank goes on from this step")
    late: bool = Field(default=False, description="others had gone on from it already")
    newest: int | None = Field(default=None, description="the newest step that is not known to be damaged, if asked alone")
