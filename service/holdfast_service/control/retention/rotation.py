"""Rotation: removes the checkpoints that retention does not keep (I10), in the background, one run at a time.

Decisions, renames and changes of pins and labels happen under one lock, so a mark that was set holds (I4). Bytes are freed
outside of the lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    Conflict,
    Damaged,
    InUse,
    NewestHealthy,
    NewestVerified,
    NoSuchCheckpoint,
    NoSuchRun,
    Pinned,
    StorageFailed,
)
from holdfast_formats.lineage import line
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Level
from holdfast_formats.rest.retention import Preview, RetentionPolicy, Verdict
from holdfast_service.control.catalog.catalog import Catalog, CommitProof
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import removal, replicas, roots, run_files
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFile, RunFiles
from holdfast_service.control.checkpoints.storage_probe import StorageProbe
from holdfast_service.control.retention import links
from holdfast_service.control.retention.policy import Candidate, Decision, decide, foresee, newest_of
from holdfast_service.control.retention.proven_decisions import UNKNOWN, ProvenDecisions, RemovalProbe
from holdfast_service.control.retention.replaced_checkpoints import ReplacedCheckpoints
from holdfast_service.control.retention.thin_policy import ThinDecision, ThinEstimate, could_save, decide_thinning, older_of
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

# Locks a run; with True it takes the lock from a node that has it for too long. Yields a check that raises once it is lost.
Elsewhere = Callable[[str, bool], AbstractContextManager[Callable[[], None]]]

NAMES_SHOWN_MAX = 5
WHY_REMOVED = ("retention", "request", "space", "replaced")
AWAY_RETRY_S = 5.0  # while the catalog is away
READERS_WAIT_S, READERS_POLL_S = 2.0, 0.05  # for readers of a checkpoint that is being replaced
CHECKS_WAIT_S = 30.0  # for the daemon's own checks: they end on request, at a low priority, between two reads


class Rotation:
    """Removes checkpoints of a root; nothing else does. Thread-safe; its thread starts with the first due run."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        files: RunFiles,
        readers: Readers,
        events: Events | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`elsewhere` locks a run against the daemons of other nodes, if any."""
        self._store, self._catalog = store, catalog
        self.files, self.readers = files, readers
        self.probe = StorageProbe(store.files)
        self.proofs = RemovalProbe(self.probe, catalog)
        self._replaced = ReplacedCheckpoints(store, catalog, self.proofs, readers)
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
        # Checkpoints that replaced others, by run and step: the catalog still describes the old ones.
        self._fresh: Counter[tuple[str, int]] = Counter()
        self._freshness = threading.Lock()
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
                stack.callback(self._decided)
            except CatalogUnavailable as away:
                if not without:
                    raise
                log.info("%s: deciding without the other nodes: %s", run, away.detail)
            yield

    def _decided(self) -> None:
        self._still_deciding = _nothing

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
        with self._turn:
            with self.deciding(run), self._telling_why_not(run):
                file, candidates = self.looked_at(run)
                candidates, decisions = self.proven(run, candidates, file.in_force)
                gone = [d for d in reversed(decisions) if not d.keep]
                trashed = self._discard(run, {d.step: d.reasons for d in gone}, "retention")
                self._wait_for_readers(run, candidates, file)
                freed = [*trashed.values(), *self._settle_replaced(run)]
            self._free(freed)
        self.applied.publish(run)
        for decision in gone:
            if decision.step in trashed:
                log.info("removed %s@%s: %s", run, decision.step, "; ".join(decision.reasons))
        return list(trashed)

    def watch_links(self, run: str, directory: str) -> None:
        """Links in this directory keep checkpoints of the run from now on.

        When this returns, no removal is in progress that looked before: a checkpoint with a link stays. Raises the errors of
        `links.watch`.
        """
        links.watch(self.files, naming.check_run(run), directory)
        with self.deciding(run, without=True):
            pass

    def make_room(self, run: str, incoming: Candidate) -> int | None:
        """Remove the oldest superseded checkpoint that the policy does not keep once `incoming` is verified; its step, or
        None.
        """
        with self._turn:
            with self.deciding(run):
                file, candidates = self.looked_at(run)
                steps = self._foreseen(run, candidates, incoming, file.in_force)
                trashed: dict[int, str] = {}
                for step in steps:
                    if trashed := self._discard(run, {step: [f"to make room for step {incoming.step}"]}, "space"):
                        break
            self._free(trashed.values())
        for step in trashed:
            log.warning("removed %s@%s early, to make room for step %s", run, step, incoming.step)
            return step
        return None

    def preview(self, run: str, policy: RetentionPolicy | None = None, step: int | None = None) -> Preview:
        """What the policy in force, or this one, would do now; nothing is changed. With `step`, only its verdict is
        included; all are judged, because verdicts depend on each other. Raises `NoSuchRun`.
        """
        listed: dict[int, bodies.CheckpointInfo] = {}
        file, candidates = self.looked_at(run, listed)
        chosen = policy or file.in_force
        candidates, decisions = self.proven(run, candidates, chosen)
        thinning = decide_thinning(candidates, decisions, chosen)
        listed = {candidate.step: listed[candidate.step] for candidate in candidates}  # what is there
        sound = {candidate.step for candidate in candidates if candidate.verified}
        kept = sum(listed[decision.step].bytes for decision in decisions if decision.keep)
        foresight = ThinEstimate(listed.values())
        after = {at: _bytes_after(listed[at], decision, foresight) for at, decision in thinning.items()}
        freed = {at: listed[at].bytes - (size or 0) for at, size in after.items()}
        return Preview(
            policy=chosen,
            verdicts=[
                _verdict(
                    decision,
                    listed[decision.step].model_copy(update={"verified": decision.step in sound}),
                    file,
                    thinning[decision.step],
                    after[decision.step],
                )
                for decision in decisions
                if step in (None, decision.step)
            ],
            bytes_kept=kept,
            bytes_removed=sum(checkpoint.bytes for checkpoint in listed.values()) - kept,
            bytes_thinned=sum(freed[at] for at, decision in thinning.items() if decision.thin),
            bytes_compacted=sum(freed[at] for at, decision in thinning.items() if decision.small is not None),
            could_save=could_save([listed[one.step] for one in older_of(candidates, decisions)], foresight),
            bytes_saved=sum(before.bytes - c.bytes for c in listed.values() if (before := c.thinned or c.compacted)),
        )

    def file(self, run: str) -> RunFile:
        """The present contents of the run's file. Raises `NoSuchRun`."""
        self._catalog.check_run(run)
        return self.files.read(run)

    def set_policy(self, run: str, policy: RetentionPolicy, tag: str) -> RunFile:
        """Set the policy of a run that has a checkpoint or an attempt, and apply it soon: when this returns, the previous
        one is no longer applied. `PreconditionFailed`.
        """
        self._catalog.check_run(run)
        with self.deciding(run):
            file = self.files.set_policy(run, policy, tag)
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
            self._refuse(checkpoint, newest, healthy)
            trashed = {} if dry_run else self._discard(run, {step: ["on request"]}, "request")
        if trashed:
            with self._turn:
                self._free(trashed.values())
        return checkpoint

    @contextmanager
    def replacing(self, run: str, step: int) -> Iterator[None]:
        """Allow another checkpoint of this step to replace this one, atomically, within the block.

        Raises `Pinned`, or `InUse`, if it may not be replaced. Readers over HTTP have it open and go on reading it. Other
        readers are waited for only briefly, because meanwhile no save of any run is committed.
        """
        self._refuse_pinned(run, step)
        with self.readers.awaited(run, step):
            self._await_readers(run, step)
            with self.deciding(run, without=True):
                self._refuse_pinned(run, step)
                self.refuse_foreign(run, step)
                with self.readers.removing(run, step, opened=False) as free:
                    if not free:
                        raise InUse(f"{run}@{step} is being read", hint="save it again after the reader has finished")
                    self.is_replaced(run, step)
                    yield
        self.removed["replaced"] += 1

    def _await_readers(self, run: str, step: int) -> None:
        began = time.monotonic()
        while self.readers.held(run, opened=False).get(step):
            limit = CHECKS_WAIT_S if self.readers.only_checked(run, step) else READERS_WAIT_S
            if time.monotonic() > began + limit:
                return
            time.sleep(READERS_POLL_S)

    def is_replaced(self, run: str, step: int) -> None:
        """Another checkpoint replaces this one: it is not judged until it is `listed`."""
        with self._freshness:
            self._fresh[run, step] += 1

    def still_deciding(self) -> None:
        """Raise if this process was suspended for so long that another node may decide by now. Call it in `deciding`."""
        self._still_deciding()

    def refuse_foreign(self, run: str, step: int) -> None:
        """`InUse` for a checkpoint with foreign files in its directory."""
        if names := self._foreign(run, step):
            raise _holds_foreign(run, step, names)

    def listed(self, run: str, step: int) -> None:
        """The catalog has the new checkpoint; from now on it may be judged."""
        with self._freshness:
            self._fresh -= Counter({(run, step): 1})

    def _refuse(self, checkpoint: bodies.CheckpointInfo, newest: bool, healthy: bool) -> None:
        self._refuse_the_newest(checkpoint, newest, healthy)
        self.refuse_held(checkpoint.run, checkpoint.step)

    def refuse_held(self, run: str, step: int) -> None:
        """Raise where the checkpoint must not lose anything now."""
        with self._freshness:
            fresh = (run, step) in self._fresh
        if fresh:
            raise InUse(f"{run}@{step} is being replaced", hint="try again in a moment")
        self._refuse_pinned(run, step)
        if held := links.standing(self.files.read(run), run).holds(step):
            raise Pinned(f"{run}@{step} stays: {'; '.join(held)}", hint="remove the link first, or mount its disk")
        if left_s := self.readers.held(run).get(step):
            raise InUse(
                f"{run}@{step} is being read", hint="try again after the reader has finished", seconds=round(left_s, 1)
            )
        self.refuse_foreign(run, step)

    def _refuse_pinned(self, run: str, step: int) -> None:
        file = self.files.read(run)
        if step in file.pins:
            raise Pinned(f"{run}@{step} is pinned", hint=f"holdfast unpin {run}@{step} removes the pin")
        if labels := file.labels_of(step):
            raise Pinned(
                f"{run}@{step} has the label {', '.join(labels)}",
                hint=f"holdfast label {run}@{step} {labels[0]} --remove takes it away",
            )

    def _refuse_the_newest(self, checkpoint: bodies.CheckpointInfo, newest: bool, healthy: bool) -> None:
        """Refuse to remove checkpoints that no policy removes, unless the caller names them."""
        groups = ", ".join(checkpoint.groups)
        which = f"{checkpoint.run}@{checkpoint.step} is the newest checkpoint of its run with the groups {groups} that is"
        if checkpoint.abandoned:
            return
        _, candidates = self.looked_at(checkpoint.run)
        # What would be the newest without this one is looked at: where it is not there, this one is.
        standing, _ = self.proofs.decided(checkpoint.run, candidates, lambda now: _stays_for(checkpoint, now))
        newest_verified, newest_healthy = newest_of(standing, checkpoint.groups)
        if checkpoint.step == newest_verified:
            if not newest:
                hint = "to remove it anyway, pass --force newest-verified"
                raise NewestVerified(f"{which} known to be sound", hint=hint)
        elif checkpoint.step == newest_healthy and not healthy:
            hint = "newer checkpoints have new NaN or infinities; to remove it anyway, pass --force newest-healthy"
            raise NewestHealthy(f"{which} verified and healthy", hint=hint)

    def looked_at(self, run: str, listed: dict[int, bodies.CheckpointInfo] | None = None) -> tuple[RunFile, list[Candidate]]:
        """The run's file, and its checkpoints as the rules see them; their catalog entries are added to `listed`."""
        file, read = self.files.read(run), self.readers.held(run)
        fresh = self._freshly(run)  # before the catalog is read
        busy = dict.fromkeys(read, _READ) | dict.fromkeys(fresh, _FRESH)
        linked = links.standing(file, run)
        for path in linked.unseen:
            log.warning("nothing of %s is removed: %s, which may hold links to it, cannot be read", run, path)
        listed_now, known = self._listed(run), self._catalog.proofs(run)
        if listed is not None:
            listed |= {c.step: c for c in listed_now}
        return file, [
            _candidate(c, known.get(c.step, UNKNOWN), file, busy.get(c.step), linked.holds(c.step)) for c in listed_now
        ]

    def proven(self, run: str, candidates: Sequence[Candidate], policy: RetentionPolicy) -> ProvenDecisions:
        """This policy's decisions about the existing candidates, as of the newest commit."""
        return self.proofs.decided(run, candidates, lambda now: decide(now, policy, _newest_commit(now)))

    def _foreseen(
        self, run: str, candidates: Sequence[Candidate], incoming: Candidate, policy: RetentionPolicy
    ) -> list[int]:
        """The result of `foresee` for the existing candidates."""
        gone: list[int] = []

        def decided(now: Sequence[Candidate]) -> list[Decision]:
            coming = incoming._replace(created=_newest_commit(now))
            gone[:] = foresee(now, coming, policy, coming.created)
            return [Decision(c.step, c.step not in gone, ()) for c in now]

        self.proofs.decided(run, candidates, decided)
        return gone

    def is_replacing(self, run: str, step: int) -> bool:
        """Whether another checkpoint is replacing this one, and the catalog still describes the old one."""
        with self._freshness:
            return (run, step) in self._fresh

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
                text = f"nothing is removed: what stays cannot be looked at: {error.detail}"
                self._tell("removal-waits", text, run, level="error", problem=error.problem())
            raise
        self._waiting.discard(run)

    def _listed(self, run: str) -> list[bodies.CheckpointInfo]:
        return roots.all_checkpoints(self._catalog, run)

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
                    self.refuse_foreign(run, step)
                    self._still_deciding()  # this process may have stood still for as long as the lock lasts
                    # First: to copy it again costs less than a copy that is left.
                    replicas.removed(self._catalog.database, run, step, requested=why == "request")
                    trashed[step] = self._taken_away(run, step)
                except NoSuchCheckpoint:
                    log.info("%s@%s was already gone", run, step)
                except Conflict as error:
                    log.warning("%s@%s was not removed: %s", run, step, error.detail)
                    continue
                except CatalogUnavailable as away:
                    if not trashed:
                        raise
                    log.warning("retention of %s: the rest is removed later: %s", run, away.detail)
                    self.due(run, AWAY_RETRY_S)
                    break
                with self._catalog.database.told_later(f"{run}@{step} was removed"):
                    self._catalog.forget_checkpoint(run, step)
                self.removed[why] += step in trashed
            if step in trashed:
                self._tell("checkpoint-removed", f"step {step} was removed: {'; '.join(reasons)}", run, step, why=why)
        return trashed

    def _taken_away(self, run: str, step: int) -> str:
        """Its path in the trash. Renamed back where this process was suspended just before: the checkpoint may be in use by
        now.
        """
        path = removal.discard(self._store, run, step)
        try:
            self._still_deciding()
        except CatalogUnavailable:
            self._store.bring_back(run, step, path)
            with self._catalog.database.told_later(f"copies of {run}@{step} count again"):
                replicas.returned(self._catalog.database, run, [step])
            raise
        return path

    def _tell(self, kind: str, text: str, run: str, step: int | None = None, level: Level = "info", **detail: Any) -> None:
        if self._events is not None:
            self._events.add(kind, text, run, step, level, **detail)

    def _foreign(self, run: str, step: int) -> list[str]:
        try:
            return removal.foreign_files(self._store.files, roots.load_manifest(self._store.files, run, step))
        except (Damaged, NoSuchCheckpoint):
            return []  # without a manifest, foreign files cannot be recognised, and damage must not keep anything for ever

    def _settle_replaced(self, run: str) -> list[str]:
        """Remove what was replaced, or put it back; returns paths to free."""
        settled = self._replaced.settle(run, self._freshly(run), self.still_deciding)
        for step in settled.back:
            self.proofs.discoveries.put_back.publish(run, step)
        if settled.again_s is not None:
            self.due(run, settled.again_s)
        return settled.freed

    def _freshly(self, run: str) -> set[int]:
        """The steps whose checkpoint is newer than the catalog's entry."""
        with self._freshness:
            return {step for of, step in self._fresh if of == run}

    def _free(self, removed: Iterable[str]) -> None:
        for path in removed:
            left = removal.unlink(self._store, path)
            if left is not None:
                log.warning("could not delete all of %s; trying again at the next start: %s", path, left.detail)

    def _wait_for_readers(self, run: str, candidates: Sequence[Candidate], file: RunFile) -> None:
        """Schedule another look for when the checkpoints that only readers keep are free."""
        if not any(_READ in c.holds for c in candidates):
            return
        free = [c._replace(holds=tuple(h for h in c.holds if h != _READ)) for c in candidates]
        decisions = decide(free, file.in_force, _newest_commit(free))
        thinned = {d.step for d in decide_thinning(free, decisions, file.in_force).values() if d.acts}
        gone = {d.step for d in decisions if not d.keep} | thinned
        waits = [left for step, left in self.readers.held(run).items() if step in gone]
        if waits:
            self.due(run, max(min(waits), 0.1))

    def _next_due(self) -> str | None:
        now = time.monotonic()
        return next((run for run, at in self._due.items() if at <= now), None)

    def _loop(self) -> None:
        while (run := self._awaited()) is not None:
            try:
                self.apply(run)
            except NoSuchRun:
                log.debug("retention of %s: it was deleted or renamed meanwhile", run)
            except CatalogUnavailable as error:
                log.warning("retention of %s: tried again: %s", run, error.detail)
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


