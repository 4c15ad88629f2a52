"""A root in a bucket: its runs and checkpoints, by their commit objects."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.read.checkpoint_root import CheckpointRoot, mapped
from holdfast_files.objects.address import BucketAddress
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, Damaged, NoSuchRun, StorageFailed
from holdfast_formats.near_names import did_you_mean
from holdfast_formats.root_files import FILE_BYTES_MAX, RootFile, decode

if TYPE_CHECKING:
    from holdfast.read.sources import Source
    from holdfast_files.objects.client import Bucket
    from holdfast_formats.lineage import Key
    from holdfast_formats.rest.bodies import CheckpointInfo

SHOWN_MAX = 3  # names of what is there instead of a root


class BucketRoot(CheckpointRoot):
    """Reads the checkpoints below a prefix of a bucket. Nothing is asked of the bucket before the first call."""

    parallel = 32

    def __init__(self, address: BucketAddress) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._opened: Bucket | None = None
        self._id = ""  # the root's, as last read
        self._known: dict[str, list[int]] = {}  # steps that `runs` has seen, for the next question about the run

    @property
    def label(self) -> str:
        return self._address.label

    def runs(self) -> list[str]:
        names = sorted(name for name in self._names() if naming.is_run_name(name))
        found = dict(zip(names, mapped(self, self.committed_steps, names), strict=True))
        self._known = {name: steps for name, steps in found.items() if steps}
        if not self._known:
            self._check()
        return list(self._known)

    def steps(self, run: str) -> list[int]:
        known = self._known.pop(run, None)
        steps = self.committed_steps(run) if known is None else known
        if not steps:
            hint = did_you_mean(run, self.runs(), "`holdfast ls` lists the runs")
            raise NoSuchRun(f"{self.label} has no run {run!r}", hint=hint)
        return steps

    def committed_steps(self, run: str) -> list[int]:
        top = f"{naming.check_run(run)}/{naming.COMMITS}/"
        keys = (one.key.removeprefix(top) for page in self._bucket.pages(top) for one in page.objects)
        return sorted((step for step in map(naming.parse_step_directory, keys) if step is not None), reverse=True)

    def published_steps(self, run: str) -> list[int]:
        return self.committed_steps(run)

    def has(self, run: str, step: int) -> bool:
        return self._bucket.head(naming.commit_object_path(run, step)) is not None

    def is_root(self, id: str) -> bool:
        """Whether the root with this id is there, and can be read with the keys of this process."""
        if self._id == id:
            return True
        try:
            data, _ = self._bucket.read_tagged(naming.ROOT_FILE, FILE_BYTES_MAX)
        except CheckpointError:
            return False
        mark = decode(RootFile, data)
        self._id = "" if mark is None else mark.id
        return self._id == id

    def source(self, run: str, step: int) -> Source:
        from holdfast.read.object_source import ObjectSource  # with numpy, which completion does not wait for

        return ObjectSource(self._bucket, run, step)

    def described(self, run: str, step: int) -> CheckpointInfo | None:
        """Out of its commit object; None also for a checkpoint that cannot be read: reading it reports the damage."""
        from holdfast_files.objects.object_files import read_commit_object
        from holdfast_formats.rest import bodies  # with pydantic, which completion does not wait for

        with suppress(Damaged):
            found = read_commit_object(self._bucket, run, step)
            return None if found is None else bodies.of_summary(run, step, found.content.checkpoint.summary)
        return None

    def lines(self, run: str) -> dict[int, Key]:
        """Of steps with one mark. Several are of a step that is, or was, replaced: its commit object says which holds."""
        found: dict[int, Key | None] = {}
        top = naming.line_marks(run)
        for page in self._bucket.pages(top):
            for one in page.objects:
                mark = naming.parse_line_mark(run, one.key.removeprefix(top))
                if mark is not None:
                    found[mark.place.step] = None if mark.place.step in found else mark.line
        return {step: line for step, line in found.items() if line is not None}

    def close(self) -> None:
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    @property
    def _bucket(self) -> Bucket:
        from holdfast_files.objects import client  # with botocore

        with self._lock:
            if self._opened is None:
                self._opened = client.opened(self.label)
            return self._opened

    def _names(self) -> set[str]:
        """The first parts of the keys."""
        return {prefix.rstrip("/") for page in self._bucket.pages("", delimiter="/") for prefix in page.prefixes}

    def _check(self) -> None:
        if self._bucket.head(naming.ROOT_FILE) is not None:
            return
        page = next(iter(self._bucket.pages("", delimiter="/")))
        there = [*(one.key for one in page.objects), *page.prefixes][:SHOWN_MAX]
        if there:
            text = f"{self.label} is not the root of a Holdfast daemon: it has {', '.join(there)}, and no {naming.ROOT_FILE}"
        else:
            text = f"{self.label} is empty: there is no {naming.ROOT_FILE}"
        raise StorageFailed(text, hint="pass the bucket and the prefix that the daemon has as --root")
