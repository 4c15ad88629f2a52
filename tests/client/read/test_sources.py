"""All sources hand over the same bytes of the same files, and translate what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.read.object_source import ObjectSource
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.sources import DirectorySource, HttpSource, Source
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, DaemonGone, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_formats.region import whole
from tests.checkpoints import Built, build_root, flip
from tests.kit.bucket_roots import upload_checkpoint
from tests.kit.memory_bucket import MemoryBucket
from tests.serving import served


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_root(tmp_path, {"tiny": (5,)})["tiny", 5]


@contextmanager
def _opened(kind: str, built: Built, root: Path) -> Iterator[Source]:
    if kind == "directory":
        with DirectorySource(built.path) as directory:
            yield directory
    elif kind == "http":
        with served(root) as running, Api(running.url) as api:
            yield HttpSource(api, "tiny", 5)
    else:
        bucket = MemoryBucket()
        upload_checkpoint(built.path, bucket)
        yield ObjectSource(bucket, "tiny", 5)


@pytest.fixture(params=["directory", "http", "bucket"])
def copied_source(request: pytest.FixtureRequest, built: Built, tmp_path: Path) -> Iterator[Source]:
    """The checkpoint by all ways; in the bucket is a copy of it."""
    with _opened(request.param, built, tmp_path) as source:
        yield source


@pytest.fixture(params=["directory", "http"])
def source(request: pytest.FixtureRequest, built: Built, tmp_path: Path) -> Iterator[Source]:
    """The checkpoint by the ways that see what a test makes of it."""
    with _opened(request.param, built, tmp_path) as source:
        yield source


def test_reads(copied_source: Source, built: Built) -> None:
    """Sizes, whole files, and parts; a part that reaches over the end is cut there."""
    for name in (naming.COMMIT, naming.MANIFEST, "config.json", "empty.txt", "optim.safetensors.index.json"):
        data = (built.path / name).read_bytes()
        assert copied_source.size(name) == len(data)
        assert copied_source.read(name) == data
        assert copied_source.read(name, 3, 5) == data[3:8]
        assert copied_source.read(name, 3) == data[3:]
        buffer = bytearray(len(data) + 10)
        assert copied_source.read_into(name, 0, memoryview(buffer)) == len(data)
        assert buffer[: len(data)] == data
    assert copied_source.size("nope.json") is None
    for name in ("nope.json", "nope.safetensors"):
        with pytest.raises(NoSuchResource):
            copied_source.read(name)


def test_a_reader_over_any_source(copied_source: Source, built: Built) -> None:
    """Every tensor reads back and the whole checkpoint verifies."""
    reader = CheckpointReader.open(copied_source)
    for group, named in built.arrays.items():
        for name, array in named.items():
            assert reader.read(group, name).tobytes() == array.tobytes()
    assert reader.verify() == []


def test_every_damage_is_found_over_any_source(source: Source, built: Built) -> None:
    """Several damages at once are each found, with file and tensor; the intact rest is not blamed."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    flip(built.path / tensor.file, tensor.start + 2500)
    flip(built.path / tensor.file, tensor.start + 5500)
    flip(built.path / "config.json", 4)
    gone = built.manifest.tensors["model"]["layers.0.q.weight"].file
    (built.path / gone).unlink()
    reader = CheckpointReader.open(source, complete=False)
    found = {(damage.file, damage.tensor, damage.offset) for damage in reader.verify()}
    name = "layers.0.q.weight/exp_avg"
    expected = {(tensor.file, name, tensor.start + 2000), (tensor.file, name, tensor.start + 5000), ("config.json", None, 0)}
    assert expected <= found
    assert {file for file, _, _ in found - expected} == {gone}
    with pytest.raises(CorruptExtent) as caught:
        reader.read("optim", name)
    assert (caught.value.members["file"], caught.value.members["tensor"]) == (tensor.file, name)


def test_a_source_knows_what_it_waits_for(built: Built, tmp_path: Path) -> None:
    """A network is always waited for; a file is not when its bytes were just read, and is where there are none."""
    with DirectorySource(built.path) as directory, served(tmp_path) as running, Api(running.url) as api:
        if _tells_what_is_cached(built.path / "config.json"):
            directory.read("config.json")
            assert not directory.waits("config.json", 0)
        assert directory.waits("empty.txt", 0)
        assert HttpSource(api, "tiny", 5).waits("config.json", 0)


def _tells_what_is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        file.read()
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:  # an overlay, for one
            return False


def test_plain_names_only(built: Built) -> None:
    """A directory is never left: paths and hidden names are refused, links are not followed."""
    (built.path / "link.json").symlink_to("/etc/hostname")
    with DirectorySource(built.path) as source:
        for name in ("../../../catalog.sqlite", "/etc/hostname", ".hidden", ""):
            with pytest.raises(InvalidRequest):
                source.read_into(name, 0, memoryview(bytearray(1)))
        with pytest.raises(StorageFailed):
            source.read_into("link.json", 0, memoryview(bytearray(1)))


def test_files_are_closed(built: Built) -> None:
    """Every descriptor is given back at the end of the context."""
    before = set(os.listdir("/proc/self/fd"))
    with DirectorySource(built.path) as source:
        source.read("config.json")
        source.read("state.json")
        assert len(set(os.listdir("/proc/self/fd")) - before) >= 2
    assert set(os.listdir("/proc/self/fd")) <= before


def test_service_that_goes_away(built: Built, tmp_path: Path) -> None:
    """When the service ends, reading says so and is not taken for damage."""
    with served(tmp_path) as running:
        reader = CheckpointReader.open(HttpSource(Api(running.url), "tiny", 5))
    shape = built.arrays["model"]["embed.weight"].shape
    target = built.arrays["model"]["embed.weight"].copy().view("<u2")
    with reader, pytest.raises(DaemonGone):
        reader.load([Want("model", "embed.weight", whole(shape), target)])
