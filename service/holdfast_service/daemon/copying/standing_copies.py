"""Looks at copies in a tier before their checkpoints leave the root: COMMIT, and the size of every file.

No tensor bytes are read. Each copy is read back when it was made, and once a week.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from holdfast_files.opened import CommittedManifest, open_checkpoint, read_commit
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, CorruptManifest, Damaged, NotFound
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_service.control.checkpoints.replicas import ReplicaRecords
from holdfast_service.storage import RootStorage, Store

_AWAY = "cannot be looked at now"


class StandingCopies:
    """The copies of one tier. A look that gets no answer holds up its caller once, and the next ones not at all."""

    def __init__(self, name: str, source: Files, opened: Callable[[], RootStorage | None], records: ReplicaRecords) -> None:
        """`source` is the root; `opened` returns the tier's storage, None while this process does not have it."""
        self._name, self._source, self._opened, self._records = name, source, opened, records
        self._lock = threading.Lock()
        self._looking: threading.Thread | None = None

    def look(self, run: str, steps: Collection[int], wait_s: float) -> Mapping[int, str]:
        """Those of these copies that were not seen to stand within `wait_s` seconds, and why. What is gone or damaged is
        recorded.
        """
        found = dict.fromkeys(steps, _AWAY)
        storage, limit = self._opened(), time.monotonic() + wait_s
        if storage is None:
            return found
        said: dict[int, str] = {}

        def go() -> None:
            for step in steps:
                if time.monotonic() > limit:
                    return
                try:
                    said[step] = self._said(storage.store, CheckpointId(run, step))
                except CheckpointError as error:
                    said[step] = f"{_AWAY}: {error.detail}"

        with self._lock:
            if self._looking is not None and self._looking.is_alive():
                return found
            self._looking = threading.Thread(target=go, name=f"holdfast-look-{self._name}", daemon=True)
            self._looking.start()
            self._looking.join(wait_s)
        return {step: why for step, why in (found | dict(said)).items() if why}

    def _said(self, copies: Store, which: CheckpointId) -> str:
        """Why a copy was not seen to stand; empty if it stands."""
        directory = naming.checkpoint_path(*which)
        try:
            pair = open_checkpoint(self._source, directory)
        except (Damaged, NotFound):
            return ""  # the root loses nothing with it
        try:
            _check(copies.files, directory, pair)
        except AlreadyCommitted as error:
            self._records.failed(self._name, which, error, damaged=False)
            return "is another checkpoint of this step"
        except (Damaged, NotFound) as error:
            if copies.stamps(*which) or copies.files.list(directory):
                self._records.lost.doubted(self._name, which, error)
                return f"is damaged: {error.detail}"
            self._records.lost.gone(self._name, which.run, [which.step])
            return "is gone"
        return ""


def _check(copies: Files, directory: str, pair: CommittedManifest) -> None:
    """Raise unless this copy of a checkpoint has its COMMIT, and all its files have their sizes."""
    if read_commit(copies, directory) != pair.commit:
        raise AlreadyCommitted(
            f"{directory} in {copies.label} is not a copy of the checkpoint in the root",
            hint="the replica's copy is kept: remove it if you do not need it, or train under another run name",
        )
    size = copies.size(f"{directory}/{naming.MANIFEST}")
    if size != len(pair.encoded):
        what = "is missing" if size is None else f"has {size} bytes, not {len(pair.encoded)}"
        raise CorruptManifest(f"{naming.MANIFEST} {what}", hint="repair the checkpoint", file=naming.MANIFEST)
    for file in pair.manifest.files:
        verification.check_size(pair.manifest, file.name, copies.size(f"{directory}/{file.name}"))
