"""A root directory, read without a service."""

from __future__ import annotations

from pathlib import Path

from holdfast.read import names
from holdfast.read.checkpoint_index import CheckpointTarget, RunListing
from holdfast.read.reader import CheckpointReader
from holdfast.read.root_directory import living_steps
from holdfast.read.sources import DirectorySource, Source
from holdfast.rest.filters import NO_FILTER, Filter
from holdfast_formats import lineage, naming
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint, StorageFailed
from holdfast_formats.rest import bodies


class DirectoryIndex:
    """Reads a root directory directly (I5). It knows only committed checkpoints, and no retention."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise StorageFailed(f"the directory {root} does not exist", hint="pass the daemon's directory as --root")
        self.root = root

    @property
    def label(self) -> str:
        return str(self.root)

    def runs(self) -> list[bodies.Run]:
        return [self._run(name) for name in names.run_names(self.root, "")]

    def checkpoints(self, run: str, wanted: Filter = NO_FILTER) -> RunListing:
        found: list[bodies.CheckpointInfo] = []
        unreadable: list[CheckpointError] = []
        for step in names.step_directories(self.root, run):
            try:
                with CheckpointReader.open(self.source(run, step), complete=False) as reader:
                    checkpoint = bodies.describe(reader.manifest)
            except CheckpointError as error:
                unreadable.append(error)
                continue
            found.append(checkpoint)
        left = lineage.abandoned(found)
        placed = [checkpoint.model_copy(update={"abandoned": checkpoint.step in left}) for checkpoint in found]
        return RunListing([checkpoint for checkpoint in placed if wanted.lets_through(checkpoint)], unreadable)

    def source(self, run: str, step: int | None) -> Source:
        steps = names.step_directories(self.root, run)
        if not steps or (step is not None and step not in steps):
            wanted = run if step is None else f"{run}@{step}"
            raise NoSuchCheckpoint(
                f"{self.root} has no checkpoint {wanted}", hint="`holdfast ls` lists the available checkpoints"
            )
        if step is None:
            step = next(iter(living_steps(self.root, run)), steps[0])
        return DirectorySource(self.root / naming.checkpoint_path(run, step))

    def judged(self, target: CheckpointTarget) -> int:
        hint = "pass --url, or give the step number"
        raise InvalidRequest(f"the newest healthy checkpoint of {target.run} is known only to a running service", hint=hint)

    def close(self) -> None:
        """Does nothing."""

    def _run(self, name: str) -> bodies.Run:
        held = self.checkpoints(name).checkpoints
        return bodies.Run(
            name=name,
            attempt=max((checkpoint.attempt for checkpoint in held), default=0),
            keep_last=None,
            checkpoints=len(held),
            newest=next((checkpoint.step for checkpoint in held if not checkpoint.abandoned), None),
            bytes=sum(checkpoint.bytes for checkpoint in held),
        )
