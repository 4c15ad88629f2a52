"""Checks shared by nodes: each verifies the portions that it claims, reports the results, and takes over portions that
others have left. The node that finds all portions verified ends the check for all.

While the catalog is unavailable, or a save is staged, checks wait. A node that does not see the checkpoint yet, because its
mount caches directory entries for a while, leaves its portion to others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from holdfast_files.opened import open_checkpoint
from holdfast_files.verifying import StoredCheckpoint
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    CorruptExtent,
    Damaged,
    InUse,
    NoSuchCheckpoint,
    NotFound,
)
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.staging.shared_check import CheckedCheckpoint, CheckEnding, CheckProgress, Portion
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking import health
from holdfast_service.daemon.checking.checker import Checker, told_of
from holdfast_service.daemon.checking.health import Examination
from holdfast_service.daemon.checking.layout_trials import LayoutTrials
from holdfast_service.daemon.checking.node_checks import WrittenSpan
from holdfast_service.daemon.checking.verifier import Heed, prove
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.wings.cluster import check_shares
from holdfast_service.wings.cluster.shared_checks import SharedChecks

log = logging.getLogger(__name__)

LOOK_S, IDLE_LOOK_S = 2.0, 30.0  # beside what is heard: while something is checked together, and else
RENEW_S = 10.0  # interval of renewing a claim
NAMES_S = 90.0  # a mount remembers for no longer which names there are
AGAIN_S, FAILED_AGAIN_S = 5.0, 60.0  # what this node has given back is left to others for so long; what it could not read
AWAY_S = 1.0  # between two tries, while the catalog is away
FOLLOW_S = (0.1, 1.0)  # how often it is looked whether a check has ended: at first, and later


CLOSES = "this daemon is stopping"


class _Left(Exception):
    """This node leaves it to others, with the reason for the log."""


class DistributedChecks:
    """A thread that does this node's portions. Thread-safe. `heed` may wait before each piece that is read."""

    def __init__(self, tier: Files, control: Control, checker: Checker, shared: SharedChecks, heed: Heed) -> None:
        self._tier, self._control, self._checker, self._shared, self._heed = tier, control, checker, shared, heed
        self._not_before: dict[tuple[str, int, int], float] = {}  # what this node has given back: time.monotonic()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-portions", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """A shared check has begun, or its end is near."""
        self._wake.set()

    def close(self) -> None:
        """Stop, even within a portion; others take it over, or the next daemon."""
        self._closing.set()
        self._wake.set()
        self._thread.join()

    def begin(self, run: str, step: int, written: Sequence[WrittenSpan]) -> str | None:
        """Have a new checkpoint checked by all nodes; returns the SHA-256 of its manifest. None if there is nothing to
        divide: it is small, or this node is alone. Raises errors of the catalog and of reading.
        """
        readers = self._shared.readers()
        if len(readers) < 2:
            return None
        try:
            manifest, sha256 = self._read(run, step)
        except Damaged:  # a check by one node records or repairs it
            return None
        plans = check_shares.divide(manifest, readers, written)
        if len(plans) < 2:
            return None
        examine = not self._control.statistics.has(run, step)
        before = self._control.health.before(run, step) if examine else None
        of = CheckedCheckpoint(run, step, sha256, None if before is None else before.step, examine)
        self._shared.begin(of, plans)
        self._wake.set()
        return sha256

    def follow(self, run: str, step: int, sha256: str, is_over: Callable[[], bool]) -> bool:
        """Wait until this check has ended; False if `is_over` comes first. `CatalogUnavailable`."""
        pause = FOLLOW_S[0]
        while self._shared.progress(run, step, sha256) is not None:
            if is_over() or self._closing.wait(pause):
                return False
            pause = min(pause * 1.5, FOLLOW_S[1])
        return True

    def going(self) -> set[tuple[str, int]]:
        """The shared checks, by run and step. `CatalogUnavailable`."""
        return self._shared.going()

    def progress(self, run: str, step: int) -> CheckProgress | None:
        """The progress of a check; None if there is none. `CatalogUnavailable`."""
        return self._shared.progress(run, step)

    def _run(self) -> None:
        give_way()
        while not self._closing.is_set():
            self._wake.clear()
            pause = IDLE_LOOK_S
            try:
                while self._do_one():
                    pass
                pause = LOOK_S if self._shared.any() else IDLE_LOOK_S
            except CheckpointError as away:
                log.info("cannot read the portions of checks: %s", away.detail)
                pause = LOOK_S
            except Exception:
                log.exception("reading the portions of checks failed")
                pause = LOOK_S
            self._wake.wait(pause)

    def _do_one(self) -> bool:
        """Verify a portion, or end a check; False if there is nothing to do."""
        if self._closing.is_set():
            return False
        now = time.monotonic()
        self._not_before = {place: at for place, at in self._not_before.items() if at > now}
        portion = self._shared.claim(self._not_before.keys())
        if portion is not None:
            self._guarded(portion, lambda: self._prove(portion), lambda: self._shared.give_back(portion))
            return True
        ending = self._shared.claim_end()
        if ending is None:
            return False
        self._guarded(ending, lambda: self._end(ending), lambda: self._shared.leave_end(ending))
        return True

    def _guarded(self, of: Portion | CheckEnding, act: Callable[[], None], leave: Callable[[], None]) -> None:
        """Run it, and on any failure leave the rest to others."""
        run, step = of.of.run, of.of.step
        again_s = AGAIN_S
        try:
            act()
            return
        except _Left as why:
            log.info("this node leaves its part of the check of %s@%s to others: %s", run, step, why)
        except Damaged as damage:
            log.error("%s@%s: %s", run, step, damage.detail)
            return  # which is recorded
        except NotFound as gone:
            if self._believes(of):
                log.info("the check of %s@%s stopped: %s", run, step, gone.detail)
                self._shared.drop(of.of)
                return
        except CatalogUnavailable:
            raise  # the claim ends by itself
        except InUse as awaited:  # a save is about to take its place, or that of the one before
            log.info("this node leaves its part of the check of %s@%s: %s", run, step, awaited.detail)
        except CheckpointError as error:
            log.warning("cannot verify this node's part of %s@%s: %s", run, step, error.detail)
            again_s = FAILED_AGAIN_S
        except Exception:
            log.exception("verifying this node's part of %s@%s failed", run, step)
            again_s = FAILED_AGAIN_S
        if isinstance(of, Portion):
            self._not_before[run, step, of.number] = time.monotonic() + again_s
        leave()
        self._closing.wait(AWAY_S if isinstance(of, Portion) else AGAIN_S)

    def _prove(self, portion: Portion) -> None:
        of = portion.of
        with self._control.readers.checking(of.run, of.step), ExitStack() as held:
            manifest = self._made(portion)
            if manifest is None:
                return
            examined = self._examination(of, held)
            wanted = check_shares.within(manifest, portion.spans)
            base = None if examined is None else examined.base
            compared = [] if base is None else [CheckpointId(base.run, base.step)]
            reading = _Reading(self._while_open, lambda done: self._shared.renew(portion, done))
            heed = self._checker.ending(reading.heed, [CheckpointId(of.run, of.step), *compared])
            source = StoredCheckpoint(self._tier, naming.checkpoint_path(of.run, of.step), manifest)
            damages = prove(source, wanted, self._checker.counting(heed), examined.passed if examined else None)
            repaired = self._mended(portion, damages) if damages else []
            statistics = examined.portion(manifest, wanted.values()) if examined is not None else b""
        self._patiently(lambda: self._shared.deliver(portion, statistics, repaired))

    def _end(self, ending: CheckEnding) -> None:
        of = ending.of
        with self._control.readers.checking(of.run, of.step):
            manifest = self._made(ending)
            if manifest is None:
                return
            before = self._before(of)
            portions = [one.statistics for one in ending.found]
            heed = self._checker.ending(self._while_open, [CheckpointId(of.run, of.step)])
            trials = LayoutTrials(self._tier, naming.checkpoint_path(of.run, of.step), heed)
            try:
                tried = self._checker.conclude(
                    manifest, lambda: health.put_together(manifest, before, portions) if of.examine else None, trials, before
                )
            except Damaged as error:
                found_here = error
                self._patiently(lambda: self._shared.damaged(ending, found_here))
                raise
        repaired = [source for one in ending.found for source in one.repaired]
        nodes = len({one.node for one in ending.found})
        check = {**told_of(manifest, ending.age_s, tried, repaired), "nodes": nodes}
        self._patiently(lambda: self._shared.sound(ending, check, tried.same_as, manifest))

    def _made(self, of: Portion | CheckEnding) -> Manifest | None:
        """The manifest of the checked checkpoint; None if another one has replaced it, which ends the check, or if it is not
        visible here yet.
        """
        run, step = of.of.run, of.of.step
        try:
            manifest, sha256 = self._read(run, step)
        except Damaged as error:
            if not self._tier.list(naming.checkpoint_path(run, step)) and self._believes(of):
                raise NoSuchCheckpoint(f"{run}@{step} was removed") from None
            self._mended(of, [error])
            manifest, sha256 = self._read(run, step)
        if sha256 == of.of.sha256:
            return manifest
        self._patiently(lambda: self._shared.drop(of.of))
        return None

    def _mended(self, of: Portion | CheckEnding, damages: Sequence[Damaged]) -> list[str]:
        """The sources of repairs. Raises remaining damage, once it is recorded; `_Left` if the files may just not be visible
        here yet.
        """
        if not self._believes(of) and not all(isinstance(damage, CorruptExtent) for damage in damages):
            raise _Left(f"some files are not visible here yet: {damages[0].detail}")

        def record(error: Damaged) -> None:
            if isinstance(of, Portion) and of.age_s < NAMES_S and self._shared.hand_over(of):
                raise _Left(f"another node may be able to repair it: {error.detail}")
            self._patiently(lambda: self._shared.damaged(of, error))

        return self._checker.mend(of.of.run, of.of.step, damages, record)[1]

    def _believes(self, of: Portion | CheckEnding) -> bool:
        """Whether missing files are really missing: this node wrote them, or has waited long enough."""
        return of.mine or of.age_s > NAMES_S

    def _read(self, run: str, step: int) -> tuple[Manifest, str]:
        found = open_checkpoint(self._tier, naming.checkpoint_path(run, step))
        return found.manifest, manifests.stated_sha256(found.commit)

    def _examination(self, of: CheckedCheckpoint, held: ExitStack) -> Examination | None:
        """The statistics of this node's portion; the previous checkpoint is protected meanwhile."""
        if not of.examine:
            return None
        before = self._before(of)
        if before is not None:
            held.enter_context(self._control.readers.checking(before.run, before.step))
        return Examination(self._tier, before)

    def _before(self, of: CheckedCheckpoint) -> Manifest | None:
        if of.before is None:
            return None
        try:
            return open_checkpoint(self._tier, naming.checkpoint_path(of.run, of.before)).manifest
        except CheckpointError as error:
            log.warning("cannot compare %s@%s with step %s: %s", of.run, of.step, of.before, error.detail)
            return None

    def _while_open(self, size: int) -> None:
        self._heed(size)
        if self._closing.is_set():
            raise _Left(CLOSES)

    def _patiently(self, tell: Callable[[], None]) -> None:
        """Report results, retrying while the catalog is unavailable."""
        while True:
            try:
                tell()
                return
            except CatalogUnavailable as away:
                log.info("the result of a check will be recorded later: %s", away.detail)
                if self._closing.wait(AWAY_S):
                    raise _Left(CLOSES) from None


class _Reading:
    """Reports a portion's progress at intervals, and stops if another node has claimed it."""

    def __init__(self, heed: Heed, renew: Callable[[int], bool]) -> None:
        self._heed, self._renew = heed, renew
        self._lock = threading.Lock()
        self._done, self._told_at = 0, time.monotonic()

    def heed(self, size: int) -> None:
        self._heed(size)
        with self._lock:
            done = self._done = self._done + size
            if time.monotonic() - self._told_at < RENEW_S:
                return
            self._told_at = time.monotonic()
        try:
            if not self._renew(done):
                raise _Left("it took too long, or the check has ended")
        except CatalogUnavailable as away:
            log.info("cannot tell other nodes that a portion is still being read: %s", away.detail)