_READ = "it is being read"
_FRESH = "it is being replaced"


def _candidate(
    c: bodies.CheckpointInfo, known: CommitProof, file: RunFile, busy: str | None, linked: Sequence[str]
) -> Candidate:
    pin = ["it is pinned"] if c.step in file.pins else []
    labels = [f"it has the label {label}" for label in file.labels_of(c.step)]
    before = file.policy is None and file.keep_last is not None and c.attempt < file.keep_last_since
    kept = [f"it was saved before the launch that first asked for keep_last={file.keep_last}"] if before else []
    holds = (*pin, *labels, *linked, *kept, *([busy] if busy else []))
    groups = frozenset(c.groups)
    verified = c.verified and busy != _FRESH  # what was verified was the one before
    gone = frozenset(c.thinned.groups) if c.thinned is not None else frozenset[str]()
    judged = Candidate(
        c.step, known.seen_s, verified, c.metrics, holds, c.healthy, groups, line(c.rewinds), c.abandoned, gone
    )
    small = frozenset(c.small_bytes or ())
    return judged._replace(small=small, compact=c.compacted is not None, proven=known.proven)


def _newest_commit(candidates: Sequence[Candidate]) -> float:
    """The end of ages, in the run's time: a run without new saves does not age."""
    return max((c.created for c in candidates), default=0.0)


