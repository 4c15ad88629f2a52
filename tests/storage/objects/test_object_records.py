"""ObjectRecords takes the exam of all records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast_files.objects.client import Bucket
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_formats.errors import NoSuchResource
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, Honours, ObjectRecords, probe
from tests.kit.memory_bucket import MemoryBucket
from tests.kit.objects import TestBucket
from tests.storage.objects import reaching
from tests.suites.records_suite import RecordsSuite


class RawBucket:
    """The objects of a bucket, past the records."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def write(self, path: str, data: bytes) -> None:
        self._bucket.put(path, data)

    def read(self, path: str) -> bytes | None:
        try:
            return self._bucket.read(path)
        except NoSuchResource:
            return None


def records_on(bucket: Bucket, honours: Honours = HONOURED) -> ObjectRecords:
    lock = threading.RLock()

    @contextmanager
    def alone(name: str) -> Iterator[None]:
        with lock:
            yield

    return ObjectRecords(bucket, ConditionalPuts(bucket, honours, alone), ObjectFiles(bucket))


class TestObjectRecords(RecordsSuite):
    @pytest.fixture
    def memory(self) -> MemoryBucket:
        return MemoryBucket()

    @pytest.fixture
    def records(self, memory: MemoryBucket) -> ObjectRecords:
        return records_on(memory)

    @pytest.fixture
    def raw(self, memory: MemoryBucket) -> RawBucket:
        return RawBucket(memory)


class TestObjectRecordsWithoutConditions(TestObjectRecords):
    @pytest.fixture
    def memory(self) -> MemoryBucket:
        return MemoryBucket(conditions=False)

    @pytest.fixture
    def records(self, memory: MemoryBucket) -> ObjectRecords:
        return records_on(memory, Honours("ignored", "ignored"))


class TestObjectRecordsOnServers(RecordsSuite):
    @pytest.fixture
    def opened(self, bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
        with reaching.opened(bucket, monkeypatch) as opened:
            yield opened

    @pytest.fixture
    def records(self, opened: Bucket) -> ObjectRecords:
        return records_on(opened, probe(opened))

    @pytest.fixture
    def raw(self, opened: Bucket) -> RawBucket:
        return RawBucket(opened)
