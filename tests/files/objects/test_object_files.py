"""Files of a bucket by logical paths: what they lead to, what is remembered, and damage by name."""

from __future__ import annotations

import pytest

from holdfast_files.objects.commit_objects import Published, commit_object, encode
from holdfast_files.objects.object_files import ObjectFiles, read_commit_object
from holdfast_formats.errors import CorruptManifest, InvalidRequest, NoSuchResource
from tests.kit.memory_bucket import MemoryBucket

AT = "run/checkpoints/step-00000007"
COMMIT_KEY = "run/commits/step-00000007"


def publish(bucket: MemoryBucket, round_id: int, step: int = 7) -> str:
    name = f"step-{step:08d}.a1.r{round_id}"
    prefix = f"run/data/{name}"
    for file in ("COMMIT", "manifest.json", "model.safetensors"):
        bucket.put(f"{prefix}/{file}", f"{file} of {round_id}".encode())
    content = commit_object(Published(name, "0" * 64, f"r{round_id}"))
    bucket.put(f"run/commits/step-{step:08d}", encode(content, "run", step))
    return prefix


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture
def files(bucket: MemoryBucket) -> ObjectFiles:
    return ObjectFiles(bucket)


def test_a_file_of_a_checkpoint(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """Its commit object leads to it; the whole, a range, a buffer, size and stamp."""
    publish(bucket, 5)
    path = f"{AT}/model.safetensors"
    assert files.read(path) == b"model.safetensors of 5" and files.read(path, 6, 4) == b"safe"
    buffer = bytearray(4)
    assert files.read_into(path, 6, buffer) == 4 == files.read_stored(path, 6, buffer) and buffer == b"safe"
    assert files.size(path) == 22 and files.stamp(path) != ""
    assert files.list(AT) == ["COMMIT", "manifest.json", "model.safetensors"]


def test_what_a_run_has(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """Steps are those with a commit object, under the name of a directory's room; data that is not committed is not seen."""
    for step in (12, 7):
        publish(bucket, 5, step)
    bucket.put("run/data/step-00000009.a1.r5/model.safetensors", b"staged")
    bucket.put("run/commits/of-somebody", b"{}")
    bucket.put("run/run.json", b"{}")
    bucket.put(".holdfast.root", b"{}")
    assert files.list("") == [".holdfast.root", "run"]
    assert files.list("run") == ["checkpoints", "run.json"]
    assert files.list("run/checkpoints") == ["step-00000007", "step-00000012"]
    assert files.read("run/run.json") == b"{}"
    assert files.list("other") == files.list("run/run.json") == files.list("run/checkpoints/step-00000009") == []


def test_what_is_not_there(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """Missing steps and files, directories, and files without a commit object."""
    prefix = publish(bucket, 5)
    for path in (f"{AT}/none", AT, "run/checkpoints", "run", "run/checkpoints/step-00000008/COMMIT", "run/checkpoints/x"):
        assert files.size(path) is None and files.stamp(path) == ""
        with pytest.raises(NoSuchResource):
            files.read(path)
        with pytest.raises(NoSuchResource):
            files.read_into(path, 0, bytearray(1))
    bucket.delete([COMMIT_KEY])
    assert files.size(f"{AT}/COMMIT") is None and files.list(AT) == []
    assert bucket.head(f"{prefix}/COMMIT") is not None


def test_a_checkpoint_that_is_replaced_meanwhile(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """A reader that has read COMMIT keeps that checkpoint's files; the next COMMIT is the new one's."""
    publish(bucket, 5)
    assert files.read(f"{AT}/COMMIT") == b"COMMIT of 5"
    publish(bucket, 6)
    assert files.read(f"{AT}/manifest.json") == b"manifest.json of 5"
    assert files.read(f"{AT}/COMMIT") == b"COMMIT of 6"
    assert files.read(f"{AT}/manifest.json") == b"manifest.json of 6"


def test_files_that_are_gone_are_looked_for_again(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """The replaced checkpoint was released: the path leads to the present one."""
    prefix = publish(bucket, 5)
    files.read(f"{AT}/COMMIT")
    publish(bucket, 6)
    bucket.delete([key for key in bucket.names() if key.startswith(prefix)])
    assert files.read(f"{AT}/manifest.json") == b"manifest.json of 6"
    assert files.size(f"{AT}/model.safetensors") == 22


def test_a_change_by_this_process_is_seen(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """What was remembered can be forgotten."""
    publish(bucket, 5)
    files.read(f"{AT}/model.safetensors")
    publish(bucket, 6)
    files.forget("run", 7)
    assert files.read(f"{AT}/model.safetensors") == b"model.safetensors of 6"


def test_requests(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """The commit object is read once for all ranges of a checkpoint's files."""
    publish(bucket, 5)
    bucket.requests.clear()
    files.read(f"{AT}/COMMIT")
    for offset in range(5):
        files.read(f"{AT}/model.safetensors", offset, 1)
    assert [key for _, key in bucket.requests].count(COMMIT_KEY) == 1 and len(bucket.requests) == 7


def test_a_commit_object_that_cannot_be_read(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """It is named, its step is listed, and what is too long is not read."""
    publish(bucket, 5)
    for data in (b"", b"{}", b"x" * 5000):
        bucket.put(COMMIT_KEY, data)
        for act in (files.size, files.read, files.list):
            with pytest.raises(CorruptManifest, match=COMMIT_KEY):
                act(f"{AT}/COMMIT" if act != files.list else AT)
        assert files.list("run/checkpoints") == ["step-00000007"]


@pytest.mark.parametrize("path", ["/x", "../x", "run/../x", "run//x", "a\0b", "."])
def test_paths_that_lead_out(files: ObjectFiles, path: str) -> None:
    """No call takes them."""
    for act in (files.size, files.stamp, files.list, files.read, lambda path: files.read_into(path, 0, bytearray(1))):
        with pytest.raises(InvalidRequest):
            act(path)


def test_positions_before_the_beginning(bucket: MemoryBucket, files: ObjectFiles) -> None:
    """Negative offsets and lengths never count from the end."""
    publish(bucket, 5)
    for offset, length in ((-1, 1), (0, -1), (-1, None)):
        with pytest.raises(InvalidRequest):
            files.read(f"{AT}/COMMIT", offset, length)
    with pytest.raises(InvalidRequest):
        files.read_into(f"{AT}/COMMIT", -1, bytearray(1))


def test_the_commit_object_with_its_tag(bucket: MemoryBucket) -> None:
    """For a replacement that names what it replaces."""
    assert read_commit_object(bucket, "run", 7) is None
    publish(bucket, 5)
    found, status = read_commit_object(bucket, "run", 7), bucket.head(COMMIT_KEY)
    assert found is not None and status is not None
    assert found.etag == status.etag and found.content.checkpoint.data == "step-00000007.a1.r5"
