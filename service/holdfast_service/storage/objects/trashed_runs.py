"""Moves whole runs to the trash of a bucket and back: control files and commit objects, not the files of checkpoints.

`.holdfast.trash/ENTRY/` has what `RUN/` had, but for `data/` and `lines/`, which stay where they are: commit objects in
the trash name them, and a sweep spares them. A move copies all objects behind a mark that says where they are going,
deletes them where they were, commit objects first, and deletes that mark. The next start finishes a move that has a mark,
so that the run is then complete in one place. `ENTRY~gone/prefixes` makes a removal final: it lists the prefixes that
`free_purged` removes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from holdfast_files.objects import commit_objects
from holdfast_files.objects.answers import Listed
from holdfast_files.objects.client import Bucket
from holdfast_formats import naming
from holdfast_formats.errors import (
    AlreadyCommitted,
    CheckpointError,
    CorruptManifest,
    InvalidRequest,
    NoSuchResource,
    StorageFailed,
)
from holdfast_formats.naming import CheckpointId
from holdfast_service.storage.store import Alone

from .conditional_puts import ConditionalPuts
from .prefixes import erase, erase_data, has_objects, names_in

COPIES_AT_ONCE = 16
PREFIXES_BYTES_MAX = 2**26
_MARK = ".moving"
_PREFIXES = "prefixes"
_TO_TRASH, _TO_RUN = b"to the trash\n", b"to the run\n"

Confirm = Callable[[], None]  # raises if another daemon has the root by now


class TrashedRuns:
    """The trash of one root. Callers keep other nodes from changing the run meanwhile."""

    def __init__(self, bucket: Bucket, puts: ConditionalPuts, confirm: Confirm) -> None:
        self._bucket, self._puts, self._confirm = bucket, puts, confirm

    def put_away(self, run: str, entry: str) -> None:
        self._confirm()
        self._check_entry(entry, naming.check_run(run))
        self._finish_moves_of(run)
        if not self._own(run):
            raise NoSuchResource(f"there is no run {run}", path=run)
        if has_objects(self._bucket, _path(entry)) or self._is_purged(entry):
            raise AlreadyCommitted(f"{_path(entry)} exists already", path=_path(entry))
        self._bucket.put(_mark(entry), _TO_TRASH)
        self._finish(entry, run, _TO_TRASH)

    def take_out(self, entry: str, run: str) -> None:
        self._confirm()
        self._finish_moves_of(naming.check_run(run))
        if self._is_purged(entry) or not has_objects(self._bucket, _path(entry)):
            raise NoSuchResource(f"the trash has no {entry}", path=_path(entry))
        self._check_entry(entry, run)
        if self._own(run):
            raise AlreadyCommitted(f"{run} exists already", path=run)
        self._bucket.put(_mark(entry), _TO_RUN)
        self._finish(entry, run, _TO_RUN)

    def purge(self, entry: str) -> bool:
        self._confirm()
        if self._is_purged(entry) or not has_objects(self._bucket, _path(entry)):
            return False
        prefixes = "".join(f"{prefix}\n" for prefix in sorted(self._prefixes(entry)))
        done = self._puts.first(f"{_path(naming.purged_entry(entry))}/{_PREFIXES}", prefixes.encode())
        if done.outcome == "unknown":
            raise StorageFailed(f"{entry} may not be given up: {done.detail}", path=_path(entry))
        if done.outcome == "done":
            erase(self._bucket, _path(entry))
        return done.outcome == "done"

    def free_purged(self) -> list[tuple[str, CheckpointError]]:
        self._confirm()
        left = []
        for name in filter(naming.is_purged_entry, names_in(self._bucket, naming.RUN_TRASH)):
            try:
                self._free(name)
            except CheckpointError as error:
                left.append((name, error))
        return left

    def finish_moves(self, alone: Alone) -> list[str]:
        """Finish what a crash has interrupted; returns the runs."""
        finished = []
        for entry in sorted(self._marked("")):
            run = _run_of(entry)
            with alone(run):
                self._finish_moves_of(run)
            finished.append(run)
        return finished

    def steps(self, run: str) -> set[int]:
        """The steps of all entries of a run."""
        return {which.step for which, _ in self._commits(f"{run}@")}

    def names(self, which: CheckpointId, data: str) -> bool:
        """Whether an entry has a commit object of this step that names these files, or that cannot be read."""
        for found, key in self._commits(f"{which.run}@"):
            if found != which:
                continue
            try:
                content = commit_objects.decode(self._read(key), *which)
            except CorruptManifest:
                return True
            except NoSuchResource:
                continue
            if any(one.data == data for one in content.kept):
                return True
        return False

    def _finish_moves_of(self, run: str) -> None:
        for entry in self._marked(f"{run}@"):
            self._finish(entry, run, self._bucket.read(_mark(entry)))

    def _finish(self, entry: str, run: str, direction: bytes) -> None:
        there = _path(entry)
        if direction == _TO_TRASH:
            self._move(run, there, self._own(run))
        else:
            below = [one for page in self._bucket.pages(f"{there}/") for one in page.objects]
            self._move(there, run, [one for one in below if one.key != _mark(entry)])
        self._bucket.delete([_mark(entry)])

    def _move(self, source: str, target: str, objects: Sequence[Listed]) -> None:
        def copy(one: Listed) -> None:
            self._bucket.copy(one.key, f"{target}{one.key.removeprefix(source)}", one.size)

        with ThreadPoolExecutor(COPIES_AT_ONCE, "holdfast-copy") as pool:
            list(pool.map(copy, objects))
        commits = [one.key for one in objects if one.key.startswith(f"{source}/{naming.COMMITS}/")]
        for key in commits:
            self._puts.settle(key)
        for keys in (commits, [one.key for one in objects if one.key not in set(commits)]):
            if keys:
                self._bucket.delete(keys)  # I8

    def _own(self, run: str) -> list[Listed]:
        """All objects of a run but the files of its checkpoints, and what is removed with them."""
        found = []
        for page in self._bucket.pages(f"{run}/", delimiter="/"):
            found += page.objects
            for prefix in page.prefixes:
                if prefix not in (f"{run}/{naming.DATA}/", naming.line_marks(run)):
                    found += [one for below in self._bucket.pages(prefix) for one in below.objects]
        return found

    def _prefixes(self, entry: str) -> set[str]:
        """The prefixes that an entry's commit objects name; those of unreadable ones are left to a sweep."""
        found = set[str]()
        for which, key in self._commits(f"{entry}/"):
            try:
                content = commit_objects.decode(self._read(key), *which)
            except CorruptManifest:
                continue
            found.update(f"{which.run}/{naming.DATA}/{one.data}" for one in content.kept)
        return found

    def _free(self, name: str) -> None:
        entry = name.removesuffix(naming.purged_entry(""))
        erase(self._bucket, _path(entry))
        prefixes = self._bucket.read(f"{_path(name)}/{_PREFIXES}", 0, PREFIXES_BYTES_MAX).decode()
        marks = self._marks(_run_of(entry))
        for prefix in prefixes.splitlines():
            run, _, data = prefix.partition(f"/{naming.DATA}/")
            if naming.is_run_name(run) and naming.parse_data_directory(run, data) is not None:
                erase_data(self._bucket, prefix, marks[data])
        erase(self._bucket, _path(name))

    def _marks(self, run: str) -> defaultdict[str, list[str]]:
        """The keys of all marks of a run's lines, by the files that they are of: one list for all."""
        found, top = defaultdict[str, list[str]](list), naming.line_marks(run)
        for page in self._bucket.pages(top):
            for one in page.objects:
                found[one.key.removeprefix(top).partition("~")[0]].append(one.key)
        return found

    def _commits(self, begin: str) -> Iterator[tuple[CheckpointId, str]]:
        """Step and key of the commit objects of entries whose names begin so."""
        for page in self._bucket.pages(f"{naming.RUN_TRASH}/{begin}"):
            for one in page.objects:
                entry, _, rest = one.key.removeprefix(f"{naming.RUN_TRASH}/").partition("/")
                room, _, name = rest.partition("/")
                step = naming.parse_step_directory(name) if room == naming.COMMITS else None
                if step is not None and naming.parse_trash_entry(entry) is not None:
                    yield CheckpointId(_run_of(entry), step), one.key

    def _marked(self, begin: str) -> list[str]:
        top = f"{naming.RUN_TRASH}/"
        keys = [one.key for page in self._bucket.pages(f"{top}{begin}") for one in page.objects]
        entries = [key.removeprefix(top).removesuffix(f"/{_MARK}") for key in keys if key.endswith(f"/{_MARK}")]
        return [entry for entry in entries if naming.parse_trash_entry(entry) is not None]

    def _is_purged(self, entry: str) -> bool:
        return has_objects(self._bucket, _path(naming.purged_entry(entry)))

    def _read(self, key: str) -> bytes:
        return self._bucket.read(key, 0, commit_objects.COMMIT_OBJECT_BYTES_MAX + 1)

    def _check_entry(self, entry: str, run: str) -> None:
        parsed = naming.parse_trash_entry(entry)
        if parsed is None or parsed[0] != run:
            raise InvalidRequest(
                f"{entry!r} is no name for {run} in the trash", hint="in a bucket, a run keeps its name there"
            )


def _path(entry: str) -> str:
    if naming.parse_trash_entry(entry) is None and not naming.is_purged_entry(entry):
        raise InvalidRequest(f"{entry!r} is no name of an entry of the trash")
    return f"{naming.RUN_TRASH}/{entry}"


def _mark(entry: str) -> str:
    return f"{_path(entry)}/{_MARK}"


def _run_of(entry: str) -> str:
    parsed = naming.parse_trash_entry(entry)
    assert parsed is not None
    return parsed[0]
