"""The manifest: the contents of a checkpoint, their places in its files, and the digest of every byte (docs/format.md)."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import repeat
from math import isfinite, prod
from operator import attrgetter
from pathlib import PurePath
from weakref import WeakValueDictionary

import msgspec

from holdfast_formats import decoding, dtypes, lineage, metric_values, naming
from holdfast_formats.digest import check_digest
from holdfast_formats.disk import compacted, tiling
from holdfast_formats.disk.compacted import Compacted
from holdfast_formats.disk.tiling import REPAIR, broken
from holdfast_formats.errors import CheckpointError, CorruptManifest, InvalidRequest, LimitExceeded, NotCommitted
from holdfast_formats.lineage import Lineage, Rewind

FORMAT = 1
EXTENT_BYTES_MAX = tiling.EXTENT_BYTES_MAX
COMMIT_BYTES_MAX = 2**16
MANIFEST_BYTES_MAX = 2**29  # a million tensors with five hundred bytes each
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Extent(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Contiguous bytes of one tensor, counted from the tensor's first byte, and their xxh3-64 digest."""

    offset: int
    length: int
    digest: str


class FileEntry(msgspec.Struct, frozen=True, gc=False):
    """A file of the checkpoint. `digest` covers its first `header_bytes` bytes, or the whole file when that is 0."""

    name: str
    bytes: int
    header_bytes: int
    digest: str


class TensorEntry(msgspec.Struct, frozen=True, gc=False):
    """A tensor: shape in elements, the file that holds it, its first byte in that file, its extents in order."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    extents: tuple[Extent, ...]
    placement: str = ""

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.dtype, prod(self.shape))


class Thinned(msgspec.Struct, frozen=True):
    """Groups were removed from a checkpoint after its commit: when, which, the previous bytes of the manifest's files,
    and the SHA-256 of the previous manifest.
    """

    at: str
    groups: tuple[str, ...]
    bytes: int
    manifest_sha256: str


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, weakref=True):
    """Everything needed to verify a checkpoint and to slice it. `tensors` and `aliases` are keyed by group, then by
    name.

    `restored`, `turn` and `rewinds` are its lineage; older manifests have none. `thinned` is missing while no group was
    removed, `compacted` while all tensors are stored as saved. `metrics` are the finite ones, `nonfinite_metrics` the
    others, which older readers do not see.
    """

    format: int
    run: str
    step: int
    attempt: int
    created: str
    world: int
    mesh: dict[str, int]
    metrics: dict[str, float]
    files: tuple[FileEntry, ...]
    tensors: dict[str, dict[str, TensorEntry]]
    aliases: dict[str, dict[str, str]]
    restored: int | None = None
    turn: int = 0
    rewinds: tuple[Rewind, ...] = ()
    thinned: Thinned | None = None
    compacted: Compacted | None = None
    nonfinite_metrics: dict[str, metric_values.Word] = {}

    @property
    def all_metrics(self) -> dict[str, float]:
        return metric_values.joined(self.metrics, self.nonfinite_metrics)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def file(self, name: str) -> FileEntry | None:
        return next((file for file in self.files if file.name == name), None)


class _Named(msgspec.Struct, frozen=True):
    """Decodes only the fields that name the directory."""

    run: str
    step: int


class _Listed(msgspec.Struct, frozen=True):
    """Decodes only the files."""

    files: tuple[FileEntry, ...]


class Placement(msgspec.Struct, frozen=True):
    """The part of a manifest that gives its place among other checkpoints."""

    step: int
    attempt: int
    tensors: dict[str, msgspec.Raw]
    turn: int = 0
    rewinds: tuple[Rewind, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self.tensors)


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The COMMIT file: it is written last, and only it makes a directory a checkpoint (I1)."""

    format: int
    manifest_sha256: str
    bytes: int
    files: int


_decode, _decode_commit = decoding.decoder(Manifest), decoding.decoder(Commit)
_decode_named = decoding.decoder(_Named)
_decode_files, _decode_place = decoding.decoder(_Listed), decoding.decoder(Placement)


_lent: WeakValueDictionary[str, Manifest] = WeakValueDictionary()  # valid ones, by the SHA-256 of their bytes


def lend(manifest: Manifest, commit_bytes: bytes) -> None:
    """Have `decode` return this manifest, which `encode` has made the bytes of, while it is kept anywhere."""
    _lent[stated_sha256(commit_bytes)] = manifest


