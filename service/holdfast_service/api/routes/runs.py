"""Routes: runs and their checkpoints."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection
from typing import Annotated

from fastapi import APIRouter, Query

from holdfast_formats import naming
from holdfast_formats.errors import Damaged
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import check_label
from holdfast_formats.rest.runs import RunAbout, RunChange
from holdfast_service.api import problems
from holdfast_service.api.access.authorization import needs
from holdfast_service.api.content import open_checkpoints, selectors
from holdfast_service.api.routes import summaries
from holdfast_service.api.services import Cursor, Limit, Services, Since, StepMax, StepMin, Viewer, Wired
from holdfast_service.control.catalog.listing import Within
from holdfast_service.control.checkpoints.run_files import RunFile, RunFiles
from holdfast_service.control.findings import missing

log = logging.getLogger(__name__)

router = APIRouter(prefix="/v1", tags=["runs"], responses=problems.RESPONSES)
Label = Annotated[str | None, Query(max_length=128, description="only checkpoints with this label")]
Sort = Annotated[
    str,
    Query(pattern=r"^-?(step|created|bytes|tensors)$", description="sort by this column; with a minus, largest first"),
]
State = Annotated[
    bodies.CheckpointState | None, Query(description="only checkpoints in this state, which is the worst known finding")
]


class Marks:
    """The pins and labels of a run: its file alone knows them."""

    def __init__(self, files: RunFiles, run: str) -> None:
        self._file = RunFile()
        self._problem: Damaged | None = None
        self._pins: set[int] = set()
        self._labels: defaultdict[int, list[str]] = defaultdict(list)
        if not naming.is_run_name(run):
            return  # the catalog knows no such run
        try:
            self._file = files.shown(run)
        except Damaged as error:
            self._problem = error
            log.warning("listing %s without pins and labels: %s", run, error.detail)
        self._pins = set(self._file.pins)
        for label, steps in sorted(self._file.labels.items()):
            for step in steps:
                self._labels[step].append(label)

    def labelled(self, label: str) -> Collection[int]:
        """The steps that have this label; `InvalidRequest`, or `CorruptManifest` where the file cannot be read."""
        check_label(label)
        if self._problem is not None:
            raise self._problem
        return self._file.labels.get(label, ())

    def on(self, checkpoint: bodies.CheckpointInfo) -> bodies.CheckpointInfo:
        """The checkpoint with its marks."""
        pinned, labels = checkpoint.step in self._pins, self._labels.get(checkpoint.step, [])
        return checkpoint.model_copy(update={"pinned": pinned, "labels": labels}) if pinned or labels else checkpoint


@router.get("/runs", dependencies=needs("read"), summary="Runs, by name or by a column of their summaries")
def list_runs(
    services: Wired, wanted: summaries.Wanted, cursor: Cursor = None, limit: Limit = 100
) -> bodies.Page[bodies.Run]:
    """Any order but that by name is some seconds old."""
    names = services.summaries.names(cursor, limit, wanted)
    return bodies.Page(items=services.summaries.runs(names.items), next=names.next)


@router.get("/runs/{run}", dependencies=needs("read"), summary="One run")
def get_run(services: Wired, run: str) -> bodies.Run:
    return _one(services, run)


@router.get(
    "/runs/{run}/about",
    dependencies=needs("read"),
    summary="What is stored about a run: owner, notes, tags, and for each launch git commit, command and config",
)
def get_about(services: Wired, run: str) -> RunAbout:
    run_summary = _one(services, run)
    return _about(services, run, run_summary)


@router.patch(
    "/runs/{run}",
    dependencies=needs("write", act="run-changed"),
    summary="Set owner, notes and tags, archive a run or undo that, acknowledge its death",
)
def patch_run(services: Wired, viewer: Viewer, run: str, change: RunChange) -> RunAbout:
    """409 for a run whose ranks are connected and that is to be archived."""
    run_summary = _one(services, run)
    if change.acknowledged is not None:
        services.control.catalog.database.check_writable()  # what is snoozed beside the run's file is there alone
    services.control.run_metadata.change(
        run, change, run_summary.life, trains=run_summary.state == "running", by=viewer.name
    )
    summed = services.summaries
    if change.acknowledged is None:
        summed.renew()
    else:
        summed.death_seen(run)
    run_summary = _one(services, run)
    return _about(services, run, run_summary)


def _about(services: Wired, run: str, found: bodies.Run) -> RunAbout:
    gone = missing.missing(services.control.catalog.database, run)
    return services.control.run_metadata.of(found).model_copy(update={"missing": gone})


def _one(services: Wired, run: str) -> bodies.Run:
    return next(iter(services.summaries.runs([run])), None) or services.control.catalog.run(run)


@router.get(
    "/runs/{run}/checkpoints", dependencies=needs("read"), summary="A run's committed checkpoints, newest step first"
)
def list_checkpoints(  # noqa: PLR0913 — one a filter
    services: Wired,
    run: str,
    label: Label = None,
    state: State = None,
    step_min: StepMin = None,
    step_max: StepMax = None,
    since: Since = None,
    sort: Sort = "-step",
    cursor: Cursor = None,
    limit: Limit = 100,
) -> bodies.Page[bodies.CheckpointInfo]:
    """All given filters apply together. An unknown label gives an empty list."""
    marks = Marks(services.control.files, run)
    within = Within(step_min, step_max, since, None if label is None else marks.labelled(label), sort)
    page = services.control.catalog.checkpoints(run, cursor, limit, state, within)
    return page.model_copy(update={"items": [marks.on(checkpoint) for checkpoint in page.items]})


@router.get("/runs/{run}/checkpoints/{step}", dependencies=needs("read"), summary="One checkpoint, by step or selector")
def get_checkpoint(
    services: Wired, run: str, step: str, metric: selectors.Metric = None, mode: selectors.Mode = "min"
) -> bodies.CheckpointInfo:
    """Selectors are `latest`, `latest-healthy`, or `best` with `?metric=` and `?mode=`, which considers verified,
    healthy checkpoints.
    """
    if step == selectors.BEST:
        checkpoint = selectors.find(services, run, step, metric, mode)
    else:
        checkpoint = open_checkpoints.find(services, run, step)
    checking = _checking(services, run, checkpoint.step) if checkpoint.unchecked else None
    return Marks(services.control.files, run).on(checkpoint.model_copy(update={"checking": checking}))


def _checking(services: Services, run: str, step: int) -> bodies.Checking | None:
    """The progress of a check that several nodes share; None if there is none."""
    progress = services.saver.spread.progress(run, step)
    return None if progress is None else bodies.Checking(done_bytes=progress.done, total_bytes=progress.total)
