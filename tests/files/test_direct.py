"""Reads past the page cache: the same bytes from anywhere in a file; through it where the file system has no other way."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.read import sources, verified_load
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.sources import DirectorySource
from holdfast_files import direct
from holdfast_files.direct import PageCacheState
from holdfast_formats.errors import CorruptExtent, StorageFailed
from holdfast_formats.region import whole
from tests.checkpoints import Built, build, cached_pages, flip, forget
from tests.client.read.test_reader import Counting, want

SIZE = 3 * 2**20 + 777
PAGES = 40


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, bytes]:
    """A descriptor that goes past the page cache, and what the file holds."""
    path = tmp_path_factory.mktemp("direct") / "plain"
    content = np.random.default_rng(5).bytes(SIZE)
    path.write_bytes(content)
    descriptor = direct.open_direct(path)
    if descriptor is None:
        pytest.skip("this file system has no direct access")
    return descriptor, content


@given(start=st.integers(0, SIZE + 5000), size=st.integers(1, 2**21))
def test_any_range_is_what_the_file_holds(plain: tuple[int, bytes], start: int, size: int) -> None:
    """Wherever a range begins and ends, also behind the file's end, it is what stands there."""
    descriptor, content = plain
    found = direct.read(descriptor, start, size, direct.memory_for(size))
    assert bytes(found) == content[start : start + size]


