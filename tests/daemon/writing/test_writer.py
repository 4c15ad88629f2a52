"""The writer's windows: aligned, in order, bounded, used again; the same bytes whatever a tier asks for."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_files.buffers import WINDOW_BYTES, BufferPool
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk import packing
from holdfast_formats.errors import StorageFailed
from holdfast_formats.naming import Place
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints import planner
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.writing import gathering, write_threads, writer
from holdfast_service.daemon.writing.priority import NICE, give_way
from holdfast_service.storage import Buffer, FileWriter, MemoryTier, PosixStore, PosixTier
from tests.daemon.writing.test_path import Shards, files_of

PLACE = Place("r", 7, 1)


def shards(sizes: Sequence[int], world: int = 1) -> Shards:
    """Byte tensors of these sizes, each cut into columns over all ranks."""
    made = Shards(world)
    for number, size in enumerate(sizes):
        spec = TensorSpec("model", f"t.{number}", "U8", (3, size))
        content = np.random.default_rng(number).integers(0, 256, spec.nbytes, np.uint8).tobytes()
        edges = [size * rank // world for rank in range(world + 1)]
        boxes = [[Box((0, a), (3, b - a))] for a, b in itertools.pairwise(edges)]
        made.add(spec, content, [(rank, held) for rank, held in enumerate(boxes) if held[0].volume])
    return made


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("alignment", [1, 256, 4096])
@pytest.mark.parametrize("extent_bytes", [1024, 64])
def test_small_windows_give_the_same_files(
    monkeypatch: pytest.MonkeyPatch, extent_bytes: int, alignment: int, world: int
) -> None:
    """With windows far smaller than a file, and smaller than a block, every byte still stands in its place."""
    sizes = [1, 700, 13, 2, 900, 5, 5, 5, 1, 333, 4000, 17]
    reference = MemoryTier()
    expected = shards(sizes).save(reference)
    monkeypatch.setattr(gathering, "EXTENT_BYTES_MAX", 1024)
    monkeypatch.setattr(gathering, "WRITE_BYTES", 1024)
    monkeypatch.setattr(gathering, "CACHED_BYTES", 512)
    monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", extent_bytes)
    tier = MemoryTier(alignment=alignment)
    made = shards(sizes, world).save(tier)
    names = [file.name for file in expected.files if file.header_bytes]
    assert {name: files_of(tier)[name] for name in names} == {name: files_of(reference)[name] for name in names}
    for tensor in made.tensors["model"].values():
        ends = [*range(extent_bytes, tensor.nbytes, extent_bytes), tensor.nbytes]
        assert [extent.offset + extent.length for extent in tensor.extents] == ends
    assert verify(tier, naming.checkpoint_path("r", 7)) == made


def test_wide_elements_across_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that begins inside an element of a strided tensor gets the rest of that element from all its holders."""
    monkeypatch.setattr(gathering, "EXTENT_BYTES_MAX", 1024)
    monkeypatch.setattr(gathering, "WRITE_BYTES", 1024)
    monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", 1024)
    content = np.random.default_rng(0).integers(0, 256, 8 * 101 * 7, np.uint8).tobytes()
    made = Shards(2)
    spec = TensorSpec("model", "w", "F64", (101, 7))
    made.add(spec, content, [(0, [Box((0, 0), (101, 3))]), (1, [Box((0, 3), (101, 4))])])
    made.add(TensorSpec("model", "a", "U8", (5,)), b"abcde", [(0, [whole((5,))])])
    tier = MemoryTier(alignment=100)  # divides no element
    saved = made.save(tier)
    for name, entry in saved.tensors["model"].items():
        assert files_of(tier)[entry.file][entry.start : entry.start + entry.nbytes] == made.bytes[name]


