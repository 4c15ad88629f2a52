"""Opens a committed checkpoint: COMMIT, then the manifest that it confirms (I5). Also reads other small files that decide.

Names prove nothing. No file is read beyond its limit, so a sparse file of gigabytes does not fill memory. A link or a pipe
in the place of a file is damage: if it counted as missing, the caller would act as if no such file had been written.
"""

from __future__ import annotations

import errno
import hashlib
from typing import NamedTuple

from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CorruptManifest, NoSuchResource, NotCommitted, StorageFailed
from holdfast_formats.files import Files

_AT_ONCE_BYTES = 16 * 2**20  # manifests up to this size are read, then verified; larger ones piece by piece
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})  # a link, or a socket, or below a file
_ANOTHER = "restore another step"
_HINT = "Holdfast does not write such files: repair it from a replica, or restore another step"


class CommittedManifest(NamedTuple):
    """COMMIT and manifest of a checkpoint, as stored and decoded."""

    commit: bytes
    encoded: bytes
    manifest: Manifest


def open_checkpoint(files: Files, directory: str = "") -> CommittedManifest:
    """COMMIT, then the manifest (I5); `NotCommitted` or `CorruptManifest` if one is missing or they do not match."""
    commit = read_commit(files, directory)
    encoded = read_manifest(files, directory, commit)
    return CommittedManifest(commit, encoded, manifests.decode(encoded, commit))


def read_placement(files: Files, directory: str = "") -> manifests.Placement:
    """The place of a checkpoint among others of its run; raises what opening it raises."""
    commit = read_commit(files, directory)
    return manifests.placement(read_manifest(files, directory, commit), commit)


def read_commit(files: Files, directory: str = "") -> bytes:
    """COMMIT as it is stored, with which reading begins (I5); `NotCommitted` if there is none."""
    try:
        commit = read_bounded(files, join(directory, naming.COMMIT), manifests.COMMIT_BYTES_MAX)
    except CorruptManifest as error:
        raise NotCommitted(error.detail, hint=error.hint, file=naming.COMMIT) from error
    if commit is None:
        raise NotCommitted(f"{directory or files.label} has no {naming.COMMIT}", hint=_ANOTHER, file=naming.COMMIT)
    return commit


def read_manifest(files: Files, directory: str, commit: bytes) -> bytes:
    """The manifest's bytes, for `manifest.decode` to verify; `CorruptManifest` if it is missing, too long, or of another
    step than its directory.

    Raises `NotCommitted` for a COMMIT that cannot be read.
    """
    path = join(directory, naming.MANIFEST)
    encoded = _begin_of(files, path, _AT_ONCE_BYTES)
    if encoded is not None and len(encoded) > _AT_ONCE_BYTES:
        if (files.size(path) or 0) <= manifests.MANIFEST_BYTES_MAX:
            _prove_in_pieces(files, path, manifests.stated_sha256(commit))
        encoded = read_bounded(files, path, manifests.MANIFEST_BYTES_MAX)
    if encoded is None:
        text = f"{directory or files.label} has no {naming.MANIFEST}"
        raise CorruptManifest(text, hint=_ANOTHER, file=naming.MANIFEST)
    manifests.check_directory(encoded, commit, directory or files.label)
    return encoded


def read_bounded(files: Files, path: str, bytes_max: int) -> bytes | None:
    """A file's bytes, None if it does not exist; `CorruptManifest` if it is not a regular file, or too long."""
    if bytes_max > _AT_ONCE_BYTES and (files.size(path) or 0) > bytes_max:
        raise _too_long(files, path, bytes_max)
    data = _begin_of(files, path, bytes_max)
    if data is not None and len(data) > bytes_max:
        raise _too_long(files, path, bytes_max)
    return data


def _begin_of(files: Files, path: str, bytes_max: int) -> bytes | None:
    """A file's bytes, up to one more than `bytes_max`, by one request; None if it does not exist."""
    try:
        return files.read(path, 0, bytes_max + 1)
    except (NoSuchResource, StorageFailed) as error:
        if isinstance(error, StorageFailed) and error.members.get("errno") not in _NO_FILE:
            raise
        parent, _, name = path.rpartition("/")
        if error.members.get("errno") != errno.ENOENT and name in files.list(parent):
            raise CorruptManifest(f"{_place(files, path)} is not a regular file", hint=_HINT, file=name) from error
        return None


def _too_long(files: Files, path: str, bytes_max: int) -> CorruptManifest:
    text = f"{_place(files, path)} has {files.size(path)} bytes, over the limit of {bytes_max}"
    return CorruptManifest(text, hint=_HINT, file=path.rpartition("/")[2])


def join(directory: str, name: str) -> str:
    """The path of a file in a directory, which is the top where it is empty."""
    return f"{directory}/{name}" if directory else name


def _place(files: Files, path: str) -> str:
    return path if "/" in path else f"{path} in {files.label}"


def _prove_in_pieces(files: Files, path: str, stated: str) -> None:
    """Check a long file's digest in pieces, so that a file that is not a manifest is never in memory as a whole."""
    running, offset = hashlib.sha256(), 0
    piece = memoryview(bytearray(_AT_ONCE_BYTES))
    while count := files.read_into(path, offset, piece):
        running.update(piece[:count])
        offset += count
    if running.hexdigest() != stated:
        text = f"the digest of {_place(files, path)} differs from the one in {naming.COMMIT}"
        raise CorruptManifest(text, hint=_HINT, file=naming.MANIFEST)