def test_a_read_that_stops_short_goes_on(plain: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A page at a time is read to the end; from the middle of one nothing can be read on, which is said."""
    descriptor, content = plain
    real, cached = os.preadv, os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)

    def stingy(limit: int) -> None:
        monkeypatch.setattr(os, "preadv", lambda _, buffers, at: real(cached, [buffers[0][:limit]], at))

    stingy(direct.ALIGNMENT)
    assert bytes(direct.read(descriptor, 5000, 40_000, direct.memory_for(40_000))) == content[5000:45_000]
    stingy(512)
    with pytest.raises(OSError, match="part way"):
        direct.read(descriptor, 5000, 40_000, direct.memory_for(40_000))
    os.close(cached)


class Waiting(Counting):
    """A directory of which nothing is in the page cache."""

    def waits(self, name: str, offset: int) -> bool:
        return True


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Two tensors of several extents, neither of which begins where a page does; short reads go past the cache as well."""
    monkeypatch.setattr(sources, "DIRECT_BYTES_MIN", 1)
    monkeypatch.setattr(direct, "possible", lambda: True)
    rng = np.random.default_rng(8)
    arrays = {name: rng.standard_normal((300, 999)).astype(np.float32) for name in ("a.weight", "b.weight")}
    return build(tmp_path / "c", {"model": arrays}, extent_bytes=2**16)


def wants_of(built: Built) -> list[Want]:
    return [want("model", name, whole(array.shape), 4) for name, array in built.arrays["model"].items()]


def test_what_is_not_cached_is_read_past_the_cache(large: Built) -> None:
    """A cold load gives what was written, though no tensor's byte is read through the page cache; damage is named."""
    tensor = large.manifest.tensors["model"]["b.weight"]
    if direct.open_direct(large.path / tensor.file) is None:
        pytest.skip("this file system has no direct access")
    source = Waiting(large.path)
    with CheckpointReader.open(source) as reader:
        wanted = wants_of(large)
        source.lengths.clear()
        reader.load(wanted)
        assert source.lengths == []
        for got in wanted:
            np.testing.assert_array_equal(got.target, large.arrays["model"][got.name].view("<u4"))
        flip(large.path / tensor.file, tensor.start + 2**16 + 3)
        wanted = wants_of(large)
        with pytest.raises(CorruptExtent, match=r"b\.weight") as caught:
            reader.load(wanted)
        assert caught.value.members["offset"] == tensor.start + 2**16
        assert not wanted[1].target.reshape(-1).view(np.uint8)[2**16 : 2**17].any()


def test_a_file_that_is_cut_off_is_damage(large: Built) -> None:
    """The end of the file comes too early, inside of a page and at one's end: the extent that lost bytes is named."""
    tensor = large.manifest.tensors["model"]["b.weight"]
    content = (large.path / tensor.file).read_bytes()
    for size in (tensor.start + 100_001, (tensor.start + 100_001) // 4096 * 4096):
        with CheckpointReader.open(Waiting(large.path)) as reader:
            os.truncate(large.path / tensor.file, size)
            with pytest.raises(CorruptExtent, match="cut off"):
                reader.load(wants_of(large))
        (large.path / tensor.file).write_bytes(content)


def test_what_is_proven_first_stays_in_the_cache(large: Built) -> None:
    """Both passes go through the page cache: the second finds there what the first has read."""
    source = Waiting(large.path)
    with CheckpointReader.open(source) as reader:
        wanted = wants_of(large)
        reader.prove(wanted)
        source.lengths.clear()
        reader.load(wanted)
        assert sum(source.lengths) == sum(array.nbytes for array in large.arrays["model"].values())


def test_what_others_read_as_well_goes_through_the_cache(large: Built) -> None:
    """The disk is read once for all of them: each finds in the page cache what another one has read."""
    source = Waiting(large.path)
    with CheckpointReader.open(source) as reader:
        wanted = wants_of(large)
        reader.peers = 2
        source.lengths.clear()
        reader.load(wanted)
        assert sum(source.lengths) == sum(array.nbytes for array in large.arrays["model"].values())
    for got in wanted:
        np.testing.assert_array_equal(got.target, large.arrays["model"][got.name].view("<u4"))


def test_a_file_system_that_refuses_is_read_through_the_cache(large: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether opening is refused or reading, all is loaded; another error is told by name."""

    def refused(number: int) -> None:
        def fail(*_: object) -> memoryview:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(direct, "read", fail)

    for deed in (lambda: monkeypatch.setattr(direct, "open_direct", lambda path: None), lambda: refused(errno.EINVAL)):
        with monkeypatch.context():
            deed()
            source = Waiting(large.path)
            with CheckpointReader.open(source) as reader:
                wanted = wants_of(large)
                source.lengths.clear()
                reader.load(wanted)
            assert sum(source.lengths) == sum(array.nbytes for array in large.arrays["model"].values())
            for got in wanted:
                np.testing.assert_array_equal(got.target, large.arrays["model"][got.name].view("<u4"))
    monkeypatch.setattr(direct, "open_direct", lambda path: os.open(path, os.O_RDONLY))
    refused(errno.EIO)
    with CheckpointReader.open(Waiting(large.path)) as reader, pytest.raises(StorageFailed, match="cannot read"):
        reader.load(wants_of(large))


def test_where_nobody_tells_what_is_cached_the_cache_is_read(large: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an answer to that question everything would be taken for cold, and read from the disk each time."""

    def unsupported(*_: object) -> bool:
        raise OSError(errno.EOPNOTSUPP, "not here")

    with DirectorySource(large.path) as source:
        assert source.past_cache() is not None
        with monkeypatch.context() as patched:
            patched.setattr(PageCacheState, "holds", unsupported)
            assert source.waits("config.json", 0)
        assert source.past_cache() is None


def test_probes_fall_all_over_what_is_read(large: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a checkpoint may have left memory: places in every tensor are looked at, each inside an extent."""
    asked: list[tuple[str, int]] = []

    class Asked(DirectorySource):
        def waits(self, name: str, offset: int) -> bool:
            asked.append((name, offset))
            return super().waits(name, offset)

    monkeypatch.setattr(verified_load, "PROBES", 6)
    with CheckpointReader.open(Asked(large.path)) as reader:
        reader.load(wants_of(large))
    tensors = large.manifest.tensors["model"]
    begins = {(entry.file, entry.start + extent.offset) for entry in tensors.values() for extent in entry.extents}
    assert 6 <= len(asked) <= 13
    assert set(asked) <= begins
    for entry in tensors.values():
        assert any(name == entry.file and 0 <= at - entry.start < entry.nbytes for name, at in asked)


@pytest.fixture
def descriptor(tmp_path: Path):
    path = tmp_path / "d" / "f"
    path.parent.mkdir()
    path.write_bytes(np.random.default_rng(1).bytes(PAGES * mmap.PAGESIZE))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    yield descriptor
    os.close(descriptor)


def test_asking_reads_nothing(descriptor: int, tmp_path: Path) -> None:
    """However often, of whatever page: what was not there is not there afterwards; what is read is told."""
    found = PageCacheState(descriptor)
    assert all(found.holds(page * mmap.PAGESIZE + 7) for page in range(PAGES)), "as written"
    forget(tmp_path / "d")
    for _ in range(3):
        assert not any(found.holds(page * mmap.PAGESIZE + 7) for page in range(PAGES))
    assert cached_pages(descriptor) == 0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(descriptor, 1, 5 * mmap.PAGESIZE)
    assert [page for page in range(PAGES) if found.holds(page * mmap.PAGESIZE)] == [5]
    assert not found.holds(PAGES * mmap.PAGESIZE), "behind its end"
    assert found.holds(4 * mmap.PAGESIZE, 2 * mmap.PAGESIZE), "half of it"
    assert not found.holds(4 * mmap.PAGESIZE, 3 * mmap.PAGESIZE)


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "empty", "w+b") as file:
        assert not PageCacheState(file.fileno()).holds(0)


@pytest.mark.parametrize("refused", [False, True])
def test_who_is_not_told_asks_by_reading(descriptor: int, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """A file of somebody else: a read that may not wait answers, or an error says that nobody can."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = PageCacheState(descriptor)
    if refused:
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(95, "not here")))
        with pytest.raises(OSError, match="not here"):
            found.holds(0)
    else:
        assert found.holds(0)
