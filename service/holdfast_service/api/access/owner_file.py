"""The file with the owner's token, for commands and trainers of the same user."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from holdfast_formats import owner_key
from holdfast_formats.errors import CheckpointError
from holdfast_formats.owner_key import OwnerKey
from holdfast_service.daemon.arena.callers import prepare_directory

log = logging.getLogger(__name__)


@contextmanager
def left_for_owner(key: OwnerKey, directories: list[Path]) -> Iterator[None]:
    """The file, in each of these directories that only this user can write to, until the end of the context."""
    with ExitStack() as stack:
        left = [directory for directory in directories if _leave(key, directory, stack)]
        if not left:
            log.warning(
                "cannot write the owner's token file: create a token with `holdfast token create NAME --scope admin`"
            )
        yield


def _leave(key: OwnerKey, directory: Path, stack: ExitStack) -> bool:
    path = directory / owner_key.file_name(key.port)
    try:
        prepare_directory(path)
        if directory.stat().st_mode & stat.S_IWOTH:
            return False  # such as /tmp itself
        _sweep(directory)
        descriptor = _locked(path)
    except (OSError, CheckpointError) as error:
        log.debug("cannot write the token file %s: %s", directory, error)
        return False
    stack.callback(os.close, descriptor)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, msgspec.json.encode(key))
    stack.callback(path.unlink, missing_ok=True)
    return True


def _locked(path: Path) -> int:
    """A new file, locked until this process ends: daemons that start later sweep unlocked files. One that starts at the same
    time may sweep it before it is locked; then another one is made.
    """
    while True:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _sweep(directory: Path) -> None:
    """Remove files of killed daemons."""
    for path in directory.glob(owner_key.GLOB):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)
