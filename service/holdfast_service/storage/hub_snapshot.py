"""A snapshot in the cache of huggingface_hub, whose files are links into `blobs` beside it: these links alone are followed.

models--ORG--NAME/blobs/<hash>
models--ORG--NAME/snapshots/<revision>/model.safetensors -> ../../blobs/<hash>
models--ORG--NAME/snapshots/<revision>/unet/config.json -> ../../../blobs/<hash>
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from holdfast_formats.files import Files

from .posix import PosixTier
from .tier import Buffer

_TARGET = re.compile(r"((?:\.\./)+)blobs/([0-9a-f]{40}|[0-9a-f]{64})")


class HubSnapshot:
    """The files of one snapshot. A link to anything but a regular file in `blobs` counts as missing."""

    def __init__(self, directory: Path) -> None:
        self._snapshot = f"{directory.parent.name}/{directory.name}"
        self._cache = PosixTier(directory.parent.parent)
        self.label = self._cache.label

    def size(self, path: str) -> int | None:
        return self._cache.size(self._found(path))

    def list(self, path: str) -> list[str]:
        return self._cache.list(f"{self._snapshot}/{path}" if path else self._snapshot)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._cache.read(self._found(path), offset, length)

    def read_into(self, path: str, offset: int, buffer: Buffer) -> int:
        return self._cache.read_into(self._found(path), offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Buffer) -> int:
        return self._cache.read_stored(self._found(path), offset, buffer)

    def is_cached(self, path: str, offset: int, length: int) -> bool:
        return self._cache.is_cached(self._found(path), offset, length)

    def stamp(self, path: str) -> str:
        return self._cache.stamp(self._found(path))

    def _found(self, path: str) -> str:
        """The path of a file's bytes. Only the text of a link is used; its target is opened without following links."""
        stored_path = f"{self._snapshot}/{path}"
        try:
            target = _TARGET.fullmatch(os.readlink(self._cache.root / stored_path))
        except OSError:  # not a link
            return stored_path
        return f"blobs/{target[2]}" if target and target[1].count("/") == stored_path.count("/") else stored_path


def opened(directory: Path) -> Files:
    """A directory to read; if it is a snapshot in a hub's cache, its links are followed."""
    snapshot = directory.parent.name == "snapshots" and (directory.parent.parent / "blobs").is_dir()
    return HubSnapshot(directory) if snapshot else PosixTier(directory)
