"""What a file system says of files without reading them: stamps, texts that change when a file is written, replaced or made
again; and identities, which all names of a file share.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from .directories import ABSENT
from .tier import FileIdentity


def stamps(directory: int, names: Sequence[str]) -> dict[str, str]:
    """The stamp of the directory itself, as "", and of each subdirectory that holds files of all these names."""
    texts = {"": _stamp(directory, "", names)}
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                texts[entry.name] = _stamp(directory, f"{entry.name}/", names)
    return {name: text for name, text in texts.items() if text is not None}


def identities(directory: int) -> dict[str, FileIdentity]:
    """The identity of each file in the directory."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                found[entry.name] = FileIdentity(f"{status.st_dev:x}.{status.st_ino:x}", status.st_nlink, status.st_size)
    return found


def _stamp(directory: int, below: str, names: Sequence[str]) -> str | None:
    parts = []
    for name in names:
        try:
            status = os.stat(f"{below}{name}", dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno in ABSENT:
                return None
            raise
        if not stat.S_ISREG(status.st_mode):
            return None
        # Programs cannot set the time of the last status change, unlike that of the last write.
        parts.append(f"{status.st_ino:x}.{status.st_size:x}.{status.st_ctime_ns:x}")
    return " ".join(parts)
