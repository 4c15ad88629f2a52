"""What this wing does with any directory of this user: imports and exports of a root, and conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast_files.objects.address import is_address
from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, InvalidRequest
from holdfast_formats.rest.jobs import ConvertArguments, ExportJob, ImportJob
from holdfast_formats.root_files import check_local, check_output_place, check_root_place
from holdfast_service.daemon.copying.progress import Progress
from holdfast_service.storage import Tier, tier_at
from holdfast_service.wing import RootWork
from holdfast_service.wings.convert import converting, export_jobs, exporting
from holdfast_service.wings.convert.export_jobs import Exporter, ExportWork
from holdfast_service.wings.convert.foreign_export import check_terms
from holdfast_service.wings.convert.import_jobs import Importer, foretold
from holdfast_service.wings.convert.importing import OURS
from holdfast_service.wings.convert.jobs import check_idle
from holdfast_service.wings.convert.sources import check_source, open_source


def bring(work: RootWork, job: ImportJob, progress: Progress) -> dict[str, Any]:
    """Import any directory; the report."""
    check_idle(work.trains, job)
    return Importer(work.control).bring(open_source(work.here / job.arguments.source), job, progress)


def export(work: RootWork, job: ExportJob, progress: Progress) -> dict[str, Any]:
    """Export to any directory, which is made with those above it; the report. After a failure nothing of it is left."""
    check_local(job.arguments.to)
    target = work.here / job.arguments.to
    exporting.check_name(target.name)
    check_output_place(target)
    if job.arguments.form is not None:
        check_terms(job.arguments)
    named = job.model_copy(update={"arguments": job.arguments.model_copy(update={"to": target.name})})
    done = Exporter(work.control).export(_place(target), named, progress)
    return {**done, "to": job.arguments.to}


def foretell(root: Path, job: ImportJob) -> dict[str, Any]:
    """A dry run of an import. Nothing is made, not even the root, and a daemon may be serving it."""
    check_root_place(root)
    present = tier_at(root).list(naming.checkpoint_path(job.run, job.step)) if root.is_dir() else []
    if present:
        raise AlreadyCommitted(f"{job.run}@{job.step} is already committed", hint="remove it, or choose another step")
    return foretold(open_source(Path(job.arguments.source)), job)


def convert(wanted: ConvertArguments, progress: Progress) -> dict[str, Any]:
    """Convert a directory or a checkpoint in a bucket, also a served one; the report. After a failure nothing is left."""
    check_local(wanted.to)
    if is_address(wanted.source):
        return _of_bucket(wanted, progress)
    check_source(Path(wanted.source))
    source, target = Path(wanted.source), Path(wanted.to).absolute()
    if target.resolve().is_relative_to(source.resolve()):
        raise InvalidRequest(f"{wanted.to} is inside the checkpoint", hint="choose another directory")
    exporting.check_name(target.name)
    check_output_place(target)
    check_terms(wanted)
    conversion = converting.plan_conversion(open_source(source), wanted)
    if wanted.dry_run:
        if target.exists() or target.is_symlink():
            raise exporting.taken(wanted.to)
        return {**converting.report(conversion), "to": wanted.to, "dry_run": True}
    done = export_jobs.convert(conversion, ExportWork(_place(target), target.name, progress))
    return {**done, "to": wanted.to}


def _of_bucket(wanted: ConvertArguments, progress: Progress) -> dict[str, Any]:
    """Export s3://BUCKET/PREFIX/RUN@STEP for another program; nothing is written there, and no lease is needed."""
    from holdfast_files.objects import client  # which needs the extra s3
    from holdfast_files.objects.object_files import ObjectFiles

    root, _, which = wanted.source.rpartition("/")
    run, _, step = which.rpartition("@")
    if not step.isdecimal() or wanted.kind not in (None, OURS) or wanted.dry_run:
        raise InvalidRequest(
            "of a bucket, only checkpoints of Holdfast are converted, and without a dry run",
            hint="write s3://BUCKET/PREFIX/RUN@STEP; or export it without --as, and convert that directory",
        )
    bucket, target = client.opened(root), Path(wanted.to).absolute()
    exporting.check_name(target.name)
    check_output_place(target)
    try:
        work = ExportWork(_place(target), target.name, progress)
        done = export_jobs.converted(ObjectFiles(bucket), naming.checkpoint_path(run, int(step)), wanted, work)
    finally:
        bucket.close()
    return {**done, "to": wanted.to}


def _place(target: Path) -> Tier:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot make {target.parent}: {error.strerror}", hint="choose another directory") from error
    return tier_at(target.parent.resolve())
