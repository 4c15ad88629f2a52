"""Announces a daemon to the programs of its machine: a file in the root, or in the directory that it keeps for a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast_formats import naming
from holdfast_formats.errors import NotFound
from holdfast_formats.root_files import DaemonFile, encode
from holdfast_service.storage import tier_at


@contextmanager
def announced(directory: Path, about: DaemonFile, node: str = "") -> Iterator[None]:
    """For the length of the block. `node` is this daemon's name, where several serve the root."""
    tier, file = tier_at(directory), naming.daemon_file(node) if node else naming.DAEMON_FILE
    tier.replace(file, encode(about))
    try:
        yield
    finally:
        with suppress(NotFound):  # it was removed with the root
            tier.remove_file(file)
