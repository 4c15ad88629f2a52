"""The files of one try to save a step in a bucket: objects below a prefix that nothing names before the commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast_files.objects.object_files import ObjectFiles
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, NoSuchResource
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.storage.tier import FileWriter

from .step_commits import StepCommits
from .unfinished_uploads import UnfinishedUploads, erase_staged
from .uploads import UploadedFile, Uploads

_OURS_ALONE = frozenset({naming.MANIFEST, naming.COMMIT, naming.RECEIPTS})


class StoredObjects:
    """Committed files by the paths that they have in a directory, and the files of staged and replaced places by theirs,
    `PLACE.path/FILE`; satisfies `Files`.
    """

    def __init__(self, committed: ObjectFiles, prefix_of: Callable[[Place], str | None]) -> None:
        """`prefix_of` returns the prefix of a place's files, None for a place that is not known."""
        self.committed, self._prefix_of = committed, prefix_of

    @property
    def label(self) -> str:
        return self.committed.label

    def size(self, path: str) -> int | None:
        key = self._key(path)
        return None if key is None else self.committed.size(key)

    def stamp(self, path: str) -> str:
        key = self._key(path)
        return "" if key is None else self.committed.stamp(key)

    def list(self, path: str) -> list[str]:
        key = self._key(path)
        return [] if key is None else self.committed.list(key)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.committed.read(self._there(path), offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        return self.committed.read_into(self._there(path), offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self.read_into(path, offset, buffer)

    def _there(self, path: str) -> str:
        key = self._key(path)
        if key is None:
            raise NoSuchResource(f"there is no file {path}", path=path)
        return key

    def _key(self, path: str) -> str | None:
        """The path itself, unless it is one of a staged or replaced place."""
        names = path.split("/")
        if len(names) < 3 or names[1] != naming.STAGING or not naming.is_run_name(names[0]):
            return path
        staged = naming.parse_staging_directory(names[2])
        if staged is None:
            return path
        prefix = self._prefix_of(Place(names[0], *staged))
        return None if prefix is None else "/".join([prefix, *names[3:]])


class StagedObjects:
    """The staged files of a place, below `prefix`; satisfies `StagedCheckpoint`. Receipts are kept in this process: one of
    several nodes delivers its own by the catalog.
    """

    def __init__(self, place: Place, prefix: str, uploads: Uploads, files: StoredObjects, commits: StepCommits) -> None:
        self.place, self.prefix, self.files, self._commits = place, prefix, files, commits
        self.receipts: dict[str, bytes] = {}
        self._created: dict[str, tuple[int, UploadedFile]] = {}  # with its bytes, as this process has created it last
        self._earlier: UnfinishedUploads | None = None
        self._uploads, self._bucket = uploads, uploads.patient

    @property
    def path(self) -> str:
        return self.place.path

    def create(self, file: str, size: int) -> FileWriter:
        made = self._uploads.create(self._key(file), size, self._earlier)
        self._created[file] = (size, made)
        return made

    def go_on(self) -> dict[str, int]:
        self._earlier = UnfinishedUploads(self._bucket, self.prefix)
        found = (one for page in self._bucket.pages(f"{self.prefix}/") for one in page.objects)
        sizes = {one.key.rpartition("/")[2]: one.size for one in found}
        return {name: size for name, size in sizes.items() if name not in _OURS_ALONE}

    def has_seen(self, file: str, size: int) -> bool:
        """Whether this process has put a file of so many bytes together here, and has asked for its size since."""
        created = self._created.get(file)
        return created is not None and created[0] == size and created[1].seen

    def put(self, file: str, data: bytes) -> None:
        self._bucket.put(self._key(file), data)

    def drop(self, file: str) -> None:
        self._created.pop(file, None)
        self._bucket.delete([self._key(file)])

    def clear(self) -> None:
        standing = self._commits.standing(CheckpointId(self.place.run, self.place.step))
        if standing is None or not standing.may_name(self.prefix):
            erase_staged(self._bucket, self.place, self.prefix)
            self._created.clear()
            self.receipts.clear()

    def sync(self, file: str) -> None:
        self._key(file)  # what was acknowledged is durable

    def take(self, file: str, step: int, run: str | None = None) -> bool:
        target = self._key(file)
        source = f"{naming.checkpoint_path(run or self.place.run, step)}/{file}"
        committed = self.files.committed.key(source)
        found = self._bucket.head(committed)
        if found is None:
            raise NoSuchResource(f"there is no file {source}", path=source)
        self._bucket.copy(committed, target, found.size)
        return True

    def put_receipt(self, node: str, data: bytes) -> None:
        name = f"{node}.json"
        if not naming.is_file_name(name):
            raise InvalidRequest(f"{node!r} cannot be the name of a node", hint="use A-Z a-z 0-9 . _ -")
        self.receipts[name] = data

    def _key(self, file: str) -> str:
        if not naming.is_file_name(file) or file in _OURS_ALONE:
            raise InvalidRequest(f"{file!r} cannot be a file of a checkpoint", hint="use a plain name, and not the format's")
        return f"{self.prefix}/{file}"
