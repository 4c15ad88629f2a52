"""The reader hands over what was written, and nothing else: any damage anywhere is found and named."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.sources import DirectorySource
from holdfast_formats import naming, transfer
from holdfast_formats.digest import digest
from holdfast_formats.disk import manifests
from holdfast_formats.errors import (
    CorruptExtent,
    CorruptManifest,
    Damaged,
    InvalidRequest,
    NotCommitted,
    StateMismatch,
)
from holdfast_formats.region import Box, whole
from tests.checkpoints import Built, build, flip


def opened(built: Built, complete: bool = True) -> CheckpointReader:
    return CheckpointReader.open(DirectorySource(built.path), complete=complete)


class Counting(DirectorySource):
    """Remembers how many bytes each read asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lengths: list[int] = []  # appended to by many threads

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        self.lengths.append(len(buffer))
        return super().read_into(name, offset, buffer)


def want(group: str, name: str, box: Box, itemsize: int) -> Want:
    return Want(group, name, box, np.zeros(box.shape, transfer.element_dtype(itemsize)))


def test_every_tensor_reads_back(shared: Built) -> None:
    """Each tensor equals what was written, bit for bit: all dtypes, 0-d, without elements, of many extents."""
    with opened(shared) as reader:
        for group, named in shared.arrays.items():
            for name, array in named.items():
                read = reader.read(group, name)
                assert (read.dtype, read.shape) == (array.dtype, array.shape)
                assert read.tobytes() == array.tobytes(), name


def test_boxes_and_aliases(shared: Built) -> None:
    """A box is the slice of its tensor, and an alias is the tensor it stands for."""
    with opened(shared) as reader:
        box = Box((3, 5), (11, 7))
        expected = shared.arrays["model"]["embed.weight"][3:14, 5:12]
        assert reader.read("model", "lm_head.weight", box).tobytes() == expected.tobytes()
        with pytest.raises(StateMismatch, match="outside"):
            reader.read("model", "embed.weight", Box((60, 0), (5, 24)))


def test_strided_targets_and_many_wants(shared: Built) -> None:
    """Random boxes, several of one tensor at once, into strided arrays, give what slicing gives."""
    rng = random.Random(7)
    array = shared.arrays["optim"]["layers.0.q.weight/exp_avg"]
    wants, expected = [], []
    for _ in range(40):
        low = [rng.randrange(0, size + 1) for size in array.shape]
        shape = tuple(rng.randrange(0, size - at + 1) for size, at in zip(array.shape, low, strict=True))
        box = Box(tuple(low), shape)
        backing = np.zeros((shape[1] * 2, shape[0]), "<u8")
        wants.append(Want("optim", "layers.0.q.weight/exp_avg", box, backing[::2].T))
        expected.append(array[box.slices].view("<u8"))
    with opened(shared) as reader:
        reader.prove(wants)
        reader.load(wants)
    for wanted, right in zip(wants, expected, strict=True):
        np.testing.assert_array_equal(wanted.target, right)


def test_extents_are_read_once(shared: Built) -> None:
    """Wants that share extents cost one read of each byte."""

    source = Counting(shared.path)
    array = shared.arrays["model"]["embed.weight"]
    with CheckpointReader.open(source) as reader:
        source.lengths.clear()
        reader.load([want("model", "embed.weight", whole(array.shape), 2) for _ in range(5)])
    assert sum(source.lengths) == array.nbytes


def test_sub_byte_tensors(tmp_path: Path) -> None:
    """A sub-byte tensor is received as bytes; as a numpy array it is refused by name of the dtype."""
    raw = np.arange(24, dtype=np.uint8).reshape(4, 6)
    built = build(tmp_path / "c", {"model": {"w": raw}})
    entry = built.manifest.tensors["model"]["w"]
    with opened(built) as reader:
        packed = manifests.TensorEntry("F4", (4, 12), entry.file, entry.start, entry.extents)
        reader.manifest.tensors["model"]["w"] = packed
        part = Want("model", "w", Box((1, 2), (2, 4)), np.zeros((2, 2), "<u1"))
        reader.load([part])
        np.testing.assert_array_equal(part.target, raw[1:3, 1:3])
        with pytest.raises(InvalidRequest, match="F4"):
            reader.read("model", "w")
        with pytest.raises(StateMismatch, match="inside a byte"):
            reader.load([part._replace(box=Box((1, 1), (2, 4)))])


