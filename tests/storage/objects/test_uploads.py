"""Uploads: what is sent is what was written (I19), in parts of one size, within one budget, and nothing is left behind."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from holdfast_files.objects import checksums
from holdfast_files.objects.answers import StoredPart
from holdfast_files.objects.client import WriteOutcome
from holdfast_formats.errors import InvalidRequest, StorageFailed
from holdfast_service.storage.objects import Uploads
from holdfast_service.storage.objects.unfinished_uploads import UnfinishedUploads, has_bytes
from tests.daemons import wait_until
from tests.kit.memory_bucket import MemoryBucket

PART = 1000
DATA = np.random.default_rng(5).bytes(20 * PART + 7)


class SlowBucket(MemoryBucket):
    """Parts take a moment. `most` is how many bytes of parts were sent at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.going = self.most = 0
        self.failing: dict[int, Exception] = {}

    def put_part(self, key: str, upload: str, number: int, views: Sequence[memoryview]) -> str:
        size = sum(view.nbytes for view in views)
        with self._lock:
            self.going += size
            self.most = max(self.most, self.going)
        time.sleep(0.002)
        with self._lock:
            self.going -= size
        if number in self.failing:
            raise self.failing[number]
        return super().put_part(key, upload, number, views)


@pytest.fixture
def bucket() -> SlowBucket:
    return SlowBucket()


def uploads(bucket: MemoryBucket, **options: Any) -> Uploads:
    return Uploads(bucket, PART, **{"memory_bytes": 4 * PART, "connections": 3, **options})


def scribble(writer: Any, data: bytes, begin: int, end: int) -> None:
    """Write a range out of a buffer that is overwritten as soon as `write` returns, as windows are."""
    buffer = bytearray(data[begin:end])
    writer.write(begin, [memoryview(buffer)])
    buffer[:] = b"\xff" * len(buffer)


@pytest.mark.parametrize("window", [1, 333, PART, PART + 1, 2 * PART, 7 * PART + 3])
def test_a_buffer_that_is_used_again(bucket: SlowBucket, window: int) -> None:
    """Windows of any size, by three threads in order: the object has what was in them when they were written."""
    data = DATA if window > 1 else DATA[: 3 * PART + 5]
    writer = uploads(bucket).create("file", len(data))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda at: scribble(writer, data, at, at + window), range(0, len(data), window)))
    writer.finish()
    assert bucket.read("file") == data and bucket.names() == ["file"] and not list(bucket.uploads(""))
    parts = [key for act, key in bucket.requests if act == "part"]
    assert len(parts) == -(-len(data) // PART)


def test_memory_of_all_files_is_one_budget(bucket: SlowBucket) -> None:
    """Three files at once, by many threads in any order of the system's: they wait for memory and never for each other."""
    made = uploads(bucket)
    writers = [made.create(f"file-{number}", len(DATA)) for number in range(3)]
    most = 0

    def write(number: int) -> None:
        nonlocal most
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: scribble(writers[number], DATA, at, at + 1700), range(0, len(DATA), 1700)))
            most = max(most, made.taken_bytes)
        writers[number].finish()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert all(bucket.read(f"file-{number}") == DATA for number in range(3))
    assert most <= (4 + 3) * PART and bucket.most <= 3 * PART
    assert made.taken_bytes == 0


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART])
def test_a_file_of_one_part_is_put_as_a_whole(bucket: SlowBucket, size: int) -> None:
    """One request, and its size is known of the answer."""
    made = uploads(bucket)
    writer = made.create("file", size)
    if size:
        scribble(writer, DATA, 0, size)
    writer.finish()
    assert bucket.requests == [("put", "file")] and bucket.read("file") == DATA[:size]
    assert made.taken_bytes == 0


def test_a_part_that_fails(bucket: SlowBucket) -> None:
    """The writer hears it, later writes too; the upload is given up, and its memory is free."""
    bucket.failing[3] = StorageFailed("the bucket is away")
    made = uploads(bucket)
    writer = made.create("file", len(DATA))
    with pytest.raises(StorageFailed, match="the bucket is away"):
        for at in range(0, len(DATA), PART):
            writer.write(at, [DATA[at : at + PART]])
        writer.finish()
    writer.discard()
    wait_until(lambda: not list(bucket.uploads("")) and made.taken_bytes == 0)  # the last part that is sent gives it up
    assert bucket.names() == []
    with pytest.raises(StorageFailed, match="closed"):
        writer.write(0, [b"x"])


