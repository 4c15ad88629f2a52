"""Checkpoints replaced by others of their steps: removed once the replacement was read back, and put back if that is found
damaged and cannot be repaired, or is gone.

All of it runs under the run's lock. A save only moves the replaced one aside.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from holdfast_formats.errors import NotFound
from holdfast_formats.naming import CheckpointId
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.retention.proven_decisions import RemovalProbe
from holdfast_service.storage import Store

MEND_S = 60.0  # for which damage may be mended before what was replaced comes back


class ReplacedResult(NamedTuple):
    """The result of a look: paths to free, the steps whose replaced one is back, and when to look again."""

    freed: list[str]
    back: list[int]
    again_s: float | None


class ReplacedCheckpoints:
    """The replaced checkpoints of one root. `settle` is for one caller at a time, the rest is thread-safe."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        proofs: RemovalProbe,
        readers: Readers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._catalog, self._proofs = store, catalog, proofs
        self._readers, self._clock = readers, clock
        self._damaged: dict[CheckpointId, float] = {}  # since when a replacement is known to be damaged
        # Checkpoints that replaced others, by run and step: the catalog still describes the old ones.
        self._fresh: Counter[tuple[str, int]] = Counter()
        self._freshness = threading.Lock()

    def began(self, run: str, step: int) -> None:
        """Record that another checkpoint replaces this one: it is not judged until it is `listed`."""
        with self._freshness:
            self._fresh[run, step] += 1

    def listed(self, run: str, step: int) -> None:
        """The catalog has the new checkpoint; from now on it may be judged."""
        with self._freshness:
            self._fresh -= Counter({(run, step): 1})

    def is_replacing(self, run: str, step: int) -> bool:
        """Whether another checkpoint is replacing this one, and the catalog still describes the old one."""
        with self._freshness:
            return (run, step) in self._fresh

    def fresh(self, run: str) -> set[int]:
        """The steps whose checkpoint is newer than the catalog's entry."""
        with self._freshness:
            return {step for of, step in self._fresh if of == run}

    def settle(self, run: str, still_deciding: Callable[[], None]) -> ReplacedResult:
        """Check all replacements but the fresh ones."""
        fresh = self.fresh(run)
        freed: list[str | None] = []
        back: list[int] = []
        again: list[float] = []
        for place in self._store.replaced(run):
            which = CheckpointId(run, place.step)
            if place.step in fresh or place.step in back:
                continue
            if self._proofs.stands(*which):
                self._damaged.pop(which, None)
                still_deciding()
                freed.append(self._store.release(place))
            elif (left_s := self._mend_s(which)) is None:
                self._damaged.pop(which, None)
            elif left_s > 0:
                again.append(left_s)
            elif self._proofs.probe.is_whole(place):
                with self._readers.removing(*which) as free:
                    if not free:  # it may be mended at this moment
                        again.append(MEND_S)
                        continue
                    still_deciding()
                    freed.append(self._store.take_back(place))
                back.append(place.step)
        if back:
            roots.list_run(self._store, self._catalog, run)
        return ReplacedResult([path for path in freed if path is not None], back, min(again, default=None))

    def _mend_s(self, which: CheckpointId) -> float | None:
        """For how long the replacement may still be repaired: 0 if it is gone, None while it is not damaged."""
        if not roots.has_commit(self._store, *which) and which.step not in self._store.steps(which.run):
            return 0.0
        try:
            if self._catalog.checkpoint(*which).damage is None:
                return None
        except NotFound:
            return None
        now = self._clock()
        return max(self._damaged.setdefault(which, now) + MEND_S - now, 0.0)
