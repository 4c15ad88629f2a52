"""A root, read without a service: the index of its runs and checkpoints."""

from __future__ import annotations

from holdfast.read.checkpoint_index import CheckpointTarget, RunListing
from holdfast.read.checkpoint_root import CheckpointRoot, mapped
from holdfast.read.reader import CheckpointReader
from holdfast.read.root_directory import living_steps
from holdfast.read.sources import Source
from holdfast.rest.filters import NO_FILTER, Filter
from holdfast_formats import lineage
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchCheckpoint
from holdfast_formats.rest import bodies


class RootIndex:
    """Reads a root directly (I5). It knows only committed checkpoints, and no retention."""

    def __init__(self, root: CheckpointRoot) -> None:
        self.root = root

    @property
    def label(self) -> str:
        return self.root.label

    def runs(self) -> list[bodies.Run]:
        return [self._run(name) for name in self.root.runs()]

    def checkpoints(self, run: str, wanted: Filter = NO_FILTER) -> RunListing:
        found: list[bodies.CheckpointInfo] = []
        unreadable: list[CheckpointError] = []
        for one in mapped(self.root, lambda step: self._described(run, step), self.root.steps(run)):
            if isinstance(one, CheckpointError):
                unreadable.append(one)
            else:
                found.append(one)
        left = lineage.abandoned(found)
        placed = [checkpoint.model_copy(update={"abandoned": checkpoint.step in left}) for checkpoint in found]
        return RunListing([checkpoint for checkpoint in placed if wanted.lets_through(checkpoint)], unreadable)

    def source(self, run: str, step: int | None) -> Source:
        living = living_steps(self.root, run) if step is None else []
        if living:
            return self.root.source(run, living[0])
        steps = self.root.steps(run)
        if not steps or (step is not None and step not in steps):
            wanted = run if step is None else f"{run}@{step}"
            raise NoSuchCheckpoint(
                f"{self.root.label} has no checkpoint {wanted}", hint="`holdfast ls` lists the available checkpoints"
            )
        return self.root.source(run, steps[0] if step is None else step)

    def judged(self, target: CheckpointTarget) -> int:
        hint = "pass --url, or give the step number"
        raise InvalidRequest(f"the newest healthy checkpoint of {target.run} is known only to a running service", hint=hint)

    def close(self) -> None:
        self.root.close()

    def _described(self, run: str, step: int) -> bodies.CheckpointInfo | CheckpointError:
        if (described := self.root.described(run, step)) is not None:
            return described
        try:
            with CheckpointReader.open(self.root.source(run, step), complete=False) as reader:
                return bodies.describe(reader.manifest)
        except CheckpointError as error:
            return error

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
