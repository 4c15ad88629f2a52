"""Imports, merges and repairs in a root that no daemon serves, and conversions from directory to directory.

A conversion only reads its source, so a daemon may serve its root. After a kill, finished files are reused; after Ctrl-C or
a failure, nothing is left.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, InvalidRequest
from holdfast_formats.rest.jobs import ConvertArguments, ImportJob, MergeJob
from holdfast_formats.rest.offline import DirectoryConversion, RootJob
from holdfast_formats.root_files import check_local, check_output_place, check_root_place
from holdfast_service.config import default_node
from holdfast_service.control.access import audit
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.control import Control
from holdfast_service.daemon.copying.progress import Printed, Progress, Quiet
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.storage import PosixStore, PosixTier, Tier, lock_root
from holdfast_service.wings.convert import converting, exporting
from holdfast_service.wings.convert import export_jobs as exports
from holdfast_service.wings.convert.export_jobs import ExportWork
from holdfast_service.wings.convert.foreign_export import check_terms
from holdfast_service.wings.convert.import_jobs import Importer, foretold
from holdfast_service.wings.convert.jobs import check_directory, open_source
from holdfast_service.wings.merge.merge_jobs import Merger

_DONE = {"verify": "repaired", "import": "imported", "merge": "merged"}


def run(work: RootJob | DirectoryConversion) -> dict[str, Any]:
    """The report."""
    progress = Printed(sys.stdout) if work.progress else Quiet()
    return _in_root(work, progress) if isinstance(work, RootJob) else _converted(work.arguments, progress)


def _in_root(work: RootJob, progress: Progress) -> dict[str, Any]:
    check_local(work.root)
    root, job = Path(work.root).resolve(), work.job
    repairs = not isinstance(job, ImportJob | MergeJob)
    if repairs and not root.is_dir():
        raise InvalidRequest(f"the directory {root} does not exist", hint="pass the daemon's directory as --root")
    if isinstance(job, ImportJob) and job.arguments.dry_run:
        return _foretold(job, root)
    replicas = {path: _root_of(Path(path)) for path in work.replicas}
    with _decided(root, listed=not repairs) as (tier, control, catalog):
        if isinstance(job, ImportJob):
            done = Importer(tier, control).bring(open_source(Path(job.arguments.source)), job, progress)
        elif isinstance(job, MergeJob):
            done = Merger(tier, control).merge(job, lambda path: open_source(Path(path)), progress, again=True)
        else:
            done = Repairer(tier, control, control.repairs, lambda: replicas).restore(job.run, job.step)
        if not (isinstance(job, MergeJob) and job.arguments.dry_run):
            audit.offline(catalog.database, default_node(), f"checkpoint-{_DONE[job.kind]}", job.run, job.step)
        return done


def _foretold(job: ImportJob, root: Path) -> dict[str, Any]:
    """A dry run of an import. Nothing is made, not even the root, and a daemon may be serving it."""
    check_root_place(root)
    there = PosixTier(root).list(naming.checkpoint_path(job.run, job.step)) if root.is_dir() else []
    if there:
        raise AlreadyCommitted(f"{job.run}@{job.step} is already committed", hint="remove it, or choose another step")
    return foretold(open_source(Path(job.arguments.source)), job)


@contextmanager
def _decided(root: Path, listed: bool) -> Iterator[tuple[Tier, Control, Catalog]]:
    """The root's tier, control and catalog, under an exclusive lock: `RootBusy` while a daemon serves it.

    With `listed` the catalog is first reconciled with the directories, which would unlist damaged checkpoints.
    """
    lock = lock_root(root)
    try:
        tier = PosixTier(root)
        catalog = Catalog.open(f"sqlite:///{root / naming.CATALOG}")
        try:
            if listed:
                roots.reconcile(PosixStore(tier), catalog)
            control = Control(tier, catalog, None)
            yield tier, control, catalog
            control.close()
        finally:
            catalog.close()
    finally:
        lock.release()


def _root_of(path: Path) -> Tier:
    """The root that a replica, or a single checkpoint's directory in one, belongs to."""
    if not path.is_dir():
        raise InvalidRequest(f"the directory {path} does not exist", hint="pass a replica's directory")
    found = path.resolve()
    if (found / naming.COMMIT).exists() or (found / naming.MANIFEST).exists():
        if found.parent.name != naming.CHECKPOINTS:
            raise InvalidRequest(f"{path} is not inside a root", hint="pass the directory that contains RUN/checkpoints/")
        found = found.parents[2]
    return PosixTier(found)


def _converted(wanted: ConvertArguments, progress: Progress) -> dict[str, Any]:
    check_local(wanted.to)
    check_directory(Path(wanted.source))
    source, target = Path(wanted.source).resolve(), Path(wanted.to).absolute()
    if target.resolve().is_relative_to(source):
        raise InvalidRequest(f"{wanted.to} is inside of the checkpoint", hint="choose another directory")
    exporting.check_name(target.name)
    check_output_place(target)
    check_terms(wanted)
    conversion = converting.plan_conversion(open_source(source), wanted)
    if wanted.dry_run:
        if target.exists() or target.is_symlink():
            raise exporting.taken(wanted.to)
        return {**converting.report(conversion), "to": wanted.to, "dry_run": True}
    done = exports.convert(conversion, ExportWork(_place(target), target.name, progress))
    return {**done, "to": wanted.to}


def _place(target: Path) -> PosixTier:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot make {target.parent}: {error.strerror}", hint="choose another directory") from error
    return PosixTier(target.parent.resolve())
