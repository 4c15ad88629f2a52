"""Detects changes to the checkpoints of a root within seconds: removals by hand, and lost or changed files.

So lists, alerts and retention follow the storage. No tensor byte is read for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Damaged, NoSuchCheckpoint, NoSuchRun
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.access import ALL
from holdfast_service.control.catalog.catalog import ANY_FILES, Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.roots import NegativeCache
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.findings.checks import Findings
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Looks, Store

log = logging.getLogger(__name__)

IDLE_TIMES = 20  # a look takes one part in so many of the time of its thread, however many checkpoints there are


class RootWatch:
    """Looks at the checkpoints of one root periodically, and records what it finds. Thread-safe."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        store: Store,
        catalog: Catalog,
        rotation: Rotation,
        findings: Findings,
        events: Events,
        absences: NegativeCache,
        *,
        looks: Looks,
        thinned: Callable[[str, int], bool],
        replaced: Callable[[str, int], object],
        is_mine: Callable[[], bool],
    ) -> None:
        """`thinned` returns whether a checkpoint was thinned or compacted by a node that was lost before it recorded that,
        and records it. `replaced` is called with a step whose checkpoint is another one now. `is_mine` returns whether this
        node, of several, does the looking.
        """
        self._store, self._catalog, self._rotation = store, catalog, rotation
        self._events, self._absences = events, absences
        self._thinned, self._replaced, self._is_mine = thinned, replaced, is_mine
        self._findings = findings
        self.suspected: Signal[[str, int, Damaged]] = Signal()  # subscribers repair or record; without any it is recorded
        self.unread: Signal[[Collection[CheckpointId]]] = Signal()  # checkpoints that are to be read back
        self.looks, self._runs = looks, 0
        self._soon: set[str] = set()  # runs in which something is missing
        found = rotation.proofs.discoveries
        found.missing.subscribe(self.missing)
        found.damaged.subscribe(self.damaged)
        found.changed.subscribe(self.changed)
        found.put_back.subscribe(self.put_back)
        self._unlisted: dict[str, set[int]] = {}  # what stood there and was not listed, at the last look
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="holdfast-root-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def missing(self, run: str, step: int) -> None:
        """A listed checkpoint has no directory. May be called while deciding about the run."""
        self._soon.add(run)
        self._wake.set()

    def damaged(self, run: str, step: int, error: Damaged, proven: str) -> None:
        """A sound checkpoint is incomplete: it counts no more, and is damaged unless it can be repaired."""
        self._catalog.doubt(run, step, proven)
        if self.suspected.subscribed:
            self.suspected.publish(run, step, error)
        else:
            self._findings.damaged(run, step, error)

    def changed(self, run: str, step: int, proven: str) -> None:
        """A sound checkpoint has other files than those that were read back: these are read back too."""
        if self._thinned(run, step):
            return
        if self._catalog.doubt(run, step, proven):
            text = f"files of step {step} were written or replaced after verification: verifying them again"
            log.warning("%s: %s", run, text)
            self._events.add("checkpoint-changed", text, run, step, level="warning")
            self.unread.publish([CheckpointId(run, step)])

    def put_back(self, run: str, step: int) -> None:
        """A replaced checkpoint was restored, since its replacement was damaged or is gone; it is read back."""
        text = f"step {step} was put back: its replacement was damaged or is gone"
        log.error("%s: %s", run, text)
        self._replaced(run, step)
        self._events.add("checkpoint-put-back", text, run, step, level="error")
        self.unread.publish([CheckpointId(run, step)])

    def scan(self) -> None:
        soon, self._soon = self._soon, set()
        for run in soon:
            self.relist(run)
        listed = self._catalog.all_proofs()
        runs = roots.runs(self._store.files)
        stamps = {} if self.looks.at_files else {run: self._store.stamps(run) for run in runs}
        steps_by_run = {run: set(stamps[run] if run in stamps else self._store.steps(run)) for run in runs}
        self._runs = len(steps_by_run)
        for run in sorted(listed.keys() | steps_by_run.keys()):
            if self._closing.is_set():
                return
            self._look_at(run, listed.get(run, {}), steps_by_run.get(run, set()), stamps.get(run, {}))
        self._unlisted = {run: steps - listed.get(run, {}).keys() for run, steps in steps_by_run.items()}

    def relist(self, run: str) -> None:
        """Update the catalog from the run's directory, and record what is gone without having been removed."""
        with limited_to(ALL), self._rotation.deciding(run):
            before = set(self._catalog.stamps(run))
            for problem in roots.list_run(self._store, self._catalog, run, self._absences):
                log.error("cannot read %s@%s: %s", run, problem.step, problem.error.detail)
            after = set(self._catalog.stamps(run))
        if new := [CheckpointId(run, step) for step in sorted(after - before)]:
            self.unread.publish(new)

    def _look_at(
        self, run: str, listed: Mapping[int, str | None], steps: Collection[int], stamps: Mapping[int, str]
    ) -> None:
        unlisted = {step for step in steps if step not in listed}
        if not listed.keys() <= set(steps) or self._is_news(run, unlisted) or self._is_replaced(run, stamps):
            self.relist(run)
        if not self.looks.at_files:
            return
        for step, proven in listed.items():
            if proven is not None and step in steps and not self._stands(run, step, proven):
                self._confirm(run, step)

    def _is_news(self, run: str, unlisted: set[int]) -> bool:
        """Whether something is there for longer than a commit takes to be listed."""
        lasting = unlisted & self._unlisted.get(run, set())
        return any(roots.has_commit(self._store, run, step) for step in lasting)

    def _is_replaced(self, run: str, stamps: Mapping[int, str]) -> bool:
        """Whether a listed checkpoint is another one now, where that is not found by its files."""
        before = self._catalog.stamps(run) if stamps else {}
        return any(before.get(step, stamp) not in (None, stamp) for step, stamp in stamps.items())

    def _stands(self, run: str, step: int, proven: str) -> bool:
        try:
            return self._rotation.probe.probe(run, step) == proven or proven == ANY_FILES
        except (Damaged, NoSuchCheckpoint):
            return False

    def _confirm(self, run: str, step: int) -> None:
        """Look again while the checkpoint cannot be replaced, thinned or removed, and record the result."""
        with self._rotation.deciding(run):
            if not self._rotation.replaced.is_replacing(run, step):
                with suppress(NoSuchCheckpoint, NoSuchRun):  # removed since the scan listed it
                    self._rotation.proofs.look(run, step)

    def _run(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                if self._is_mine():
                    self.scan()
            except CatalogUnavailable as away:
                log.info("the root will be scanned again when the catalog responds: %s", away.detail)
            except CheckpointError as error:
                log.warning("cannot scan the root: %s", error.detail)
            except Exception:
                log.exception("scanning the root failed")
            self._wake.wait(max(self.looks.every_s(self._runs), IDLE_TIMES * (time.monotonic() - began)))
            self._wake.clear()
