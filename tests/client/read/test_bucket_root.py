"""The newest checkpoint of a run in a bucket: by two lists and one read, and never another than all commit objects say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.read.bucket_root import BucketRoot
from holdfast.read.root_directory import living_steps
from holdfast.read.root_index import RootIndex
from holdfast_files.objects import client
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.commit_objects import Published, commit_object, encode
from holdfast_formats import lineage, naming
from holdfast_formats.lineage import Key, Rewind, Way
from holdfast_formats.naming import Place
from tests.kit.memory_bucket import MemoryBucket

RUN = "tiny"
STATED = {"run": RUN, "attempt": 1, "created": "", "world": 1, "groups": [], "tensors": 0, "files": 0, "bytes": 0}
FIRST, SECOND = Rewind(2, 1, 20), Rewind(3, 0, 35)


def put(bucket: MemoryBucket, step: int, rewinds: Way, marks: Mapping[int, Key] | None = None) -> None:
    """A checkpoint on a line, with marks by the round of the files that they are of; without any, with its own alone."""
    summary: dict[str, Any] = {**STATED, "step": step, "metrics": {}, "rewinds": [list(one) for one in rewinds]}
    data = naming.data_directory(Place(RUN, step, 1, 7))
    for round_id, line in ({7: lineage.line(rewinds)} if marks is None else marks).items():
        bucket.put(naming.line_mark(RUN, naming.data_directory(Place(RUN, step, 1, round_id)), line), b"")
    content = commit_object(Published(data, "0" * 64, "r7", summary))
    bucket.put(naming.commit_object_path(RUN, step), encode(content, RUN, step))


@contextmanager
def opened(bucket: MemoryBucket) -> Iterator[BucketRoot]:
    with mock.patch.object(client, "opened", lambda text: bucket):
        yield BucketRoot(BucketAddress("memory", "root"))


def living(bucket: MemoryBucket) -> list[int]:
    bucket.requests.clear()
    with opened(bucket) as root:
        return living_steps(root, RUN)


def read_all(bucket: MemoryBucket) -> list[int]:
    """The living steps by all commit objects."""
    with opened(bucket) as root, mock.patch.object(BucketRoot, "lines", lambda self, run: {}):
        return living_steps(root, RUN)


def kinds(bucket: MemoryBucket) -> list[str]:
    return [kind for kind, _ in bucket.requests]


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


def test_the_newest_of_a_thousand(bucket: MemoryBucket) -> None:
    """Two lists where training never continued from an older step, and one read more where it did."""
    for step in range(1000):
        put(bucket, step, ())
    assert living(bucket)[0] == 999 and kinds(bucket) == ["list", "list"]
    for step in range(21, 61):
        put(bucket, step, (FIRST,), {6: lineage.ROOT, 7: FIRST[:2]} if step == 30 else None)
        bucket.delete([naming.line_mark(RUN, f"{naming.step_directory(step)}.a1.r7", lineage.ROOT)])
    bucket.requests.clear()
    with opened(bucket) as root:
        assert RootIndex(root).source(RUN, None).label == "s3://memory/root/tiny@60"
    assert kinds(bucket) == ["list", "list", "read"], "of step 30, which has two marks, and is on the line"
    bucket.delete([naming.line_mark(RUN, "step-00000030.a1.r6", lineage.ROOT)])
    assert living(bucket)[0] == 60 and kinds(bucket) == ["list", "list", "read"], "of the newest"
    assert living(bucket) == read_all(bucket)


def test_what_is_without_a_mark_is_read(bucket: MemoryBucket) -> None:
    """Each checkpoint of a root that has no marks, and a line that only such ones are on."""
    for step in (10, 20, 30):
        put(bucket, step, (), {})
    assert living(bucket) == [30, 20, 10] and kinds(bucket).count("read") == 3
    put(bucket, 25, (FIRST,), {})
    put(bucket, 30, ())
    assert living(bucket) == [25, 20, 10] and kinds(bucket).count("read") == 3


def test_a_mark_of_nothing(bucket: MemoryBucket) -> None:
    """A save that was killed before its commit object is no checkpoint, and what is no mark says nothing."""
    for step in (10, 20):
        put(bucket, step, ())
    bucket.put(naming.line_mark(RUN, "step-00000030.a1.r9", (9, 9)), b"")
    bucket.put(f"{naming.line_marks(RUN)}notes.txt", b"")
    assert living(bucket) == [20, 10]


def test_a_checkpoint_that_cannot_be_read(bucket: MemoryBucket) -> None:
    """Another one of its line says how the line was reached."""
    put(bucket, 10, ())
    put(bucket, 30, ())
    put(bucket, 25, (FIRST,))
    put(bucket, 26, (FIRST,))
    bucket.put(naming.commit_object_path(RUN, 26), b"{}")
    assert living(bucket) == [26, 25, 10]


def test_a_mark_that_is_wrong(bucket: MemoryBucket) -> None:
    """Of the line that would be the newest: all commit objects are read instead."""
    put(bucket, 10, ())
    put(bucket, 30, ())
    put(bucket, 25, (FIRST,), {7: SECOND[:2]})
    assert living(bucket) == read_all(bucket) == [25, 10]


# One way to each line: all checkpoints of a line tell the same.
WAYS = st.sampled_from([(), (FIRST,), (Rewind(3, 1, 35),), (FIRST, SECOND), (Rewind(4, 2, lineage.NOTHING),)])


@given(st.dictionaries(st.integers(1, 60), st.tuples(WAYS, st.sampled_from(["own", "none", "two"]), WAYS), min_size=1))
def test_marks_change_nothing(saved: dict[int, tuple[Way, str, Way]]) -> None:
    """Whichever checkpoints have their mark, none, or one more of files that were not published or are kept."""
    bucket = MemoryBucket()
    for step, (rewinds, which, other) in saved.items():
        own = {} if which == "none" else {7: lineage.line(rewinds)}
        put(bucket, step, rewinds, own | ({8: lineage.line(other)} if which == "two" else {}))
    assert living(bucket) == read_all(bucket)
    assert living(bucket) == read_all(bucket)
