"""The trainer's `keep_last`: in force for an admin, or until a policy is set."""

from __future__ import annotations

import logging

from holdfast_formats.errors import CatalogUnavailable, Damaged, NoSuchRun
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints.run_files import RunFiles

log = logging.getLogger(__name__)


class RetentionRequests:
    """The `keep_last` of launches. Thread-safe."""

    def __init__(self, files: RunFiles, catalog: Catalog, record_queue: RecordQueue, usual: int | None) -> None:
        """`usual` is the number to keep without any setting."""
        self._files, self._catalog, self._record_queue, self.usual = files, catalog, record_queue, usual

    def take(self, run: str, keep_last: int | None, attempt: int, new: bool) -> None:
        """A launch, perhaps a `new` one, has begun: its `keep_last` is in force until the run has a policy, and removes
        nothing committed before it.
        """
        try:
            before = self._files.read(run)
            wanted = keep_last if keep_last is not None else before.keep_last or self.usual
            since = before.keep_last_since if keep_last in (None, before.keep_last) else attempt
            now = {"keep_last": wanted, "keep_last_since": since}
            file = self._files.change(run, lambda file: file.model_copy(update=now))
            if file.policy is not None and keep_last not in (None, file.policy.last):
                log.info("%s: the trainer's keep_last=%s is ignored: the run has a retention policy", run, keep_last)
            if new or file != before:
                last = file.in_force.last
                self._record_queue.enqueue("how much is kept", lambda: self._catalog.set_keep_last(run, last))
        except Damaged as error:  # training goes on; nothing of the run is removed until its file is mended
            log.error("%s", error)
        except (CatalogUnavailable, NoSuchRun) as away:  # of a rank that reconnects: its `keep_last` was in force before
            log.warning("keep_last=%s of %s is not applied yet: %s", keep_last, run, away.detail)

    def denied(self, run: str, keep_last: int | None, owner: bool) -> tuple[str, ...]:
        """The notice for a rank whose `keep_last` requires an admin to be in force."""
        if owner or keep_last is None:
            return ()
        try:
            held = self._files.read(run).in_force.last
        except Damaged:
            held = None
        if held == keep_last:
            return ()
        holds = "keeps all checkpoints" if held is None else f"keeps the last {held}"
        return (f"keep_last={keep_last} is not applied: the run {holds} until an admin runs `holdfast keep {run} --last N`",)
