"""Committed checkpoints for the API: COMMIT first, then the manifest, decoded once and cached for a while (I5)."""

from __future__ import annotations

import base64
import binascii
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_files import opened
from holdfast_formats import naming
from holdfast_formats.disk import coded, manifests, verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.disk.verification import PieceColumns
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint, NoSuchResource
from holdfast_formats.files import Files
from holdfast_formats.rest import bodies, statistics
from holdfast_service.api.content import selectors
from holdfast_service.api.read_protection import hold
from holdfast_service.api.services import Services
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.findings import missing

OPENED_MAX = 8  # manifests kept decoded; one of 100 000 tensors takes about 100 MB
LATEST = "latest"


class Columns:
    """Every tensor in the order of the manifest, which is that of its statistics, and sort keys."""

    def __init__(self, manifest: Manifest) -> None:
        self.listed = statistics.tensors_of(manifest)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        listed = self.listed
        return np.array(sorted(range(len(listed)), key=lambda i: (listed[i][0], natural_key(listed[i][1]))), np.int64)

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        return np.array([entry.nbytes for _, _, entry in self.listed], np.float64)

    @cached_property
    def elements(self) -> NDArray[np.float64]:
        return np.array([prod(entry.shape) for _, _, entry in self.listed], np.float64)


class Contents:
    """One committed checkpoint: its manifest, and lazily computed views of it."""

    def __init__(self, directory: str, manifest: Manifest, sha256: str) -> None:
        self.directory = directory
        self.manifest = manifest
        self.sha256 = sha256

    @cached_property
    def pieces(self) -> dict[str, PieceColumns]:
        """The pieces of each file with digests, only for readers of files, because there are as many as extents."""
        return verification.pieces(self.manifest)

    @cached_property
    def contents(self) -> Manifest:
        """The manifest with every tensor as it was saved; coded ones have no file there."""
        return coded.contents(self.manifest)

    @cached_property
    def tensor_keys(self) -> list[tuple[str, Any, str]]:
        """(group, sort key, name) of every tensor and alias, in the order in which they are listed."""
        # In the manifest's order, which is nearly this one: sorted sooner.
        held = [(group, name) for group, tensors in self.contents.tensors.items() for name in tensors]
        held += [(group, name) for group, aliases in self.contents.aliases.items() for name in aliases]
        return sorted((group, natural_key(name), name) for group, name in held)

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.manifest)

    def tensor(self, group: str, name: str) -> bodies.Tensor:
        alias_of = self.contents.aliases.get(group, {}).get(name)
        entry = self.contents.tensors[group][alias_of or name]
        form = coded.stored_form(self.manifest, group, name)
        return bodies.Tensor(
            group=group,
            name=name,
            dtype=entry.dtype,
            shape=list(entry.shape),
            bytes=entry.nbytes,
            file=entry.file,
            start=entry.start,
            extents=0 if form is not None else len(entry.extents),
            placement=entry.placement,
            alias_of=alias_of,
            stored=None
            if form is None
            else bodies.StoredAs(coding=form.coding, parts=list(form.parts), bytes=form.bytes, error=form.error),
        )


class OpenedCheckpoints:
    """The decoded manifests, newest use last. COMMIT is read again each time, so a replaced checkpoint is never mixed up."""

    def __init__(self, tier: Files, readers: Readers) -> None:
        """Opening a checkpoint registers a reader with `readers`: see `reading`."""
        self._tier, self._readers = tier, readers
        self._held: OrderedDict[bytes, Contents] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, run: str, step: int) -> Contents:
        """The contents of a checkpoint; `NotCommitted` or `CorruptManifest` if its directory is not one."""
        commit = self.commit_bytes(run, step)
        key = f"{run}/{step}/".encode() + commit
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        manifest = manifests.decode(self._encoded(run, step, commit), commit)
        contents = Contents(naming.checkpoint_path(run, step), manifest, manifests.stated_sha256(commit))
        with self._lock:
            self._held[key] = contents
            if len(self._held) > OPENED_MAX:
                self._held.popitem(last=False)
        return contents

    def commit_bytes(self, run: str, step: int) -> bytes:
        """The stored COMMIT, read before everything else (I5), so reading begins here."""
        directory = naming.checkpoint_path(run, step)
        hold(self._readers, run, step)
        return opened.read_commit(self._tier, directory)

    def manifest_bytes(self, run: str, step: int, commit: bytes) -> bytes:
        """The stored manifest, checked against this COMMIT."""
        encoded = self._encoded(run, step, commit)
        manifests.check_bytes(encoded, commit)
        return encoded

    def _encoded(self, run: str, step: int, commit: bytes) -> bytes:
        return opened.read_manifest(self._tier, naming.checkpoint_path(run, step), commit)


