"""Refuses an empty answer to a restore where checkpoints of the run are gone, or replicas have them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from sqlalchemy import select

from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CheckpointsMissing
from holdfast_formats.lineage import Rewind
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints.lost_copies import SHOWN_MAX, shown
from holdfast_service.control.database.schema import ReplicaRow
from holdfast_service.control.findings import missing

AGAIN = "`holdfast nodes` says what is wrong there; try again once it answers"
AFRESH = "to train from the beginning, delete the run (`holdfast rm {run}`), or use another run name"


class FoundCopies(NamedTuple):
    """The steps of a run in the replicas that answer, and why the others do not, both by replica."""

    steps: dict[str, Collection[int]]
    silent: dict[str, str]


class LostCheckpoints:
    """Committed checkpoints of a root's runs that are gone, by catalog and replicas. Thread-safe."""

    def __init__(self, catalog: Catalog, look: Callable[[str], FoundCopies]) -> None:
        """`look` asks the replicas for the steps of a run."""
        self._catalog, self._look = catalog, look

    def copies(self, run: str) -> dict[str, set[int]]:
        """The steps that replicas have a copy of, by replica, without removed ones and those known to be damaged."""
        return self._recorded_too(run, self._look(run))

    def _recorded_too(self, run: str, found: FoundCopies) -> dict[str, set[int]]:
        copies_of = {name: set(steps) for name, steps in found.steps.items()}
        try:
            for name, step, state in self._rows(run):
                if state == "present":
                    copies_of.setdefault(name, set()).add(step)
                elif state in ("gone", "damaged"):
                    copies_of.get(name, set()).discard(step)
        except CatalogUnavailable:
            pass  # the reachable replicas decide
        return {name: steps for name, steps in sorted(copies_of.items()) if steps}

    def damaged(self, run: str) -> set[int]:
        """The steps of which only damaged copies are known, as far as the catalog knows; none while it is away."""
        try:
            rows = self._rows(run)
        except CatalogUnavailable:
            return set()
        present = {step for _, step, state in rows if state == "present"}
        return {step for _, step, state in rows if state == "damaged"} - present

    def recorded(self, run: str) -> set[int]:
        """The steps of which a replica has a copy, as far as the catalog knows; no storage is asked."""
        return {step for _, step, state in self._rows(run) if state == "present"}

    def unread(self, run: str, step: int) -> CheckpointsMissing | None:
        """The refusal of a restore of a step that the root lacks and no replica lets be read; None where none has it."""
        holders = sorted({name for name, there, state in self._rows(run) if there == step and state == "present"})
        if not holders:
            return None
        silent = self._look(run).silent
        why = "".join(f"; {name}: {silent[name]}" for name in holders if name in silent)
        return CheckpointsMissing(
            f"step {step} of {run} is not in the root, and could not be read from {', '.join(holders)}, which has it{why}",
            hint=AGAIN,
            run=run,
            steps=[step],
        )

    def _rows(self, run: str) -> list[tuple[str, int, str]]:
        columns = select(ReplicaRow.tier, ReplicaRow.step, ReplicaRow.state)
        with self._catalog.database.read() as session:
            return [(name, step, state) for name, step, state in session.execute(columns.where(ReplicaRow.run == run))]

    def of_another_root(self, run: str, step: int) -> CheckpointsMissing:
        """The refusal of a restore where a replica has a newer checkpoint of an attempt that this root has not had."""
        return CheckpointsMissing(
            f"a replica has step {step} of {run}, of an attempt that this root does not know: the root is from before it",
            hint=f"stop the daemon and run `holdfast import` on the replica's checkpoint; or {AFRESH.format(run=run)}",
            run=run,
            steps=[step],
        )

    def left_behind(self, run: str, step: int, rewind: Rewind) -> CheckpointsMissing:
        """The refusal of a restore where another machine's line has left this root's newest step behind, and no checkpoint
        of that line could be copied back.
        """
        return CheckpointsMissing(
            f"another machine has trained {run} on from step {rewind.step}, as attempt {rewind.attempt}: step {step} of "
            "this root is not on its line, and no newer step of that line can be read from a tier",
            hint=f"`restore(step={step})` goes on from this root's step, as a line of its own. To follow the other machine, "
            f"remove this root's steps after {rewind.step} (`holdfast rm {run}@{step} --force newest-verified`)",
            run=run,
            steps=[step],
        )

    def refuse(self, run: str) -> None:
        """`CheckpointsMissing` for a run without checkpoints here that once had some."""
        found, damaged = self._look(run), self.damaged(run)
        copies = self._recorded_too(run, found)
        try:
            gone = missing.missing(self._catalog.database, run)
        except CatalogUnavailable:
            gone = []
        if not gone and not copies and not damaged:
            return
        steps = sorted({*gone, *damaged, *(step for held in copies.values() for step in held)}, reverse=True)
        text = f"no checkpoint of {run} is left in {run}/{naming.CHECKPOINTS} of the root: {shown(steps)} "
        text += "was there" if len(steps) == 1 else "were there"
        text += ", and they were not removed by Holdfast" if gone else ", although replicas have copies"
        if damaged:
            text += f"; the copies of {shown(damaged)} are damaged"
        for name, held in copies.items():
            text += f"; replica {name} has {shown(held)}" + (f", but {found.silent[name]}" if name in found.silent else "")
        if copies and found.silent.keys() >= copies.keys():
            hint = AGAIN
        elif copies:
            newest = max(step for held in copies.values() for step in held)
            hint = f"`holdfast repair {run}@{newest}` copies step {newest} back from the replica"
            if max(damaged, default=newest) > newest:  # an older one instead would be chosen in silence
                hint = f"`restore(step={newest})` takes the newest sound copy, and later restores begin with it"
        else:
            hint = "put the directory back (mount its disk, or copy it from a backup): it is found within seconds"
        raise CheckpointsMissing(text, hint=f"{hint}; {AFRESH.format(run=run)}", run=run, steps=steps[:SHOWN_MAX])
