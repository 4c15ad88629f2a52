"""A committed checkpoint as a source: all tensors as they are, no byte that was not verified where it is copied from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats.errors import CorruptExtent, CorruptManifest, NoSuchResource, StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping import committed_files
from holdfast_formats.mapping.box_moves import permuted
from holdfast_formats.mapping.committed_files import CommittedFiles
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.mapping.reading import elements, fetched
from holdfast_service.storage import PosixTier
from holdfast_service.wings.convert.exports.source import of_committed
from tests.checkpoints import Built, build, flip, varied_arrays


class Counted:
    """Notes every read, and can turn a bit of what it reads from then on."""

    def __init__(self, directory: Path) -> None:
        self._tier, self.reads = PosixTier(directory), list[tuple[str, int, int]]()
        self.flipping = False

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._tier.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        read = self._tier.read_into(path, offset, buffer)
        self.reads.append((path, offset, read))
        if self.flipping and read:
            buffer[read // 2] ^= 1
        return read

    def size(self, path: str) -> int | None:
        return self._tier.size(path)

    def list(self, path: str) -> list[str]:
        return self._tier.list(path)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "step")


def test_every_tensor_is_listed_with_its_values(built: Built) -> None:
    """Groups, names, dtypes and values are those that were saved; an alias is its target; step and assets are told."""
    source = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest)
    listed = source.listing.tensors
    assert len(listed) == sum(map(len, varied_arrays().values())) + 1
    for group, named in varied_arrays().items():
        for name, array in named.items():
            found = fetched(source.files, listed[TensorKey(group, name)])
            assert found.dtype == array.dtype and found.tobytes() == array.tobytes()
    tied = listed[TensorKey("model", "lm_head.weight")]
    assert tied.pieces == listed[TensorKey("model", "embed.weight")].pieces
    assert "lm_head.weight" not in source.group("model")
    assert source.listing.step == 5 and set(source.assets) == {"config.json", "empty.txt"}
    assert source.listing.documents["extra"] == {"lr": 0.1}
    assert {use.file for use in source.listing.files} == {file.name for file in built.manifest.files}


def test_values_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    """They are no documents of the checkpoint as a whole."""
    ranks = {0: {"extra": {"same": "1", "own": "1"}}, 1: {"extra": {"same": "1", "own": "2"}}}
    built = build(tmp_path / "step", ranks=ranks)
    source = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest)
    assert source.ranked == ("extra/own",) and source.listing.documents["extra"] == {"same": 1}


def test_any_range_of_any_file_is_what_was_written(built: Built) -> None:
    """Whole files and ranges across extents, headers and the end of a file."""
    files = CommittedFiles(PosixTier(built.path), built.manifest)
    rng = np.random.default_rng(0)
    for entry in built.manifest.files:
        data = (built.path / entry.name).read_bytes()
        assert files.read(entry.name) == data and files.size(entry.name) == len(data)
        for _ in range(30):
            start, length = (int(n) for n in rng.integers(0, len(data) + 20, 2))
            assert files.read(entry.name, start, length) == data[start : start + length]
    assert files.size("nothing") is None and files.list("") == sorted(file.name for file in built.manifest.files)
    assert files.list("below") == []
    with pytest.raises(NoSuchResource, match="'COMMIT'"):
        files.read("COMMIT")


def test_no_flipped_bit_comes_out(built: Built) -> None:
    """Whichever byte of a tensor is damaged: what covers it is refused with its place, what does not is handed over."""
    entry = built.manifest.tensors["model"]["layers.0.q.weight"]
    flip(built.path / entry.file, entry.start + 1500)
    files = CommittedFiles(PosixTier(built.path), built.manifest)
    into = np.full(3840, 7, np.uint8)
    for start, length in ((0, 3840), (1499, 2), (1000, 1000), (1001, 5), (1999, 1)):
        with pytest.raises(CorruptExtent) as caught:
            files.read_into(entry.file, entry.start + start, into[:length])
        assert caught.value.members["tensor"] == "layers.0.q.weight"
        hurt = into[max(1000 - start, 0) : min(2000 - start, length)]  # no byte of the damaged extent was left there
        assert set(hurt.tolist()) <= {0, 7}
        into[:] = 7
    raw = varied_arrays()["model"]["layers.0.q.weight"].tobytes()
    assert files.read(entry.file, entry.start + 2000, 900) == raw[2000:2900]


def test_a_byte_that_flips_between_two_reads_is_seen(built: Built) -> None:
    """An extent that was verified before, and is no longer kept, is verified again."""
    counted = Counted(built.path)
    files = CommittedFiles(counted, built.manifest, kept_bytes_max=0)
    entry = built.manifest.tensors["model"]["layers.0.q.weight"]
    first = files.read(entry.file, entry.start + 10, 20)
    assert files.read(entry.file, entry.start + 10, 20) == first
    counted.flipping = True
    with pytest.raises(CorruptExtent):
        files.read(entry.file, entry.start + 10, 20)


def test_kept_extents_are_read_and_verified_once(built: Built) -> None:
    """What takes a few bytes out of every row costs one read of each extent."""
    counted = Counted(built.path)
    files = CommittedFiles(counted, built.manifest)
    entry = built.manifest.tensors["model"]["layers.0.q.weight"]
    raw = varied_arrays()["model"]["layers.0.q.weight"].tobytes()
    for column in range(0, 160, 40):
        for row in range(24):
            at = row * 160 + column
            assert files.read(entry.file, entry.start + at, 40) == raw[at : at + 40]
    assert counted.reads == [(entry.file, entry.start + extent.offset, extent.length) for extent in entry.extents]


def test_a_transposed_tensor_is_exact(built: Built) -> None:
    """Range by range, through the boxes that an export reads."""
    source = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest)
    tensor = source.group("model")["layers.0.q.weight"]
    turned = np.ascontiguousarray(varied_arrays()["model"]["layers.0.q.weight"].T).reshape(-1)
    for start in range(0, 960, 48):
        found = elements(source.files, {tensor.key: tensor}, permuted(tensor, (1, 0)), start, start + 48)
        assert np.array_equal(found, turned[start : start + 48])


def test_the_kept_extents_have_a_limit(built: Built) -> None:
    """The oldest goes first, and one that is longer than the limit is not kept."""
    counted = Counted(built.path)
    files = CommittedFiles(counted, built.manifest, kept_bytes_max=2000)
    entry = built.manifest.tensors["model"]["layers.0.q.weight"]
    for extent in (0, 1, 0, 2, 0, 1):  # 1 was dropped for 2
        files.read(entry.file, entry.start + 1000 * extent, 10)
    assert [(start - entry.start) // 1000 for _, start, _ in counted.reads] == [0, 1, 2, 1]


def test_a_file_that_is_cut_or_gone(built: Built) -> None:
    """The size is compared, and a read at the end says which bytes are missing."""
    entry = built.manifest.tensors["optim"]["mask"]
    path = built.path / entry.file
    files = CommittedFiles(PosixTier(built.path), built.manifest)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptManifest):
        files.size(entry.file)
    last = max(
        (tensor for tensor in built.manifest.tensors["optim"].values() if tensor.file == entry.file), key=lambda t: t.start
    )
    with pytest.raises(CorruptExtent, match="cut off"):
        files.read(entry.file, last.start, last.nbytes)
    path.unlink()
    with pytest.raises(CorruptManifest, match="missing"):
        files.size(entry.file)


def test_a_checkpoint_below_a_root(tmp_path: Path) -> None:
    """The directory is a path of the tier."""
    built = build(tmp_path / "run" / "checkpoints" / "step-00000005")
    source = of_committed(
        CommittedFiles(PosixTier(tmp_path), built.manifest, "run/checkpoints/step-00000005"), built.manifest
    )
    found = fetched(source.files, source.group("model")["embed.weight"])
    assert found.tobytes() == varied_arrays()["model"]["embed.weight"].tobytes()


def test_equal_bytes_are_known_by_their_digests(tmp_path: Path) -> None:
    """Two tensors of one checkpoint are compared without reading them."""
    one = np.arange(600, dtype=np.float32).reshape(20, 30)
    arrays = {"model": {"a": one, "b": one.copy(), "c": one + 1, "d": one.reshape(30, 20)}}
    tensors = build(tmp_path / "step", arrays).manifest.tensors["model"]
    assert committed_files.same_bytes(tensors["a"], tensors["b"])
    assert not committed_files.same_bytes(tensors["a"], tensors["c"]) and not committed_files.same_bytes(
        tensors["a"], tensors["d"]
    )


def test_a_file_has_one_stamp(built: Built) -> None:
    """It says what the file's bytes must be, so it differs between files, and the file's state has no part in it."""
    files = CommittedFiles(PosixTier(built.path), built.manifest)
    stamps = {entry.name: files.stamp(entry.name) for entry in built.manifest.files}
    assert len(set(stamps.values())) == len(stamps)
    (built.path / "config.json").unlink()
    assert CommittedFiles(PosixTier(built.path), built.manifest).stamp("config.json") == stamps["config.json"]
    into = np.empty(4, np.uint8)
    assert files.read_stored("model.safetensors.index.json", 0, into) == 4 and into.tobytes() == b"{\n  "


def test_elements_shorter_than_a_byte_are_refused_by_name(built: Built) -> None:
    """They can be copied and not moved."""
    tensor = of_committed(CommittedFiles(PosixTier(built.path), built.manifest), built.manifest).group("model")[
        "embed.weight"
    ]
    short = tensor._replace(spec=type(tensor.spec)("model", "codes", "F4", (4, 4)))
    committed_files.refuse_sub_byte({"embed.weight": tensor})
    with pytest.raises(StateMismatch, match="'codes' is F4"):
        committed_files.refuse_sub_byte({"codes": short})
    assert tensor.pieces[0].strides == strides(tensor.spec.shape)