def test_wrong_wants_are_refused_by_name(shared: Built) -> None:
    """Unknown tensors, and arrays of another shape or width, are refused before anything is read."""
    with opened(shared) as reader:
        with pytest.raises(StateMismatch, match=r"nope.*model"):
            reader.read("model", "nope")
        with pytest.raises(StateMismatch, match=r"embed\.weight"):
            reader.prove([want("model", "embed.weight", Box((0, 0), (2, 2)), 4)])
        with pytest.raises(StateMismatch, match=r"embed\.weight"):
            wrong = Want("model", "embed.weight", Box((0, 0), (2, 2)), np.zeros((2, 3), "<u2"))
            reader.load([wrong])


def test_state_and_small_files(shared: Built) -> None:
    """Small files come back whole, also empty ones."""
    with opened(shared) as reader:
        assert reader.state == (shared.path / naming.STATE).read_bytes()
        assert reader.read_file("empty.txt") == b""


def test_intact_checkpoint_verifies(shared: Built) -> None:
    """Nothing is found in an intact checkpoint, and every listed byte is reported as read."""
    seen: list[int] = []
    with opened(shared) as reader:
        assert reader.verify(seen.append) == []
        assert sum(seen) == reader.manifest.bytes


def test_unlisted_files_are_ignored(built: Built) -> None:
    """A file that the manifest does not list is no damage."""
    (built.path / "notes.txt").write_text("mine")
    with opened(built) as reader:
        assert reader.verify() == []


def test_any_flipped_bit_is_found(built: Built) -> None:
    """A bit turned round at a random place of every file, first and last byte included, is one finding of that file."""
    rng = random.Random(3)
    for file in built.manifest.files:
        if not file.bytes:
            continue
        for position in {0, file.bytes - 1, *(rng.randrange(file.bytes) for _ in range(12))}:
            bit = rng.randrange(8)
            flip(built.path / file.name, position, bit)
            with opened(built) as reader:
                (damage,) = reader.verify()
            assert damage.file == file.name
            assert damage.offset <= position < damage.offset + damage.length
            in_data = file.header_bytes and position >= file.header_bytes
            assert (damage.tensor is not None) == bool(in_data)
            flip(built.path / file.name, position, bit)


def test_any_flipped_bit_of_commit_is_found(built: Built) -> None:
    """Every single bit of COMMIT matters: with any of them turned round there is no checkpoint."""
    size = (built.path / naming.COMMIT).stat().st_size
    for position in range(size):
        for bit in range(8):
            flip(built.path / naming.COMMIT, position, bit)
            with pytest.raises((NotCommitted, CorruptManifest)):
                opened(built)
            flip(built.path / naming.COMMIT, position, bit)
    opened(built).close()


def test_any_flipped_bit_of_the_manifest_is_found(built: Built) -> None:
    """A bit turned round anywhere in the manifest is found before the manifest is believed."""
    rng = random.Random(5)
    size = (built.path / naming.MANIFEST).stat().st_size
    for position in {0, size - 1, *(rng.randrange(size) for _ in range(50))}:
        flip(built.path / naming.MANIFEST, position, 1)
        with pytest.raises(CorruptManifest):
            opened(built)
        flip(built.path / naming.MANIFEST, position, 1)


@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST])
def test_without_commit_or_manifest_there_is_no_checkpoint(built: Built, name: str) -> None:
    """A directory that lacks COMMIT or manifest is refused, and the missing file is named."""
    (built.path / name).unlink()
    with pytest.raises(Damaged) as caught:
        opened(built)
    assert caught.value.members["file"] == name


def test_missing_file(built: Built) -> None:
    """Opening names a missing file and the tensors in it; verify finds it and goes on."""
    lost = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"].file
    (built.path / lost).unlink()
    flip(built.path / naming.STATE, 3)
    with pytest.raises(CorruptManifest, match="is missing") as caught:
        opened(built)
    assert caught.value.members["file"] == lost
    with opened(built, complete=False) as reader:
        found = reader.verify()
    assert [(damage.file, damage.tensor) for damage in found] == [
        (lost, caught.value.members["tensor"]),
        (naming.STATE, None),
    ]


