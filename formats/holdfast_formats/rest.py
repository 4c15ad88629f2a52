"""The bodies of the REST API, shared by the service that writes them and the typed client that reads them."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from .manifest import Manifest
from .wire import Policy

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
    newest: int | None = Field(description="step of the newest committed checkpoint")
    bytes: int


class Checkpoint(BaseModel):
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


def describe(manifest: Manifest, verified: bool = False) -> Checkpoint:
    """What a manifest says of its checkpoint; whether it was read back since is not in it."""
    return Checkpoint(
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


class Node(BaseModel):
    name: str
    pid: int
    version: str
    root: str
    socket: str | None
    started: str
    arena_bytes: int
    ranks: int
    socket_id: str | None = Field(
        default=None, description="inode and change time of the socket: a socket of that path without them is another's"
    )


class Health(BaseModel):
    status: str
    version: str
    root: str


class RankHello(BaseModel):
    """Who a rank is that shares no memory with the daemon. Ranks with the same `launch` share an attempt."""

    protocol: int
    run: str
    rank: int = Field(ge=0)
    world: int = Field(ge=1)
    launch: str = Field(min_length=1, max_length=256)
    keep_last: int | None = Field(default=None, ge=1)


class RankWelcome(BaseModel):
    attempt: int
    node: str
    root: str
    version: str
    silence_max_s: float = Field(description="a rank that is not heard of for this long is taken for dead")
    chunk_bytes_max: int = Field(description="most bytes of one chunk, before compression")


class Room(BaseModel):
    """What the daemon keeps for a rank: so many slots of so many bytes, within its arena."""

    slots: int = Field(ge=1, le=64)
    data_bytes: int = Field(ge=0)
    table_bytes: int = Field(ge=0)


class UploadRequest(BaseModel):
    step: int = Field(ge=0)
    policy: Policy = Field(default="wait", description="what gives way where no slot is free; `wait`: ask again")


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
    wait_s: float = Field(default=0.0, ge=0.0, le=20.0)


class Answer(BaseModel):
    step: int | None
