"""Wires replicas and repair: connects the daemon's copies and repairs to control. Only `__main__` is above."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from holdfast_files.objects import settings
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.traffic import Traffic
from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, Damaged, RootBusy, StorageFailed
from holdfast_formats.naming import CheckpointId
from holdfast_formats.staging.messages import CopyPlace
from holdfast_service.config import Config, check_apart
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.replicas import RepairRecords, ReplicaRecords
from holdfast_service.control.control import Control
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.control.launches.missing_checkpoints import FoundCopies
from holdfast_service.control.nodes import replica_duty
from holdfast_service.control.retention.tier_retention import TierRetention
from holdfast_service.daemon.checking.checker import Checker
from holdfast_service.daemon.copying.lag_reports import LagReports
from holdfast_service.daemon.copying.repair import Lend, Repairer
from holdfast_service.daemon.copying.replicas import Replicator, reached
from holdfast_service.daemon.saving.awaited_repairs import AwaitedRepairs
from holdfast_service.observe import bucket_traffic
from holdfast_service.observe.bucket_traffic import checkpoint_of
from holdfast_service.storage import RootLock, RootStorage, lock_root, stored_in, tier_at
from holdfast_service.storage.identity import mark
from holdfast_service.storage.pacing import Pace

log = logging.getLogger(__name__)

REACH_MAX_S, REACH_POLL_S = 60.0, 0.1  # how long a start waits for replicas before it repairs without them
FIRST_TRY_S = 4.0  # how long a restore waits for replicas that were not tried to be reached yet, or do not answer
ASK_S = 20.0  # how long a launch of a run that is new here waits for the lists of tiers
CLOSE_S = 10.0


class MendedAtStart:
    """Checkpoints that a start could not list, because manifest or COMMIT is damaged: repaired once replicas can be
    reached.
    """

    def __init__(self, replicators: dict[str, Replicator], records: RepairRecords, repairer: Repairer) -> None:
        self._replicators, self._records, self._repairer = replicators, records, repairer
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._mend, name="holdfast-mend", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop before the next one."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _mend(self) -> None:
        limit = time.monotonic() + REACH_MAX_S
        while any(one.replica is None for one in self._replicators.values()) and time.monotonic() < limit:
            if self._closed.wait(REACH_POLL_S):
                return
        try:
            for run, step in self._records.unlisted():
                if self._closed.is_set():
                    return
                self._repairer.run(run, step)
        except CheckpointError as error:
            log.error("cannot look for damaged checkpoints: %s", error.detail)


class RestoreRepair:
    """Repairs for a restore, also from replicas: checkpoints that it would skip are repaired first, or, if it can read a
    copy, behind it.
    """

    def __init__(self, checker: Checker, replication: Replication, control: Control) -> None:
        self._checker, self._replication, self._control = checker, replication, control
        self._records = control.repairs

    def serve(self, busy: Callable[[], bool]) -> None:
        """Repair for restores from now on; `busy` returns whether ranks are restoring."""
        awaited, restores = AwaitedRepairs(self.mend, busy=busy, due=self.is_due), self._control.restores
        restores.skipping.subscribe(awaited.settle)
        restores.copies_wanted.subscribe(self.add_copies)
        restores.copies.behind.subscribe(awaited.behind)
        restores.copies.suspected.subscribe(self.suspect)
        self._control.lineage_index.copy_wanted.subscribe(self.add_manifest)

    def is_due(self, run: str, step: int) -> bool:
        """Whether a checkpoint that a restore has read from a copy is copied back: not if retention would remove it."""
        lineage_index = self._control.lineage_index
        copy = lineage_index.copy(run, step)
        if copy is not None and self._control.rotation.verdicts.keeps(copy, lineage_index.leaves(copy)):
            return True
        log.info("%s@%s is not copied back to the root: retention would not keep it there", run, step)
        return False

    def suspect(self, run: str, step: int, replica: str, error: CheckpointError) -> None:
        """A rank met this in a copy, and went on with another one."""
        log.warning("%s@%s in replica %s could not be read by a rank: %s", run, step, replica, error.detail)
        if isinstance(error, Damaged):
            self._control.replicas.suspected(replica, CheckpointId(run, step), error)

    def mend(self, run: str, step: int, error: Damaged | None) -> None:
        """Repair a checkpoint with this damage, or copy back a missing one."""
        self._replication.await_first_tries()
        if error is None:
            with self._records.repairing(run, step):
                outcome = self._replication.repairer.run(run, step)
            if isinstance(outcome.left, Damaged):
                self._check_copies(run, step)
        elif self._checker.suspect(run, step, error) is None and self._checker.result_of(run, step) == "damaged":
            self._checker.check(run, step)  # it was mended: only now it counts

    def _check_copies(self, run: str, step: int) -> None:
        """Of a step that could not be copied back, look for the damage, so that the next answer names it."""
        for one in self._replication.replicators.values():
            if one.is_mine():
                one.check(run, step)

    def add_copies(self, run: str, found: FoundCopies) -> None:
        """Add the steps of a run in each replica of this node, or why it does not say them."""
        self._replication.await_first_tries()
        steps_by_tier: dict[str, list[int]] = {}
        begun_s, errors = time.time(), dict[str, str]()

        def look() -> None:
            for name, replica in reached(self._replication.replicators).items():
                try:
                    steps_by_tier[name] = list(replica.store.stamps(run))
                except CheckpointError as error:
                    errors[name] = error.detail
                    log.warning("cannot look for checkpoints of %s in replica %s: %s", run, name, error.detail)

        looking = threading.Thread(target=look, name="holdfast-replicas-of-a-run", daemon=True)
        looking.start()
        looking.join(FIRST_TRY_S)
        found.steps.update(dict(steps_by_tier))  # the thread may still add some
        for name, one in self._replication.replicators.items():
            asked = name not in found.steps and one.is_mine()
            if asked and (why := errors.get(name) or self._replication.silence(name, begun_s)):
                found.silent[name] = why

    def add_manifest(self, run: str, step: int, manifests: list[Manifest]) -> None:
        """Add the manifest of a step in the first reachable replica of this node that has it."""
        self._replication.await_first_tries()

        def look() -> None:
            for name, replica in reached(self._replication.replicators).items():
                try:
                    manifests.append(roots.load_manifest(replica.store.files, run, step))
                    return
                except CheckpointError as error:
                    log.warning("cannot look for %s@%s in replica %s: %s", run, step, name, error.detail)

        looking = threading.Thread(target=look, name="holdfast-replicas-of-a-step", daemon=True)
        looking.start()
        looking.join(FIRST_TRY_S)


class RunsInTiers:
    """The runs of tiers, before a run that is new to the root is launched."""

    def __init__(
        self, replicators: Mapping[str, Replicator], records: ReplicaRecords, silence: Callable[[str, float], str]
    ) -> None:
        """`silence` returns why a replica that is asked since a time does not answer; empty if it may."""
        self._replicators, self._records, self._silence = replicators, records, silence
        self._begun_s = time.time()

    def await_known(self, run: str) -> None:
        """Return once each tier has been asked for its runs. `StorageFailed` for one that cannot be asked, unless this root
        has copied there before: then it has listed what is there.
        """
        limit = time.monotonic() + ASK_S
        for one in self._replicators.values():
            while (
                one.tier is not None and one.is_mine() and one.replica is None and not self._records.has_drained_to(one.name)
            ):
                if one.problem is not None or time.monotonic() > limit:
                    why = self._silence(one.name, self._begun_s) or "its checkpoints are being listed"
                    raise StorageFailed(
                        f"{run!r} is new here, and the tier {one.name} may have checkpoints of it: {why}",
                        hint="try again when it can be reached; or start the daemon without --tier",
                    )
                time.sleep(REACH_POLL_S)


class Reached:
    """A replica's directory, locked, so that no other daemon serves it or copies there, and checked again at each use.

    An unmounted disk may leave an empty directory at its path: nothing is written there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: RootLock | None = None
        self._opened: RootStorage | None = None
        self._at: tuple[int, int] | None = None

    def __call__(self) -> RootStorage:
        """Its storage; `StorageFailed` if it cannot be reached, `RootBusy` if another daemon has it."""
        at = _identity(self._path)
        if self._opened is not None and at == self._at:
            return self._opened
        if self._opened is not None and not (self._path / naming.LOCK).exists():
            raise StorageFailed(
                f"{self._path} is no longer the same directory as when copying started; its disk may be unmounted",
                hint="mount it again",
            )
        self.close()
        self._lock = lock_root(self._path)
        self._opened, self._at = stored_in(tier_at(self._path)), _identity(self._path)
        return self._opened

    def close(self) -> None:
        """Release it."""
        if self._lock is not None:
            self._lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class ReachedBucket:
    """A bucket, opened as the only daemon that copies there. It is opened again once another daemon had its lease."""

    def __init__(self, address: BucketAddress, config: Config) -> None:
        settings.require()
        self._address, self._config = address, config
        self.traffic = Traffic(checkpoint_of(address))
        self._opened: RootStorage | None = None

    def __call__(self) -> RootStorage:
        """Its storage; the errors of `open_bucket` if it cannot be reached or used, `RootBusy` if another daemon has it."""
        if self._opened is not None and (lease := self._opened.lease) is not None and (why := lease.lost(busy=False)):
            self.close()
            if not lease.vanished:
                raise RootBusy(why, hint="give every daemon a prefix of its own, or stop the other daemon")
            log.warning("%s: it is taken again", why)
        if self._opened is None:
            from holdfast_service.storage.objects.opening import open_bucket  # which needs the extra s3

            config = self._config
            opened = open_bucket(
                self._address,
                config.node,
                config.place.directory,
                alone=config.alone,
                storing=config.tier_storing,
                traffic=self.traffic,
            )
            mark(opened.records, self._address.label)
            self._opened = opened
        return self._opened

    def close(self) -> None:
        """Release it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _nothing() -> None:
    """A directory stays locked."""


def _copies_here(control: Control, name: str) -> bool:
    """Whether it is this node that copies to a replica, of several that were given one of this name."""
    return control.nodes.has(replica_duty(name))


class Replication:
    """The configured replicas and tiers, each with a worker once started, and the repairs for which they have the bytes."""

    def __init__(self, config: Config, control: Control, lend: Lend) -> None:
        check_apart(config.root, (*config.replica, *config.tier))
        self.replicators: dict[str, Replicator] = {}
        self.repairer = Repairer(control, self._reached, lend)
        self._places: list[Reached | ReachedBucket] = []
        self.traffic: dict[str, Traffic] = {}  # to the buckets among them
        rates = {"replica": config.replica_bytes_per_second, "tier": config.tier_bytes_per_second}
        named = [("replica", *one) for one in config.replica] + [("tier", *one) for one in config.tier]
        for kind, name, at in named:
            self._places.append(place := Reached(at) if isinstance(at, Path) else ReachedBucket(at, config))
            if isinstance(place, ReachedBucket):
                self.traffic[name] = place.traffic
            self.replicators[name] = Replicator(
                name,
                control.records,
                place,
                control.replicas,
                news=control.events.wait,
                tier=self._tier(config, control, name) if kind == "tier" else None,
                pace=Pace(rate) if (rate := rates[kind]) else None,
                mend=self.repairer.replica,
                is_mine=partial(_copies_here, control, name),
                release=place.close if isinstance(place, ReachedBucket) else _nothing,
            )
            control.tiers.add_replica(name)
            if kind == "tier":
                control.tiers.add(name, self.replicators[name].standing.look)
            label = str(at.resolve()) if isinstance(at, Path) else at.label
            control.restores.copies.add(name, CopyPlace(name=f"{kind} {name}", at=label))
            log.info("%s %s: %s", kind, name, label)
        if config.tier:  # what the root has kept for a copy may go
            control.replicas.copied.subscribe(control.rotation.due)
            control.launches.known.subscribe(lambda run: self.await_first_tries())
        control.launches.unknown.subscribe(RunsInTiers(self.replicators, control.replicas, self.silence).await_known)
        self.lags = CopyLags(control.catalog.database, self.replicators)
        self.lag_reports = LagReports(config.node, self.replicators, self.traffic, self.lags)
        self._mending = MendedAtStart(self.replicators, control.repairs, self.repairer)

    @staticmethod
    def _tier(config: Config, control: Control, name: str) -> TierRetention:
        lost, readers = control.replicas.lost, control.readers
        return TierRetention(name, config.tier_keep, control.catalog, control.files, lost, readers)

    def _reached(self) -> dict[str, RootStorage]:
        self.await_first_tries()  # a repair soon after the start is not told that there is no other copy
        return reached(self.replicators)

    def silence(self, name: str, since_s: float) -> str:
        """Why a replica that is asked since then, in seconds since 1970, does not answer, with its last answer; empty if
        nothing is known to be wrong.
        """
        one = self.replicators[name]
        if one.said is not None:
            return f"it cannot be reached since {one.problem_since}: {one.said}"
        return bucket_traffic.silence(self.traffic.get(name), since_s)

    def await_first_tries(self) -> None:
        """Wait a moment for replicas of this node that were not tried to be reached yet, or do not answer."""
        limit = time.monotonic() + FIRST_TRY_S
        mine = [one for one in self.replicators.values() if one.is_mine()]
        while any(one.replica is None and one.problem is None for one in mine) and time.monotonic() < limit:
            time.sleep(REACH_POLL_S)

    def start(self) -> None:
        """Copy, and repair what a start found damaged, until `close`."""
        for one in self.replicators.values():
            one.start()
        self._mending.start()

    def close(self) -> None:
        for one in self.replicators.values():
            one.end()
        self._mending.close()
        for one in self.replicators.values():
            one.close()
        for place in reversed(self._places):
            place.close()
