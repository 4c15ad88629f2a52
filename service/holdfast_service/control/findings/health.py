"""Health: whether a checkpoint has NaN or infinite values that the last healthy one did not have.

It is compared with the newest *healthy* checkpoint, so a NaN stays new as long as it stays. For new tensors, NaN
is always unhealthy, and infinities only in groups that hold no masks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.rest.statistics import Statistics, sum_up
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.pages import INTEGER_MAX
from holdfast_service.control.catalog.statistics import NonFinite, StatisticsStore
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.findings.selection import newest_before, newest_healthy

log = logging.getLogger(__name__)

NOT_JUDGED = ("extra",)  # what the trainer's own objects hold: a best loss may well be infinite
NEVER_MASKS = ("master", "optim")
TENSORS_NAMED_MAX = 20


class Suspect(NamedTuple):
    """A tensor with new values that are not finite."""

    group: str
    name: str
    nan: int
    inf: int


def judge(now: NonFinite, before: NonFinite, known: Callable[[str, str], bool]) -> list[Suspect]:
    """The tensors that have more NaN or more infinities than `before`; `known` says which of them were there."""
    suspects = []
    for group, tensors in now.items():
        if group in NOT_JUDGED:
            continue
        for name, (nan, inf) in tensors.items():
            nan_before, inf_before = before.get(group, {}).get(name, (0, 0))
            grown = inf > inf_before and (group in NEVER_MASKS or known(group, name))
            if nan > nan_before or grown:
                suspects.append(Suspect(group, name, nan, inf))
    return suspects


class HealthRecords:
    """Judges and stores the statistics of checkpoints."""

    def __init__(self, files: Files, store: StatisticsStore, events: Events) -> None:
        self._files, self._store, self._events = files, store, events
        self._last: Manifest | None = None  # that was examined: the next one is compared with it

    def take(self, manifest: Manifest, statistics: Statistics) -> None:
        """Record the statistics of a checkpoint and whether it is healthy; an event names what makes it unhealthy."""
        if not self._store.lists(manifest):
            return
        summary = sum_up(manifest, statistics)
        baseline = self._store.baseline(manifest.run, manifest.step)
        compared = None if baseline is None else baseline.step
        suspects = judge(
            summary["nonfinite"], {} if baseline is None else baseline.nonfinite, self._known(manifest, compared)
        )
        if suspects:  # never compared with, and a broken model breaks every tensor
            summary["nonfinite"] = {}
        self._store.record(manifest.run, manifest.step, statistics, summary, healthy=not suspects)
        self._last = manifest
        if suspects:
            first = suspects[0]
            text = f"step {manifest.step} has new NaN or infinite values in {len(suspects)} tensors: {first.name}"
            text += " and others" if len(suspects) > 1 else ""
            log.error("%s: %s", manifest.run, text)
            named = [suspect._asdict() for suspect in suspects[:TENSORS_NAMED_MAX]]
            self._events.add(
                "checkpoint-unhealthy",
                text,
                manifest.run,
                manifest.step,
                "error",
                tensors=named,
                count=len(suspects),
                compared_with=compared,
            )

    def _known(self, manifest: Manifest, step: int | None) -> Callable[[str, str], bool]:
        """A function that returns whether a checkpoint has a tensor in the same form; reads its manifest only on use."""
        held: list[Manifest | None] = []

        def known(group: str, name: str) -> bool:
            if not held:
                held.append(self._manifest(manifest.run, step))
            old = held[0].tensors.get(group, {}).get(name) if held[0] is not None else None
            new = manifest.tensors[group][name]
            return old is not None and (old.dtype, old.shape) == (new.dtype, new.shape)

        return known

    def newest(self, run: str, groups: Collection[str]) -> int | None:
        """The newest healthy checkpoint with these groups; None where the run has no checkpoint at all.

        Raises `NoSuchCheckpoint` where only others exist: starting from nothing would be wrong.
        """
        step = newest_healthy(self._store.database, run, groups)
        if step is None and newest_before(self._store.database, run, INTEGER_MAX) is not None:
            raise NoSuchCheckpoint(
                f"no checkpoint of {run} is known to be healthy",
                hint="a checkpoint can count as healthy once it is verified after its commit; see `holdfast ls`, or "
                "restore a step by its number",
            )
        return step

    def before(self, run: str, step: int) -> Manifest | None:
        """The newest sound checkpoint before a new one, the base for its changes."""
        before, last = newest_before(self._store.database, run, step), self._last
        if last is not None and (last.run, last.step) == (run, before) and self._store.lists(last):
            return last
        return self._manifest(run, before)

    def _manifest(self, run: str, step: int | None) -> Manifest | None:
        if step is None:
            return None
        try:
            return roots.load_manifest(self._files, run, step)
        except CheckpointError as error:
            log.warning("cannot compare with %s@%s: %s", run, step, error.detail)
            return None
