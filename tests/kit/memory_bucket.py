"""A bucket in memory, in place of `holdfast_files.objects.client.Bucket`, and what a test may change in it."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.answers import KeyPage, Listed, PendingUpload, StoredPart
from holdfast_files.objects.client import Bucket, Found, WriteOutcome
from holdfast_formats.errors import LimitExceeded, NoSpace, NoSuchResource, StorageFailed

PAGE_KEYS = 1000


class _Object(NamedTuple):
    data: bytes
    etag: str
    modified: float
    writer: str


class MemoryBucket(Bucket):
    """`conditions`: whether conditional puts are honoured, or accepted and ignored. `requests` lists the calls in order."""

    def __init__(self, conditions: bool = True) -> None:
        self.address = BucketAddress("memory", "root")
        self.label = self.address.label
        self.conditions = conditions
        self.clock = time.time
        self.requests: list[tuple[str, str]] = []
        self.room = 2**40  # bytes that still fit
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, tuple[PendingUpload, dict[int, bytes]]] = {}
        self._ids = itertools.count(1)
        self._lock = threading.RLock()

    def using(self, **_: Any) -> MemoryBucket:
        return self

    def checks_crc32(self, key: str) -> bool:
        return False

    def head(self, key: str) -> Found | None:
        with self._asked("head", key):
            held = self._objects.get(key)
            return None if held is None else Found(len(held.data), held.etag, held.modified, self.clock(), held.writer)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._asked("read", key):
            data = self._object(key).data
            return data[offset:] if length is None else data[offset : offset + length]

    def read_tagged(self, key: str, bytes_max: int) -> tuple[bytes, str]:
        with self._asked("read", key):
            held = self._object(key)
            if len(held.data) > bytes_max:
                raise LimitExceeded(f"{key} has {len(held.data)} bytes, over the limit of {bytes_max}")
            return held.data, held.etag

    def read_into(self, key: str, offset: int, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(key, offset, view.nbytes)
        view[: len(data)] = data
        return len(data)

    def put(
        self, key: str, data: Any, *, if_absent: bool = False, if_match: str | None = None, writer: str = ""
    ) -> WriteOutcome:
        with self._asked("put", key):
            held = self._objects.get(key)
            if self.conditions and if_absent and held is not None:
                return WriteOutcome("exists")
            if self.conditions and if_match is not None and (held is None or held.etag != if_match):
                return WriteOutcome("exists")
            return WriteOutcome("done", self._store(key, bytes(data), writer))

    def delete(self, keys: Sequence[str]) -> None:
        with self._asked("delete", ",".join(keys)):
            for key in keys:
                self._objects.pop(key, None)

    def pages(self, prefix: str, after: str = "", delimiter: str = "") -> Iterator[KeyPage]:
        with self._asked("list", prefix):
            found: dict[str, Listed | None] = {}
            for key in sorted(self._objects):
                if not key.startswith(prefix) or key <= after:
                    continue
                rest = key[len(prefix) :]
                if delimiter and delimiter in rest:
                    found[prefix + rest.partition(delimiter)[0] + delimiter] = None
                else:
                    held = self._objects[key]
                    found[key] = Listed(key, len(held.data), held.etag, held.modified)
        names = sorted(found)
        for begin in range(0, max(len(names), 1), PAGE_KEYS):
            some = names[begin : begin + PAGE_KEYS]
            objects = [one for name in some if (one := found[name]) is not None]
            yield KeyPage(objects, [name for name in some if found[name] is None], self.clock())

    def copy(self, source: str, key: str, size: int) -> None:
        with self._asked("copy", key):
            self._store(key, self._object(source).data)

    def begin_upload(self, key: str) -> str:
        with self._asked("begin", key):
            upload = PendingUpload(key, f"upload-{next(self._ids)}", self.clock())
            self._uploads[upload.id] = (upload, {})
            return upload.id

    def put_part(self, key: str, upload: str, number: int, views: Sequence[memoryview]) -> str:
        with self._asked("part", key):
            data = b"".join(views)
            self._check_room(len(data))
            self._parts(upload)[number] = data
            return _etag(data)

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]]) -> WriteOutcome:
        with self._asked("complete", key):
            held = self._parts(upload)
            if any(_etag(held[number]) != etag for number, etag in parts):
                raise StorageFailed(f"a part of {key} is not the one that was sent")
            data = b"".join(held[number] for number, _ in sorted(parts))
            del self._uploads[upload]
            return WriteOutcome("done", self._store(key, data))

    def abort(self, key: str, upload: str) -> None:
        with self._asked("abort", key):
            self._uploads.pop(upload, None)

    def uploads(self, prefix: str) -> Iterator[PendingUpload]:
        with self._asked("uploads", prefix):
            found = sorted(upload for upload, _ in self._uploads.values() if upload.key.startswith(prefix))
        yield from found

    def parts(self, key: str, upload: str) -> Iterator[StoredPart]:
        with self._asked("parts", key):
            held = sorted(self._parts(upload).items())
        yield from (StoredPart(number, len(data), _etag(data), "") for number, data in held)

    def sizes(self) -> dict[str, int]:
        """The bytes of each object, by its key, and of the parts of each unfinished upload, by its id."""
        parts = {upload.id: sum(map(len, held.values())) for upload, held in self._uploads.values()}
        return {**parts, **{key: len(held.data) for key, held in self._objects.items()}}

    def names(self) -> list[str]:
        return sorted(self._objects)

    def _asked(self, act: str, key: str) -> threading.RLock:
        self.requests.append((act, key))
        return self._lock

    def _object(self, key: str) -> _Object:
        held = self._objects.get(key)
        if held is None:
            raise NoSuchResource(f"there is no object {key}", path=key)
        return held

    def _parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self._uploads:
            raise NoSuchResource(f"there is no upload {upload}")
        return self._uploads[upload][1]

    def _store(self, key: str, data: bytes, writer: str = "") -> str:
        self._check_room(len(data))
        self._objects[key] = _Object(data, _etag(data), self.clock(), writer)
        return self._objects[key].etag

    def _check_room(self, size: int) -> None:
        if size > self.room:
            raise NoSpace(f"{size} bytes do not fit")


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
