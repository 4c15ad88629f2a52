"""A checkpoint as a tar archive: tar unpacks a checkpoint of it, and nothing damaged is in it."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from holdfast.export import tar_stream
from holdfast.read.object_source import ObjectSource
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent
from tests.checkpoints import Built, build_root, flip
from tests.kit.bucket_roots import upload_checkpoint
from tests.kit.commands import call
from tests.kit.memory_bucket import MemoryBucket


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_root(tmp_path, {"tiny": (5,)})["tiny", 5]


def archived(source: DirectorySource | ObjectSource, groups: tuple[str, ...] = ()) -> bytes:
    out, told = io.BytesIO(), list[int]()
    with CheckpointReader.open(source) as reader:
        copied = tar_stream.stream(reader, out, groups, told.append)
    assert sum(told) == copied.bytes
    return out.getvalue()


def test_tar_unpacks_the_checkpoint(built: Built, tmp_path: Path) -> None:
    """The very files, COMMIT last; out of a directory and out of a bucket the same."""
    data = archived(DirectorySource(built.path))
    bucket = MemoryBucket()
    upload_checkpoint(built.path, bucket)
    assert archived(ObjectSource(bucket, "tiny", 5)) == data
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-x", "-C", tmp_path / "out"], input=data, check=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in built.path.iterdir()
    }
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames()[-2:] == [naming.MANIFEST, naming.COMMIT]


def test_groups(built: Built) -> None:
    """Without a manifest, as a plain directory."""
    with tarfile.open(fileobj=io.BytesIO(archived(DirectorySource(built.path), ("model",)))) as archive:
        names = archive.getnames()
    assert naming.COMMIT not in names and "config.json" in names and not any(name.startswith("optim") for name in names)


def test_damage_ends_it_before_the_commit(built: Built) -> None:
    """What was written by then unpacks to no checkpoint."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    flip(built.path / tensor.file, tensor.start + 2500)
    out = io.BytesIO()
    with CheckpointReader.open(DirectorySource(built.path)) as reader, pytest.raises(CorruptExtent):
        tar_stream.stream(reader, out, (), lambda count: None)
    assert naming.COMMIT.encode() not in out.getvalue()


@pytest.mark.usefixtures("no_service")
def test_the_command(built: Built, tmp_path: Path) -> None:
    """Only the archive is on stdout; --as is refused."""
    result = call("export", "tiny@5", "-", "--root", tmp_path)
    assert result.exit_code == 0 and "exported  the archive" in result.stderr
    with tarfile.open(fileobj=io.BytesIO(result.stdout_bytes)) as archive:
        assert archive.getnames()[-1] == naming.COMMIT
    refused = call("export", "tiny@5", "-", "--as", "hf", "--root", tmp_path)
    assert refused.exit_code == 2 and "--as writes a directory" in refused.stderr and not refused.stdout_bytes
