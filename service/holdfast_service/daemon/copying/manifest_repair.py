"""Repairs COMMIT and manifest if one of them, or both, cannot be trusted.

A pair from elsewhere is accepted only if something here confirms it: the manifest with that digest, the same COMMIT, or the
catalog's record together with tensors that still exist here, if anything does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

from holdfast_files.opened import CommittedManifest, open_checkpoint, read_bounded
from holdfast_formats import naming
from holdfast_formats.decoding import decoder
from holdfast_formats.disk import manifests, thinning, verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, CorruptManifest, Damaged
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest import bodies
from holdfast_service.daemon.copying.repair_sources import Directory

PROVEN_MIN = 0.1  # of the tensors' bytes
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_decode = decoder(Manifest)


def trusted_pair(
    files: Files, which: CheckpointId, others: Mapping[str, Files], known: bodies.CheckpointInfo | None
) -> tuple[CommittedManifest, str | None]:
    """The pair with which this checkpoint was committed, and its source: None if the pair here is sound.

    `others` may have the checkpoint, too, by label. Raises `Damaged` for the pair here if no other one can be trusted.
    """
    directory = naming.checkpoint_path(*which)
    try:
        return _of(open_checkpoint(files, directory), which), None
    except Damaged as error:
        damage = error
    commit, encoded = (stored(files, f"{directory}/{name}") for name in (naming.COMMIT, naming.MANIFEST))
    own = _from_manifest(commit, encoded, which)
    if own is not None:
        return own, "manifest"
    for label, pair in _pairs(others, which):
        if commit == pair.commit or encoded == pair.encoded:
            return pair, label
        described = known is not None and bodies.as_committed(known) == bodies.as_committed(bodies.describe(pair.manifest))
        if described and (not files.list(directory) or _proves_some(files, directory, pair)):
            return pair, label
    raise damage


def same_pairs(others: Mapping[str, Files], pair: CommittedManifest) -> list[str]:
    """The labels of those with this very checkpoint, first those with the same manifest, byte for byte; others have it
    before or after thinning or compaction, and so the files that stayed.
    """
    pairs_found = list(_pairs(others, CheckpointId(pair.manifest.run, pair.manifest.step)))
    same = [label for label, other in pairs_found if other.encoded == pair.encoded]
    return same + [label for label, other in pairs_found if label not in same and _origin(other) == _origin(pair)]


def _origin(pair: CommittedManifest) -> str:
    return thinning.origin_sha256(pair.manifest, manifests.stated_sha256(pair.commit))


def _of(pair: CommittedManifest, which: CheckpointId) -> CommittedManifest:
    if (pair.manifest.run, pair.manifest.step) != which:
        what = f"{pair.manifest.run}@{pair.manifest.step}, not {which[0]}@{which[1]}"
        raise CorruptManifest(f"this is {what}", hint="it was moved or copied: rename it back", file=naming.MANIFEST)
    return pair


def _pairs(others: Mapping[str, Files], which: CheckpointId) -> Iterator[tuple[str, CommittedManifest]]:
    for label, files in others.items():
        try:
            yield label, _of(open_checkpoint(files, naming.checkpoint_path(*which)), which)
        except CheckpointError:
            continue


def stored(files: Files, path: str) -> bytes:
    """The present content of COMMIT or a manifest; empty if it cannot be read, or is too long to be one."""
    try:
        return read_bounded(files, path, manifests.MANIFEST_BYTES_MAX) or b""
    except CheckpointError:
        return b""


def _from_manifest(commit: bytes, encoded: bytes, which: CheckpointId) -> CommittedManifest | None:
    """A sound manifest whose digest is still readable in a damaged COMMIT, whose rest follows from it."""
    if hashlib.sha256(encoded).hexdigest().encode() not in _DIGEST.findall(commit):
        return None
    try:
        rebuilt_from = _decode(encoded)
        rebuilt = manifests.encode_commit(rebuilt_from, encoded)
        return _of(CommittedManifest(rebuilt, encoded, manifests.decode(encoded, rebuilt)), which)
    except (CheckpointError, ValueError):
        return None


def _proves_some(files: Files, directory: str, pair: CommittedManifest) -> bool:
    """Whether many tensors here match the digests of this pair's manifest.

    Headers do not count: those of another step's are the same.
    """
    itself = Directory("itself", files, directory)
    listed = verification.pieces(pair.manifest).values()
    pieces = [piece for of_file in listed for piece in of_file if piece.tensor is not None]
    whole = sum(piece.length for piece in pieces)
    return sum(piece.length for piece in pieces if itself.piece(piece) is not None) >= PROVEN_MIN * whole
