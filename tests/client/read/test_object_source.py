"""Checkpoints in a bucket: what reading them costs, and damage of every kind by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import Checkpoint
from holdfast.read.bucket_root import BucketRoot
from holdfast.read.object_source import GAP_BYTES, ObjectSource
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.root_index import RootIndex
from holdfast_files.objects import client
from holdfast_files.objects.address import BucketAddress
from holdfast_files.objects.commit_objects import Published, commit_object, encode
from holdfast_formats import naming
from holdfast_formats.disk.manifests import FileEntry
from holdfast_formats.errors import (
    CorruptExtent,
    CorruptManifest,
    Damaged,
    InUse,
    NoSuchCheckpoint,
    NoSuchResource,
    NoSuchRun,
    NotCommitted,
    StorageFailed,
)
from holdfast_formats.region import whole
from tests.checkpoints import Built, build, build_root, varied_arrays
from tests.kit.bucket_roots import ROUND, upload_checkpoint
from tests.kit.memory_bucket import MemoryBucket

DATA = f"tiny/data/step-00000005.a1.r{ROUND}"
COMMIT_KEY = "tiny/commits/step-00000005"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_root(tmp_path, {"tiny": (5,)})["tiny", 5]


@pytest.fixture
def bucket(built: Built) -> MemoryBucket:
    made = MemoryBucket()
    upload_checkpoint(built.path, made)
    made.requests.clear()
    return made


@pytest.fixture
def source(bucket: MemoryBucket) -> ObjectSource:
    """The checkpoint, of which COMMIT and manifest are read."""
    source = ObjectSource(bucket, "tiny", 5)
    CheckpointReader.open(source)
    return source


def _read(source: ObjectSource, file: FileEntry) -> bytes:
    buffer = bytearray(file.bytes)
    assert source.read_into(file.name, 0, buffer) == len(buffer)
    return bytes(buffer)


def _erase(bucket: MemoryBucket, prefix: str) -> None:
    bucket.delete([key for key in bucket.names() if key.startswith(f"{prefix}/")])


def test_a_repair_moves_the_files_of_a_checkpoint_while_it_is_read(
    source: ObjectSource, bucket: MemoryBucket, built: Built
) -> None:
    """They are read where they are now: they are the same files."""
    upload_checkpoint(built.path, bucket, round_id=ROUND + 1)
    _erase(bucket, DATA)
    file = built.manifest.files[0]
    assert _read(source, file) == built.path.joinpath(file.name).read_bytes()


def test_files_that_vanish_while_they_are_read_are_damage(source: ObjectSource, bucket: MemoryBucket, built: Built) -> None:
    """Of a checkpoint that stands. One that was replaced by another, or removed, is not there: its reader says so."""
    file = built.manifest.files[0]
    _erase(bucket, DATA)
    with pytest.raises(CorruptManifest, match="is gone") as caught:
        _read(source, file)
    assert caught.value.members["file"] == file.name
    other = commit_object(Published(f"step-00000005.a1.r{ROUND + 1}", "0" * 64, "r8"))
    bucket.put(COMMIT_KEY, encode(other, "tiny", 5))
    with pytest.raises(NoSuchResource):
        _read(source, file)
    bucket.delete([COMMIT_KEY])
    with pytest.raises(NoSuchResource):
        _read(source, file)


@pytest.fixture
def root(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> BucketRoot:
    """A root in the bucket; it has no mark yet."""
    monkeypatch.setattr(client, "opened", lambda text: bucket)
    monkeypatch.setattr(MemoryBucket, "close", lambda self: None, raising=False)
    return BucketRoot(BucketAddress("memory", "root"))


def reader(bucket: MemoryBucket, complete: bool = True) -> CheckpointReader:
    return CheckpointReader.open(ObjectSource(bucket, "tiny", 5), complete=complete)


class TestRequests:
    """What is read costs no more requests than it must."""

    def test_opening(self, bucket: MemoryBucket) -> None:
        """The commit object, COMMIT and manifest, and one list for the sizes of all files."""
        reader(bucket)
        assert bucket.requests == [
            ("read", COMMIT_KEY),
            ("read", f"{DATA}/COMMIT"),
            ("read", f"{DATA}/manifest.json"),
            ("list", f"{DATA}/"),
        ]

    def test_a_listing_reads_no_other_files(self, bucket: MemoryBucket, root: BucketRoot) -> None:
        """One small read a checkpoint, of its commit object; the list of the run names them."""
        found = RootIndex(root).checkpoints("tiny")
        assert [one.step for one in found.checkpoints] == [5] and not found.unreadable
        assert [kind for kind, _ in bucket.requests] == ["list", "read"]

    def test_the_newest_of_one(self, bucket: MemoryBucket, root: BucketRoot) -> None:
        """A list is enough to find it."""
        source = RootIndex(root).source("tiny", None)
        assert source.label == "s3://memory/root/tiny@5" and bucket.requests == [("list", "tiny/commits/")]

    def test_near_ranges_are_one_request(self, tmp_path: Path) -> None:
        """Tensors no further apart than a gap are read together, and what lies between them is not handed over."""
        rng = np.random.default_rng(1)
        between = GAP_BYTES // 5
        sizes = {f"w{at}": 3000 if at % 2 == 0 else between for at in range(9)} | {"x": GAP_BYTES + 5000, "y": 3000}
        arrays = {name: rng.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
        one = build(tmp_path / "tiny" / naming.CHECKPOINTS / "step-00000005", {"model": arrays}, file_bytes_max=2**30)
        bucket = MemoryBucket()
        upload_checkpoint(one.path, bucket)
        opened = reader(bucket)
        wanted = [name for name in arrays if name.startswith("w") and int(name[1:]) % 2 == 0] + ["y"]
        wants = [Want("model", name, whole((sizes[name],)), np.zeros(sizes[name], np.uint8)) for name in wanted]
        bucket.requests.clear()
        opened.load(wants)
        assert all(np.array_equal(want.target, arrays[want.name]) for want in wants)
        assert [kind for kind, _ in bucket.requests] == ["read", "read"]
        opened.prove(wants)

    def test_gaps_are_a_small_part_of_what_is_read(self, tmp_path: Path) -> None:
        """Larger gaps are left out where all of them together would be much; the smallest are read along."""
        rng = np.random.default_rng(1)
        sizes = {f"w{at:02}": 3000 if at % 2 == 0 else GAP_BYTES // (2 if at < 12 else 20) for at in range(24)}
        arrays = {name: rng.integers(0, 256, size, np.uint8) for name, size in sizes.items()}
        one = build(tmp_path / "tiny" / naming.CHECKPOINTS / "step-00000005", {"model": arrays}, file_bytes_max=2**30)
        bucket = MemoryBucket()
        upload_checkpoint(one.path, bucket)
        opened = reader(bucket)
        bucket.requests.clear()
        wants = [
            Want("model", name, whole((size,)), np.zeros(size, np.uint8)) for name, size in sizes.items() if size == 3000
        ]
        opened.load(wants)
        assert all(np.array_equal(want.target, arrays[want.name]) for want in wants)
        assert len(bucket.requests) == 7  # six with large gaps around them, and one for the six others


class TestDamage:
    """Each kind is named, and nothing damaged is handed over."""

    def tensor(self, built: Built) -> tuple[str, str]:
        name = "layers.0.q.weight"
        return name, f"{DATA}/{built.manifest.tensors['model'][name].file}"

    def test_a_changed_object_of_the_same_size(self, bucket: MemoryBucket, built: Built) -> None:
        name, key = self.tensor(built)
        data = bytearray(bucket.read(key))
        data[built.manifest.tensors["model"][name].start + 7] ^= 1
        bucket.put(key, data)
        with pytest.raises(CorruptExtent) as caught:
            reader(bucket).read("model", name)
        assert caught.value.members["tensor"] == name
        found = reader(bucket).verify()
        assert [(one.file, one.tensor) for one in found] == [(key.rpartition("/")[2], name)]

    def test_an_object_that_is_cut(self, bucket: MemoryBucket, built: Built) -> None:
        _, key = self.tensor(built)
        bucket.put(key, bucket.read(key)[:-1])
        with pytest.raises(Damaged) as caught:
            reader(bucket)
        assert caught.value.members["file"] == key.rpartition("/")[2]
        assert reader(bucket, complete=False).verify() != []

    def test_an_object_that_is_missing(self, bucket: MemoryBucket, built: Built) -> None:
        name, key = self.tensor(built)
        opened = reader(bucket)
        bucket.delete([key])
        with pytest.raises(Damaged) as caught:
            reader(bucket)
        assert caught.value.members["file"] == key.rpartition("/")[2]
        with pytest.raises(Exception, match="is gone") as lost:
            opened.read("model", name)
        assert lost.value.members["file"] == key.rpartition("/")[2]

    @pytest.mark.parametrize("data", [b"", b"{}", b"null", b'{"a": "stranger"}', b"\xff" * 5000, b"[" * 4000])
    def test_a_commit_object_of_a_stranger(self, bucket: MemoryBucket, data: bytes) -> None:
        bucket.put(COMMIT_KEY, data)
        with pytest.raises(Damaged, match="commits/step-00000005 cannot be read"):
            reader(bucket)

    def test_a_commit_object_whose_files_are_gone(self, bucket: MemoryBucket) -> None:
        """Not the same as a step without one."""
        bucket.delete([f"{DATA}/COMMIT"])
        with pytest.raises(NotCommitted, match="names files that are gone"):
            reader(bucket)
        bucket.delete([COMMIT_KEY])
        with pytest.raises(NotCommitted, match="has no COMMIT"):
            reader(bucket)

    def test_a_commit_of_another_step(self, bucket: MemoryBucket, tmp_path: Path) -> None:
        """Files that were copied over those of this step are sound in themselves, and are not its checkpoint."""
        other = build(tmp_path / "other", step=6)
        for name in (naming.MANIFEST, naming.COMMIT):
            bucket.put(f"{DATA}/{name}", (other.path / name).read_bytes())
        with pytest.raises(Damaged, match="is not the one that tiny/commits/step-00000005 means"):
            reader(bucket)

    def test_a_manifest_of_another_step(self, bucket: MemoryBucket, tmp_path: Path) -> None:
        other = build(tmp_path / "other", step=6)
        bucket.put(f"{DATA}/{naming.MANIFEST}", (other.path / naming.MANIFEST).read_bytes())
        with pytest.raises(CorruptManifest):
            reader(bucket)

    def test_a_listing_names_what_cannot_be_read(self, bucket: MemoryBucket, root: BucketRoot) -> None:
        """The other checkpoints are listed."""
        bucket.put("tiny/commits/step-00000009", b"{}")
        found = RootIndex(root).checkpoints("tiny")
        assert [one.step for one in found.checkpoints] == [5]
        assert ["step-00000009" in str(error) for error in found.unreadable] == [True]


class TestReplaced:
    """A checkpoint that is replaced while it is read."""

    def replace(self, bucket: MemoryBucket, built: Built) -> None:
        upload_checkpoint(built.path, bucket, round_id=8)
        bucket.delete([key for key in list(bucket._objects) if key.startswith(DATA)])

    def test_its_files_stay_those_of_one_commit(self, bucket: MemoryBucket, built: Built, tmp_path: Path) -> None:
        """What was begun with the old files ends with a word about it; a new reader takes the new ones."""
        opened = reader(bucket)
        other = build(tmp_path / "other" / "tiny" / "checkpoints" / built.path.name, varied_arrays(1))
        self.replace(bucket, other)
        with pytest.raises(InUse, match="was replaced or removed"):
            opened.read("model", "embed.weight")
        assert reader(bucket).read("model", "embed.weight").tobytes() == other.arrays["model"]["embed.weight"].tobytes()

    def test_before_its_commit_is_read(self, bucket: MemoryBucket, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between the commit object and COMMIT."""
        plain = bucket.read_tagged
        left = [1]

        def read_tagged(key: str, bytes_max: int) -> tuple[bytes, str]:
            found = plain(key, bytes_max)
            if key == COMMIT_KEY and left:
                left.clear()
                self.replace(bucket, built)
            return found

        monkeypatch.setattr(bucket, "read_tagged", read_tagged)
        with Checkpoint(ObjectSource(bucket, "tiny", 5)) as checkpoint:
            assert checkpoint.read("embed.weight").tobytes() == built.arrays["model"]["embed.weight"].tobytes()


