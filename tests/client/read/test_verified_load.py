"""The passes of a load: what is read into whom, at any chunk size, and what is found when a file changes in between."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.sources import DirectorySource
from holdfast_formats.errors import CorruptExtent, StorageFailed
from holdfast_formats.region import Box, whole
from tests.checkpoints import Built, build, flip
from tests.client.read.test_reader import Counting, opened, want


def chunked(built: Built, chunk_bytes: int) -> DirectorySource:
    """A source whose chunks are so small that small extents are large pieces."""
    source = DirectorySource(built.path)
    source.chunk_bytes = chunk_bytes
    return source


@pytest.mark.parametrize("chunk_bytes", [1, 333, 2**19])
def test_a_file_changed_after_its_proof_is_checked_again(built: Built, chunk_bytes: int) -> None:
    """Damage done between the proof and the load is found and named."""
    tensor = built.manifest.tensors["model"]["embed.weight"]
    array = built.arrays["model"]["embed.weight"]
    rows = Box((10, 0), (41, 24))  # a part of three extents: bytes 480 to 2448
    for wanted in (want("model", "embed.weight", box, 2) for box in (whole(array.shape), rows)):
        with CheckpointReader.open(chunked(built, chunk_bytes)) as reader:
            reader.prove([wanted])
            reader.load([wanted])
            np.testing.assert_array_equal(wanted.target, array[wanted.box.slices].view("<u2"))
            status = (built.path / tensor.file).stat()
            flip(built.path / tensor.file, tensor.start + 1500, 6)
            os.utime(built.path / tensor.file, ns=(status.st_atime_ns, status.st_mtime_ns))
            wanted.target[:] = 0
            with pytest.raises(CorruptExtent) as caught:
                reader.load([wanted])
        assert caught.value.members == {
            "file": tensor.file,
            "tensor": "embed.weight",
            "offset": tensor.start + 1000,
            "length": 1000,
        }
        flip(built.path / tensor.file, tensor.start + 1500, 6)


def test_damage_before_the_load_changes_nothing(built: Built) -> None:
    """One damaged byte anywhere in what is wanted, and prove refuses while no receiver has changed."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    wants = [
        want(group, name, whole(array.shape), array.itemsize)
        for group, named in built.arrays.items()
        for name, array in named.items()
    ]
    flip(built.path / tensor.file, tensor.start + 7000)
    for chunk_bytes in (100, 2**19):
        with CheckpointReader.open(chunked(built, chunk_bytes)) as reader, pytest.raises(CorruptExtent, match="exp_avg"):
            reader.prove(wants)
    assert not any(wanted.target.any() for wanted in wants)


@pytest.mark.parametrize("chunk_bytes", [7, 999, 1000, 4096])
def test_any_receiver_at_any_chunk_size(shared: Built, chunk_bytes: int) -> None:
    """Whole tensors, rows, columns and strided receivers get what slicing gives, whether pieces are large or small."""
    array = shared.arrays["optim"]["layers.0.q.weight/exp_avg"]
    boxes = [whole(array.shape), Box((3, 0), (9, 40)), Box((5, 7), (1, 20)), Box((0, 30), (24, 10)), Box((4, 4), (0, 3))]
    for proven in (True, False):
        for box in boxes:
            backing = np.zeros((box.shape[1], box.shape[0]), "<u8")
            for into in (np.zeros(box.shape, "<u8"), backing.T):
                wanted = [Want("optim", "layers.0.q.weight/exp_avg", box, into)]
                with CheckpointReader.open(chunked(shared, chunk_bytes)) as reader:
                    if proven:
                        reader.prove(wanted)
                    reader.load(wanted)
                np.testing.assert_array_equal(into, array[box.slices].view("<u8"))


def test_only_extents_that_are_wanted_are_read(shared: Built) -> None:
    """Rows that end inside an extent cost each pass whole extents, and no other; the load says how many bytes those are."""
    source = Counting(shared.path)
    source.chunk_bytes = 100
    rows = want("model", "embed.weight", Box((30, 0), (20, 24)), 2)  # bytes 1440 to 2400: of two extents of 1000
    with CheckpointReader.open(source) as reader:
        source.lengths.clear()
        reader.prove([rows])
        header = sum(f.header_bytes for f in reader.manifest.files if f.name == reader.entry("model", "embed.weight").file)
        assert sum(source.lengths) == header + 2000
        source.lengths.clear()
        assert reader.load([rows]) == 2000
        assert sum(source.lengths) == 2000


