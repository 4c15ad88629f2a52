"""The restore check: reads a checkpoint back, verifies it (I7), tests it in other layouts, and repairs or marks damage.

Every commit is followed by a check in the background; only then may older checkpoints be removed (I10). Scrubs, jobs and
damage reported by readers use the same check.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, Literal, NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_files.verifying import VerifiedBatch
from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Damaged, InUse, NoSuchCheckpoint, NotFound
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.statistics import Statistics
from holdfast_service.control.checkpoints import shared_files
from holdfast_service.control.checkpoints.storage_probe import Probed
from holdfast_service.control.control import Control
from holdfast_service.control.findings.checks import Fence
from holdfast_service.daemon.checking import layout_trials
from holdfast_service.daemon.checking.health import Examination, examination, report
from holdfast_service.daemon.checking.layout_trials import LayoutTrials
from holdfast_service.daemon.checking.node_checks import ONE_NODE, CheckDistributor, WrittenSpan
from holdfast_service.daemon.checking.verifier import DAMAGES_MAX, Heed, Passed, VerificationResult, examine
from holdfast_service.observe.bucket_traffic import RequestsSince

log = logging.getLogger(__name__)

REPAIR_ROUNDS_MAX = 2 * DAMAGES_MAX  # what is damaged again after so many repairs stays so
SUSPICIONS_MAX = 1000
CATALOG_WAIT_S = 1.0
PAUSE_S = 0.1


class CheckEnd(Enum):
    SOUND = "sound"
    DAMAGED = "damaged"
    GONE = "gone"
    REPLACED = "replaced"
    FAILED = "could not be read"


Repair = Callable[[str, int, Damaged], str | None]


class CheckCounts:
    """Totals of all checks since the start. Thread-safe enough for scraped counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"bytes": 0, "checks": 0, "damages": 0, "repaired": 0}

    def add(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counts[what] += count

    def all(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Checker:
    """Checks one checkpoint at a time. Thread-safe.

    `repair` replaces damaged bytes by verified ones, and returns where they came from; None if there is no copy.
    """

    def __init__(self, tier: Files, control: Control, repair: Repair | None = None) -> None:
        self._tier, self._control = tier, control
        self.repair = repair
        self.counts = CheckCounts()

    def check(
        self, run: str, step: int, heed: Heed | None = None, hold: bool = True, fence: Fence | None = None
    ) -> dict[str, Any]:
        """Read a whole checkpoint back and record the result; return seconds, bytes, layouts and repairs.

        Raises the first `Damaged` that could not be repaired, after recording it; `NoSuchCheckpoint` if it is removed;
        `InUse` if a save is about to replace it, or the one it is compared with; storage errors; and whatever `heed` raises
        to stop. Without `hold` the checkpoint may be removed meanwhile: apparent damage is then checked again with a hold.
        If `fence` returns True, the results are void.
        """
        began, asked = time.monotonic(), RequestsSince(self._control.storage.traffic, run, step)
        directory = naming.checkpoint_path(run, step)

        def record(error: Damaged) -> None:
            self._control.findings.damaged(run, step, error, checked=True, fence=fence)

        with (
            self._control.readers.checking(run, step) if hold else nullcontext(),
            examination(self._tier, self._control, run, step) as examined,
        ):
            base = None if examined is None else examined.base
            before = None if base is None else CheckpointId(run, base.step)
            probed = self._control.findings.probed(run, step)
            proof: str | None = "" if probed is None else probed.stamp
            heed = self.ending(heed, [CheckpointId(run, step), *([before] if before else [])])
            trials = LayoutTrials(self._tier, directory, heed)
            manifest, damages = self._examined(
                CheckpointId(run, step), self.counting(heed), _all_of(trials, examined), probed
            )
            repaired: list[str] = []
            if damages or manifest is None:
                manifest, repaired = self.mend(run, step, damages, record)
                proof = None  # the files that were repaired are others
            try:
                tried = self.conclude(manifest, lambda: examined.result(manifest) if examined else None, trials, base)
            except Damaged as error:
                with self._control.readers.reading(run, step):
                    self._give_up(run, step, [error], record)
                raise
        check = told_of(manifest, time.monotonic() - began, tried, repaired)
        check |= asked.of_check()
        self._control.findings.sound(run, step, check, tried.same_as, manifest, fence, proof)
        return check

    def conclude(
        self,
        manifest: Manifest,
        result: Callable[[], Statistics | None],
        trials: LayoutTrials,
        before: Manifest | None,
    ) -> LayoutChecks:
        """All bytes are verified: try other layouts, and record the statistics in `result`, before the checkpoint counts as
        verified, because retention then asks for its health. `before` is an earlier checkpoint that was read already.

        Raises `NoSuchCheckpoint` if it was removed, and the damage that makes another layout impossible, unrecorded.
        """
        try:
            tried = trials.result(manifest)
            same_as = self._same_as(manifest, before)
        except NotFound:
            raise self._gone(manifest.run, manifest.step) from None
        report(self._control, manifest, result)
        self.counts.add("checks")
        return LayoutChecks(tried.layouts, same_as)

    def result_of(self, run: str, step: int) -> Literal["sound", "damaged", "gone", "unknown"]:
        """The recorded state of a checkpoint."""
        return self._control.findings.result_of(run, step)

    def suspect(self, run: str, step: int, error: Damaged) -> Damaged | None:
        """A reader reports damage. Check there, and repair or record it; None if everything is sound.

        Raises `NoSuchCheckpoint` if the checkpoint is being removed.
        """
        with self._control.readers.reading(run, step):
            only = _files([error])
            result = examine(self._tier, naming.checkpoint_path(run, step), self.counting(None), only)
            if not result.damages:
                return None
            try:
                self.mend(run, step, result.damages)
            except Damaged as damage:
                return damage
        return None

    def _examined(self, at: CheckpointId, heed: Heed, passed: Passed, probed: Probed | None) -> VerificationResult:
        directory = naming.checkpoint_path(*at)
        opened = None if probed is None else probed.manifest
        result = examine(self._tier, directory, heed, passed=passed, opened=opened)
        if result.damages and not self._tier.list(directory):
            raise self._gone(*at)
        return result

    def mend(
        self, run: str, step: int, damages: Sequence[Damaged], record: Callable[[Damaged], None] | None = None
    ) -> tuple[Manifest, list[str]]:
        """Have damages repaired, and verify them again. Raises the first one that is left, once it is recorded, by `record`
        if given.
        """
        directory = naming.checkpoint_path(run, step)
        sources: list[str] = []
        with self._control.readers.reading(run, step):
            for _ in range(REPAIR_ROUNDS_MAX + 1):
                # Is it damaged while it cannot be removed? And is it sound, after a repair?
                result = examine(self._tier, directory, self.counting(None), _files(damages))
                if result.manifest is not None and not result.damages:
                    return result.manifest, sources
                damages = result.damages
                self._suspect_others(run, step, damages[0])
                source = self._repair(run, step, damages[0])  # which may mend the others as well
                if source is None:
                    break
                sources.append(source)
            self._give_up(run, step, damages, record)
            raise damages[0]

    def _suspect_others(self, run: str, step: int, error: Damaged) -> None:
        """Have the checkpoints that share the damaged file looked at, unless it is known of them."""
        for other in shared_files.sharing(self._control.store, run, step, _files([error])):
            if self.result_of(run, other) == "sound":
                self._control.watch.suspected.publish(run, other, error)

    def _repair(self, run: str, step: int, error: Damaged) -> str | None:
        if self.repair is None:
            return None
        with self._control.repairs.repairing(run, step):
            try:
                source = self.repair(run, step, error)
            except CheckpointError as failure:
                log.warning("%s@%s could not be repaired: %s", run, step, failure.detail)
                return None
        if source is not None:
            self.counts.add("repaired")
            self._control.findings.repaired(run, step, error, source)
        return source

    def _give_up(
        self, run: str, step: int, damages: Sequence[Damaged], record: Callable[[Damaged], None] | None = None
    ) -> None:
        self.counts.add("damages", len(damages))
        first = damages[0]
        if len(damages) > 1:
            more = f"at least {DAMAGES_MAX - 1}" if len(damages) >= DAMAGES_MAX else str(len(damages) - 1)
            log.error("%s@%s: %s more damaged ranges than the reported one", run, step, more)
            first.members["more"] = len(damages) - 1
        if record is not None:
            record(first)
        else:
            self._control.findings.damaged(run, step, first, checked=True)

    def _same_as(self, manifest: Manifest, known: Manifest | None) -> int | None:
        """The previous checkpoint, if this one has the same tensors: a save of something that does not train."""
        before = self._control.findings.before(manifest.run, manifest.step)
        if before is None:
            return None
        try:
            other = known
            if other is None or other.step != before:
                other = open_checkpoint(self._tier, naming.checkpoint_path(manifest.run, before)).manifest
        except CheckpointError as error:  # it may be about to be removed; its own check reports what is wrong with it
            log.info("cannot compare %s@%s with step %s: %s", manifest.run, manifest.step, before, error.detail)
            return None
        return before if layout_trials.identical(manifest, other) else None

    def counting(self, heed: Heed | None) -> Heed:
        """As `heed`, and counts the bytes read."""

        def counted(size: int) -> None:
            if heed is not None:
                heed(size)
            self.counts.add("bytes", size)

        return counted

    def ending(self, heed: Heed | None, read: Sequence[CheckpointId]) -> Heed:
        """As `heed`, and raises `InUse` if a save waits to replace one of the checkpoints being read."""

        def ending(size: int) -> None:
            if heed is not None:
                heed(size)
            for run, step in read:
                if self._control.readers.is_awaited(run, step):
                    raise InUse(
                        f"{run}@{step} is being replaced by a new save", hint="check it again when the new save is committed"
                    )

        return ending

    def _gone(self, run: str, step: int) -> NoSuchCheckpoint:
        return NoSuchCheckpoint(
            f"{run}@{step} was removed while being read", hint=f"list its checkpoints with `holdfast ls {run}`"
        )


def _all_of(trials: LayoutTrials, examined: Examination | None) -> Passed:
    """What is lent every verified piece."""
    if examined is None:
        return trials.passed

    def passed(manifest: Manifest, batch: VerifiedBatch) -> None:
        trials.passed(manifest, batch)
        examined.passed(manifest, batch)

    return passed


def _files(damages: Sequence[Damaged]) -> set[str] | None:
    """The files of these damages; None, for all, if one has no file, or is COMMIT or manifest."""
    names = {str(error.members.get("file")) for error in damages}
    return None if names & {"None", naming.COMMIT, naming.MANIFEST} else names


class LayoutChecks(NamedTuple):
    """Results besides the bytes: the tested layouts, and the previous checkpoint if this one has the same tensors."""

    layouts: tuple[str, ...]
    same_as: int | None


def told_of(manifest: Manifest, seconds: float, tried: LayoutChecks, repaired: Sequence[str]) -> dict[str, Any]:
    """The result of a check, for events and jobs."""
    return {
        "seconds": round(seconds, 3),
        "bytes": manifest.bytes,
        "layouts": list(tried.layouts),
        "repaired": list(repaired),
    }


class Committed(NamedTuple):
    """A commit that waits for its check; saves may be faster than checks, so there may be many. `written`: the parts of
    several nodes.
    """

    run: str
    step: int
    attempt: int
    bytes: int
    written: Sequence[WrittenSpan] = ()


class Checks:
    """A thread that checks committed checkpoints one after the other, and damage reported by readers."""

    def __init__(
        self,
        checker: Checker,
        took: Callable[[Committed, float], None] = lambda committed, seconds: None,
        heed: Heed | None = None,
        recorded: Callable[[float], bool] = lambda wait_s: True,
        spread: CheckDistributor = ONE_NODE,
    ) -> None:
        """`took` is called for every commit found sound, with the seconds. `heed` may wait in a check; `recorded` waits, so
        many seconds, for the catalog: nothing is checked that it does not know yet. Checkpoints written by several nodes are
        `spread` over all of them.
        """
        self._spread = spread
        self._checker, self._took = checker, took
        self._heed, self._recorded = heed, recorded
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, int, Committed | Damaged]] = deque()
        self._pending: set[tuple[str, int]] = set()  # committed, and not checked yet
        self._newest: Manifest | None = None  # that was committed: while it is kept here, its check need not decode it
        self._left = 0
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="holdfast-verifier", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Number of checks still to do."""
        return self._left

    def add(self, manifest: Manifest, written: Sequence[WrittenSpan] = ()) -> None:
        """Check this new checkpoint; `written` are the parts of several nodes."""
        with self._changed:
            self._pending.add((manifest.run, manifest.step))
            self._newest = manifest
        self._put(
            manifest.run, manifest.step, Committed(manifest.run, manifest.step, manifest.attempt, manifest.bytes, written)
        )

    def awaits(self, run: str, step: int) -> bool:
        """Whether this checkpoint's first check is still to come."""
        with self._changed:
            return (run, step) in self._pending

    def suspect(self, run: str, step: int, error: Damaged) -> None:
        """Check a reader's report; the same report only once."""
        with self._changed:
            complaints = [(r, s, str(e)) for r, s, e in self._waiting if isinstance(e, Damaged)]
            known = (run, step, str(error)) in complaints
            if known or len(self._waiting) >= SUSPICIONS_MAX:
                return
        self._put(run, step, error)

    def close(self) -> None:
        """Finish all checks, or leave them to the next start if the catalog does not answer; stop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        if self._left:
            log.warning("%d checkpoints will be checked by the next daemon: the catalog does not respond", self._left)

    def _put(self, run: str, step: int, what: Committed | Damaged) -> None:
        with self._changed:
            if self._closed:
                return
            self._left += 1
            self._waiting.append((run, step, what))
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                run, step, what = self._waiting[0]
            if not self._recorded(CATALOG_WAIT_S):
                with self._changed:  # where it did not wait, since nothing will be recorded any more, this does
                    if self._changed.wait_for(lambda: self._closed, PAUSE_S):
                        return  # the next start finds what was not checked
                continue
            try:
                ended = told(run, step, self._task(run, step, what))
            except CatalogUnavailable as away:
                log.warning("cannot record the result of checking %s@%s: %s", run, step, away.detail)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, CATALOG_WAIT_S):
                        return
                continue
            with self._changed:
                if ended is CheckEnd.REPLACED and not self._closed:  # or what it stood before was: it comes again, behind
                    self._waiting.rotate(-1)
                    self._changed.wait(PAUSE_S)
                    continue
                self._waiting.popleft()
                self._left -= 1
                self._pending.discard((run, step))
                if not self._waiting:
                    self._newest = None

    def _task(self, run: str, step: int, what: Committed | Damaged) -> Callable[[], object]:
        if isinstance(what, Damaged):
            return lambda: self._look_into(run, step, what)
        return lambda: self._first_check(what)

    def _look_into(self, run: str, step: int, error: Damaged) -> None:
        """Read reported damage. If that is sound, but other parts no longer count as verified, read everything."""
        sound = self._checker.suspect(run, step, error) is None
        if sound and not self.awaits(run, step) and self._checker.result_of(run, step) == "unknown":
            self._checker.check(run, step, self._heed)

    def _first_check(self, committed: Committed) -> None:
        """By all nodes for several nodes' checkpoint; otherwise, or if they leave it, by this one."""
        began = time.monotonic()
        sha256 = self._spread.begin(committed.run, committed.step, committed.written) if committed.written else None
        if sha256 is None:
            self._took(committed, self._checker.check(committed.run, committed.step, self._heed)["seconds"])
            return
        if not self._spread.follow(committed.run, committed.step, sha256, lambda: self._closed):
            return  # this daemon ends: others go on with it
        state = self._checker.result_of(committed.run, committed.step)
        if state == "unknown":
            self._checker.check(committed.run, committed.step, self._heed)
        elif state == "sound":
            self._took(committed, time.monotonic() - began)


def told(run: str, step: int, act: Callable[[], object]) -> CheckEnd:
    """The outcome of a check, logging the reason. The check itself records damage. Raises `CatalogUnavailable`."""
    try:
        act()
    except InUse as why:
        log.info("the check of %s@%s stopped: %s", run, step, why.detail)
        return CheckEnd.REPLACED
    except NoSuchCheckpoint:
        log.info("%s@%s was removed before it was checked", run, step)
        return CheckEnd.GONE
    except Damaged:
        return CheckEnd.DAMAGED
    except CatalogUnavailable:
        raise
    except CheckpointError as error:
        log.warning("cannot verify %s@%s: %s", run, step, error.detail)
        return CheckEnd.FAILED
    except Exception:
        log.exception("verification of %s@%s failed", run, step)
        return CheckEnd.FAILED
    return CheckEnd.SOUND
