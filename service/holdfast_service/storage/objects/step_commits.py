"""Reads, lists, puts, replaces and deletes the commit objects of one root."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from holdfast_files.objects import commit_objects
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.commit_objects import CommitObject, Published, commit_object
from holdfast_files.objects.object_files import ObjectFiles, read_commit_object
from holdfast_formats import naming
from holdfast_formats.errors import CorruptManifest, StorageFailed
from holdfast_formats.naming import CheckpointId, Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.bodies import CheckpointInfo

from .conditional_puts import ConditionalPuts
from .put_intents import Settled
from .uploads import RETRY_S

READS_AT_ONCE = 32


class Standing(NamedTuple):
    """The commit object of a step and its tag; `content` is None if it cannot be read."""

    content: CommitObject | None
    etag: str

    @property
    def checkpoint(self) -> Published | None:
        return None if self.content is None else self.content.checkpoint

    @property
    def replaced(self) -> tuple[Published | None, ...]:
        return () if self.content is None else self.content.replaced

    def names(self, data: str) -> bool:
        return self.content is not None and any(one.data == data for one in self.content.kept)

    def may_name(self, prefix: str) -> bool:
        """Whether files below this prefix are a checkpoint's, or may be, since the commit object cannot be read."""
        return self.content is None or self.names(prefix.rpartition("/")[2])

    def replaced_at(self, place: Place) -> Published | None:
        """What is kept at a `naming.replaced_place`."""
        return self.replaced[place.round_id] if place.round_id < len(self.replaced) else None

    def without(self, place: Place) -> tuple[Published | None, ...]:
        return tuple(None if number == place.round_id else one for number, one in enumerate(self.replaced))


class StepCommits:
    """The commit objects of a root. What this process changes is read again by `committed`."""

    def __init__(self, bucket: Bucket, puts: ConditionalPuts, committed: ObjectFiles) -> None:
        self._bucket, self._puts, self._committed = bucket, puts, committed
        # By run and step, whether replaced checkpoints are named: as last listed, and as written here since.
        self._replacing: dict[str, dict[int, bool]] = {}
        self._lock = threading.Lock()

    def standing(self, which: CheckpointId) -> Standing | None:
        try:
            found = read_commit_object(self._bucket, *which)
        except CorruptManifest:
            status = self._bucket.head(naming.commit_object_path(*which))
            return None if status is None else Standing(None, status.etag)
        return None if found is None else Standing(*found)

    def listed(self, run: str) -> Mapping[int, str]:
        """The ETag of each commit object of a run, by step, ascending."""
        top = f"{naming.check_run(run)}/{naming.COMMITS}/"
        found, replacing = {}, {}
        for page in self._bucket.pages(top, delimiter="/"):
            for one in page.objects:
                step = naming.parse_step_directory(one.key.removeprefix(top))
                if step is not None:
                    found[step], replacing[step] = one.etag, commit_objects.may_name_replaced(one.size)
        with self._lock:
            self._replacing[run] = replacing
        return dict(sorted(found.items()))

    def contents(self, run: str, steps: Collection[int]) -> Mapping[int, CommitObject]:
        """The commit objects of these steps, those that can be read."""

        def read(step: int) -> CommitObject | None:
            standing = self.standing(CheckpointId(run, step))
            return None if standing is None else standing.content

        with ThreadPoolExecutor(min(READS_AT_ONCE, max(len(steps), 1)), "holdfast-commits") as pool:
            return {step: one for step, one in zip(steps, pool.map(read, steps), strict=True) if one is not None}

    def described(self, run: str, steps: Collection[int]) -> dict[int, CheckpointInfo]:
        """What the commit objects of these steps repeat of the manifests, where they do."""
        stated = {step: content.checkpoint.summary for step, content in self.contents(run, steps).items()}
        found = {step: bodies.of_summary(run, step, summary) for step, summary in stated.items()}
        return {step: one for step, one in found.items() if one is not None}

    def replacing(self, run: str) -> Mapping[int, CommitObject]:
        """The commit objects that name replaced checkpoints, of those that this process has listed last, or written since:
        no save needs a list for it.
        """
        if run not in self._replacing:
            self.listed(run)
        with self._lock:
            wanted = [step for step, replaces in self._replacing.get(run, {}).items() if replaces]
        return self.contents(run, wanted)

    def forget_all(self) -> None:
        """Runs were moved: list and read their commit objects again."""
        with self._lock:
            self._replacing.clear()
        self._committed.forget_all()

    def put(self, which: CheckpointId, content: CommitObject, standing: Standing | None) -> Settled:
        """Write the commit object where there is none, or in place of the standing one."""
        path, data = naming.commit_object_path(*which), commit_objects.encode(content, *which)
        if standing is None:
            done = self._puts.first(path, data, RETRY_S)
        else:
            done = self._puts.replace(path, data, standing.etag, RETRY_S)
        with self._lock:
            if done.outcome != "done":
                self._replacing.pop(which.run, None)
            elif which.run in self._replacing:
                self._replacing[which.run][which.step] = any(content.replaced)
        self._committed.forget(*which)
        return done

    def mark(self, key: str | None) -> None:
        """Write the mark of a line before the commit object; None where the line is not known."""
        if key is not None:
            self._puts.always(key, b"", RETRY_S)

    def change(self, which: CheckpointId, content: CommitObject, standing: Standing) -> None:
        """Replace the standing commit object; `StorageFailed` if that may not have happened."""
        done = self.put(which, content, standing)
        if done.outcome != "done":
            path = naming.commit_object_path(*which)
            raise StorageFailed(f"{path} was not replaced: {done.detail or 'another writer has changed it'}", path=path)

    def delete(self, which: CheckpointId) -> None:
        """Delete the commit object; a lost answer is settled by reading back."""
        path = naming.commit_object_path(*which)
        self._puts.settle(path)
        try:
            self._bucket.delete([path])
        except StorageFailed:
            if self._bucket.head(path) is not None:
                raise
        with self._lock:
            self._replacing.get(which.run, {}).pop(which.step, None)
        self._committed.forget(*which)

    def withdraw(self, which: CheckpointId, data: str) -> None:
        """Unpublish a checkpoint whose files are gone, if it stands: what it has replaced stands again."""
        standing = self.standing(which)
        if standing is None or standing.checkpoint is None or standing.checkpoint.data != data:
            return
        kept = [number for number, one in enumerate(standing.replaced) if one is not None]
        if not kept:
            self.delete(which)
            return
        newest = naming.replaced_place(*which, kept[-1])
        before = standing.replaced_at(newest)
        assert before is not None
        self.change(which, commit_object(before, standing.without(newest)), standing)


def data_of(run: str, one: Published) -> str:
    """The prefix of a published checkpoint's files."""
    return f"{run}/{naming.DATA}/{one.data}"
