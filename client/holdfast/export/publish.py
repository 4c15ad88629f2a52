"""An export: a verified and durable copy of a checkpoint, which gets its name only when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.export.copy import Copied, copy_checkpoint, translated
from holdfast.read.reader import CheckpointReader
from holdfast_formats.errors import InvalidRequest


def export(reader: CheckpointReader, target: Path, groups: Sequence[str], on_bytes: Callable[[int], None]) -> Copied:
    """Copy the checkpoint, or some groups of it as a plain directory, to `target`; every byte is checked.

    Raises `InvalidRequest` if `target` exists and is not an empty directory. On this and any other error, nothing is left. A
    process that is killed leaves `.NAME.partial`, which the next export to the same name removes.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InvalidRequest(f"{target} already exists", hint="choose another name")
    if target.is_dir() and any(target.iterdir()):
        raise InvalidRequest(f"{target} is not empty", hint="export to a directory that is empty or does not exist yet")
    part = target.parent / f".{target.name}.partial"
    try:
        if part.is_dir() and not part.is_symlink():
            shutil.rmtree(part)
        copied = copy_checkpoint(reader, part, groups, on_bytes)
        _make_durable(part)
        part.rename(target)
        _sync(target.parent)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise translated(target, error) from error
    return copied


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