def test_giving_up_does_not_wait_for_a_part(bucket: SlowBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the bucket does not answer may be sent for minutes; the upload is ended after it."""
    put_part, answers = bucket.put_part, threading.Event()

    def late(key: str, upload: str, number: int, views: Sequence[memoryview]) -> str:
        assert answers.wait(180)
        return put_part(key, upload, number, views)

    monkeypatch.setattr(bucket, "put_part", late)
    made = uploads(bucket)
    writer = made.create("file", 3 * PART)
    writer.write(0, [DATA[:PART]])
    wait_until(lambda: list(bucket.uploads("")))
    writer.discard()
    assert list(bucket.uploads("")) and made.taken_bytes == PART
    answers.set()
    wait_until(lambda: not list(bucket.uploads("")) and made.taken_bytes == 0)
    assert bucket.names() == []


def test_a_writer_that_waits_for_memory_hears_of_a_failure(bucket: SlowBucket) -> None:
    """It does not wait for ever."""
    made = uploads(bucket, memory_bytes=PART)
    other = made.create("other", 2 * PART)
    other.write(0, [DATA[:10]])  # has all memory
    writer = made.create("file", len(DATA))
    writer.write(0, [DATA[:10]])  # its first part needs no room
    waiting = threading.Thread(target=lambda: failures.append(_failure(writer)))
    failures: list[str] = []
    waiting.start()
    time.sleep(0.05)
    assert waiting.is_alive()
    writer.discard()
    waiting.join(180)
    assert failures == ["file is closed already"]
    other.discard()
    assert made.taken_bytes == 0


def _failure(writer: Any) -> str:
    try:
        writer.write(2 * PART, [b"x"])
    except StorageFailed as error:
        return error.detail
    return "none"


def test_a_file_with_a_hole_is_not_finished(bucket: SlowBucket) -> None:
    """The server would put it together without a word."""
    made = uploads(bucket)
    writer = made.create("file", 3 * PART)
    writer.write(0, [DATA[:PART]])
    writer.write(2 * PART, [DATA[:PART]])
    with pytest.raises(StorageFailed, match="of 3000 bytes, parts with 1000 were not written"):
        writer.finish()
    assert bucket.names() == [] and not list(bucket.uploads("")) and made.taken_bytes == 0


def test_bytes_that_are_written_twice(bucket: SlowBucket) -> None:
    """Of a part that was sent already."""
    writer = uploads(bucket).create("file", 2 * PART)
    writer.write(0, [DATA[:PART]])
    with pytest.raises(InvalidRequest, match="twice"):
        writer.write(5, [b"x"])
    writer.discard()


def test_a_store_that_is_closed_meanwhile(bucket: SlowBucket) -> None:
    """Parts that are under way end, later ones are refused, and nothing waits for ever."""
    made = uploads(bucket)
    writer = made.create("file", 3 * PART)
    writer.write(0, [DATA[:PART]])
    made.close()
    with pytest.raises(StorageFailed, match="is closed"):
        writer.write(PART, [DATA[:PART]])
    with pytest.raises(StorageFailed, match="is closed"):
        writer.finish()
    wait_until(lambda: made.taken_bytes == 0 and not list(bucket.uploads("")))
    assert bucket.names() == []


def test_a_size_below_zero(bucket: SlowBucket) -> None:
    with pytest.raises(InvalidRequest):
        uploads(bucket).create("file", -1)


def test_parts_of_a_long_file() -> None:
    """There are never more than 10 000, all of one size but the last."""
    writer = Uploads(MemoryBucket()).create("file", 10**12)
    assert writer.part_bytes * 10_000 >= 10**12 > writer.part_bytes * 9_000 and writer.part_bytes % 2**20 == 0


class Completing(MemoryBucket):
    """Answers of completions, and what is stored for each: all of it, nothing, or the object without its end."""

    def __init__(self, *acts: tuple[str, str]) -> None:
        super().__init__()
        self.acts = list(acts)

    def complete(self, key: str, upload: str, parts: Sequence[tuple[int, str]]) -> WriteOutcome:
        stores, says = self.acts.pop(0)
        if stores == "all" and upload in self._uploads:
            super().complete(key, upload, parts)
        elif stores == "less":
            super().complete(key, upload, parts[:-1])
        return WriteOutcome("done") if says == "done" else WriteOutcome("unknown", detail="no answer")


@pytest.mark.parametrize(
    "acts",
    [
        [("all", "done")],
        [("all", "unknown")],
        [("nothing", "unknown"), ("all", "done")],
        [("nothing", "unknown"), ("nothing", "unknown"), ("all", "unknown")],
    ],
)
def test_a_completion_is_settled_by_the_objects_size(acts: list[tuple[str, str]]) -> None:
    """A lost answer is a question (I14), and an object counts when it was asked for (I20)."""
    bucket = Completing(*acts)
    writer = uploads(bucket).create("file", 2 * PART)
    writer.write(0, [DATA[: 2 * PART]])
    writer.finish()
    assert bucket.read("file") == DATA[: 2 * PART] and not bucket.acts


@pytest.mark.parametrize(
    ("acts", "why"),
    [
        ([("less", "done")], "it has 1000 bytes"),
        ([("nothing", "done")], "it is not there"),
        ([("nothing", "unknown")] * 3, "it is not there no answer"),
    ],
)
def test_a_completion_that_made_something_else(acts: list[tuple[str, str]], why: str) -> None:
    """It is refused with the sizes."""
    writer = uploads(Completing(*acts)).create("file", 2 * PART)
    writer.write(0, [DATA[: 2 * PART]])
    with pytest.raises(StorageFailed, match=f"after its upload of 2000 bytes {why}"):
        writer.finish()


def begun(bucket: MemoryBucket, parts: Mapping[int, bytes]) -> str:
    """The upload that an earlier start has left."""
    upload = bucket.begin_upload("place/file")
    for number, data in parts.items():
        bucket.put_part("place/file", upload, number, [memoryview(data)])
    bucket.requests.clear()
    return upload


def write_all(writer: Any) -> None:
    for at in range(0, len(DATA), PART):
        writer.write(at, [DATA[at : at + PART]])
    writer.finish()


def test_an_upload_that_was_left(bucket: SlowBucket) -> None:
    """Parts that have the same bytes are not sent; one of other bytes, or of another size, is; parts beyond the end, of a
    start with shorter parts, do no harm.
    """
    sound = {number: DATA[(number - 1) * PART : number * PART] for number in (1, 2, 5, 9)}
    upload = begun(bucket, sound | {3: bytes(PART), 4: b"short", 30: b"beyond"})
    writer = uploads(bucket).create("place/file", len(DATA), UnfinishedUploads(bucket, "place"))
    write_all(writer)
    assert bucket.read("place/file") == DATA and not list(bucket.uploads(""))
    counts = Counter(act for act, _ in bucket.requests)
    assert (counts["begin"], counts["part"]) == (0, 21 - len(sound)) and upload not in bucket.sizes()


def test_of_several_uploads_the_newest(bucket: SlowBucket) -> None:
    """Is gone on with, once; another start begins another one."""
    begun(bucket, {1: DATA[:PART]})
    newest, earlier = begun(bucket, {2: DATA[PART : 2 * PART]}), UnfinishedUploads(bucket, "place")
    found = earlier.take("place/file")
    assert found is not None and found.id == newest and set(found.parts) == {2}
    assert earlier.take("place/file") is None and UnfinishedUploads(bucket, "other").take("place/file") is None


def test_an_upload_is_left_for_a_later_start(bucket: SlowBucket) -> None:
    """One that can be found. One to which nothing could be added is given up: the bucket may refuse what is added to it."""
    bucket.failing = {number: StorageFailed("the bucket is away") for number in range(5, 30)}
    made = uploads(bucket)
    for sent, left in ((4, 1), (4, 0)):
        writer = made.create("place/file", len(DATA), UnfinishedUploads(bucket, "place"))
        with pytest.raises(StorageFailed, match="the bucket is away"):
            write_all(writer)
        writer.discard()
        wait_until(lambda: made.taken_bytes == 0)
        assert [len(parts) for _, parts in bucket._uploads.values()] == [sent] * left


def test_parts_that_may_not_be_listed(bucket: SlowBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload is given up, and the file begun again."""
    upload = begun(bucket, {1: DATA[:PART]})

    def refuse(key: str, upload: str) -> Iterator[StoredPart]:
        raise StorageFailed("403 AccessDenied")

    monkeypatch.setattr(bucket, "parts", refuse)
    write_all(uploads(bucket).create("place/file", len(DATA), UnfinishedUploads(bucket, "place")))
    assert bucket.read("place/file") == DATA and upload not in bucket.sizes() and not list(bucket.uploads(""))


def test_a_part_is_proven_by_its_tag_or_its_checksum() -> None:
    """Tags of an encrypted object are no MD5 of it; then its CRC32 is looked at, where there is one."""
    data = memoryview(DATA)
    tag, crc32 = hashlib.md5(DATA, usedforsecurity=False).hexdigest(), checksums.crc32([data])
    for part, proven in (
        (StoredPart(1, len(DATA), f'"{tag}"', ""), True),
        (StoredPart(1, len(DATA), tag.upper(), ""), True),
        (StoredPart(1, len(DATA), '"of-kms"', crc32), True),
        (StoredPart(1, len(DATA), '"of-kms"', ""), False),
        (StoredPart(1, len(DATA), '"of-kms"', checksums.crc32([data[1:]])), False),
        (StoredPart(1, len(DATA) - 1, f'"{tag}"', crc32), False),
    ):
        assert has_bytes(part, data) == proven, part


def test_memory_is_kept_for_the_next_file_and_given_up_later(bucket: SlowBucket) -> None:
    """Making it costs more than filling it, and the next file may come in hours."""
    made = uploads(bucket, kept_s=3600.0)
    for key in ("a", "b"):
        writer = made.create(key, len(DATA))
        writer.write(0, [DATA])
        writer.finish()
    kept = {id(memory) for memory in made._free}
    writer = made.create("c", len(DATA))
    writer.write(0, [DATA[:10]])
    assert kept and {id(memory) for memory in made._free} < kept, "one of them is filled"
    writer.discard()
    made.close()
    made = uploads(bucket, kept_s=0.05)
    writer = made.create("d", len(DATA))
    writer.write(0, [DATA[:PART]])
    wait_until(lambda: not made.taken_bytes)
    wait_until(lambda: not made._free)
    writer.write(PART, [DATA[PART:]])
    writer.finish()
    wait_until(lambda: not made._free)