def test_blocks_are_written_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write begins and ends at a block from memory that is aligned, but for the file's end; none overlaps another."""
    monkeypatch.setattr(gathering, "EXTENT_BYTES_MAX", 2**13)
    monkeypatch.setattr(gathering, "WRITE_BYTES", 2**13)
    monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", 2**13)
    written: list[tuple[int, int, int]] = []

    class Watched(MemoryTier):
        def create(self, path: str, size: int) -> Any:
            made = super().create(path, size)
            plain = made.write

            def write(offset: int, buffers: Sequence[Buffer]) -> None:
                plain(offset, buffers)
                for data in buffers:
                    assert isinstance(data, np.ndarray)
                    written.append((offset, data.nbytes, data.ctypes.data))
                    offset += data.nbytes

            made.write = write  # type: ignore[method-assign]
            return made

    content = shards([20_000, 77, 5_000, 1])
    plan = planner.plan(content.tables())
    content_slots = {rank: memoryview(bytes(data)) for rank, data in enumerate(content.data)}
    writer.write(PosixStore(Watched(alignment=4096)).begin(PLACE), plan, content_slots, "node")
    whole_blocks = [entry for entry in written if entry[1] % 4096 == 0]
    assert all(offset % 4096 == 0 for offset, _, _ in written)
    assert all(memory % 4096 == 0 for _, _, memory in whole_blocks)
    assert len(written) - len(whole_blocks) <= len(plan.files)
    assert sum(length for _, length, _ in written) == sum(file.layout.bytes for file in plan.files)


def place(made: Shards, residues: Sequence[int | None], alignment: int, rank: int = 0) -> memoryview:
    """The slot of a rank anew, in memory that begins at a page: what it has of each tensor, bytes in one dimension, as far
    from a block's begin as it stands in its file, and `residues` bytes farther; anywhere for None."""
    (file,) = planner.plan(made.tables()).files
    starts = {tensor.spec.name: tensor.start for tensor in file.tensors}
    memory = memoryview(mmap.mmap(-1, sum(len(content) + 2 * alignment for content in made.bytes.values())))
    end = 0
    for number, fragment in enumerate(made.fragments[rank]):
        name, box = fragment.spec.name, fragment.boxes[0]
        first, size = box.offset[0], box.shape[0]
        residue = residues[number % len(residues)]
        if residue is not None:
            end += (starts[name] + first + residue - end) % alignment
        made.fragments[rank][number] = msgspec.structs.replace(fragment, slot_offset=end)
        memory[end : end + size] = made.bytes[name][first : first + size]
        end += size
    return memory


class Recorded(MemoryTier):
    """Remembers where in memory each write came from."""

    def __init__(self, alignment: int) -> None:
        super().__init__(alignment=alignment)
        self.taken: list[tuple[int, int]] = []

    def create(self, path: str, size: int) -> Any:
        made = super().create(path, size)
        plain = made.write

        def write(offset: int, buffers: Sequence[Buffer]) -> None:
            plain(offset, buffers)
            self.taken += [(data.ctypes.data, data.nbytes) for data in buffers if isinstance(data, np.ndarray)]

        made.write = write  # type: ignore[method-assign]
        return made

    def out_of(self, memory: memoryview) -> int:
        """How many bytes were written from there."""
        low = np.frombuffer(memory, np.uint8).ctypes.data
        return sum(size for address, size in self.taken if low <= address < low + len(memory))


