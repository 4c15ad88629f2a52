"""An export: a verified and durable copy of a checkpoint, which gets its name only when it is complete."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.export.copy import Copied, copy_checkpoint, translated
from holdfast.read.reader import CheckpointReader
from holdfast_formats import naming
from holdfast_formats.errors import InUse, InvalidRequest
from holdfast_formats.root_files import check_output_place


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
        raise InvalidRequest(f"{target.name!r} has a character that does not print", hint="choose another name")
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
    path = target.parent / naming.export_lock(target.name)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                break
        except BlockingIOError:
            os.close(descriptor)
            raise InUse(
                f"another export writes to {target} already", hint="wait until it has ended, or choose another name"
            ) from None
        os.close(descriptor)  # its holder has removed it between our opening and our locking it
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


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
