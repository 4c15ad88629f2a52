"""Repairs in a root that no daemon serves, and what wings do there: imports, merges, conversions.

A conversion only reads its source, so a daemon may serve its root. After a kill, finished files are reused; after Ctrl-C or
a failure, nothing is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast_files.objects.address import is_address
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.jobs import VerifyJob
from holdfast_formats.rest.offline import DirectoryConversion, RootJob
from holdfast_formats.root_files import check_local
from holdfast_service import config
from holdfast_service.config import RootPlace, default_node
from holdfast_service.control.access import audit
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.control import Control
from holdfast_service.control.retention import run_trash
from holdfast_service.daemon.copying.progress import Printed, Progress, Quiet
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.offline.opened_root import opened, whereabouts
from holdfast_service.storage import RootStorage, stored_in, tier_at
from holdfast_service.storage.identity import settle
from holdfast_service.wing import OwnJob, RootWork, required

CONVERT = "convert"  # the wing


def run(work: RootJob | DirectoryConversion) -> dict[str, Any]:
    """The report."""
    progress = Printed(sys.stdout) if work.progress else Quiet()
    if isinstance(work, RootJob):
        return _in_root(work, progress)
    convert = required(CONVERT, "a conversion").offline().convert
    assert convert is not None  # it is that wing's
    return convert(work.arguments, progress)


def _in_root(work: RootJob, progress: Progress) -> dict[str, Any]:
    place, job = _place(work.root), work.job
    if isinstance(job, VerifyJob):
        if place.bucket is None and not place.directory.is_dir():
            raise InvalidRequest(
                f"the directory {place.directory} does not exist", hint="pass the daemon's directory as --root"
            )
        kind = _repair({path: _root_of(Path(path)) for path in work.replicas})
    else:
        kind = required(job.wing, f"a job of kind {job.kind!r}").offline().jobs[job.kind]
        if job.arguments.dry_run and kind.foretell is not None and place.bucket is None:
            return kind.foretell(place.directory, job)
    with _decided(place, listed=not isinstance(job, VerifyJob)) as (control, catalog):
        done = kind.run(RootWork(control, Path.cwd()), job, progress)
        if isinstance(job, VerifyJob) or not job.arguments.dry_run:
            audit.offline(catalog.database, default_node(), f"checkpoint-{kind.done}", job.run, job.step)
        return done


def _place(root: str) -> RootPlace:
    if is_address(root):
        return config.parse(["--root", root]).place
    check_local(root)
    directory = Path(root).resolve()
    return RootPlace(str(directory), directory)


def _repair(replicas: dict[str, RootStorage]) -> OwnJob:
    def repair(work: RootWork, job: VerifyJob, progress: Progress) -> dict[str, Any]:
        return Repairer(work.control, lambda: replicas).restore(job.run, job.step)

    return OwnJob(repair, "repaired")


@contextmanager
def _decided(place: RootPlace, listed: bool) -> Iterator[tuple[Control, Catalog]]:
    """The root's control and catalog, under an exclusive lock: `RootBusy` while a daemon serves it, `WrongRoot` for a bucket
    that daemons share.

    With `listed` the catalog is first reconciled with the directories, which would unlist damaged checkpoints.
    """
    with opened(place, default_node()) as storage:
        if place.bucket is not None:
            settle(storage.records, whereabouts(place))
        catalog = Catalog.open(f"sqlite:///{place.directory / naming.CATALOG}", default_node())
        try:
            control = Control(storage, catalog)
            if listed:
                run_trash.forget_deleted(storage.records, catalog)
                roots.reconcile(storage.store, catalog)
            yield control, catalog
            control.close()
        finally:
            catalog.close()


def _root_of(path: Path) -> RootStorage:
    """The root that a replica, or a single checkpoint's directory in one, belongs to."""
    if not path.is_dir():
        raise InvalidRequest(f"the directory {path} does not exist", hint="pass the directory of a replica")
    found = path.resolve()
    if (found / naming.COMMIT).exists() or (found / naming.MANIFEST).exists():
        if found.parent.name != naming.CHECKPOINTS:
            raise InvalidRequest(f"{path} is not inside a root", hint="pass the directory that contains RUN/checkpoints/")
        found = found.parents[2]
    return stored_in(tier_at(found))