@contextmanager
def short_extents() -> Iterator[pytest.MonkeyPatch]:
    """Extents of a kilobyte and more, every one of which is copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "EXTENT_BYTES_MAX", 4096)
        patch.setattr(gathering, "WRITE_BYTES", 4096)
        patch.setattr(packing, "EXTENT_BYTES_MIN", 1024)
        patch.setattr(gathering, "STRAIGHT_BYTES_MIN", 2**30)
        yield patch


@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=8),
    residues=st.lists(st.sampled_from([0, 0, 0, 1, 64, None]), min_size=8, max_size=8),
    alignment=st.sampled_from([1, 256, 4096]),
    least=st.sampled_from([1, 600, 5000]),
)
def test_what_lies_in_a_slot_as_in_the_file_is_written_from_there(
    sizes: list[int], residues: list[int | None], alignment: int, least: int
) -> None:
    """Wherever tensors stand in their slot, the files and extents are the same; and what can be is not copied."""
    reference = MemoryTier()
    with short_extents() as patch:
        expected = whole_rows(sizes).save(reference)
        patch.setattr(gathering, "STRAIGHT_BYTES_MIN", least)
        made, tier = whole_rows(sizes), Recorded(alignment)
        memory = place(made, residues[: len(sizes)], alignment)
        plan = planner.plan(made.tables())
        receipt = writer.write(PosixStore(tier).begin(PLACE), plan, {0: memory}, "node")
    (file,) = plan.files
    assert tier.read(f"{PLACE.path}/{file.layout.name}") == files_of(reference)[file.layout.name]
    assert receipt.extents["model"] == {name: tensor.extents for name, tensor in expected.tensors["model"].items()}
    assert all(address % alignment == 0 for address, size in tier.taken if size % alignment == 0)
    straight = sum(
        max(cut // alignment * alignment - 2 * alignment, 0)
        for size, residue in zip(sizes, residues, strict=False)
        for cut in cuts_of(size, 4096)
        if residue == 0 and cut >= least
    )
    assert tier.out_of(memory) >= straight


@given(
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=5),
    points=st.lists(st.floats(0, 1), max_size=3),
    residue=st.sampled_from([0, 0, 0, 1, None]),
    alignment=st.sampled_from([1, 256, 4096]),
    least=st.sampled_from([1, 600, 5000]),
)
def test_parts_of_several_ranks_are_written_from_their_slots(
    sizes: list[int], points: list[float], residue: int | None, alignment: int, least: int
) -> None:
    """However tensors are cut over ranks, the files and extents are the same; only extents that two ranks share, what lies
    elsewhere, and the blocks at the ends of a part are copied."""
    world = len(points) + 1
    made = Shards(world)
    made.file_bytes_max = 2**40
    parts: list[tuple[int, int, int]] = []  # size of the tensor, and what of it a rank has
    for number, size in enumerate(sizes):
        content = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
        ends = [*sorted(int(point * size) for point in points), size]
        held = [(rank, low, high) for rank, (low, high) in enumerate(itertools.pairwise([0, *ends])) if low < high]
        boxes = [(rank, [Box((low,), (high - low,))]) for rank, low, high in held]
        made.add(TensorSpec("model", f"t.{number}", "U8", (size,)), content, boxes)
        parts += [(size, low, high) for rank, low, high in held if residue == 0]
    reference = MemoryTier()
    with short_extents() as patch:
        expected = whole_rows(sizes).save(reference)
        patch.setattr(gathering, "STRAIGHT_BYTES_MIN", least)
        tier = Recorded(alignment)
        memory = {rank: place(made, [residue], alignment, rank) for rank in range(world)}
        plan = planner.plan(made.tables())
        receipt = writer.write(PosixStore(tier).begin(PLACE), plan, memory, "node")
        steps = [packing.tensor_extent_bytes(size, plan.extent_bytes) for size, _, _ in parts]
    (file,) = plan.files
    assert tier.read(f"{PLACE.path}/{file.layout.name}") == files_of(reference)[file.layout.name]
    assert receipt.extents["model"] == {name: tensor.extents for name, tensor in expected.tensors["model"].items()}
    assert all(address % alignment == 0 for address, size in tier.taken if size % alignment == 0)
    straight = 0
    for (size, low, high), step in zip(parts, steps, strict=True):
        begin, end = low + -low % step, high if high == size else high - high % step
        edges = sorted({begin, *range(begin + -begin % 4096, end, 4096), max(end, begin)})
        pieces = [max(after - before, 0) for before, after in itertools.pairwise(edges)] if end - begin >= least else []
        straight += sum(max(piece // alignment * alignment - 2 * alignment, 0) for piece in pieces if piece >= least)
    assert sum(tier.out_of(data) for data in memory.values()) >= straight


def cuts_of(size: int, most: int) -> list[int]:
    return [min(most, size - at) for at in range(0, size, most)]


def whole_rows(sizes: Sequence[int]) -> Shards:
    """Byte tensors of these sizes, whole on one rank, in one file."""
    made = Shards(1)
    made.file_bytes_max = 2**40
    for number, size in enumerate(sizes):
        content = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
        made.add(TensorSpec("model", f"t.{number}", "U8", (size,)), content, [(0, [whole((size,))])])
    return made


def test_long_tensors_go_to_the_disk_without_a_copy(tmp_path: Path) -> None:
    """Through a real file system, past its cache where it can: the windows stay untouched but for where tensors meet."""
    sizes = [3 * 2**20, 5, 2**24 + 2**20 + 3, 2**18]
    made = whole_rows(sizes)
    memory = place(made, [0] * len(sizes), 4096)
    plan = planner.plan(made.tables())
    receipt = writer.write(PosixStore(PosixTier(tmp_path)).begin(PLACE), plan, {0: memory}, "node")
    (file,) = plan.files
    stored = PosixTier(tmp_path).read(f"{PLACE.path}/{file.layout.name}")
    for tensor in file.tensors:
        content = made.bytes[tensor.spec.name]
        assert stored[tensor.start : tensor.start + tensor.spec.nbytes] == content
        for extent in receipt.extents["model"][tensor.spec.name]:
            assert digest(content[extent.offset : extent.offset + extent.length]) == extent.digest
    recorded = Recorded(4096)
    writer.write(PosixStore(recorded).begin(PLACE), plan, {0: memory}, "node")
    assert recorded.out_of(memory) > 0.99 * sum(size for size in sizes if size > 5)


def test_a_save_through_a_file_system(tmp_path: Path) -> None:
    """Files larger than a window, over a real directory: the bytes are the slots', and the checkpoint verifies."""
    content = shards([2**21, 3, 2**22 + 5, 1000, 2**20 - 1], world=2)
    tables = [table.__class__(**{**_members(table), "file_bytes_max": 2**40}) for table in content.tables()]
    tier = PosixTier(tmp_path)
    plan = planner.plan(tables)
    writer.write(PosixStore(tier).begin(PLACE), plan, {r: memoryview(bytes(d)) for r, d in enumerate(content.data)}, "node")
    (file,) = plan.files
    stored = tier.read(f"{PLACE.path}/{file.layout.name}")
    assert stored[: len(file.layout.header)] == file.layout.header
    for tensor in file.tensors:
        assert stored[tensor.start : tensor.start + tensor.spec.nbytes] == content.bytes[tensor.spec.name]


