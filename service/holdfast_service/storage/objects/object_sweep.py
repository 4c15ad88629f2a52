"""Finds what a bucket holds that will never be a checkpoint: files that no commit object names, and unfinished uploads.

Files are listed before commit objects are read, and marks of lines, which are put after files, before files, so that what is
committed meanwhile is not taken for garbage. Only names of
Holdfast's own form are looked at: everything else below `RUN/data/` stays. Ages are differences of the store's own times, of
one answer (I17).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from holdfast_files.objects.answers import PendingUpload
from holdfast_files.objects.client import Bucket
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import CheckpointId, Place

from .prefixes import FENCE, names_in, objects_below
from .step_commits import StepCommits
from .trashed_runs import TrashedRuns

log = logging.getLogger(__name__)


class Garbage(NamedTuple):
    """The prefix of files that can be removed, and their place."""

    place: Place
    prefix: str


class Sweep:
    """One sweep of a root."""

    def __init__(self, bucket: Bucket, commits: StepCommits, trash: TrashedRuns) -> None:
        self._bucket, self._commits, self._trash = bucket, commits, trash

    def found(self, live: Collection[Place], idle_s: float | None) -> Iterator[Garbage]:
        """Files that no commit object names, in order; unfinished uploads are aborted. Those at a live place stay, and those
        that were begun or written within `idle_s`.
        """
        spared = {place if place.round_id else place[:3] for place in live}
        pending = self._pending()
        for run in sorted({*filter(naming.is_run_name, names_in(self._bucket, "")), *(place.run for place in pending)}):
            marks = self._marks(run, idle_s)
            places = self._places(run, spared, idle_s)
            self._delete_marks(marks, places)
            uploading = {place for place in pending if place.run == run}
            steps = {*self._commits.listed(run), *self._trash.steps(run)} if places or uploading else set()
            for place in sorted(places | uploading):
                if place in spared or place[:3] in spared or not self._end_uploads(pending.get(place, ()), idle_s):
                    continue
                if place in uploading and place not in places:
                    yield Garbage(place, naming.data_path(place))
                    continue
                others = [other for other in places if other.step == place.step and other != place]
                named = place.step in steps and not others  # by the only commit object that could name it
                if not named and self._is_garbage(place, idle_s):
                    yield Garbage(place, naming.data_path(place))

    def _places(self, run: str, spared: Collection[object], idle_s: float | None) -> set[Place]:
        """The places of a run that have files. Fences that a crash has left are removed."""
        found, top = set[Place](), f"{run}/{naming.DATA}/"
        for page in self._bucket.pages(top, delimiter="/"):
            names = [prefix.removeprefix(top).rstrip("/") for prefix in page.prefixes]
            found.update(place for name in names if (place := naming.parse_data_directory(run, name)) is not None)
            for one in page.objects:
                place = naming.parse_data_directory(run, one.key.removeprefix(top).removesuffix(FENCE))
                is_left = one.key.endswith(FENCE) and place is not None and place not in spared
                if is_left and (idle_s is None or page.now - one.modified >= idle_s):
                    self._bucket.delete([one.key])
        return found

    def _marks(self, run: str, idle_s: float | None) -> dict[str, Place]:
        """The marks of a run's lines that were not put too lately, by key, and the places of their files."""
        found, top = dict[str, Place](), naming.line_marks(run)
        for page in self._bucket.pages(top):
            for one in page.objects:
                mark = naming.parse_line_mark(run, one.key.removeprefix(top))
                if mark is not None and (idle_s is None or page.now - one.modified >= idle_s):
                    found[one.key] = mark.place
        return found

    def _delete_marks(self, marks: Mapping[str, Place], places: Collection[Place]) -> None:
        """Delete those whose files are gone."""
        left = [key for key, place in marks.items() if place not in places]
        if left:
            self._bucket.delete(left)

    def _pending(self) -> dict[Place, list[PendingUpload]]:
        """Unfinished uploads by place; none where listing them is not allowed."""
        found = defaultdict(list)
        try:
            for upload in self._bucket.uploads(""):
                run, _, rest = upload.key.partition(f"/{naming.DATA}/")
                place = naming.parse_data_directory(run, rest.partition("/")[0]) if naming.is_run_name(run) else None
                if place is not None:
                    found[place].append(upload)
        except CheckpointError as error:
            log.warning(
                "unfinished uploads to %s are not swept, because they cannot be listed: %s", self._bucket.label, error.detail
            )
        return dict(found)

    def _end_uploads(self, uploads: Collection[PendingUpload], idle_s: float | None) -> bool:
        """Abort uploads; False if one was begun too lately."""
        if uploads and idle_s is not None:
            now = next(page.now for page in self._bucket.pages(f"{naming.ROOT_FILE}/"))
            if any(now - one.begun < idle_s for one in uploads):
                return False
        for one in uploads:
            self._bucket.abort(one.key, one.id)
        return True

    def _is_garbage(self, place: Place, idle_s: float | None) -> bool:
        which, data = CheckpointId(place.run, place.step), naming.data_directory(place)
        standing = self._commits.standing(which)
        if standing is not None and (standing.content is None or standing.names(data)):
            return False
        if self._trash.names(which, data):
            return False
        found = objects_below(
            self._bucket, naming.data_path(place)
        )  # none, where a server lists empty directories for a while
        return bool(found.keys) and (idle_s is None or found.idle_s >= idle_s)


def job_places(bucket: Bucket, run: str) -> list[Place]:
    """The places of jobs of a run that have files or, where these can be listed, unfinished uploads."""
    top = f"{naming.check_run(run)}/{naming.DATA}/"
    names = set(names_in(bucket, top.rstrip("/")))
    with suppress(CheckpointError):
        names.update(one.key.removeprefix(top).partition("/")[0] for one in bucket.uploads(top))
    found = (naming.parse_data_directory(run, name) for name in names)
    return sorted(place for place in found if place is not None and naming.is_job_place(place))
