"""The executor writes exactly what was planned, goes on where it was killed, and notices what changes meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.errors import CheckpointError, CorruptExtent, CorruptManifest, InvalidRequest, NoSpace, StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.box_moves import BoxMove, MappedTensor, permuted, same
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.mapping.target_files import LiteralBytes, StreamedTensor, TargetFile
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.daemon.copying import streaming, target_bytes
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped
from holdfast_service.daemon.copying.finished_files import FinishedFile
from holdfast_service.daemon.copying.streaming import StreamTarget
from holdfast_service.storage import MemoryTier, PosixTier, StagedDirectory, Tier

RNG = np.random.default_rng(7)
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}
GOING = CopyControl()


class Model:
    """Arrays in source files of a directory, and their listing."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.tensors, self.arrays = directory, dict[TensorKey, ForeignTensor](), dict[str, NDArray[Any]]()
        directory.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, array: NDArray[Any], file: str = "source") -> ForeignTensor:
        """Append an array to a file, at an odd place."""
        spec = TensorSpec("model", name, NAMES[array.dtype.name], array.shape)
        with open(self.directory / file, "ab") as out:
            out.write(b"\0" * 3)
            piece = ForeignPiece(file, out.tell(), whole(array.shape), strides(array.shape))
            out.write(array.tobytes())
        self.arrays[name] = array
        self.tensors[TensorKey("model", name)] = made = ForeignTensor(spec, (piece,))
        return made


def a_file(name: str, mapped: Mapping[str, MappedTensor], head: bytes = b"head") -> TargetFile:
    """A file of a head, the tensors, and the CRC-32 of each behind it."""
    at, placed, crcs = len(head), [], []
    for one in mapped.values():
        placed.append(StreamedTensor(one, at))
        crcs.append((at + one.spec.nbytes, one.key))
        at += one.spec.nbytes + 4

    def sealed(found: Mapping[TensorKey, int]) -> tuple[LiteralBytes, ...]:
        return tuple(LiteralBytes(start, found[key].to_bytes(4, "little")) for start, key in crcs)

    return TargetFile(name, at, (LiteralBytes(0, head),), tuple(placed), sealed)


