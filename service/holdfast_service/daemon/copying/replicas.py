"""Copies checkpoints to replicas in the background: newest first, verified, at idle priority.

Each replica has its own worker, so one that hangs or is full delays neither the others nor saves.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming, timestamps
from holdfast_formats.errors import CheckpointError, Damaged, InUse, NoSuchCheckpoint, Unavailable
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest import bodies
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.checkpoints.replicas import ReplicaRecords
from holdfast_service.control.retention.tier_retention import TierRetention
from holdfast_service.daemon.copying import renamed_copies
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped, read_back
from holdfast_service.daemon.copying.copy_progress import CopyProgress
from holdfast_service.daemon.copying.copy_publisher import CopyPublisher
from holdfast_service.daemon.copying.standing_copies import StandingCopies
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.observe import bucket_traffic
from holdfast_service.storage import RootStorage, Store
from holdfast_service.storage.pacing import Pace

log = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 5.0, 30.0  # a failing replica is tried again after so long, doubled each time
SKIP_S = 600.0  # a checkpoint that cannot be copied is tried again after so long
IN_USE_S = 30.0  # and one that would replace a copy that is being read
LOOK_S = 60.0  # without a sign of news
WAIT_S = 0.5
CLOSE_S = 10.0  # a worker that hangs in a disk is left behind
CHECK_AGAIN_S = 7 * 86_400.0
LIST_AGAIN_S = 600.0  # for copies that something else has removed; less often where a list costs more

Mend = Callable[[str, str, int, CheckpointError], object]


class Replicator:
    """The worker of one replica. `open_replica` opens it, or raises a named error while it cannot be reached."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        name: str,
        source: Files,
        open_replica: Callable[[], RootStorage],
        records: ReplicaRecords,
        *,
        news: Callable[[float], bool],
        tier: TierRetention | None = None,
        pace: Pace | None = None,
        mend: Mend | None = None,
        is_mine: Callable[[], bool] = lambda: True,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`news(seconds)` waits for something new to copy; `mend` is called with a damaged copy, and may repair it.
        `is_mine` returns whether this node, of several with this replica, copies there. A `tier` keeps copies by its own
        rules, and a root that lacks its runs begins with them.
        """
        self.is_mine, self.tier = is_mine, tier
        self.name = name
        self._source, self._open, self._records = source, open_replica, records
        self._release = release  # so that the node whose turn it is can open it
        self._news, self._mend = news, mend
        self._pace = pace
        self._opened: RootStorage | None = None
        self._listed, self._is_marked = 0.0, False  # when it was listed, by time.monotonic()
        self._closed, self._again = threading.Event(), threading.Event()
        self._skipped: dict[CheckpointId, float] = {}  # until when
        self.problem: CheckpointError | None = None
        self.problem_since: str | None = None
        self.progress = CopyProgress()
        self.standing = StandingCopies(name, source, lambda: self._opened, records)
        self._publisher = CopyPublisher(name, source, records, is_mine, self._going)
        self._thread = threading.Thread(target=self._loop, name=f"holdfast-replica-{name}", daemon=True)

    @property
    def replica(self) -> RootStorage | None:
        """The replica's storage; None while it cannot be reached."""
        return self._opened

    @property
    def said(self) -> str | None:
        """Why it cannot be copied to and what to do; None while it can."""
        if self.problem is None:
            return None
        return f"{self.problem.detail}; {self.problem.hint}" if self.problem.hint else self.problem.detail

    def start(self) -> None:
        self._thread.start()

    def retry(self) -> bool:
        """Retry failures at once; returns whether this node copies there."""
        self._skipped.clear()
        self._again.set()
        return self.is_mine()

    def end(self) -> None:
        """Stop soon; the next start goes on with a running copy."""
        self._closed.set()
        self._again.set()

    def close(self) -> None:
        self.end()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def run_once(self) -> bool:
        """Open the replica if need be, remove and copy what is due; returns whether anything was done.

        Raises errors of its storage, which is then left alone for a while.
        """
        if not self.is_mine():
            if self._opened is not None:
                self._release()
            self._opened = None  # another disk may be mounted there, or the contents may change
            return False
        replica = self._reached()
        if replica is not self._opened:
            begun = self._publisher.find_begun(replica.store, self._records.wanted(self.name))
            self._records.opened(self.name, replica, begun, begins=self.tier is not None)
            self._publisher.settle(replica.store, filter(naming.is_run_name, replica.records.list("")))
            self._opened, self._listed = replica, time.monotonic()
            self._is_marked = self._has_mark(replica)
        if self._rename(replica):
            return True
        if self.tier is not None:
            self.tier.let_go(replica.store)
        done = self._remove(replica.store)
        now = time.monotonic()
        if self._publisher.has_begun:
            self._publisher.keep_begun(replica.store, self._records.wanted(self.name))
        due = [c for c in self._records.due(self.name) if self._skipped.get(CheckpointId(c.run, c.step), 0.0) <= now]
        if due and self._is_marked and not self._has_mark(replica):
            self._reopen()  # it was emptied: mark and lease come first
            return True
        if due:
            self._copy(replica, due[0])
            return True
        return done or self._check_oldest() or self._list_again(replica)

    @staticmethod
    def _has_mark(replica: RootStorage) -> bool:
        """Whether a bucket is marked as one to which a root was copied."""
        return replica.tier is None and replica.records.size(naming.ROOT_FILE) is not None

    def _reopen(self) -> None:
        log.error("replica %s has lost its mark, so it was emptied: what it lacks is copied again", self.name)
        self._opened = None
        self._release()

    def _list_again(self, replica: RootStorage) -> bool:
        """Look for copies that are gone, if the last list is old."""
        runs = len(self._records.counted(self.name))
        if time.monotonic() - self._listed < max(LIST_AGAIN_S, replica.looks.every_s(runs)):
            return False
        self._records.look(self.name, replica, self.tier is not None)
        self._listed = time.monotonic()
        return True

    def _reached(self) -> RootStorage:
        try:
            return self._open()
        except CheckpointError as error:
            if self.problem is None or self.problem.code != error.code:
                self._records.unreached(self.name, error)
            raise

    def check(self, run: str, step: int) -> CheckpointError | None:
        """Verify a copy, and have it repaired if it is damaged; returns remaining damage."""
        which = CheckpointId(run, step)
        if self._opened is None:
            return self.problem
        files, directory = self._opened.store.files, naming.checkpoint_path(run, step)
        try:
            manifest = open_checkpoint(files, directory).manifest
            read_back(files, directory, manifest, self._going())
        except Damaged as error:
            log.error("%s@%s in replica %s is damaged: %s", run, step, self.name, error.detail)
            self._records.failed(self.name, which, error, damaged=True)
            return self._mended(self._opened, which, error)
        self._records.present(self.name, which, manifest.bytes)
        return None

    def _mended(self, replica: RootStorage, which: CheckpointId, error: CheckpointError) -> CheckpointError | None:
        if self._mend is None:
            return error
        with suppress(NoSuchCheckpoint):  # of a lost primary, say, nothing can be had
            self._mend(self.name, *which, error)
        files, directory = replica.store.files, naming.checkpoint_path(*which)
        try:
            manifest = open_checkpoint(files, directory).manifest
            read_back(files, directory, manifest, self._going())
        except Damaged as left:
            if not self._records.lost.was_made(self.name, which):
                return left
            again = self._publisher.copy_again(replica, which)
            if again is None:
                return left
            manifest = again
        self._records.present(self.name, which, manifest.bytes)
        return None

    def _rename(self, replica: RootStorage) -> bool:
        """Give a copy of a renamed run its new name; the old one is removed afterwards. If that is impossible, it is copied
        again, as everything that is due.
        """
        now = time.monotonic()
        for which, run in self._records.renames(self.name):
            if self._skipped.get(which, 0.0) > now or replica.store.files.list(naming.checkpoint_path(run, which.step)):
                continue
            try:
                if self._renamed(replica, which, run):
                    return True
            except Unavailable:
                raise
            except CheckpointError as error:
                log.warning("cannot rename %s@%s in replica %s to %s: %s", *which, self.name, run, error.detail)
            self._skip(which)
        return False

    def _renamed(self, replica: RootStorage, which: CheckpointId, run: str) -> bool:
        pair = renamed_copies.renamed(replica.store.files, which, run)
        if renamed_copies.is_another(self._source, pair):
            return False
        self._publisher.publish(replica, pair, lambda staged: renamed_copies.stage(staged, which, pair, self._going()))
        self._records.present(self.name, CheckpointId(run, which.step), pair.manifest.bytes)
        log.info("%s@%s in replica %s was renamed to %s@%s", *which, self.name, run, which.step)
        return True

    def _remove(self, store: Store) -> bool:
        removed = False
        for run, step in self._records.removals(self.name):
            if self._records.remove(self.name, store, run, step):
                removed = True
                log.info("removed %s@%s from replica %s, because it was removed from the root", run, step, self.name)
        return removed

    def _copy(self, replica: RootStorage, checkpoint: bodies.CheckpointInfo) -> None:
        """Copy one checkpoint, without protecting it: a hanging disk must not delay its removal."""
        run, step = which = CheckpointId(checkpoint.run, checkpoint.step)
        directory = naming.checkpoint_path(run, step)
        self._records.copying(self.name, checkpoint)
        try:
            self._records.others.refuse_left(checkpoint)
            pair = open_checkpoint(self._source, directory)
            if replica.store.stamps(run, step) or replica.store.files.list(directory):
                another = self._publisher.settle_another(replica, pair)
                if another and not self._publisher.follow(replica, pair):
                    self._skip(which)
                    return
                self.check(run, step)
                return
            began = time.monotonic()
            asked_for(replica, which)  # what was asked of it before is no part of this copy
            with self.progress.of(which, pair.manifest.bytes):
                self._publisher.copy(replica, pair)
            measured = {"seconds": round(time.monotonic() - began, 3), **asked_for(replica, which)}
            self._records.present(self.name, which, pair.manifest.bytes, measured)
            log.info("copied %s@%s to replica %s: %d bytes", run, step, self.name, pair.manifest.bytes)
        except CheckpointError as error:
            if not self.is_mine():  # the node that has it now reports it
                log.warning("this node does not copy %s@%s to replica %s: %s", run, step, self.name, error.detail)
                return
            if not self._source.list(directory):
                log.info("%s@%s was removed before it was copied to replica %s", run, step, self.name)
                self._skip(which)
                return
            if isinstance(error, InUse):
                log.info("%s; replica %s follows %s@%s later", error.detail, self.name, run, step)
                self._skip(which, IN_USE_S)
                return
            if isinstance(error, Unavailable):  # the disk: of others on it nothing better is to be expected
                self._records.failed(self.name, which, error, damaged=False)
                raise
            log.error("cannot copy %s@%s to replica %s: %s", run, step, self.name, error.detail)
            self._records.failed(self.name, which, error, damaged=False)
            self._skip(which)

    def _check_oldest(self) -> bool:
        """Verify the copy whose last verification is the oldest, if that is long ago."""
        stale = self._records.stale(self.name, timestamps.later(utc_now(), -CHECK_AGAIN_S))
        if stale is None:
            return False
        self.check(*stale)
        return True

    def _skip(self, which: CheckpointId, seconds: float = SKIP_S) -> None:
        self._skipped[which] = time.monotonic() + seconds

    def _going(self) -> CopyControl:
        return CopyControl(self._pace, self._closed.is_set, self.progress.moved)

    def _loop(self) -> None:
        give_way()
        wait_s = RETRY_S
        while not self._closed.is_set():
            try:
                done = self.run_once()
                if self.problem is not None:
                    log.warning("replica %s works again", self.name)
                self.problem, self.problem_since, wait_s = None, None, RETRY_S
                if not done:
                    self._await_news()
            except CopyStopped:
                return
            except Exception as error:
                self._failed(error, wait_s)
                self._again.wait(wait_s)
                self._again.clear()
                wait_s = min(2 * wait_s, RETRY_MAX_S)

    def _failed(self, error: Exception, wait_s: float) -> None:
        self.problem_since = self.problem_since or utc_now()
        if isinstance(error, CheckpointError):
            if self.problem is None or self.problem.code != error.code:
                text = f"replica {self.name} cannot be reached: {error.detail}"
                log.error("%s; trying again in %.0f s, then less often; %s", text, wait_s, error.hint)
            self.problem = error
        else:
            log.exception("replica %s failed", self.name)
            self.problem = CheckpointError(f"unexpected {type(error).__name__}", hint="see the daemon's log")

    def _await_news(self) -> None:
        limit = time.monotonic() + LOOK_S
        while time.monotonic() < limit and not self._closed.is_set():
            if self._news(WAIT_S) or self._again.is_set():
                self._again.clear()
                return


def asked_for(replica: RootStorage, which: CheckpointId) -> Mapping[str, float]:
    """The requests for a checkpoint's objects since this was last asked; none of a directory."""
    return {} if replica.traffic is None else bucket_traffic.of_save(replica.traffic.take(which))


def reached(replicators: Mapping[str, Replicator]) -> dict[str, RootStorage]:
    return {name: one.replica for name, one in replicators.items() if one.replica is not None}
