"""Wires jobs: the kinds that a node can do, and their handlers. Only `__main__` is above."""

from __future__ import annotations

from typing import Any

from holdfast_files.comparing import bytes_to_read
from holdfast_formats import naming
from holdfast_formats.disk import coded
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest import comparing
from holdfast_formats.rest.jobs import CompareJob, VerifyJob
from holdfast_formats.rest.operations import Job
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.checkpoints import consistency, roots
from holdfast_service.control.jobs.catalog import Jobs
from holdfast_service.control.jobs.runner import JobKind, JobRunner, Progress
from holdfast_service.daemon.checking.comparing import ComparedCheckpoint, compare
from holdfast_service.daemon.job_workers import Workers
from holdfast_service.daemon.writing.priority import give_way
from holdfast_service.wing import installed

MOST_CHANGED = 100  # tensors that a comparison names


def start_jobs(node: str, workers: Workers) -> JobRunner:
    catalog, control, repairer = workers.catalog, workers.control, workers.repairer

    def exists(wanted: VerifyJob) -> None:
        if not (wanted.arguments.repair and repairer.has_copy(wanted.run, wanted.step)):
            catalog.checkpoint(wanted.run, wanted.step)

    def verify(job: Job, progress: Progress) -> dict[str, Any]:
        wanted = VerifyJob.of(job)
        if wanted.arguments.repair:
            return repairer.restore(wanted.run, wanted.step)
        return workers.checks.verify(wanted.run, wanted.step, progress)

    def rebuild(job: Job, progress: Progress) -> dict[str, Any]:
        control.trash.recover()
        return consistency.rebuild(workers.control.store, catalog, {node, *control.writers()}, utc_now()).model_dump()

    comparison = Comparison(workers)
    kinds = {
        "verify": JobKind(verify, exists),
        "scrub": JobKind(workers.checks.scrub),
        "rebuild": JobKind(rebuild),
        "compare": JobKind(comparison, comparison.check),
    }
    for wing in installed():
        kinds |= wing.jobs(workers)
    runner = JobRunner(Jobs(catalog.database, node, utc_now, control.nodes), control.events, kinds, begin=give_way)
    runner.start()
    return runner


class Comparison:
    """The `compare` job: the differences of checkpoint `with`, RUN@STEP or a step of the same run, from the job's
    checkpoint.
    """

    def __init__(self, workers: Workers) -> None:
        self._files, self._catalog, self._control = workers.control.store.files, workers.catalog, workers.control

    def check(self, wanted: CompareJob) -> None:
        """`InvalidRequest` for an invalid name, `NoSuchCheckpoint` for a checkpoint that does not exist."""
        for side in self._sides(wanted):
            self._catalog.checkpoint(side.run, side.step)

    def __call__(self, job: Job, progress: Progress) -> dict[str, Any]:
        """Raises `CorruptExtent` for damaged bytes: only verified bytes are compared (I7)."""
        left, right = sides = self._sides(CompareJob.of(job))
        with self._control.readers.reading(*left), self._control.readers.reading(*right):
            manifests = [coded.contents(roots.load_manifest(self._files, *side)) for side in sides]
            pairs = comparing.pairs(manifests[0], manifests[1])
            total, done = bytes_to_read(pairs), 0

            def read(size: int) -> None:
                nonlocal done
                done += size
                progress.report(done, total)

            differences = list(compare(self._files, sides, pairs, read))
        differing = [one for one in differences if one.state != "equal"]
        most = sorted(differing, key=lambda one: comparing.largest_first(one, one.relative, comparing.has_nonfinite(one)))
        summary = comparing.summarise(differences)._asdict()
        return {**summary, "bytes": total, "most": [one.model_dump() for one in most[:MOST_CHANGED]]}

    def _sides(self, wanted: CompareJob) -> tuple[ComparedCheckpoint, ComparedCheckpoint]:
        run, at, step = str(wanted.arguments.other).rpartition("@")
        if not (step.isascii() and step.isdigit() and len(step) <= len(str(naming.STEP_MAX))):
            raise InvalidRequest("`with` does not name a checkpoint", hint="give RUN@STEP, or a step of the same run")
        other = naming.check_run(run) if at else wanted.run
        return ComparedCheckpoint(wanted.run, wanted.step), ComparedCheckpoint(other, naming.check_step(int(step)))