def find(services: Services, run: str, step: str) -> bodies.CheckpointInfo:
    """The checkpoint of a path, by number, `latest` or `latest-healthy`. Raises `NoSuchRun`, `NoSuchCheckpoint` or
    `InvalidRequest`.
    """
    if step == LATEST:
        newest = services.control.catalog.newest(run)
        if newest is None and services.control.catalog.run(run).checkpoints:
            raise NoSuchCheckpoint(f"run {run!r} has no sound checkpoint", hint=f"`holdfast ls {run}` shows what is damaged")
        if newest is None:
            raise NoSuchCheckpoint(f"run {run!r} has no checkpoint yet")
        return services.control.catalog.checkpoint(run, newest)
    if step in selectors.NAMES:
        return selectors.find(services, run, step)
    if not (step.isascii() and step.isdigit() and len(step) <= len(str(naming.STEP_MAX))):
        raise InvalidRequest(f"step {step!r} is not an integer", hint=f"use a number or {LATEST!r}")
    try:
        return services.control.catalog.checkpoint(run, int(step))
    except NoSuchCheckpoint:
        if int(step) not in missing.missing(services.control.catalog.database, run):
            raise
        raise NoSuchCheckpoint(
            f"{run}@{int(step)} is gone: something other than Holdfast removed its directory",
            hint=f"`holdfast repair {run}@{int(step)}` copies it back from a replica; `holdfast ls {run}` lists the others",
        ) from None


def page_of_tensors(contents: Contents, group: str | None, cursor: str | None, limit: int) -> bodies.Page[bodies.Tensor]:
    """The tensors after `cursor`, of one group or of all."""
    keys = [key for key in contents.tensor_keys if group is None or key[0] == group]
    if group is not None and group not in contents.manifest.tensors:
        raise NoSuchResource(f"there is no group {group!r}", hint=f"groups: {', '.join(contents.manifest.groups)}")
    first = 0
    if cursor is not None:
        at_group, at_name = decode_cursor(cursor, 2)
        first = bisect_right(keys, (at_group, natural_key(at_name), at_name))
    shown = keys[first : first + limit]
    more = first + limit < len(keys)
    return bodies.Page(
        items=[contents.tensor(key[0], key[2]) for key in shown],
        next=encode_cursor(shown[-1][0], shown[-1][2]) if more else None,
    )


def page_of_files(tier: Files, contents: Contents, cursor: str | None, limit: int) -> bodies.Page[bodies.File]:
    """Every file of the checkpoint, COMMIT and manifest included, with expected and stored sizes."""
    listed = {file.name: file for file in contents.manifest.files}
    names = sorted({*listed, naming.COMMIT, naming.MANIFEST})
    first = 0 if cursor is None else bisect_right(names, decode_cursor(cursor, 1)[0])
    items = []
    for name in names[first : first + limit]:
        stored = tier.size(f"{contents.directory}/{name}")
        entry = listed.get(name)
        items.append(
            bodies.File(
                name=name,
                bytes=entry.bytes if entry else stored or 0,
                stored=stored,
                header_bytes=entry.header_bytes if entry else 0,
                digest=entry.digest if entry else None,
            )
        )
    return bodies.Page(items=items, next=encode_cursor(items[-1].name) if first + limit < len(names) else None)


def encode_cursor(*position: str) -> str:
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, parts: int) -> list[str]:
    """The position a cursor stands for; `InvalidRequest` when it is not one of ours."""
    try:
        position = json.loads(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        position = None
    if not isinstance(position, list) or len(position) != parts or not all(isinstance(part, str) for part in position):
        raise InvalidRequest("the cursor does not belong to this list", hint="start again without a cursor")
    return position
