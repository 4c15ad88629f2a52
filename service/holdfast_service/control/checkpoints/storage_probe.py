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
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchResource
from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_service.control.checkpoints import roots

KNOWN_MAX = 10_000  # file lists that are kept
_PAIR = (naming.COMMIT, naming.MANIFEST)


class _Listed(NamedTuple):
    pair: tuple[str, ...]  # the stamps of COMMIT and manifest
    files: tuple[tuple[str, int], ...]


class Probed(NamedTuple):
    """A complete checkpoint: the stamp of its files, and its manifest."""

    stamp: str
    manifest: Manifest


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
        return self._stamp(run, step, self._listed(run, step)[0])

    def read(self, run: str, step: int) -> Probed | None:
        """As `probe`, before it is read back, with the manifest; None where that fails."""
        try:
            listed, manifest = self._listed(run, step, again=True)
            stamp = self._stamp(run, step, listed)
        except CheckpointError:
            return None
        return None if manifest is None else Probed(stamp, manifest)

    def _stamp(self, run: str, step: int, listed: _Listed) -> str:
        directory = naming.checkpoint_path(run, step)
        stamps = list(listed.pair)
        for name, size in listed.files:
            path = f"{directory}/{name}"
            stamp = self._files.stamp(path)
            if not stamp.startswith(f"{size:x}."):
                verification.check_size(roots.load_manifest(self._files, run, step), name, self._files.size(path))
            stamps.append(stamp)
        return hashlib.sha256(" ".join(stamps).encode()).hexdigest()[:32]

    def proof(self, run: str, step: int) -> str:
        """As `probe`; "" where it fails."""
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

    def _listed(self, run: str, step: int, again: bool = False) -> tuple[_Listed, Manifest | None]:
        """A checkpoint's files, and its manifest unless that is known and not to be read `again`."""
        directory = naming.checkpoint_path(run, step)
        pair = tuple(self._files.stamp(f"{directory}/{name}") for name in _PAIR)
        known = self._known.get((run, step))
        if known is not None and known.pair == pair and "" not in pair and not again:
            return known, None
        manifest = roots.load_manifest(self._files, run, step)
        listed = _Listed(pair, tuple((file.name, file.bytes) for file in manifest.files))
        with self._lock:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[run, step] = listed
        return listed, manifest
