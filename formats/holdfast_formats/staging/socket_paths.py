"""Paths of unix sockets for the kernel: an address holds 107 bytes, and job directories are often longer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATH_BYTES_MAX = 107  # of sockaddr_un, less the byte that ends it


@contextmanager
def addressable(path: Path) -> Iterator[str]:
    """The path as bind(2) and connect(2) take it within the block: a longer one by way of a descriptor of its directory."""
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
