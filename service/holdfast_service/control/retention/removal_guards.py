"""What keeps a checkpoint from being removed, thinned or replaced (I4): pins, labels, links, readers and files of others."""

from __future__ import annotations

from holdfast_formats.errors import Damaged, InUse, NoSuchCheckpoint, Pinned
from holdfast_service.control.checkpoints import removal, roots
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.retention import protecting_links
from holdfast_service.control.retention.replaced_checkpoints import ReplacedCheckpoints
from holdfast_service.storage import Store

NAMES_SHOWN_MAX = 5


class RemovalGuards:
    """The refusals of one root. They hold within `Rotation.deciding`, where marks do not change."""

    def __init__(self, store: Store, files: RunFiles, readers: Readers, replaced: ReplacedCheckpoints) -> None:
        self._store, self._files, self._readers, self._replaced = store, files, readers, replaced

    def refuse_held(self, run: str, step: int) -> None:
        """Raise where the checkpoint must not lose anything now."""
        if self._replaced.is_replacing(run, step):
            raise InUse(f"{run}@{step} is being replaced", hint="try again in a moment")
        self.refuse_pinned(run, step)
        if held := protecting_links.standing(self._files.read(run), run).holds(step):
            raise Pinned(f"{run}@{step} was not removed: {'; '.join(held)}", hint="remove the link first, or mount its disk")
        if left_s := self._readers.held(run).get(step):
            raise InUse(
                f"{run}@{step} is being read", hint="try again after the reader has finished", seconds=round(left_s, 1)
            )
        self.refuse_foreign(run, step)

    def refuse_pinned(self, run: str, step: int) -> None:
        """`Pinned` for a checkpoint with a pin or a label."""
        file = self._files.read(run)
        if step in file.pins:
            raise Pinned(f"{run}@{step} is pinned", hint=f"unpin it first: holdfast unpin {run}@{step}")
        if labels := file.labels_of(step):
            raise Pinned(
                f"{run}@{step} has the label {', '.join(labels)}",
                hint=f"remove the label first: holdfast label {run}@{step} {labels[0]} --remove",
            )

    def refuse_foreign(self, run: str, step: int) -> None:
        """`InUse` for a checkpoint with foreign files in its directory."""
        if names := self._foreign(run, step):
            shown = ", ".join(names[:NAMES_SHOWN_MAX])
            raise InUse(
                f"{run}@{step} contains {len(names)} files that Holdfast did not write: {shown}",
                hint="move them away; Holdfast removes only files that it wrote",
            )

    def _foreign(self, run: str, step: int) -> list[str]:
        try:
            return removal.foreign_files(self._store.files, roots.load_manifest(self._store.files, run, step))
        except (Damaged, NoSuchCheckpoint):
            return []  # without a manifest, foreign files cannot be recognised, and damage must not keep anything for ever
