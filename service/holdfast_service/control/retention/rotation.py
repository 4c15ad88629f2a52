"""Rotation: removes the checkpoints that retention does not keep (I10), in the background, one run at a time.

Decisions, renames and changes of pins and labels happen under one lock, so a mark that was set holds (I4). Bytes are freed
outside of the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    Conflict,
    InUse,
    NoSuchCheckpoint,
    NoSuchRun,
    StorageFailed,
)
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Level
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog import losses
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import removal, replicas, run_files, shared_files
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFile, RunFiles
from holdfast_service.control.checkpoints.storage_probe import StorageProbe
from holdfast_service.control.checkpoints.tiers import Tiers
from holdfast_service.control.retention import protecting_links
from holdfast_service.control.retention.copy_looks import CopyLooks
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.control.retention.proven_decisions import RemovalProbe
from holdfast_service.control.retention.removal_guards import RemovalGuards
from holdfast_service.control.retention.replaced_checkpoints import ReplacedCheckpoints
from holdfast_service.control.retention.verdicts import Verdicts
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

# Locks a run; with True it takes the lock from a node that has it for too long. Yields a check that raises once it is lost.
Elsewhere = Callable[[str, bool], AbstractContextManager[Callable[[], None]]]

WHY_REMOVED = ("retention", "request", "space", "replaced")
AWAY_RETRY_S = 5.0  # while the catalog is away
UNSEEN_RETRY_S = 60.0  # of what stays because its copy in a tier was not seen


class Rotation:
    """Removes checkpoints of a root; nothing else does. Thread-safe; its thread starts with the first due run."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        store: Store,
        catalog: Catalog,
        files: RunFiles,
        readers: Readers,
        events: Events | None = None,
        elsewhere: Elsewhere | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`elsewhere` locks a run against the daemons of other nodes, if any. What is not seen in the `tiers` stays, unless
        a save needs the room.
        """
        self._store, self._catalog = store, catalog
        self._tiers = tiers or Tiers(catalog.database)
        self.files, self.readers = files, readers
        self.probe = StorageProbe(store.files)
        self.proofs = RemovalProbe(self.probe, catalog)
        self.replaced = ReplacedCheckpoints(store, catalog, self.proofs, readers)
        self.verdicts = Verdicts(store, catalog, files, readers, self.proofs, self.replaced, self._tiers)
        self.guards = RemovalGuards(store, files, readers, self.replaced)
        self._looks = CopyLooks(self._tiers, self.verdicts)
        self._waiting: set[str] = set()  # runs whose blocked removals were reported
        self._local = threading.Lock()
        self._elsewhere = elsewhere or _alone
        self._still_deciding: Callable[[], None] = _nothing
        self._turn = threading.Lock()  # for freeing bytes
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}  # run -> time.monotonic()
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        self.removed: Counter[str] = Counter()  # by reason
        self._events = events
        self.applied: Signal[[str]] = Signal()  # each run whose policy was applied; subscribers must not wait
        self.readers.freed.subscribe(self.look_again)

    @contextmanager
    def deciding(self, run: str, without: bool = False) -> Iterator[None]:
        """Lock the run against other decisions, also of all nodes that serve this root. `without` the others if they are
        unreachable: then none of them decides either. A node that was suspended in a decision does not carry it out.
        """
        with self._local, ExitStack() as stack:
            try:
                self._still_deciding = stack.enter_context(self._elsewhere(run, without))
                stack.callback(setattr, self, "_still_deciding", _nothing)
            except CatalogUnavailable as away:
                if not without:
                    raise
                log.info("%s: deciding without the other nodes: %s", run, away.detail)
            yield

    def due(self, run: str, after_s: float = 0.0) -> None:
        """Apply the run's policy soon, or after so many seconds; returns at once."""
        with self._changed:
            if self._closed:
                return
            at = time.monotonic() + after_s
            self._due[run] = min(at, self._due.get(run, at))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="holdfast-rotation", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def look_again(self, run: str) -> None:
        """A reader of this run is done. If a removal waits for that, it is due now."""
        with self._changed:
            awaited = run in self._due
        if awaited:
            self.due(run)

    def wait_until_applied(self, wait_s: float = 30.0) -> bool:
        """Wait until everything that is due now has been done; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and self._next_due() is None, wait_s)

    def close(self) -> None:
        """Finish what is due, then stop. Removals that wait for readers are left to the next start."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def apply(self, run: str) -> list[int]:
        """Apply the run's policy now, and return the removed steps; their bytes are free. For one caller at a time."""
        with self._telling_why_not(run):
            copies = self._looks.before_removal(run)
            if copies.unseen:
                self.due(run, UNSEEN_RETRY_S)
            with self._turn:
                with self.deciding(run):
                    file, candidates = self.verdicts.looked_at(run)
                    candidates, decisions = self.verdicts.proven(run, candidates, file.in_force)
                    gone = [d for d in reversed(decisions) if not d.keep and copies.allow(d.step)]
                    trashed = self._discard(run, {d.step: d.reasons for d in gone}, "retention")
                    if (after_s := self.verdicts.readers_left_s(run, candidates, file)) is not None:
                        self.due(run, after_s)
                    freed = [*trashed.values(), *self._settle_replaced(run)]
                removal.free(self._store, freed)
        self.applied.publish(run)
        for decision in gone:
            if decision.step in trashed:
                log.info("removed %s@%s: %s", run, decision.step, "; ".join(decision.reasons))
        return list(trashed)

    def watch_links(self, run: str, directory: str) -> None:
        """Links in this directory keep checkpoints of the run from now on.

        When this returns, no removal is in progress that looked before: a checkpoint with a link stays. Raises the errors of
        `protecting_links.watch`.
        """
        protecting_links.watch(self.files, naming.check_run(run), directory)
        with self.deciding(run, without=True):
            pass

    def make_room(self, run: str, incoming: Candidate) -> int | None:
        """Remove the oldest superseded checkpoint that the policy does not keep once `incoming` is verified; its step, or
        None. Those that are not seen in a tier are the last to go.
        """
        self._looks.before_room(run, incoming)
        with self._turn:
            with self.deciding(run):
                trashed: dict[int, str] = {}
                for step, reasons in self.verdicts.for_room(run, incoming).items():
                    if trashed := self._discard(run, {step: reasons}, "space"):
                        break
            removal.free(self._store, trashed.values())
        for step in trashed:
            log.warning("removed %s@%s early, to make room for step %s", run, step, incoming.step)
            return step
        return None

    def file(self, run: str) -> RunFile:
        """The present contents of the run's file. Raises `NoSuchRun`."""
        self._catalog.check_run(run)
        return self.files.read(run)

    def set_policy(self, run: str, policy: RetentionPolicy, etag: str) -> RunFile:
        """Set the policy of a run that has a checkpoint or an attempt, and apply it soon: when this returns, the previous
        one is no longer applied. `PreconditionFailed`.
        """
        self._catalog.check_run(run)
        with self.deciding(run):
            file = self.files.set_policy(run, policy, etag)
        with self._catalog.database.told_later(f"the policy of {run} was set"):
            self._catalog.set_keep_last(run, policy.last)
        self._tell("policy-changed", "the retention policy was set", run, policy=policy.model_dump(exclude_defaults=True))
        self.due(run)
        return file

    def mark(self, run: str, step: int, act: Callable[[RunFile], RunFile]) -> None:
        """Pin or label a checkpoint: when this returns, nothing removes it any more. `NoSuchCheckpoint`."""
        with self.deciding(run):
            self._catalog.checkpoint(run, step)
            self._change_marks(run, act)

    def unmark(self, run: str, act: Callable[[RunFile], RunFile]) -> None:
        """Remove a pin or label, also from a checkpoint that is gone."""
        self._catalog.check_run(run)
        with self.deciding(run):
            self._change_marks(run, act)
        self.due(run)

    def _change_marks(self, run: str, act: Callable[[RunFile], RunFile]) -> None:
        """Change the marks; no event is sent if nothing changes."""
        before = self.files.read(run)
        after = self.files.change(run, act)
        for step, text, mark in run_files.differences(before, after):
            self._tell("mark-changed", text, run, step, mark=mark)

    def remove(
        self, run: str, step: int, newest: bool = False, dry_run: bool = False, healthy: bool = False
    ) -> bodies.CheckpointInfo:
        """Remove one checkpoint on request (I4), and return what it was; with `dry_run` only check whether that would work.

        Raises `NoSuchCheckpoint`, `Pinned`, `InUse`, for the newest verified one `NewestVerified` unless `newest`, and if
        that is unhealthy, for the newest healthy one `NewestHealthy` unless `healthy`.
        """
        with self.deciding(run):
            checkpoint = self._catalog.checkpoint(run, step)
            self.verdicts.refuse_newest(checkpoint, newest, healthy)
            self.guards.refuse_held(run, step)
            trashed = {} if dry_run else self._discard(run, {step: ["on request"]}, "request")
        if trashed:
            with self._turn:
                removal.free(self._store, trashed.values())
        return checkpoint

    @contextmanager
    def replacing(self, run: str, step: int) -> Iterator[None]:
        """Allow another checkpoint of this step to replace this one, atomically, within the block.

        Raises `Pinned`, or `InUse`, if it may not be replaced. Readers over HTTP have it open and go on reading it. Other
        readers are waited for only briefly, because meanwhile no save of any run is committed.
        """
        self.guards.refuse_pinned(run, step)
        with self.readers.awaited(run, step):
            self.readers.wait_until_free(run, step)
            with self.deciding(run, without=True):
                self.guards.refuse_pinned(run, step)
                self.guards.refuse_foreign(run, step)
                with self.readers.removing(run, step, opened=False) as free:
                    if not free:
                        raise InUse(f"{run}@{step} is being read", hint="save it again after the reader has finished")
                    self.replaced.began(run, step)
                    yield
        self.removed["replaced"] += 1

    def still_deciding(self) -> None:
        """Raise if this process was suspended for so long that another node may decide by now. Call it in `deciding`."""
        self._still_deciding()

    @contextmanager
    def _telling_why_not(self, run: str) -> Iterator[None]:
        """Record one event if nothing can be removed because the storage fails."""
        try:
            yield
        except CatalogUnavailable:
            raise
        except StorageFailed as error:
            if run not in self._waiting:
                self._waiting.add(run)
                text = f"nothing is removed: the remaining checkpoints cannot be checked: {error.detail}"
                self._tell("removal-waits", text, run, level="error", problem=error.problem())
            raise
        self._waiting.discard(run)

    def _discard(self, run: str, steps: Mapping[int, Sequence[str]], why: str) -> dict[int, str]:
        """Rename checkpoints to trash unless they are being read or contain foreign files; their new paths by step.

        `steps` has the reasons.
        """
        trashed: dict[int, str] = {}
        for step, reasons in steps.items():
            with self.readers.removing(run, step) as free:
                try:
                    if not free:
                        raise InUse(f"{run}@{step} is being read")
                    self.guards.refuse_foreign(run, step)
                    self._still_deciding()  # this process may have stood still for as long as the lock lasts
                    trashed[step] = self._taken_away(run, step, why == "request")
                except NoSuchCheckpoint:
                    log.info("%s@%s was already gone", run, step)
                except Conflict as error:
                    log.warning("%s@%s was not removed: %s", run, step, error.detail)
                    continue
                except CatalogUnavailable as away:
                    if not trashed:
                        raise
                    log.warning("retention of %s: the rest will be removed later: %s", run, away.detail)
                    self.due(run, AWAY_RETRY_S)
                    break
                with self._catalog.database.told_later(f"{run}@{step} was removed"):
                    self._catalog.forget_checkpoint(run, step)
                    shared_files.look(self._store, self._catalog.database, run)
                self.removed[why] += step in trashed
            if step in trashed:
                level: Level = "warning" if why == "space" and len(reasons) > 1 else "info"
                self._tell("checkpoint-removed", f"step {step} was removed: {'; '.join(reasons)}", run, step, level, why=why)
        return trashed

    def _taken_away(self, run: str, step: int, requested: bool) -> str:
        """Its path in the trash. Renamed back where this process was suspended just before: the checkpoint may be in use by
        now.
        """
        with self._catalog.database.write() as session:  # first: to copy it again costs less than a copy that is left
            losses.leaves(session, run, step)
            replicas.removed(session, run, step, requested, () if requested else self._tiers.names)
        with _taken_back(self._store, self._catalog, run, step):
            path = removal.discard(self._store, run, step)
            try:
                self._still_deciding()
            except CatalogUnavailable:
                self._store.bring_back(run, step, path)
                raise
        return path

    def _tell(self, kind: str, text: str, run: str, step: int | None = None, level: Level = "info", **detail: Any) -> None:
        if self._events is not None:
            self._events.add(kind, text, run, step, level, **detail)

    def _settle_replaced(self, run: str) -> list[str]:
        """Remove what was replaced, or put it back; returns paths to free."""
        settled = self.replaced.settle(run, self.still_deciding)
        for step in settled.back:
            self.proofs.discoveries.put_back.publish(run, step)
        if settled.again_s is not None:
            self.due(run, settled.again_s)
        return settled.freed

    def _next_due(self) -> str | None:
        now = time.monotonic()
        return next((run for run, at in self._due.items() if at <= now), None)

    def _loop(self) -> None:
        while (run := self._awaited()) is not None:
            try:
                self.apply(run)
            except NoSuchRun:
                log.debug("retention of %s: the run was deleted or renamed in the meantime", run)
            except CatalogUnavailable as error:
                log.warning("retention of %s: retrying: %s", run, error.detail)
                self.due(run, AWAY_RETRY_S)
            except CheckpointError as error:
                log.error("retention of %s: %s", run, error.detail)
            except Exception:
                log.exception("retention of %s failed", run)

    def _awaited(self) -> str | None:
        """The next due run; None after `close`."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while (run := self._next_due()) is None and not self._closed:
                soonest = min(self._due.values(), default=None)
                self._changed.wait(None if soonest is None else max(soonest - time.monotonic(), 0))
            if run is not None:
                del self._due[run]
                self._busy = True
            return run


def _nothing() -> None:
    """For a root with one process."""


def _alone(run: str, insists: bool) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(_nothing)


@contextmanager
def _taken_back(store: Store, catalog: Catalog, run: str, step: int) -> Iterator[None]:
    """A checkpoint that stands after an error was not removed: it can be lost, and its copies are used again."""
    try:
        yield
    except CheckpointError:
        if step in store.steps(run):
            with catalog.database.told_later(f"{run}@{step} was not removed"):
                replicas.returned(catalog.database, run, [step])
        raise