def expected(file: TargetFile, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    data = [arrays[one.mapped.spec.name].tobytes() for one in file.tensors]
    return b"head" + b"".join(part + crc32(part).to_bytes(4, "little") for part in data)


def at(tier: Tier) -> StreamTarget:
    """Where the tests stage files, and the records of these."""
    return StreamTarget(StagedDirectory(tier, "staging"), tier)


def check_digests(tier: Tier, staging: str, made: FinishedFile) -> None:
    """Literals and extents tile the file, and each has its digest."""
    data = tier.read(f"{staging}/{made.name}")
    pieces = [(one.offset, one.length, one.digest) for one in made.literals]
    pieces += [(t.start + one.offset, one.length, one.digest) for t in made.tensors for one in t.extents]
    at = 0
    for start, length, stated in sorted(pieces):
        assert start == at and digest(data[start : start + length]) == stated
        at += length
    assert at == len(data) == made.bytes


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """Small and large tensors of several types, in two files."""
    made = Model(tmp_path / "source")
    made.add("small", RNG.standard_normal((3, 5)).astype(np.float32))
    made.add("scalar", np.array(3, np.int64))
    made.add("empty", np.zeros((0, 4), np.float32))
    made.add("large", RNG.standard_normal((1500, 800)).astype(np.float32), "other")
    made.add("half", RNG.standard_normal((350, 801)).astype(np.float16), "other")
    return made


def plan(model: Model) -> tuple[list[TargetFile], dict[str, NDArray[Any]]]:
    """Every way to make a tensor of others: as it is, turned, converted, joined, cut and padded."""
    source = {key.name: tensor for key, tensor in model.tensors.items()}
    arrays = model.arrays
    joined = TensorSpec("model", "joined", "F16", (700, 801))
    box = whole((350, 801))
    moves = tuple(BoxMove(TensorKey("model", "half"), box, Box((at, 0), (350, 801)), (0, 1)) for at in (0, 350))
    padded = TensorSpec("model", "padded", "F32", (4, 5))
    pad = (BoxMove(TensorKey("model", "small"), whole((3, 5)), whole((3, 5)), (0, 1)),)
    first = {name: same(source[name]) for name in source}
    second = {
        "turned": permuted(source["large"], (1, 0), TensorKey("model", "turned")),
        "cast": same(source["large"], TensorKey("model", "cast"), "BF16"),
        "joined": MappedTensor(joined, moves),
        "padded": MappedTensor(padded, pad, padded=True),
    }
    made = {
        **arrays,
        "turned": arrays["large"].T,
        "cast": arrays["large"].astype(ml_dtypes.bfloat16),
        "joined": np.concatenate([arrays["half"], arrays["half"]]),
        "padded": np.concatenate([arrays["small"], np.zeros((1, 5), np.float32)]),
    }
    return [a_file("first", first), a_file("second", second)], made


@pytest.mark.parametrize("kind", ["memory", "aligned", "posix"])
def test_files_are_as_planned(model: Model, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte on every tier, also where a tensor is computed in several bands; digests, and progress, are true."""
    monkeypatch.setattr(target_bytes, "BAND_BYTES", 2**20)
    tiers: dict[str, Callable[[], Tier]] = {
        "memory": MemoryTier,
        "aligned": lambda: MemoryTier(alignment=4096),
        "posix": lambda: PosixTier(tmp_path / "target"),
    }
    tier = tiers[kind]()
    files, arrays = plan(model)
    done = 0

    def moved(count: int) -> None:
        nonlocal done
        done += count

    made = streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), CopyControl(moved=moved))
    for file, found in zip(files, made, strict=True):
        assert tier.read(f"staging/{file.name}") == expected(file, arrays)
        check_digests(tier, "staging", found)
    assert done == sum(file.bytes for file in files)
    streaming.prove(tier, "staging", made, GOING)
    at(tier).forget()
    assert tier.list("") == ["staging"]


class Killed(BaseException):
    """As SIGKILL, as far as one process can show it."""


class KilledTier(PosixTier):
    """Ends after so many writes; counts the files that it makes."""

    def __init__(self, root: Path, after: int | None = None) -> None:
        super().__init__(root)
        self.after, self.acts, self.created = after, 0, list[str]()

    def _act(self) -> None:
        self.acts += 1
        if self.after is not None and self.acts > self.after:
            raise Killed

    def create(self, path: str, size: int) -> Any:
        self._act()
        self.created.append(path.rpartition("/")[2])
        return super().create(path, size)

    def replace(self, path: str, data: bytes) -> None:
        self._act()
        parent, _, leaf = path.rpartition("/")
        for size in (len(data) // 2, len(data)):  # a note may be cut, or lack its name
            super().replace(f"{parent}/.{leaf}.new", data[:size])
            self._act()
        super().remove_file(f"{parent}/.{leaf}.new")
        super().replace(path, data)

    def sync_directory(self, path: str) -> None:
        self._act()
        super().sync_directory(path)


def test_goes_on_after_any_death(model: Model, tmp_path: Path) -> None:
    """Killed at every act, it repeats one file at most, and the bytes are the same."""
    names = list(model.arrays)
    files = [a_file(f"file-{name}", {name: same(model.tensors[TensorKey("model", name)])}) for name in names]
    source = PosixTier(model.directory)
    whole_run = KilledTier(tmp_path / "whole")
    streaming.stream(source, model.tensors, files, at(whole_run), GOING)
    for point in range(whole_run.acts):
        tier = KilledTier(tmp_path / f"target-{point}", after=point)
        with pytest.raises(Killed):
            streaming.stream(source, model.tensors, files, at(tier), GOING)
        tier.after = None
        made = streaming.stream(source, model.tensors, files, at(tier), GOING)
        repeated = len(tier.created) - len(set(tier.created))
        assert repeated <= 1 and set(tier.created) == {file.name for file in files}
        for file, found in zip(files, made, strict=True):
            assert tier.read(f"staging/{file.name}") == expected(file, model.arrays)
            check_digests(tier, "staging", found)


def test_another_job_begins_anew(model: Model, tmp_path: Path) -> None:
    """Where the sources or the plan are not those of the notes, nothing of them is used, and nothing is left."""
    tier, source = KilledTier(tmp_path / "target"), PosixTier(model.directory)
    files, arrays = plan(model)
    streaming.stream(source, model.tensors, files, at(tier), GOING)
    streaming.stream(source, model.tensors, files[1:], at(tier), GOING)
    assert tier.list("staging") == ["second"]
    os.utime(model.directory / "other", ns=(1, 1))
    streaming.stream(source, model.tensors, files[1:], at(tier), GOING)
    assert tier.created == ["first", "second", "second", "second"]
    assert tier.read("staging/second") == expected(files[1], arrays)


class Changing(PosixTier):
    """A source in which something happens once so much of a file has been read."""

    def __init__(self, root: Path, happens: Callable[[], None]) -> None:
        super().__init__(root)
        self._happens: Callable[[], None] | None = happens

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        read = super().read_into(path, offset, buffer)
        if path == "other" and self._happens is not None:
            happens, self._happens = self._happens, None
            happens()
        return read


@pytest.mark.parametrize("how", ["written", "replaced", "cut", "gone"])
def test_a_source_that_changes_ends_it(model: Model, tmp_path: Path, how: str) -> None:
    """By the file's name, whatever happens to it; nothing is noted as finished that was read of both."""
    path = model.directory / "other"

    def happens() -> None:
        if how == "written":
            with open(path, "r+b") as out:
                out.write(b"x")
            os.utime(path, ns=(5, 5))
        elif how == "replaced":
            (model.directory / "new").write_bytes(path.read_bytes())
            (model.directory / "new").rename(path)
        elif how == "cut":
            os.truncate(path, 1000)
        else:
            path.unlink()

    tier = PosixTier(tmp_path / "target")
    files, _ = plan(model)
    with pytest.raises(CheckpointError, match="other") as caught:
        streaming.stream(Changing(model.directory, happens), model.tensors, files, at(tier), GOING)
    assert isinstance(caught.value, StateMismatch | CorruptManifest) or how == "gone"
    assert tier.list(naming.progress_path("staging")) == []
    at(tier).discard()
    assert tier.list("") == []


@pytest.mark.parametrize("equal", [True, False])
def test_copies_must_be_equal(model: Model, tmp_path: Path, equal: bool) -> None:
    """What stands twice, perhaps in another order, is compared byte by byte; both files are named."""
    array = model.arrays["large"].copy()
    array[1499, 799] += 0 if equal else 1
    turned = model.add("copy", np.ascontiguousarray(array.T), "third").pieces[0]
    key = TensorKey("model", "large")
    copy = ForeignPiece("third", turned.start, whole((1500, 800)), (1, 1500))
    model.tensors[key] = model.tensors[key]._replace(copies=(copy,))
    files, tier = [a_file("file", {"large": same(model.tensors[key])})], MemoryTier()
    if equal:
        streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), GOING)
        return
    with pytest.raises(StateMismatch, match=r"'large'.*other.*third") as caught:
        streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), GOING)
    assert caught.value.members["files"] == ["other", "third"] and not tier.list("staging")


