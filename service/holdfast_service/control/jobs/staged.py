"""Staging of queued or running imports and merges: a later start of the job continues from it."""

from __future__ import annotations

import logging

from sqlalchemy import select

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.files import Files
from holdfast_formats.naming import Place
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import JobRow
from holdfast_service.control.jobs.catalog import GOES_ON

log = logging.getLogger(__name__)

KINDS = ("import", "merge")


def wanted_places(database: Database, files: Files) -> list[Place]:
    """The places of staging that a sweep has to spare; all places of jobs if the catalog cannot be asked."""
    staged_places = _places(files)
    if not staged_places:
        return []
    try:
        with database.read() as session:
            wanted = select(JobRow.run, JobRow.step).where(JobRow.kind.in_(KINDS), JobRow.state.in_(GOES_ON))
            wanted_steps = {(run, step) for run, step in session.execute(wanted)}
    except CheckpointError as away:
        log.warning("cannot sweep the files that jobs staged: %s", away.detail)
        return staged_places
    return [place for place in staged_places if (place.run, place.step) in wanted_steps]


def _places(files: Files) -> list[Place]:
    places = set()
    for run in filter(naming.is_run_name, files.list("")):
        for name in files.list(f"{run}/{naming.STAGING}"):
            staged = naming.parse_staging_directory(naming.without_progress(name))
            if staged is not None and naming.is_job_place(staged):
                places.add(Place(run, *staged))
    return sorted(places)