@pytest.mark.parametrize("keep", [0, 7, 4096, 5000])
def test_truncated_file(built: Built, keep: int) -> None:
    """A truncated file is named, with the first tensor that lost bytes; the bytes before the cut are still checked."""
    tensor = built.manifest.tensors["optim"]["layers.0.q.weight/exp_avg"]
    path = built.path / tensor.file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptManifest) as caught:
        opened(built)
    assert caught.value.members["file"] == tensor.file
    with opened(built, complete=False) as reader:
        (damage,) = reader.verify()
    assert (damage.file, damage.offset) == (tensor.file, keep)
    assert damage.tensor == "layers.0.q.weight/exp_avg"


def test_file_with_extra_bytes(built: Built) -> None:
    """Bytes behind the end of a file are damage too."""
    with (built.path / "config.json").open("ab") as file:
        file.write(b"!")
    with opened(built, complete=False) as reader:
        (damage,) = reader.verify()
    assert (damage.file, damage.length) == ("config.json", 1)


def test_link_in_place_of_a_file(built: Built, tmp_path: Path) -> None:
    """A link is not followed, not even to the right bytes."""
    target = tmp_path / "elsewhere"
    (built.path / "config.json").rename(target)
    (built.path / "config.json").symlink_to(target)
    with opened(built, complete=False) as reader:
        (damage,) = reader.verify()
    assert damage.file == "config.json"
    assert "regular file" in damage.what


def test_damage_is_named_and_nothing_of_it_handed_over(built: Built) -> None:
    """prove and load name file, tensor and byte range; what prove refused, load has not touched."""
    tensor = built.manifest.tensors["model"]["embed.weight"]
    flip(built.path / tensor.file, tensor.start + 1500, 6)
    array = built.arrays["model"]["embed.weight"]
    wanted = want("model", "embed.weight", whole(array.shape), 2)
    with opened(built) as reader:
        for act in (reader.prove, reader.load):
            with pytest.raises(CorruptExtent) as caught:
                act([wanted])
            assert caught.value.members == {
                "file": tensor.file,
                "tensor": "embed.weight",
                "offset": tensor.start + 1000,
                "length": 1000,
            }
        bad = wanted.target.reshape(-1)[500:1000]
        assert not bad.any()
        row = want("model", "embed.weight", Box((0, 0), (2, 24)), 2)
        reader.prove([row])  # the damage is elsewhere
        reader.load([row])
        np.testing.assert_array_equal(row.target, array[:2].view("<u2"))


def test_damaged_header_stops_a_restore(built: Built) -> None:
    """prove checks the headers of the files that it reads."""
    tensor = built.manifest.tensors["model"]["embed.weight"]
    flip(built.path / tensor.file, 20)
    with opened(built) as reader, pytest.raises(CorruptExtent) as caught:
        reader.prove([want("model", "embed.weight", Box((0, 0), (1, 1)), 2)])
    assert (caught.value.members["file"], caught.value.members["offset"]) == (tensor.file, 0)


def test_agreement_of_header_index_and_manifest(built: Built) -> None:
    """A header or an index that is intact by its digest, but says other than the manifest, is damage."""
    changes = {
        built.manifest.tensors["model"]["layers.0.scale"].file: (b"layers.0.scale", b"layers.0.skale"),
        naming.index_file_name("optim"): (b"mask", b"mast"),
    }
    files = []
    for file in built.manifest.files:
        path = built.path / file.name
        if file.name in changes:
            path.write_bytes(path.read_bytes().replace(*changes[file.name]))
        head = path.read_bytes()[: file.header_bytes or None]
        files.append(manifests.FileEntry(file.name, file.bytes, file.header_bytes, digest(head)))
    made = msgspec.structs.replace(built.manifest, files=tuple(files))
    encoded = manifests.encode(made)
    (built.path / naming.MANIFEST).write_bytes(encoded)
    (built.path / naming.COMMIT).write_bytes(manifests.encode_commit(made, encoded))
    with opened(built) as reader:
        assert {damage.file for damage in reader.verify()} == set(changes)
