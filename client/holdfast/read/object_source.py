"""The files of a checkpoint in a bucket, read without a service.

A checkpoint's files are those that the step's commit object names. It is read when COMMIT is asked for, with which reading
begins (I5), and all files are of that one from then on. When one of them is gone, the commit object is read again: a repair
writes a checkpoint's files to another prefix. What is gone otherwise is damage, so that an older step is restored. COMMIT
and manifest are read whole, so that their sizes cost no requests of their own; the sizes of all other files come from one
list of the checkpoint's prefix.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from errno import ENOENT
from typing import TYPE_CHECKING, Any

from holdfast.read.sources import Source, read_part
from holdfast_files.objects.object_files import read_commit_object
from holdfast_files.objects.traffic import RequestCount, Traffic
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import (
    CheckpointError,
    CorruptManifest,
    InvalidRequest,
    LimitExceeded,
    NoSuchResource,
    NotCommitted,
)

if TYPE_CHECKING:
    from holdfast_files.objects.answers import Listed
    from holdfast_files.objects.client import Bucket
    from holdfast_files.objects.commit_objects import Published

RANGE_BYTES = 8 * 2**20  # of one request, of which eight are in flight
BUFFERS_BYTES_MAX = 64 * 2**20  # of all requests in flight
GAP_BYTES = 2**20  # read along: a network sends so much sooner than it answers one more request
REPLACED_MAX = 4  # times that another checkpoint takes the place of one while its COMMIT is read
_READ_WHOLE = {naming.COMMIT: manifests.COMMIT_BYTES_MAX, naming.MANIFEST: 16 * 2**20}  # up to so many bytes


class ObjectSource(Source):
    """The files of one step's checkpoint. The bucket is the caller's, and is not closed. Safe for threads."""

    chunk_bytes = RANGE_BYTES
    origin = "bucket"
    gap_bytes = GAP_BYTES
    buffers_bytes_max = BUFFERS_BYTES_MAX

    def __init__(self, bucket: Bucket, run: str, step: int) -> None:
        self._traffic = Traffic()
        self._bucket = bucket.using(traffic=self._traffic)
        self.run, self.step = naming.check_run(run), naming.check_step(step)
        self._lock = threading.RLock()
        self._published: Published | None = None
        self._whole: dict[str, bytes] = {}
        self._listed: dict[str, Listed] | None = None

    @property
    def label(self) -> str:
        return f"{self._bucket.label}/{self.run}@{self.step}"

    def requests(self) -> Mapping[str, RequestCount]:
        return self._traffic.by_kind()

    def size(self, name: str) -> int | None:
        _check(name)
        if name in _READ_WHOLE:
            with self._lock, suppress(LimitExceeded):
                data = self._read_commit() if name == naming.COMMIT else self._small(name)
                return None if data is None else len(data)
        found = self._list().get(name)
        return None if found is None else found.size

    def stamp(self, name: str) -> str:
        found = self._list().get(name)
        return "" if found is None else f"{found.size:x}.{found.etag}"

    def list(self, path: str) -> list[str]:
        return sorted(self._list()) if not path else []

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._lock:
            whole = self._read_commit() if name == naming.COMMIT else self._small_enough(name)
        if whole is not None:
            return whole[offset:] if length is None else whole[offset : offset + length]
        if (size := self.size(name)) is None:
            raise self._missing(name)
        return read_part(self, size, name, offset, length)

    def read_into(self, name: str, offset: int, buffer: Any) -> int:
        key = self._key(name)
        try:
            return self._bucket.read_into(key, offset, buffer)
        except NoSuchResource:
            again = self._key_again(name)
        if again == key:
            raise self._gone(name)
        try:
            return self._bucket.read_into(again, offset, buffer)
        except NoSuchResource:
            raise self._gone(name) from None

    def still_has(self, commit: bytes) -> bool:
        try:
            found = read_commit_object(self._bucket, self.run, self.step)
        except CheckpointError:  # unknown
            return True
        return found is not None and self._is_same(found.content.checkpoint)

    def beside(self, run: str, step: int) -> AbstractContextManager[Source | None]:
        return nullcontext(ObjectSource(self._bucket, run, step))

    def close(self) -> None:
        """Forget what was read; the source can still be used, and reads the commit object again."""
        with self._lock:
            self._published, self._listed = None, None
            self._whole.clear()

    def _read_commit(self) -> bytes | None:
        """COMMIT of the checkpoint that the step has now; None if it has none.

        `CorruptManifest` for a COMMIT that the commit object does not mean.
        """
        for _ in range(REPLACED_MAX):
            self.close()
            found = read_commit_object(self._bucket, self.run, self.step)
            if found is None:
                return None
            self._published = found.content.checkpoint
            commit = self._small(naming.COMMIT)
            if commit is not None:
                self._check_commit(commit, self._published)
                return commit
            again = read_commit_object(self._bucket, self.run, self.step)
            if again is not None and again.content.checkpoint == self._published:
                break
        raise NotCommitted(
            f"{self.label}: {naming.commit_object_path(self.run, self.step)} names files that are gone: there is no "
            f"{self._key(naming.COMMIT)}",
            hint="something other than Holdfast removed them: repair the step from another copy, or restore another step",
            file=naming.COMMIT,
        )

    def _check_commit(self, commit: bytes, published: Published) -> None:
        with suppress(NotCommitted):  # the reader reports a COMMIT that cannot be read
            if manifests.stated_sha256(commit) != published.manifest_sha256:
                raise CorruptManifest(
                    f"{self.label}: {self._key(naming.COMMIT)} is not the one that "
                    f"{naming.commit_object_path(self.run, self.step)} means: Holdfast did not write it",
                    hint="repair the step from another copy, or restore another step",
                    file=naming.COMMIT,
                )

    def _small(self, name: str) -> bytes | None:
        """All bytes of a small file, kept until the source is closed; None if it does not exist."""
        data = self._whole.get(name)
        if data is None:
            try:
                data, _ = self._bucket.read_tagged(self._key(name), _READ_WHOLE[name])
            except NoSuchResource:
                return None
            self._whole[name] = data
        return data

    def _small_enough(self, name: str) -> bytes | None:
        """`_small` of a file that is read whole; None for any other, and for a longer one."""
        with suppress(LimitExceeded):
            return self._small(name) if name in _READ_WHOLE else None
        return None

    def _list(self) -> dict[str, Listed]:
        with self._lock:
            if self._listed is None:
                try:
                    top = self._key("")
                except NoSuchResource:
                    return {}
                pages = self._bucket.pages(top)
                self._listed = {one.key.removeprefix(top): one for page in pages for one in page.objects}
            return self._listed

    def _key(self, name: str) -> str:
        """The key of a file; `NoSuchResource` if the step has no checkpoint."""
        if name:
            _check(name)
        with self._lock:
            if self._published is None:
                found = read_commit_object(self._bucket, self.run, self.step)
                if found is None:
                    raise self._missing(name)
                self._published = found.content.checkpoint
            return f"{self.run}/{naming.DATA}/{self._published.data}/{name}"

    def _key_again(self, name: str) -> str:
        """The key of a file of this checkpoint, which a repair may have moved: it writes the same files to another prefix.
        `NoSuchResource` if the step has another checkpoint by now, or none.
        """
        with self._lock:
            found = read_commit_object(self._bucket, self.run, self.step)
            if found is None or not self._is_same(found.content.checkpoint):
                raise self._missing(name)
            self._published = found.content.checkpoint
            return self._key(name)

    def _is_same(self, published: Published) -> bool:
        """Whether these are files of the checkpoint that is being read."""
        return self._published is not None and published.manifest_sha256 == self._published.manifest_sha256

    def _gone(self, name: str) -> CorruptManifest:
        return CorruptManifest(
            f"{self.label}: {name} is gone, which {naming.commit_object_path(self.run, self.step)} names",
            hint="repair the step from another copy, or restore another step",
            file=name,
        )

    def _missing(self, name: str) -> NoSuchResource:
        return NoSuchResource(
            f"{self.label} has no file {name!r}",
            hint="`holdfast show` lists the files of the checkpoint",
            file=name,
            errno=ENOENT,
        )


def _check(name: str) -> None:
    if not naming.is_file_name(name):
        raise InvalidRequest(
            f"{name!r} is not a valid name of a checkpoint file",
            hint="give a path inside the checkpoint as `holdfast show` lists it, without .. or a leading /",
        )