def test_a_full_disk_is_named(model: Model) -> None:
    """And nothing counts as finished that is not."""
    files, _ = plan(model)
    tier = MemoryTier(capacity_bytes=files[0].bytes + files[1].bytes // 2)
    with pytest.raises(NoSpace):
        streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), GOING)
    at(tier).discard()
    assert tier.list("") == []


def test_it_can_be_stopped(model: Model) -> None:
    files, _ = plan(model)
    with pytest.raises(CopyStopped):
        streaming.stream(PosixTier(model.directory), model.tensors, files, at(MemoryTier()), CopyControl(ended=lambda: True))


def test_plans_that_cannot_be_true(model: Model) -> None:
    """A gap, a name that comes twice, a tensor that is not filled, pieces that overlap: refused before a byte is written."""
    files, _ = plan(model)
    key = TensorKey("model", "small")
    half = MappedTensor(TensorSpec("model", "half-full", "F32", (6, 5)), same(model.tensors[key]).moves)
    piece = model.tensors[key].pieces[0]
    twice = {**model.tensors, key: model.tensors[key]._replace(pieces=(piece, piece))}
    for tensors, planned, error in (
        (model.tensors, [files[0]._replace(bytes=files[0].bytes + 1)], InvalidRequest),
        (model.tensors, [files[0], files[0]], InvalidRequest),
        (model.tensors, [a_file("file", {"half-full": half})], StateMismatch),
        (twice, [files[0]], StateMismatch),
    ):
        tier = MemoryTier()
        with pytest.raises(error):
            streaming.stream(PosixTier(model.directory), tensors, planned, at(tier), GOING)
        assert tier.list("") == []


def test_damage_is_found_when_it_is_read_back(model: Model, tmp_path: Path) -> None:
    tier = PosixTier(tmp_path / "target")
    files, _ = plan(model)
    made = streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), GOING)
    with open(tmp_path / "target" / "staging" / "second", "r+b") as out:
        out.seek(12345)
        out.write(b"?")
    with pytest.raises(CorruptExtent, match="second"):
        streaming.prove(tier, "staging", made, GOING)


class Counted(PosixTier):
    """Notes what is read past the cache."""

    reads: list[tuple[str, int, int]]

    def read_stored(self, path: str, offset: int, buffer: NDArray[Any]) -> int:  # type: ignore[override]
        self.reads.append((path, offset, buffer.nbytes))
        return super().read_stored(path, offset, buffer)


def test_many_extents_are_read_back_at_once(model: Model, tmp_path: Path) -> None:
    """A window is full of them; each byte is read once, but for what aligning the two ends adds."""
    tier = Counted(tmp_path / "target")
    tier.reads = []
    files, _ = plan(model)
    made = streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), GOING)
    extents = sum(len(one.extents) for file in made for one in file.tensors)
    streaming.prove(tier, "staging", made, GOING)
    assert len(tier.reads) == len(files) < extents // 4
    assert sum(length for *_, length in tier.reads) <= sum(file.bytes + 2 * 2**16 for file in files)


def test_computed_is_what_would_be_noted(model: Model, tmp_path: Path) -> None:
    """Of every file, without writing one."""
    tier = PosixTier(tmp_path / "target")
    files, _ = plan(model)
    made = streaming.stream(PosixTier(model.directory), model.tensors, files, at(tier), GOING)
    assert streaming.computed(PosixTier(model.directory), model.tensors, files, GOING) == made
    assert streaming.noted(PosixTier(model.directory), model.tensors, files, at(tier)) == made
    assert streaming.noted(PosixTier(model.directory), model.tensors, files[:1], at(tier)) == ()
    at(tier).forget()
    assert streaming.noted(PosixTier(model.directory), model.tensors, files, at(tier)) == ()
    ended = CopyControl(ended=lambda: True)
    with pytest.raises(CopyStopped):
        streaming.computed(PosixTier(model.directory), model.tensors, files, ended)