class TestRoots:
    """What is at an address."""

    def test_nothing(self, root: BucketRoot, bucket: MemoryBucket) -> None:
        bucket.delete(list(bucket._objects))
        with pytest.raises(StorageFailed, match=r"s3://memory/root is empty: there is no \.holdfast\.root"):
            root.runs()

    def test_something_else(self, root: BucketRoot, bucket: MemoryBucket) -> None:
        """A run's name does not make it a root, and neither does data without a commit object."""
        bucket.delete([COMMIT_KEY])
        bucket.put("photos/1.jpg", b"x")
        bucket.put("notes.txt", b"x")
        with pytest.raises(StorageFailed, match=r"has notes\.txt, photos/, tiny/, and no \.holdfast\.root"):
            root.runs()

    def test_an_empty_root(self, root: BucketRoot, bucket: MemoryBucket) -> None:
        bucket.delete(list(bucket._objects))
        bucket.put(naming.ROOT_FILE, json.dumps({"id": "x", "inode": 0}).encode())
        assert root.runs() == []
        with pytest.raises(NoSuchRun):
            root.steps("tiny")

    def test_missing_names(self, root: BucketRoot) -> None:
        with pytest.raises(NoSuchRun) as caught:
            root.steps("tinny")
        assert "did you mean tiny?" in caught.value.hint
        with pytest.raises(NoSuchCheckpoint, match="tiny@6"):
            RootIndex(root).source("tiny", 6)

    def test_steps_are_numbers(self, root: BucketRoot, bucket: MemoryBucket) -> None:
        """What a stranger put there is no step, and the order is by number."""
        for name in ("step-1234567890", "notes", "step-00000007/x", "step-7"):
            bucket.put(f"tiny/commits/{name}", b"{}")
        content = commit_object(Published(f"step-00000042.a1.r{ROUND}", "0" * 64, "r7"))
        bucket.put("tiny/commits/step-00000042", encode(content, "tiny", 42))
        assert root.steps("tiny") == [1234567890, 42, 5]