def test_columns_of_wide_rows_read_only_their_extents(tmp_path: Path) -> None:
    """Of rows much longer than an extent, columns need few of each row's extents, and get what slicing gives."""
    array = np.random.default_rng(1).standard_normal((5, 2000)).astype(np.float32)  # rows of eight extents of 1000
    built = build(tmp_path / "c", {"model": {"w": array}})
    source = Counting(built.path)
    columns = want("model", "w", Box((1, 500), (3, 300)), 4)  # bytes 2000 to 3200 of each row of 8000
    with CheckpointReader.open(source) as reader:
        source.lengths.clear()
        assert reader.load([columns]) == sum(source.lengths) == 3 * 2000
    np.testing.assert_array_equal(columns.target, array[1:4, 500:800].view("<u4"))


def test_receivers_that_share_extents(shared: Built) -> None:
    """Overlapping rows, columns and the whole of one tensor, wanted at once: each extent is read once, each gets its own."""
    array = shared.arrays["optim"]["layers.0.q.weight/exp_avg"]
    boxes = [Box((0, 0), (10, 40)), Box((5, 0), (3, 40)), Box((0, 3), (24, 9)), Box((20, 0), (4, 40)), Box((20, 1), (1, 1))]
    for chunk_bytes in (100, 1500, 2**19):
        wants = [want("optim", "layers.0.q.weight/exp_avg", box, 8) for box in [*boxes, whole(array.shape)]]
        for chosen in (wants, wants[:2], wants[3:5], wants[::-1]):
            with CheckpointReader.open(chunked(shared, chunk_bytes)) as reader:
                reader.prove(chosen)
                assert reader.load(chosen) <= array.nbytes
            for wanted in chosen:
                np.testing.assert_array_equal(wanted.target, array[wanted.box.slices].view("<u8"))
                wanted.target[:] = 0


@pytest.mark.parametrize("chunk_bytes", [300, 2500, 2**19])
def test_unproven_bytes_are_never_handed_over(built: Built, chunk_bytes: int) -> None:
    """A load that nobody proved first checks every extent before it is copied: nothing of a damaged one arrives."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    array = built.arrays["optim"]["layers.0.q.weight/exp_avg"]
    flip(built.path / tensor.file, tensor.start + 3500)
    for box in (whole(array.shape), Box((1, 0), (20, 40)), Box((0, 1), (24, 39))):
        wanted = want("optim", "layers.0.q.weight/exp_avg", box, 8)
        with CheckpointReader.open(chunked(built, chunk_bytes)) as reader, pytest.raises(CorruptExtent):
            reader.load([wanted])
        arrived = np.zeros(array.shape, "<u8")
        arrived[box.slices] = wanted.target
        assert not arrived.reshape(-1)[3000 // 8 : 4000 // 8].any()


@pytest.mark.parametrize("chunk_bytes", [300, 2500, 2**19])
@pytest.mark.parametrize("damage", ["flip", "unreadable"])
def test_what_fails_leaves_nothing_that_is_not_proven(
    built: Built, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, damage: str
) -> None:
    """Whatever was read in place when a load failed: each extent is as it was before, as it was written, or zeros (I7)."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    array = built.arrays["optim"]["layers.0.q.weight/exp_avg"]
    wanted = want("optim", "layers.0.q.weight/exp_avg", whole(array.shape), 8)
    wanted.target.reshape(-1).view(np.uint8)[:] = 0xAA
    with CheckpointReader.open(chunked(built, chunk_bytes)) as reader:
        if damage == "flip":
            flip(built.path / tensor.file, tensor.start + 3500)
        else:
            _break_reading(monkeypatch, tensor.start + 3500)
        with pytest.raises(CorruptExtent if damage == "flip" else StorageFailed):
            reader.load([wanted])
    found, written = wanted.target.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8)
    for extent in tensor.extents:
        held = found[extent.offset : extent.offset + extent.length]
        right = written[extent.offset : extent.offset + extent.length]
        kinds = [(held == 0xAA).all(), not held.any(), np.array_equal(held, right)]
        assert any(kinds[:2] if extent.offset == 3000 else kinds), f"{extent.offset}: {bytes(held[:8])!r}"