def encode(manifest: Manifest) -> bytes:
    """The manifest's bytes. Validates first, so it never writes a manifest that `decode` or a reader's limit refuses."""
    validate(manifest)
    encoded = msgspec.json.encode(manifest)
    if len(encoded) > MANIFEST_BYTES_MAX:
        raise LimitExceeded(
            f"{naming.MANIFEST} would have {len(encoded)} bytes, over the limit of {MANIFEST_BYTES_MAX}",
            hint="save fewer tensors, or shorter names",
        )
    return encoded


def encode_commit(manifest: Manifest, manifest_bytes: bytes) -> bytes:
    sha256 = hashlib.sha256(manifest_bytes).hexdigest()
    return _encode_commit(sha256, manifest.bytes, len(manifest.files))


def _encode_commit(sha256: str, size: int, files: int) -> bytes:
    return msgspec.json.encode(Commit(FORMAT, sha256, size, files)) + b"\n"


def decode(manifest_bytes: bytes, commit_bytes: bytes) -> Manifest:
    """Decode the manifest, after checking its bytes against COMMIT and its parts against each other (I5).

    Raises `NotCommitted` if COMMIT is empty or unreadable, `CorruptManifest` if the two disagree or the manifest does not
    tile its files. Bytes whose manifest is kept by any part of this process are decoded once.
    """
    commit = _check_digest(manifest_bytes, commit_bytes)
    manifest = _lent.get(commit.manifest_sha256)
    if manifest is None:
        try:
            manifest = _decode(manifest_bytes)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise CorruptManifest(f"cannot read {naming.MANIFEST}: {error}", hint=REPAIR) from error
        validate(manifest)
        _share(manifest)
        _lent[commit.manifest_sha256] = manifest
    _check_counts(commit, commit_bytes, manifest.files)
    return manifest


def _share(manifest: Manifest) -> None:
    """Keep equal words and shapes once: a decoder makes them for each tensor, and they are most of what it makes."""
    known: dict[object, object] = {}
    entries = [entry for tensors in manifest.tensors.values() for entry in tensors.values()]
    for field in ("dtype", "shape", "file", "placement"):
        values = list(map(attrgetter(field), entries))
        shared = map(known.setdefault, values, values)
        deque(map(msgspec.structs.force_setattr, entries, repeat(field), shared), 0)


def placement(manifest_bytes: bytes, commit_bytes: bytes) -> Placement:
    """A checkpoint's place, after checking the manifest's bytes against COMMIT; the rest is not examined."""
    check_bytes(manifest_bytes, commit_bytes)
    try:
        return _decode_place(manifest_bytes)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {naming.MANIFEST}: {error}", hint=REPAIR) from error


def check_directory(manifest_bytes: bytes, commit_bytes: bytes, directory: str) -> None:
    """Raise `CorruptManifest` if the directory is named after another step: a sound checkpoint was moved or copied by
    hand. A directory whose name is no step may have any.
    """
    step = naming.parse_step_directory(PurePath(directory).name)
    if step is None:
        return
    try:
        found = _decode_named(manifest_bytes)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return  # `decode` reports what is wrong with it
    if found.step != step and hashlib.sha256(manifest_bytes).hexdigest() == _read_commit(commit_bytes).manifest_sha256:
        raise CorruptManifest(
            f"{directory} contains {found.run}@{found.step}",
            hint=f"it was moved or copied: rename the directory to {naming.step_directory(found.step)}",
            file=naming.MANIFEST,
        )


def check_bytes(manifest_bytes: bytes, commit_bytes: bytes) -> None:
    """Raise `CorruptManifest` unless COMMIT states the digest of these bytes and the right counts (I5).

    Raises `NotCommitted` for an invalid COMMIT. For callers that forward the bytes: only the manifest's files are
    examined.
    """
    commit = _check_digest(manifest_bytes, commit_bytes)
    try:
        files = _decode_files(manifest_bytes).files
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {naming.MANIFEST}: {error}", hint=REPAIR) from error
    _check_counts(commit, commit_bytes, files)


def _check_digest(manifest_bytes: bytes, commit_bytes: bytes) -> Commit:
    commit = _read_commit(commit_bytes)
    if hashlib.sha256(manifest_bytes).hexdigest() != commit.manifest_sha256:
        raise CorruptManifest(
            f"the digest of {naming.MANIFEST} differs from the one in {naming.COMMIT}", hint=REPAIR, file=naming.MANIFEST
        )
    return commit


