"""Copies of a checkpoint: what the nearest one lacks is read from the next, and every byte is checked."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast.read.copies import CheckpointCopy, Copies, OtherCopies
from holdfast.read.reader import CheckpointReader
from holdfast.read.requests import Want
from holdfast.read.root_directory import CheckpointIdentity, open_nearest
from holdfast.read.sources import DirectorySource, Source
from holdfast_files import opened
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, CorruptExtent, Denied, NoSuchCheckpoint, NotCommitted
from holdfast_formats.region import whole
from tests.checkpoints import Built, build

BIG = {"model": {"a": np.arange(500_000, dtype=np.int64), "b": np.arange(300_000, dtype=np.int64)}, "optim": {}}


class World:
    """A root's checkpoint and two copies of it, whose opening is counted."""

    def __init__(self, directory: Path) -> None:
        self.built: Built = build(directory / "root" / "step-00000005", BIG, file_bytes_max=3_000_000, extent_bytes=2**18)
        self.paths = {"": self.built.path}
        for name in ("near", "far"):
            self.paths[name] = directory / name / "step-00000005"
            shutil.copytree(self.built.path, self.paths[name])
        self.opened: list[str] = []
        self.problems: dict[str, CheckpointError] = {}
        self.which = CheckpointIdentity("tiny", 5)

    def copy(self, name: str) -> CheckpointCopy:
        return CheckpointCopy(name, lambda: self._source(name))

    def _source(self, name: str) -> Source:
        self.opened.append(name)
        if not self.paths[name].exists():
            raise NoSuchCheckpoint(f"there is no {name}")
        return DirectorySource(self.paths[name])

    def open(self) -> CheckpointReader:
        return open_nearest([self.copy(name) for name in ("", "near", "far")], self.which, self.problems)

    def shard(self, copy: str, tensor: str = "a") -> Path:
        return self.paths[copy] / self.built.manifest.tensors["model"][tensor].file

    def load(self, reader: CheckpointReader) -> int:
        """Load everything, and compare it."""
        targets = {name: np.zeros(array.shape, np.int64) for name, array in BIG["model"].items()}
        wants = [Want("model", name, whole(array.shape), array.view(np.uint64)) for name, array in targets.items()]
        reader.check_headers(wants)
        size = reader.load(wants)
        assert all(np.array_equal(targets[name], array) for name, array in BIG["model"].items())
        return size


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_is_sound_asks_no_copy(world: World) -> None:
    """Nothing but the root is opened, and no byte counts as another copy's."""
    with world.open() as reader:
        world.load(reader)
        assert reader.state
    assert world.opened == [""] and not reader.copies.taken and not world.problems


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, path.stat().st_size - 9),
        lambda path: path.write_bytes(path.read_bytes()[:-400_000]),
        Path.unlink,
        lambda path: flip(path, 3),
    ],
    ids=["bit", "cut", "gone", "header"],
)
def test_a_range_that_fails_is_read_from_the_next_copy(world: World, damage: Callable[[Path], object]) -> None:
    """And only what fails, a read at a time; the problem is told, and the copy behind it is not opened."""
    damage(world.shard(""))
    with world.open() as reader:
        size = world.load(reader)
    assert world.opened == ["", "near"] and list(world.problems) == [""]
    assert set(reader.copies.taken) <= {"near"} and reader.copies.taken["near"] < size


def test_two_damaged_copies_make_a_sound_one(world: World) -> None:
    """Each range counts by itself."""
    flip(world.shard(""), world.shard("").stat().st_size - 1)
    flip(world.shard("near", "b"), world.shard("near", "b").stat().st_size - 1)
    world.shard("far").unlink()
    with world.open() as reader:
        world.load(reader)
    assert list(world.problems) == [""]


def test_what_is_damaged_everywhere_is_damage_of_the_nearest(world: World) -> None:
    """Nothing of it stays; the problems of all are told."""
    for name in world.paths:
        flip(world.shard(name), world.shard(name).stat().st_size - 1)
    with world.open() as reader:
        target = np.ones(BIG["model"]["a"].shape, np.int64)
        with pytest.raises(CorruptExtent, match="model"):
            reader.load([Want("model", "a", whole(target.shape), target.view(np.uint64))])
        with pytest.raises(CorruptExtent):
            reader.prove([Want("model", "a", whole(target.shape), target.view(np.uint64))])
    assert set(world.problems) == {"", "near", "far"}
    assert not np.any(target[-100:]), "wrong bytes do not stay"


