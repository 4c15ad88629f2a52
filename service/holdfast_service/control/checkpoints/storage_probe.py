"""Checks a checkpoint's files in storage before anything is removed because of it.

The catalog shows what was true when storage was last read. Before a checkpoint's presence justifies a removal, COMMIT,
manifest and every file's metadata are read. No tensor bytes are.
"""

from __future__ import annotations

import hashlib
import threading
from typing import NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchResource
from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_service.control.checkpoints import roots

KNOWN_MAX = 10_000  # file lists that are kept
_PAIR = (naming.COMMIT, naming.MANIFEST)


class _Listed(NamedTuple):
    pair: tuple[str, ...]  # the stamps of COMMIT and manifest
    files: tuple[tuple[str, int], ...]


class StorageProbe:
    """Looks at the checkpoints of one root. Thread-safe. Manifests are cached by their stamp."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Listed] = {}

    def probe(self, run: str, step: int) -> str:
        """A stamp of a complete checkpoint's files: a text that changes when one of them is written, replaced or written
        again.

        Raises `NoSuchCheckpoint` if it is gone, and `Damaged` if COMMIT or manifest is wrong, or a file is missing or has
        another length.
        """
        directory = naming.checkpoint_path(run, step)
        listed = self._listed(directory, run, step)
        stamps = list(listed.pair)
        for name, size in listed.files:
            path = f"{directory}/{name}"
            stamp = self._files.stamp(path)
            if not stamp.startswith(f"{size:x}."):
                verification.check_size(roots.load_manifest(self._files, run, step), name, self._files.size(path))
            stamps.append(stamp)
        return hashlib.sha256(" ".join(stamps).encode()).hexdigest()[:32]

    def proof(self, run: str, step: int) -> str:
        """As `look`, before or after it was read back; "" where it fails."""
        try:
            return self.probe(run, step)
        except CheckpointError:
            return ""

    def is_whole(self, place: Place) -> bool:
        """Whether the kept checkpoint at this place has all its files, at their lengths."""
        try:
            manifest = open_checkpoint(self._files, place.path).manifest
        except (Damaged, NoSuchResource):
            return False
        sizes = {file.name: self._files.size(f"{place.path}/{file.name}") for file in manifest.files}
        return (manifest.run, manifest.step) == (place.run, place.step) and sizes == {
            file.name: file.bytes for file in manifest.files
        }

    def _listed(self, directory: str, run: str, step: int) -> _Listed:
        pair = tuple(self._files.stamp(f"{directory}/{name}") for name in _PAIR)
        known = self._known.get((run, step))
        if known is not None and known.pair == pair and "" not in pair:
            return known
        manifest = roots.load_manifest(self._files, run, step)
        listed = _Listed(pair, tuple((file.name, file.bytes) for file in manifest.files))
        with self._lock:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[run, step] = listed
        return listed
