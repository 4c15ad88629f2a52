"""Control files in a bucket: objects at the paths that they have in a directory."""

from __future__ import annotations

from typing import Any

from holdfast_files.objects.client import Bucket
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_formats.errors import LimitExceeded, NoSuchResource, StorageFailed
from holdfast_formats.files import split_leaf

from .conditional_puts import ConditionalPuts
from .prefixes import has_objects


class ObjectRecords:
    """The control files of a root; satisfies `Records`. A lost answer is settled by looking at the object."""

    def __init__(self, bucket: Bucket, puts: ConditionalPuts, files: ObjectFiles) -> None:
        """`files` are those of the root's store, which knows the prefixes of the checkpoints that it has written."""
        self._bucket, self._puts, self._files = bucket, puts, files

    @property
    def label(self) -> str:
        return self._files.label

    def size(self, path: str) -> int | None:
        return self._files.size(path)

    def stamp(self, path: str) -> str:
        return self._files.stamp(path)

    def list(self, path: str) -> list[str]:
        return self._files.list(path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._files.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_into(path, offset, buffer)

    def read_stored(self, path: str, offset: int, buffer: Any) -> int:
        return self._files.read_into(path, offset, buffer)

    def put_first(self, path: str, data: bytes) -> bool:
        split_leaf(path)
        return self._settled(path, data, None)

    def replace(self, path: str, data: bytes) -> None:
        split_leaf(path)
        self._bucket.put(path, data)

    def swap(self, path: str, before: bytes | None, data: bytes) -> bool:
        split_leaf(path)
        if before is None:
            return self._settled(path, data, None)
        found = self._bucket.head(path)
        if found is None or found.size != len(before):
            return False
        try:
            stands, etag = self._bucket.read_tagged(path, len(before))
        except (NoSuchResource, LimitExceeded):  # another node has changed it at this moment
            return False
        return stands == before and self._settled(path, data, etag)

    def remove_file(self, path: str) -> None:
        split_leaf(path)
        if self._bucket.head(path) is None:
            raise NoSuchResource(f"there is no file {path}", path=path)
        self._puts.settle(path)
        self._bucket.delete([path])

    def is_empty(self, path: str) -> bool:
        """There are no directories, but some servers list those for a while that had objects."""
        split_leaf(path)
        return not has_objects(self._bucket, path) and self.size(path) is None

    def remove_empty(self, path: str) -> bool:
        return self.is_empty(path)

    def _settled(self, path: str, data: bytes, etag: str | None) -> bool:
        done = self._puts.first(path, data) if etag is None else self._puts.replace(path, data, etag)
        if done.outcome == "unknown":
            raise StorageFailed(f"{path} may not be written: {done.detail}", hint="look at it again", path=path)
        return done.outcome == "done"
