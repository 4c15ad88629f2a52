"""Reads small files that decide about others: never more than a limit, and never taking a damaged file for a missing one.

A sparse file of gigabytes must not fill the daemon's memory. A link or a pipe in the place of a file is damage: if it
counted as missing, the daemon would act as if no such file had been written.
"""

from __future__ import annotations

import hashlib

from holdfast_formats import naming
from holdfast_formats.disk import manifest
from holdfast_formats.errors import CorruptManifest, NotCommitted

from .tier import Readable

_AT_ONCE_BYTES = 16 * 2**20  # manifests up to this size are read, then verified; larger ones piece by piece
_HINT = "Holdfast writes no such file: restore it from a replica, or restore another step"


def read_whole(tier: Readable, path: str, bytes_max: int) -> bytes | None:
    """A file's bytes, None if it does not exist; `CorruptManifest` if it is not a regular file, or too long."""
    size, name = tier.size(path), path.rpartition("/")[2]
    if size is None:
        if name in tier.list(path.rpartition("/")[0]):
            raise CorruptManifest(f"{path} is not a regular file", hint=_HINT, file=name)
        return None
    if size <= bytes_max:
        data = tier.read(path, 0, bytes_max + 1)  # it may have been replaced by a longer one
        size = len(data)
    if size > bytes_max:
        raise CorruptManifest(f"{path} has {size} bytes, over the limit of {bytes_max}", hint=_HINT, file=name)
    return data


def read_commit(tier: Readable, directory: str) -> bytes:
    """COMMIT as stored, which is read first (I5); `NotCommitted` if there is none."""
    try:
        found = read_whole(tier, f"{directory}/{naming.COMMIT}" if directory else naming.COMMIT, manifest.COMMIT_BYTES_MAX)
    except CorruptManifest as error:
        raise NotCommitted(error.detail, hint=error.hint, file=naming.COMMIT) from error
    if found is None:
        raise NotCommitted(f"{directory or 'the directory'} has no {naming.COMMIT}", file=naming.COMMIT)
    return found


def read_manifest(tier: Readable, directory: str, commit: bytes) -> bytes:
    """The manifest's bytes, for `manifest.decode` to verify; `CorruptManifest` if it is missing, too long, or of another
    step than its directory.

    Raises `NotCommitted` for a COMMIT that cannot be read.
    """
    path = f"{directory}/{naming.MANIFEST}" if directory else naming.MANIFEST
    if (tier.size(path) or 0) in range(_AT_ONCE_BYTES + 1, manifest.MANIFEST_BYTES_MAX + 1):
        _prove_in_pieces(tier, path, manifest.stated_sha256(commit))
    found = read_whole(tier, path, manifest.MANIFEST_BYTES_MAX)
    if found is None:
        raise CorruptManifest(f"{directory or 'the directory'} has no {naming.MANIFEST}", file=naming.MANIFEST)
    manifest.check_directory(found, commit, directory)
    return found


def _prove_in_pieces(tier: Readable, path: str, stated: str) -> None:
    """Check a long file's digest in pieces, so that a file that is no manifest is never in memory as a whole."""
    made, offset = hashlib.sha256(), 0
    piece = memoryview(bytearray(_AT_ONCE_BYTES))
    while count := tier.read_into(path, offset, piece):
        made.update(piece[:count])
        offset += count
    if made.hexdigest() != stated:
        raise CorruptManifest(f"the digest of {path} is not the one in {naming.COMMIT}", hint=_HINT, file=naming.MANIFEST)
