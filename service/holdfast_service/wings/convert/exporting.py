"""Exports a checkpoint out of the root and verifies every byte: all of it, or only the model as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from holdfast_files.opened import CommittedManifest, open_checkpoint, read_bounded
from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, Damaged, InvalidRequest, NoSuchResource
from holdfast_formats.files import Files, split_leaf
from holdfast_formats.rest.jobs import ExportJob
from holdfast_service.daemon.copying.copies import CopyControl, carry, read_back
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.storage import StagedDirectory, Tier

GROUP = "model"


def stage(source: Files, target: Tier, staging: str, wanted: ExportJob, going: CopyControl) -> Manifest:
    """Put the copy, durable, at `staging`; returns its manifest. `Damaged` for bytes that fail their digest."""
    directory = naming.checkpoint_path(wanted.run, wanted.step)
    pair = open_checkpoint(source, directory)
    manifest = only_model(pair.manifest) if wanted.arguments.model_only else pair.manifest
    staged = StagedDirectory(target, staging)
    StreamTarget(staged, target).discard()
    try:
        carry(source, directory, staged, manifest, going)
        if not wanted.arguments.model_only:
            _vouch(target, staging, pair)
        target.sync_directory(staging)
    except BaseException:
        target.remove_tree(staging)
        raise
    return manifest


def stands(source: Files, target: Tier, wanted: ExportJob, going: CopyControl) -> Manifest | None:
    """The manifest of the target, if it is this very copy, with every byte verified: a job that was killed before it
    reported success finds it so.
    """
    pair = open_checkpoint(source, naming.checkpoint_path(wanted.run, wanted.step))
    manifest = only_model(pair.manifest) if wanted.arguments.model_only else pair.manifest
    beside = {} if wanted.arguments.model_only else {naming.MANIFEST: pair.encoded, naming.COMMIT: pair.commit}
    there = wanted.arguments.to
    if set(target.list(there)) != {file.name.partition("/")[0] for file in manifest.files} | beside.keys():
        return None
    try:
        if any(read_bounded(target, f"{there}/{name}", len(data)) != data for name, data in beside.items()):
            return None
        read_back(target, there, manifest, going)
    except Damaged:
        return None
    return manifest


def is_taken(target: Tier, wanted: str) -> bool:
    parent, leaf = split_leaf(wanted)
    return leaf in target.list("/".join(parent))


def taken(wanted: str) -> AlreadyCommitted:
    """The error for a name that is taken."""
    return AlreadyCommitted(f"{wanted} already exists", hint="choose another name, or remove the existing one")


@contextmanager
def alone(target: Tier, wanted: str) -> Iterator[str]:
    """Lock the export's name `wanted` against all processes. Yields its staging path, beside it, so that a rename completes
    the export.

    Raises `InvalidRequest` for a hidden name or a path that leads out of the tier, `InUse` while another process writes
    there.
    """
    parent, leaf = split_leaf(wanted)
    for name in (*parent, leaf):
        check_name(name)
    with target.hold("/".join((*parent, naming.export_lock(leaf)))):
        yield "/".join((*parent, naming.export_staging(leaf)))


def check_name(name: str) -> None:
    """`InvalidRequest` for a hidden name of an export, or one of several lines."""
    if not name.isprintable():
        raise InvalidRequest(
            f"{name!r} contains a non-printing character", hint="choose a name without line breaks and control characters"
        )
    if name.startswith("."):
        raise InvalidRequest(f"{name!r} is a hidden name", hint="choose a name that does not begin with a dot")


def only_model(manifest: Manifest) -> Manifest:
    """The manifest restricted to the model and the files beside it."""
    if GROUP not in manifest.tensors:
        raise NoSuchResource(
            f"there is no group {GROUP!r}", hint=f"groups: {', '.join(manifest.groups)}; leave --model-only out"
        )
    tensors = manifest.tensors[GROUP]
    ours = {naming.index_file_name(group) for group in manifest.groups} | {naming.STATE}
    wanted = {tensor.file for tensor in tensors.values()} | {naming.index_file_name(GROUP)}
    files = tuple(file for file in manifest.files if file.name in wanted or not (file.header_bytes or file.name in ours))
    return msgspec.structs.replace(manifest, files=files, tensors={GROUP: tensors}, aliases={})


def _vouch(target: Tier, staging: str, pair: CommittedManifest) -> None:
    target.put(f"{staging}/{naming.MANIFEST}", pair.encoded)
    target.put(f"{staging}/{naming.COMMIT}", pair.commit)
