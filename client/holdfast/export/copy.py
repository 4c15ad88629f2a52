"""A verified copy of a checkpoint in another directory. If the checkpoint is damaged, no copy is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.read.reader import CheckpointReader
from holdfast.read.verified_load import windows
from holdfast_files.held_names import held
from holdfast_files.verifying import ReadControl
from holdfast_formats import naming
from holdfast_formats.disk.manifests import FileEntry
from holdfast_formats.errors import InUse, InvalidRequest, NoSpace, NoSuchResource, StateMismatch, StorageFailed
from holdfast_formats.near_names import one_of
from holdfast_formats.root_files import check_output_place

_NO_SPACE = frozenset({28, 122})  # ENOSPC, EDQUOT


class Copied(NamedTuple):
    files: int
    bytes: int
    committed: bool


def copy_checkpoint(reader: CheckpointReader, out: Path, groups: Sequence[str], on_bytes: Callable[[int], None]) -> Copied:
    """Copy every file, or those of some groups, into `out`, which must be empty or absent; every byte is checked first.

    The manifest and then COMMIT are written last, so `out` is a checkpoint only when it is complete; with `groups` neither
    is written. On any error the written files are removed again. Nothing is synced: a power cut may lose the copy.
    """
    files = chosen(reader, groups)
    created = _prepare(out)
    written: list[Path] = []
    try:
        create = partial(_Output, out, written)
        control = ReadControl(windows(reader.source), moved=on_bytes)
        reader.copy(files, create, control)
        if not groups:
            for name, data in ((naming.MANIFEST, reader.manifest_bytes), (naming.COMMIT, reader.commit_bytes)):
                file = create(name, len(data))
                try:
                    file.write(0, [memoryview(data)])
                finally:
                    file.discard()
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if created:
            out.rmdir()
        if isinstance(error, OSError):
            raise translated(out, error) from error
        raise
    return Copied(len(written), sum(file.bytes for file in files), committed=not groups)


def chosen(reader: CheckpointReader, groups: Sequence[str]) -> list[FileEntry]:
    """The files of these groups with the assets, all files without groups; `NoSuchResource` for an unknown group."""
    listed = reader.manifest.files
    if not groups:
        return list(listed)
    unknown = sorted(set(groups) - set(reader.manifest.groups))
    if unknown:
        raise NoSuchResource(
            f"the checkpoint has no group {unknown[0]!r}",
            hint=one_of(unknown[0], reader.manifest.groups, "groups"),
        )
    small = reader.manifest.compacted
    if small is not None and (coded := sorted(small.tensors.keys() & set(groups))):
        raise StateMismatch(
            f"group {coded[0]!r} of this checkpoint is stored in fewer bytes, which other programs cannot read",
            hint="copy the checkpoint without --group, or write the values with --layout, or `holdfast export --as`",
        )
    ours = {naming.index_file_name(group) for group in reader.manifest.groups} | {naming.STATE}
    wanted = {tensor.file for group in groups for tensor in reader.manifest.tensors[group].values()}
    wanted |= {naming.index_file_name(group) for group in groups}
    return [file for file in listed if file.name in wanted or not (file.header_bytes or file.name in ours)]


def _prepare(out: Path) -> bool:
    check_output_place(out)
    try:
        if out.is_dir():
            if any(out.iterdir()):
                raise InvalidRequest(
                    f"{out} is not empty", hint="pass --out a directory that is empty or does not exist yet"
                )
            return False
        out.mkdir(parents=True)
    except OSError as error:
        raise translated(out, error) from error
    return True


class _Output:
    """A new file of a copy, noted among those that were `written`. It is not synced."""

    def __init__(self, out: Path, written: list[Path], name: str, size: int) -> None:
        path = out / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor: int | None = os.open(path, flags, 0o644)
        written.append(path)
        os.truncate(self._descriptor, size)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for data in buffers:
            assert self._descriptor is not None
            write(self._descriptor, offset, data)
            offset += len(data)

    def finish(self) -> None:
        self.discard()

    def discard(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def write(descriptor: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def translated(out: Path, error: OSError) -> StorageFailed | NoSpace:
    """The named error for a file or directory that could not be written."""
    if error.errno in _NO_SPACE:
        return NoSpace(f"no space left on device while writing {out}", hint="free some space, or choose another directory")
    return StorageFailed(f"cannot write {out}: {error.strerror}", hint="check its permissions", errno=error.errno)


def export(reader: CheckpointReader, target: Path, groups: Sequence[str], on_bytes: Callable[[int], None]) -> Copied:
    """Copy the checkpoint, or some groups of it as a plain directory, to `target`; every byte is checked.

    Raises `InvalidRequest` if `target` exists and is not an empty directory, or is inside a run or a checkpoint; `InUse`
    while another export writes there. On this and any other error, nothing is left. A process that is killed leaves
    `.NAME.partial`, which the next export to the same name removes.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InvalidRequest(f"{target} already exists", hint="choose another name")
    if target.is_dir() and any(target.iterdir()):
        raise InvalidRequest(f"{target} is not empty", hint="export to a directory that is empty or does not exist yet")
    if not target.name.isprintable():
        raise InvalidRequest(f"{target.name!r} contains a non-printing character", hint="choose another name")
    check_output_place(target)
    part = target.parent / naming.export_staging(target.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            try:
                if part.is_dir() and not part.is_symlink():
                    shutil.rmtree(part)
                copied = copy_checkpoint(reader, part, groups, on_bytes)
                _make_durable(part)
                part.rename(target)
                _sync(target.parent)
            except OSError:
                shutil.rmtree(part, ignore_errors=True)
                raise
    except OSError as error:
        raise translated(target, error) from error
    return copied


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Exclude other exports to this name, including the service's, by a lock on a file beside it."""
    leaf = naming.export_lock(target.name)
    parent = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with ExitStack() as stack:
        stack.callback(os.close, parent)
        try:
            stack.enter_context(held(parent, leaf, str(target.parent / leaf)))
        except InUse:
            raise InUse(
                f"another export is already writing to {target}", hint="wait until it ends, or choose another name"
            ) from None
        yield


def _make_durable(directory: Path) -> None:
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