def _check_counts(commit: Commit, commit_bytes: bytes, files: Sequence[FileEntry]) -> None:
    size = sum(file.bytes for file in files)
    if commit_bytes != _encode_commit(commit.manifest_sha256, size, len(files)):
        raise CorruptManifest(
            f"{naming.COMMIT} states {commit.files} files of {commit.bytes} bytes, or is not formatted as it "
            f"was written; the manifest has {len(files)} files of {size} bytes",
            hint=REPAIR,
            file=naming.COMMIT,
        )


def stated_sha256(commit_bytes: bytes) -> str:
    """The manifest's digest as stated by COMMIT; `NotCommitted` if it states none."""
    return _read_commit(commit_bytes).manifest_sha256


def stated_bytes(commit_bytes: bytes) -> int:
    """The size of the checkpoint's files as stated by COMMIT, in bytes; `NotCommitted` if it states none."""
    return _read_commit(commit_bytes).bytes


def _read_commit(commit_bytes: bytes) -> Commit:
    try:
        commit = _decode_commit(commit_bytes)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise NotCommitted(f"cannot read {naming.COMMIT}: {error}", hint=REPAIR, file=naming.COMMIT) from error
    if commit.format != FORMAT:
        raise NotCommitted(
            f"{naming.COMMIT} has format {commit.format}, but this version reads format {FORMAT}",
            hint="use the version of holdfast that wrote it",
            file=naming.COMMIT,
        )
    return commit


def validate(manifest: Manifest) -> None:
    """Check that files, tensors and extents tile exactly and that every name resolves; `CorruptManifest` if not."""
    try:
        _validate(manifest)
    except CorruptManifest:
        raise
    except CheckpointError as error:
        raise CorruptManifest(f"manifest: {error.detail}", hint=REPAIR) from error


def _validate(manifest: Manifest) -> None:
    if manifest.format != FORMAT:
        raise broken(f"format {manifest.format} is not {FORMAT}")
    naming.check_run(manifest.run)
    naming.check_step(manifest.step)
    check_metrics(manifest.metrics, manifest.nonfinite_metrics)
    if manifest.attempt < 0 or manifest.world < 1:
        raise broken(f"attempt {manifest.attempt} and world size {manifest.world} are not valid")
    lineage.check(Lineage(manifest.restored, manifest.turn, manifest.rewinds))
    if manifest.thinned is not None:
        _check_thinned(manifest.thinned, manifest)
    if manifest.compacted is not None:
        compacted.check(manifest.compacted, manifest.tensors, manifest.bytes)
    for group in manifest.tensors:
        naming.check_group(group)
    tiling.check(_checked_files(manifest.files), manifest.tensors)
    for group, aliases in manifest.aliases.items():
        for alias, target in aliases.items():
            held = manifest.tensors.get(group, {})
            if alias in held or target not in held:
                raise broken(f"alias {alias!r} of {target!r} in group {group!r} does not resolve")


def _check_thinned(thinned: Thinned, manifest: Manifest) -> None:
    for group in thinned.groups:
        naming.check_group(group)
        if group in manifest.tensors:
            raise broken(f"group {group!r} is listed although it was removed")
    if not thinned.groups or thinned.bytes < manifest.bytes or not _SHA256.fullmatch(thinned.manifest_sha256):
        raise broken("it does not list what was removed")


def _checked_files(listed: Sequence[FileEntry]) -> dict[str, FileEntry]:
    files = {file.name: file for file in listed}
    if len(files) != len(listed):
        raise broken("a file is listed twice")
    for file in listed:
        check_digest(file.digest)
        reserved = file.name in (naming.COMMIT, naming.MANIFEST)
        if reserved or not naming.is_file_name(file.name) or not 0 <= file.header_bytes <= file.bytes:
            raise broken(f"file {file.name!r} has an impossible name or header length")
    return files


def check_metrics(metrics: Mapping[str, float], nonfinite: Mapping[str, metric_values.Word]) -> None:
    if twice := sorted(metrics.keys() & nonfinite.keys()):
        raise InvalidRequest(f"metric {twice[0]!r} is finite and not finite")
    for name, value in metrics.items():
        if not isfinite(value):
            raise InvalidRequest(f"metric {name!r} is {value}, which JSON cannot represent", hint="state it as not finite")