def _stays_for(checkpoint: bodies.CheckpointInfo, candidates: Sequence[Candidate]) -> list[Decision]:
    """The newest ones with the groups of this one, besides it, and this one itself."""
    newest = newest_of([c for c in candidates if c.step != checkpoint.step], checkpoint.groups)
    return [Decision(c.step, c.step in (checkpoint.step, *newest), ()) for c in candidates]


def _verdict(
    decision: Decision, listed: bodies.CheckpointInfo, file: RunFile, thinning: ThinDecision, after: int | None
) -> Verdict:
    return Verdict(
        step=decision.step,
        keep=decision.keep,
        reasons=list(decision.reasons),
        verified=listed.verified,
        pinned=decision.step in file.pins,
        labels=list(file.labels_of(decision.step)),
        created=listed.created,
        bytes=listed.bytes,
        thin=thinning.thin,
        thinned=listed.thinned is not None,
        thin_reason=thinning.why,
        compact=thinning.small is not None,
        compacted=listed.compacted is not None,
        bytes_after=after,
    )


def _bytes_after(listed: bodies.CheckpointInfo, thinning: ThinDecision, foresight: ThinEstimate) -> int | None:
    if thinning.small is not None:
        return foresight.bytes_after(listed, thinning.small)
    return (listed.thin_bytes or listed.bytes) if thinning.thin else None


def _holds_foreign(run: str, step: int, names: Sequence[str]) -> InUse:
    shown = ", ".join(names[:NAMES_SHOWN_MAX])
    return InUse(
        f"{run}@{step} contains {len(names)} files that Holdfast did not write: {shown}",
        hint="move them away; Holdfast removes only files that it wrote",
    )
