"""Named points at which a process of the product waits to be killed. Python imports this before anything else.

Nothing of the product knows of it: with this directory on PYTHONPATH, and CRASH_POINT and CRASH_DIRECTORY set, functions
of the product are wrapped when their modules are imported, or at once in a fork that has them. The first process that gets
to one while `armed` stands in the directory leaves its id in `hit` and goes on when there is a file `go`. CRASH_POINT may
name several points, with "|" between them; then `armed` says for which of them it stands.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

POLL_S = 0.005


class Point(NamedTuple):
    """Where in the product: before or after a function, when `at` says that these are the arguments that matter."""

    module: str
    function: str
    after: bool = False
    at: Callable[..., bool] = lambda *arguments, **options: True


def _is_commit(tier: Any, path: str, data: bytes) -> bool:
    return path.endswith("/COMMIT")


def _is_joint(tier: Any, path: str, data: bytes) -> bool:
    return "/staging/" in path and ".r" in path.split("/")[2]


def _is_joint_commit(tier: Any, path: str, data: bytes) -> bool:
    return _is_joint(tier, path, data) and _is_commit(tier, path, data)


def _puts_index(puts: Any, key: str, data: bytes, *more: object) -> bool:
    return "/data/" in key and key.endswith(".index.json")


def _puts_commit(puts: Any, key: str, data: bytes, *more: object) -> bool:
    return "/data/" in key and key.endswith("/COMMIT")


def _begins_data(bucket: Any, key: str) -> bool:
    return "/data/" in key


def _from_staging(tier: Any, source: str, target: str) -> bool:
    return "/staging/" in source


def _to_checkpoints(here: int, source: str, there: int, target: str) -> bool:
    return target.startswith("step-") and "/checkpoints" in os.readlink(f"/proc/self/fd/{there}")


def _from_trash(tier: Any, path: str) -> bool:
    return "/trash/" in path


def _is_third(segment: Any, chunk: Any, number: int, index: int) -> bool:
    return index == 2


def _is_noted_third(memory: Any, number: int, chunks: int) -> bool:
    return chunks == 3


_FOLDING = "holdfast_service.daemon.averaging.folding"
_SAVED = "holdfast_service.daemon.averaging.saved_average"
_RENDEZVOUS = "holdfast_service.wings.cluster.rendezvous"
_OBJECTS = "holdfast_service.storage.objects"

POINTS = {
    # in a rank
    "before stage": Point("holdfast.stage.slots", "Slots.lease"),
    "mid stage": Point("tests.crash.rank_process", "copy_half", after=True),
    "staged": Point("holdfast.stage.slots", "Slot.seal"),
    "sealed": Point("holdfast.stage.slots", "Slot.hand_over", after=True),
    "mid restore": Point("holdfast.read.verified_load", "hand_over"),
    "before a restore reads": Point("holdfast.read.root_directory", "open_checkpoint"),
    # in the daemon
    "before a lease": Point("holdfast_service.daemon.saving.saver", "Saver.lease"),
    "in a seal": Point("holdfast_service.daemon.saving.saver", "Saver.seal"),
    "before the write": Point("holdfast_service.control.checkpoints.planner", "plan"),
    "main loop": Point("holdfast_service.daemon.saving.saver", "Saver.unwritten"),
    "mid write": Point("holdfast_service.storage.posix", "PosixFile.write", after=True),
    "before manifest": Point("holdfast_service.control.checkpoints.commit", "compose"),
    "before COMMIT": Point("holdfast_service.storage.posix", "PosixTier.put", at=_is_commit),
    "before rename": Point("holdfast_service.storage.posix", "PosixTier.publish", at=_from_staging),
    "before exchange": Point("holdfast_service.storage.posix", "_exchange"),
    "after exchange": Point("holdfast_service.storage.posix", "_exchange", after=True),
    "after rename": Point("holdfast_service.storage.posix", "_rename", after=True, at=_to_checkpoints),
    "before the catalog": Point("holdfast_service.control.catalog.catalog", "Catalog.record_checkpoint"),
    "before it is read back": Point("holdfast_service.daemon.checking.verifier", "examine"),
    "mid rotation": Point("holdfast_service.storage.posix", "PosixTier.remove_tree", at=_from_trash),
    # in a daemon that keeps averages
    "before a fold": Point(_FOLDING, "fold"),
    "mid chunk": Point(_FOLDING, "widened"),
    "chunk in the journal": Point(_FOLDING, "_copy", at=_is_third),
    "chunk copied, not noted": Point("holdfast_formats.staging.average", "note_copied", at=_is_noted_third),
    "chunk noted": Point("holdfast_formats.staging.average", "note_copied", after=True, at=_is_noted_third),
    "folded, not recorded": Point(_FOLDING, "_after", after=True),
    "recorded, not freed": Point("holdfast_service.daemon.arena.average_segment", "AverageSegment.free"),
    "freed": Point("holdfast_service.daemon.arena.average_segment", "AverageSegment.free", after=True),
    "before an average is saved": Point(_SAVED, "put"),
    "average in the slot": Point(_SAVED, "tell"),
    "before voting": Point("holdfast_service.wings.cluster.average_votes", "AverageVotes.cast"),
    "voted": Point("holdfast_service.wings.cluster.average_votes", "AverageVotes.cast", after=True),
    # in a daemon that saves with those of other nodes
    "before arriving": Point(_RENDEZVOUS, "Rendezvous.arrive"),
    "arrived": Point(_RENDEZVOUS, "Rendezvous.arrive", after=True),
    "before the round is sealed": Point(_RENDEZVOUS, "Rendezvous.seal"),
    "the round is sealed": Point(_RENDEZVOUS, "Rendezvous.seal", after=True),
    "before planning": Point("holdfast_service.wings.cluster.saving.share_planner", "plan_share"),
    "bytes brought": Point("holdfast_service.wings.cluster.exchange.fetching", "Peer.fetch", after=True),
    "mid share": Point("holdfast_service.wings.cluster.saving.part_writer", "_write_all"),
    "bytes asked for": Point("holdfast_service.wings.cluster.exchange.fetching", "Peer._once"),
    "bytes sent without their digest": Point(
        "holdfast_service.wings.cluster.exchange.server", "ExchangeServer.still_offers"
    ),
    "share written": Point("holdfast_service.wings.cluster.saving.part_writer", "write_share", after=True),
    "before delivering": Point(_RENDEZVOUS, "Rendezvous.deliver"),
    "delivered": Point(_RENDEZVOUS, "Rendezvous.deliver", after=True),
    "claimed": Point(_RENDEZVOUS, "Rendezvous.receipts"),
    "before the joint manifest": Point("holdfast_service.control.checkpoints.commit", "publish_joint"),
    "between two small files": Point("holdfast_service.storage.posix", "PosixTier.put", after=True, at=_is_joint),
    "before the joint COMMIT": Point("holdfast_service.storage.posix", "PosixTier.put", at=_is_joint_commit),
    "before the end is told": Point(_RENDEZVOUS, "Rendezvous.committed"),
    "the end is told": Point(_RENDEZVOUS, "Rendezvous.committed", after=True),
    # in a daemon whose root is in a bucket
    "a part is sent": Point(f"{_OBJECTS}.uploads", "UploadedFile.send", after=True),
    "before parts are put together": Point(f"{_OBJECTS}.uploads", "UploadedFile._complete"),
    "parts are put together": Point(f"{_OBJECTS}.uploads", "UploadedFile._complete", after=True),
    "a small object is put": Point(f"{_OBJECTS}.conditional_puts", "ConditionalPuts.first", after=True, at=_puts_index),
    "before COMMIT is put": Point(f"{_OBJECTS}.conditional_puts", "ConditionalPuts.first", at=_puts_commit),
    "before the commit object": Point(f"{_OBJECTS}.step_commits", "StepCommits.put"),
    "the commit object is put": Point(f"{_OBJECTS}.step_commits", "StepCommits.put", after=True),
    "before the place is cleared": Point(f"{_OBJECTS}.object_store", "ObjectStore.discard"),
    # in a daemon that drains to a bucket
    "a copy begins": Point(f"{_OBJECTS}.staged_objects", "StagedObjects.go_on"),
    "an upload is begun": Point("holdfast_files.objects.client", "Bucket.begin_upload", after=True, at=_begins_data),
    "before a part": Point(f"{_OBJECTS}.uploads", "UploadedFile.send"),
    "before a file is put": Point(f"{_OBJECTS}.uploads", "UploadedFile._put_whole"),
    "a file is put": Point(f"{_OBJECTS}.uploads", "UploadedFile._put_whole", after=True),
    "before a copy is read back": Point("holdfast_service.daemon.copying.copies", "read_back"),
    "before a copy is published": Point(f"{_OBJECTS}.object_store", "ObjectStore.commit"),
    "COMMIT of a copy is put": Point(f"{_OBJECTS}.object_store", "ObjectStore._complete", after=True),
    "before a copy is recorded": Point("holdfast_service.control.checkpoints.replicas", "ReplicaRecords.present"),
    "a copy is recorded": Point("holdfast_service.control.checkpoints.replicas", "ReplicaRecords.present", after=True),
    # in a daemon that thins and compacts
    "states are coded": Point("holdfast_service.daemon.copying.streaming", "stream", after=True),
    "coded, not proven": Point("holdfast_service.daemon.copying.compactor", "_prove"),
    "before it is replaced": Point("holdfast_service.control.retention.thinning", "publish_copy"),
    "it is replaced": Point("holdfast_service.control.retention.thinning", "publish_copy", after=True),
    # in a daemon whose saves take unchanged files from earlier checkpoints
    "before a file is linked": Point("holdfast_service.storage.posix", "PosixTier.link"),
    "a file is linked": Point("holdfast_service.storage.posix", "PosixTier.link", after=True),
    "a second copy is staged": Point("holdfast_service.daemon.copying.copies", "carry", after=True),
    "before a second copy is put": Point("holdfast_service.storage.posix", "PosixTier.supplant"),
    "a second copy is put": Point("holdfast_service.storage.posix", "PosixTier.supplant", after=True),
    # in what the daemon does beside saves
    "job claimed": Point("holdfast_service.control.jobs.catalog", "Jobs.claim", after=True),
    "mid job": Point("holdfast_service.storage.posix", "PosixTier.read_stored", after=True),
    "before the job's end": Point("holdfast_service.control.jobs.catalog", "Jobs.finish"),
    "after the job's end": Point("holdfast_service.control.jobs.catalog", "Jobs.finish", after=True),
    "before an event": Point("holdfast_service.control.catalog.events", "Events.add"),
    "after an event": Point("holdfast_service.control.catalog.events", "Events.add", after=True),
    "a round has ended": Point("holdfast_service.control.catalog.round_records", "RoundRecords.end", after=True),
    "mid check": Point("holdfast_service.daemon.checking.layout_trials", "LayoutTrials.result"),
    # in the command line
    "mid export": Point("holdfast.export.copy", "write", after=True),
    "before COMMIT of the export": Point(
        "holdfast.export.copy", "write", at=lambda fd, start, data: b'"manifest' in bytes(data)
    ),
}


def pause(directory: Path, name: str) -> None:
    """Wait to be killed, or to be let go; only the first one who comes."""
    try:
        armed = (directory / "armed").read_text()
    except FileNotFoundError:
        return
    if armed not in ("", name):
        return
    try:
        descriptor = os.open(directory / "hit", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    os.write(descriptor, b"%d\n" % os.getpid())
    os.close(descriptor)
    while not (directory / "go").exists():
        time.sleep(POLL_S)


def _wrap(module: ModuleType, name: str, directory: Path) -> None:
    point = POINTS[name]
    *owners, attribute = point.function.split(".")
    owner: Any = module
    for each in owners:
        owner = getattr(owner, each)
    function = getattr(owner, attribute)

    def stopping(*arguments: Any, **options: Any) -> Any:
        due = point.at(*arguments, **options)
        if due and not point.after:
            pause(directory, name)
        result = function(*arguments, **options)
        if due and point.after:
            pause(directory, name)
        return result

    setattr(owner, attribute, stopping)
    for other in [one for key, one in sys.modules.items() if key.startswith("holdfast")]:
        for key in [key for key, value in vars(other).items() if value is function]:  # that imported it by its name
            setattr(other, key, stopping)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module as it would have been, then wraps the points in it."""

    points: Sequence[str]
    directory: Path

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for point in self.points:
            _wrap(module, point, self.directory)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have the points."""

    def __init__(self, points: Sequence[str], directory: Path) -> None:
        self._points, self._directory = points, directory

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        here = [point for point in self._points if POINTS[point].module == name]
        if not here:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.origin is not None, name
        loader = _Loader(name, spec.origin)
        loader.points, loader.directory = here, self._directory
        spec.loader = loader
        return spec


if "CRASH_POINT" in os.environ:
    _points, _directory = os.environ["CRASH_POINT"].split("|"), Path(os.environ["CRASH_DIRECTORY"])
    sys.meta_path.insert(0, _Finder(_points, _directory))
    for _point in _points:
        if POINTS[_point].module in sys.modules:
            _wrap(sys.modules[POINTS[_point].module], _point, _directory)