def _break_reading(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """A disk that cannot read the byte there, and hands over garbage of what comes before it."""
    real = os.preadv

    def failing(descriptor: int, buffers: tuple[memoryview, ...], offset: int, flags: int = 0) -> int:
        buffer = buffers[0]
        if len(buffer) > 1 and offset <= position < offset + len(buffer):
            buffer[: len(buffer) // 2] = b"x" * (len(buffer) // 2)
            raise OSError(errno.EIO, "input/output error")
        return real(descriptor, [buffer], offset, flags)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(DirectorySource, "file", lambda *_: -1)  # nor for whoever is not Python


@pytest.mark.parametrize("cores", [1, 2, 40])
def test_threads_keep_to_the_cores_and_to_their_memory(shared: Built, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """As many threads as cores, and never so many that their buffers pass the limit."""
    used: set[int] = set()

    class Watched(DirectorySource):
        chunk_bytes = 8

        def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
            used.add(threading.get_ident())
            return super().read_into(name, offset, buffer)

    monkeypatch.setattr(DirectorySource, "buffers_bytes_max", 5000)  # of extents of 1000
    array = shared.arrays["optim"]["layers.0.q.weight/exp_avg"]
    wanted = want("optim", "layers.0.q.weight/exp_avg", whole(array.shape), 8)
    with CheckpointReader.open(Watched(shared.path)) as reader:
        reader.cores = cores
        used.clear()
        reader.load([wanted])
    assert 1 <= len(used) <= {1: 1, 2: 2, 40: 5}[cores]


def test_many_small_tensors(tmp_path: Path) -> None:
    """Thousands of tensors smaller than a chunk come back, and one damaged byte among them names its tensor."""
    rng = np.random.default_rng(3)
    arrays = {f"experts.{n}.scale": rng.integers(0, 256, n % 37, np.uint8) for n in range(3000)}
    built = build(tmp_path / "c", {"model": arrays}, file_bytes_max=20_000)
    wants = [want("model", name, whole(array.shape), 1) for name, array in arrays.items()]
    with opened(built) as reader:
        reader.prove(wants)
        reader.load(wants)
        for wanted in wants:
            np.testing.assert_array_equal(wanted.target, arrays[wanted.name])
        tensor = built.manifest.tensors["model"]["experts.2000.scale"]
        flip(built.path / tensor.file, tensor.start)
        with pytest.raises(CorruptExtent, match=r"experts\.2000\.scale"):
            reader.prove(wants)


def test_reads_that_return_little_at_a_time(shared: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that hands over fewer bytes than asked is asked again."""
    real = os.preadv

    def stingy(descriptor: int, buffers: tuple[memoryview, ...], offset: int, flags: int = 0) -> int:
        return real(descriptor, [memoryview(buffers[0])[:11]], offset, flags)

    array = shared.arrays["model"]["layers.0.q.weight"]
    wanted = want("model", "layers.0.q.weight", whole(array.shape), 4)
    with CheckpointReader.open(chunked(shared, 300)) as reader:
        monkeypatch.setattr(os, "preadv", stingy)
        reader.prove([wanted])
        reader.load([wanted])
    np.testing.assert_array_equal(wanted.target, array.view("<u4"))


@pytest.mark.parametrize("chunk_bytes", [300, 2**19])
def test_a_file_cut_off_under_the_reader(built: Built, chunk_bytes: int) -> None:
    """A file that becomes shorter before or after its proof is damage, with the piece that lost bytes."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    array = built.arrays["optim"]["layers.0.q.weight/exp_avg"]
    for box in (whole(array.shape), Box((2, 0), (20, 40))):  # the second: bytes 640 to 7040
        wanted = [want("optim", "layers.0.q.weight/exp_avg", box, 8)]
        content = (built.path / tensor.file).read_bytes()
        with CheckpointReader.open(chunked(built, chunk_bytes)) as reader:
            reader.prove(wanted)
            os.truncate(built.path / tensor.file, tensor.start + 5500)
            for act in (reader.load, reader.prove):
                with pytest.raises(CorruptExtent, match="cut off") as caught:
                    act(wanted)
                assert caught.value.members["offset"] >= tensor.start + 5000
            (built.path / tensor.file).write_bytes(content)


@pytest.mark.parametrize("chunk_bytes", [300, 2**19])
def test_a_source_with_its_bytes_in_memory_is_viewed(built: Built, chunk_bytes: int) -> None:
    """Bytes that a source has in memory are not read; they are proven all the same, and damage is not handed over."""

    class Held(DirectorySource):
        def view(self, name: str, start: int, stop: int) -> memoryview:
            return memoryview((self.path / name).read_bytes())[start:stop]

        def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
            assert not name.endswith(".safetensors")
            return super().read_into(name, offset, buffer)

    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    array = built.arrays["optim"]["layers.0.q.weight/exp_avg"]
    box = Box((1, 0), (array.shape[0] - 1, array.shape[1]))
    wanted = [want("optim", "layers.0.q.weight/exp_avg", b, 8) for b in (whole(array.shape), box)]
    source = Held(built.path)
    source.chunk_bytes = chunk_bytes
    with CheckpointReader.open(source) as reader:
        reader.prove(wanted)
        reader.load(wanted[:1])
        reader.load(wanted[1:])
        for got in wanted:
            np.testing.assert_array_equal(got.target, array[got.box.slices].view("<u8"))
        flip(built.path / tensor.file, tensor.start + 1500, 6)
        wanted[0].target[:] = 0
        with pytest.raises(CorruptExtent):
            reader.load(wanted[:1])
        assert not wanted[0].target.reshape(-1)[1000 // 8 : 2000 // 8].any()