def _members(table: Any) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.__struct_fields__}


def test_a_failing_write_ends_the_save_and_closes_every_file() -> None:
    """The error of one window is raised, files that were under way are closed, and the next save has all its windows."""
    closed: list[str] = []

    class Failing(MemoryTier):
        def create(self, path: str, size: int) -> Any:
            made: FileWriter = super().create(path, size)
            discard = made.discard

            def write(offset: int, buffers: Sequence[Buffer]) -> None:
                raise StorageFailed("the disk is gone")

            def note() -> None:
                closed.append(path)
                discard()

            made.write, made.discard = write, note  # type: ignore[method-assign]
            return made

    for _ in range(write_threads.WORKERS + 1):
        closed.clear()
        content = shards([300, 300, 300])
        slots = {rank: memoryview(bytes(data)) for rank, data in enumerate(content.data)}
        with pytest.raises(StorageFailed, match="disk is gone"):
            writer.write(PosixStore(Failing()).begin(PLACE), planner.plan(content.tables()), slots, "node")
        assert closed
    tier = MemoryTier()
    shards([300]).save(tier)
    verify(tier, naming.checkpoint_path("r", 7))


def test_windows_are_bounded_and_used_again() -> None:
    """No more windows exist than the ring has; the one given back is the one that is taken next."""
    ring = BufferPool(1)
    with ring.taken() as first:
        assert first.nbytes == WINDOW_BYTES
        assert first.ctypes.data % 4096 == 0
        waiting = threading.Thread(target=lambda: ring.taken().__enter__())
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join(180)
    assert not waiting.is_alive()


def test_threads_give_way_alone() -> None:
    """Only the thread that asks gives way; the rest of the process stays as it was."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def background() -> None:
        give_way()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=background)
    thread.start()
    thread.join()
    assert seen == [max(NICE, before)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
