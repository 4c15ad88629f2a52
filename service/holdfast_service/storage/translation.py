"""The only place where OSErrors become named errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast_formats.errors import NoSpace, NoSuchResource, StorageFailed
from holdfast_formats.staging.room import FILE_SIZE_HINT, FILES_HINT

READ_ONLY_HINT = (
    "it is read-only for the daemon: mount it writable; under systemd, ProtectSystem= makes it so: add "
    "ReadWritePaths=DIRECTORY to the unit"
)


@contextmanager
def translated(operation: str, path: str) -> Iterator[None]:
    """Turn any OSError into the named error that says what to do."""
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        what = f"{operation} {path or 'the root'}: {os.strerror(code)}"
        members: dict[str, Any] = {"operation": operation, "path": path, "errno": code}
        if code in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(what, hint="free space, or keep fewer checkpoints", **members) from error
        if code == errno.ENOENT and operation in ("read", "publish", "remove", "sync"):
            raise NoSuchResource(what, **members) from error
        hint = "check the disk and its mount"
        if code in (errno.ENOTDIR, errno.ELOOP):
            hint = "inside the root, symbolic links are not allowed, and a file may not take the place of a directory"
        elif code in (errno.EMFILE, errno.ENFILE):
            hint = FILES_HINT.format("the daemon")
        elif code == errno.EFBIG:
            hint = f"{FILE_SIZE_HINT.format('the daemon')}; or have smaller files: Checkpointer(file_bytes_max=…)"
        elif code in (errno.EACCES, errno.EPERM):
            hint = "give the daemon's user permission to write there"
        elif code == errno.EROFS:
            hint = READ_ONLY_HINT
        raise StorageFailed(what, hint=hint, **members) from error
