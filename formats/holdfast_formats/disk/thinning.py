"""Thin checkpoints: the weights that stay after optimizer, masters and rank state are removed from a checkpoint.

Files hold whole tensors of one group, so what stays keeps its files, extents and digests; only state.json and the
manifest are written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import state_json
from holdfast_formats.disk.manifests import FileEntry, Manifest, Thinned
from holdfast_formats.errors import StateMismatch

GONE = frozenset({"optim", "master", "extra"})  # all others stay: weights of any kind, and groups that we do not know
USABLE_FOR = "inference, exports and starting another training run from its weights, not for resuming this one"
EXACT_USABLE_FOR = "everything, as it was saved"
SMALL_USABLE_FOR = "everything, including resuming, from approximate optimizer states"


class ThinCheckpoint(NamedTuple):
    """A thinned checkpoint: its manifest, its state.json, and the files that stay.

    `proof` is the manifest of what stays, by which its bytes are verified before the rest goes.
    """

    manifest: Manifest
    state: bytes
    stays: tuple[FileEntry, ...]
    proof: Manifest


def can_be_thinned(groups: Collection[str]) -> bool:
    return bool(GONE & set(groups)) and bool(set(groups) - GONE)


def thin_bytes(manifest: Manifest) -> int | None:
    """The bytes that would stay, except for a shorter state.json; None if nothing can be removed."""
    if manifest.thinned is not None or not can_be_thinned(manifest.groups):
        return None
    gone = _files_of(manifest, GONE & manifest.tensors.keys())
    return sum(file.bytes for file in manifest.files if file.name not in gone)


def thin(full: Manifest, encoded: bytes, state: bytes, at: str) -> ThinCheckpoint:
    """The thinned form of a checkpoint with the encoded manifest `encoded` and state.json `state`.

    Raises `StateMismatch` if nothing can be removed, no weights would stay, or one file holds tensors of both.
    """
    what = f"{full.run}@{full.step}"
    gone = GONE & full.tensors.keys()
    kept = {group: tensors for group, tensors in full.tensors.items() if group not in gone}
    if full.thinned is not None or not gone:
        raise StateMismatch(f"{what} has nothing to remove", hint="the checkpoint stays as it is")
    if not any(kept.values()):
        raise StateMismatch(f"{what} has no weights to keep", hint="the checkpoint stays as it is")
    files = _files_of(full, gone)
    both = sorted({tensor.file for tensors in kept.values() for tensor in tensors.values()} & files)
    if both:
        hint = "the checkpoint stays as it is; pin it to stop further attempts"
        raise StateMismatch(f"{both[0]} of {what} holds both tensors to keep and tensors to remove", hint=hint)
    stays = tuple(file for file in full.files if file.name not in files and file.name != naming.STATE)
    left = state_json.without_groups(state, gone)
    aliases = {group: names for group, names in full.aliases.items() if group not in gone}
    if full.compacted is not None and full.compacted.tensors.keys() - gone:
        raise StateMismatch(f"{what} has coded tensors among those to keep", hint="the checkpoint stays as it is")
    proof = msgspec.structs.replace(full, files=stays, tensors=kept, aliases=aliases, compacted=None)
    before, sha256 = full.bytes, hashlib.sha256(encoded).hexdigest()
    if full.compacted is not None:  # what it was when it was whole
        before, sha256 = full.compacted.bytes, full.compacted.manifest_sha256
    thinned = Thinned(at, tuple(sorted(gone)), before, sha256)
    entries = (*stays, FileEntry(naming.STATE, len(left), 0, digest(left)))
    thinned_manifest = msgspec.structs.replace(proof, files=entries, thinned=thinned)
    return ThinCheckpoint(thinned_manifest, left, stays, proof)


def _files_of(manifest: Manifest, groups: Collection[str]) -> set[str]:
    tensors: Mapping[str, Mapping[str, object]] = manifest.tensors
    assert tensors.keys() >= set(groups)
    shards = {tensor.file for group in groups for tensor in manifest.tensors[group].values()}
    return shards | {naming.index_file_name(group) for group in groups}


def origin_sha256(manifest: Manifest, sha256: str) -> str:
    """The SHA-256 of the manifest before thinning or compaction; `sha256` is that of the present one."""
    for changed in (manifest.thinned, manifest.compacted):
        if changed is not None:
            return changed.manifest_sha256
    return sha256


def lost(manifest: Manifest) -> int:
    """What was removed: 0 nothing, 1 it is compact, 2 only its weights are left."""
    return 2 if manifest.thinned is not None else int(manifest.compacted is not None)
