"""The bodies of the REST API, shared by the service that writes them and the typed client that reads them."""

from __future__ import annotations

from typing import Generic, TypeVar

from pydantic import BaseModel, Field

from .manifest import Manifest

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


class Round(BaseModel):
    id: int
    run: str
    step: int
    attempt: int
    world: int
    state: str = Field(description="open, sealed, committed or aborted")
    sealed: int = Field(description="ranks that have sealed their slot")
    opened: str
    ended: str | None
    code: str | None = Field(description="error code, when aborted")
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


class Health(BaseModel):
    status: str
    version: str
    root: str