@pytest.mark.parametrize("name", [naming.COMMIT, naming.MANIFEST, naming.STATE])
def test_a_small_file_that_is_damaged_is_read_from_the_next(world: World, name: str) -> None:
    """COMMIT and manifest decide which copy is opened; it is told which was not."""
    flip(world.paths[""] / name, 5)
    with world.open() as reader:
        world.load(reader)
        assert reader.state == (world.paths["far"] / naming.STATE).read_bytes()
    assert list(world.problems) == [""] and reader.copies.name == ("" if name == naming.STATE else "near")


def test_a_root_that_lacks_the_step_is_no_problem(world: World) -> None:
    """The nearest copy is read as the root would be."""
    shutil.rmtree(world.paths[""])
    with world.open() as reader:
        world.load(reader)
    assert reader.copies.name == "near" and not world.problems and not reader.copies.taken
    shutil.rmtree(world.paths["near"])
    (world.paths["far"] / naming.COMMIT).unlink()
    with pytest.raises(NotCommitted):
        world.open()
    shutil.rmtree(world.paths["far"])
    world.problems.clear()
    with pytest.raises(NoSuchCheckpoint, match="there is no "):
        world.open()


def test_another_checkpoint_is_no_copy(world: World) -> None:
    """Of the same run and step, from another save: none of its bytes is taken, and it is tried once."""
    shutil.rmtree(world.paths["near"])
    build(world.paths["near"], {**BIG, "optim": {"x": np.zeros(3)}}, file_bytes_max=3_000_000, extent_bytes=2**18)
    world.shard("").unlink()
    with world.open() as reader:
        world.load(reader)
    assert set(reader.copies.taken) == {"far"} and isinstance(world.problems["near"], NoSuchCheckpoint)
    assert world.opened == ["", "near", "far"]
    other = build(world.paths["near"].parent / "step-00000006", BIG, step=6)
    shutil.rmtree(world.paths[""])
    world.paths["near"] = other.path
    world.problems.clear()
    with world.open() as reader:
        assert reader.copies.name == "far"
    world.which = world.which._replace(created="2001-01-01T00:00:00Z")
    with pytest.raises(NoSuchCheckpoint):  # of that run and step, but from another save
        world.open()
    world.which = world.which._replace(created=world.built.manifest.created)
    world.open().close()


def test_a_copy_that_cannot_be_read_is_tried_once() -> None:
    """A network that is away would be waited for again at every range."""
    source, tried = DirectorySource(Path("/")), []

    def away() -> Source:
        tried.append("away")
        raise Denied("no keys")

    def act(of: Source) -> None:
        raise CorruptExtent("a flipped bit")

    problems: dict[str, CheckpointError] = {}
    copies = Copies(source, b"", OtherCopies("", [CheckpointCopy("tier cloud", away)], problems))
    for _ in range(3):
        with pytest.raises(CorruptExtent):
            copies.read(act)
    assert tried == ["away"] and isinstance(problems["tier cloud"], Denied)


def test_threads_wait_for_a_copy_that_another_one_opens(tmp_path: Path) -> None:
    """None of them takes it for one that cannot be read."""
    world, meeting = World(tmp_path), threading.Barrier(2)
    begun, go = threading.Event(), threading.Event()

    def slowly() -> Source:
        begun.set()
        assert go.wait(180)
        return world.copy("near").open()

    nearest = world.copy("").open()
    others = OtherCopies("", (CheckpointCopy("near", slowly),), world.problems)
    copies = Copies(nearest, opened.read_commit(nearest), others)

    def act(source: Source) -> Source:
        if source is nearest:
            meeting.wait(180)
            raise CorruptExtent("a flipped bit")
        return source

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(copies.read, act) for _ in range(2)]
        assert begun.wait(180)
        threading.Timer(0.2, go.set).start()
        assert found[0].result(180) is found[1].result(180)
    assert world.opened == ["", "near"]
    copies.close()
    nearest.close()
