"""ObjectStore takes the exam of all stores: on a bucket in memory, in parts and whole, and on servers of S3."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import cast

import numpy as np
import pytest

from holdfast_files.objects.client import Bucket
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_formats import naming
from holdfast_formats.errors import NoSuchResource
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, Honours, ObjectStore, Uploads, probe
from tests.kit.failing_bucket import FailingBucket, Switch
from tests.kit.memory_bucket import MemoryBucket
from tests.kit.objects import TestBucket
from tests.storage.objects import reaching
from tests.suites.store_suite import PART, Fault, StoreSuite

_numbers = itertools.count()
LIAR = Honours("ignored", "ignored")


class BucketStorage:
    """What lies below the stores of several nodes: one bucket, which each reaches by requests that may fail."""

    def __init__(self, bucket: Bucket, honours: Honours = HONOURED, part_bytes: int = PART) -> None:
        self.bucket, self._honours, self._part_bytes = bucket, honours, part_bytes
        self._switch, self._lock = Switch(), threading.Lock()

    def open(self) -> ObjectStore:
        bucket = cast(Bucket, FailingBucket(self.bucket, self._switch))
        puts = ConditionalPuts(bucket, self._honours, None if self._honours.arbitrates else self._alone)
        return ObjectStore(Uploads(bucket, self._part_bytes, memory_bytes=4 * PART, connections=3), puts)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        with self._lock:
            yield

    def used(self) -> int:
        """Commit objects are no files; they are those of the steps that are listed."""
        return sum(size for key, size in self.sizes().items() if f"/{naming.COMMITS}/" not in key)

    def sizes(self) -> dict[str, int]:
        assert isinstance(self.bucket, MemoryBucket)
        return self.bucket.sizes()

    def lose(self, path: str) -> None:
        files = ObjectFiles(self.bucket)
        try:
            key = files.key(path)
        except NoSuchResource:
            return
        below = [one.key for page in self.bucket.pages(key) for one in page.objects] if key.endswith("/") else [key]
        self.bucket.delete(below)

    def failing(self, fault: Fault) -> AbstractContextManager[None]:
        return self._switch.failing(fault)

    def full(self) -> AbstractContextManager[None]:
        return self._switch.full()


class TestObjectStore(StoreSuite):
    """Every file of more than 64 KiB is an upload in parts."""

    @pytest.fixture
    def fresh(self) -> Callable[[], BucketStorage]:
        return lambda: BucketStorage(MemoryBucket())


class TestObjectStoreOfWholeFiles(StoreSuite):
    """No file is longer than a part."""

    @pytest.fixture
    def fresh(self) -> Callable[[], BucketStorage]:
        return lambda: BucketStorage(MemoryBucket(), part_bytes=2**24)


class TestObjectStoreWithoutConditions(StoreSuite):
    """The bucket takes conditions and ignores them, and an arbiter outside it keeps writers apart."""

    @pytest.fixture
    def fresh(self) -> Callable[[], BucketStorage]:
        return lambda: BucketStorage(MemoryBucket(conditions=False), LIAR)


class ServerStorage(BucketStorage):
    """A prefix of a bucket on a server."""

    def __init__(self, raw: TestBucket, bucket: Bucket, honours: Honours, part_bytes: int) -> None:
        self._raw, self._prefix = raw, f"root-{next(_numbers)}"
        super().__init__(reaching.below(bucket, self._prefix), honours, part_bytes)

    def sizes(self) -> dict[str, int]:
        found = self._raw.sizes(f"{self._prefix}/")
        for key, upload in self._raw.uploads(f"{self._prefix}/"):
            parts = self._raw.server.s3.list_parts(Bucket=self._raw.name, Key=key, UploadId=upload)
            found[upload] = sum(one["Size"] for one in parts.get("Parts", ()))
        return found


@pytest.fixture
def on_server(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], BucketStorage]]:
    """moto takes parts of any size here; the others need 5 MiB."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    with reaching.opened(bucket, monkeypatch) as opened:
        honours = probe(opened)
        part_bytes = PART if bucket.server.kind == "moto" else 5 * 2**20
        yield lambda: ServerStorage(bucket, opened, honours, part_bytes)


@pytest.mark.objects
class TestObjectStoreOnServers(StoreSuite):
    """The whole exam."""

    @pytest.fixture
    def fresh(self, on_server: Callable[[], BucketStorage]) -> Callable[[], BucketStorage]:
        return on_server


class TestObjectStoreOnServersInShort:
    """What does not take minutes."""

    fresh = TestObjectStoreOnServers.fresh
    storage, store = StoreSuite.storage, StoreSuite.store
    test_nothing_is_visible_before_the_commit = StoreSuite.test_nothing_is_visible_before_the_commit
    test_threads_fill_a_file_in_order = StoreSuite.test_threads_fill_a_file_in_order
    test_a_job_goes_on_where_it_was_killed = StoreSuite.test_a_job_goes_on_where_it_was_killed
    test_damaged_files_are_mended = StoreSuite.test_damaged_files_are_mended
    test_a_race_of_two_committers = StoreSuite.test_a_race_of_two_committers
    test_a_round_that_was_given_up = StoreSuite.test_a_round_that_was_given_up
    test_of_several_replacements = StoreSuite.test_of_several_replacements_the_first_and_the_newest_are_kept
    test_what_was_replaced_is_taken_back = StoreSuite.test_what_was_replaced_is_taken_back
    test_removal = StoreSuite.test_removal
    test_a_run_goes_to_the_trash_and_comes_back = StoreSuite.test_a_run_goes_to_the_trash_and_comes_back
    test_a_sweep_spares_what_lives = StoreSuite.test_a_sweep_spares_what_lives


@pytest.mark.parametrize("size", [5 * 2**20, 12 * 2**20 + 5])
def test_parts_on_servers(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Parts of 5 MiB out of windows of other sizes, whose buffers are used again at once, with the checksum that the server
    checks.
    """
    data = np.random.default_rng(1).bytes(size)
    with reaching.opened(bucket, monkeypatch) as opened:
        writer = Uploads(opened.using(checksum=probe(opened).checksum), part_bytes=5 * 2**20).create("file", size)
        buffer = bytearray(2**20 + 17)
        for at in range(0, size, len(buffer)):
            window = data[at : at + len(buffer)]
            buffer[: len(window)] = window
            writer.write(at, [memoryview(buffer)[: len(window)]])
        writer.finish()
    assert bucket.read("file") == data and bucket.uploads() == []
