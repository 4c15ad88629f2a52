"""From slots to a published checkpoint over the in-memory tier: whatever the sharding, the same bytes, proven."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load

from holdfast_formats import dtypes, naming
from holdfast_formats.disk import manifests, packing
from holdfast_formats.disk.packing import EXTENT_BYTES_MIN
from holdfast_formats.errors import AlreadyCommitted, CorruptExtent, CorruptManifest, StateMismatch
from holdfast_formats.naming import Place
from holdfast_formats.region import Box, byte_box, byte_view, flat_boxes
from holdfast_formats.staging.slot_table import Blob, SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_formats.transfer import element_dtype
from holdfast_service.control.checkpoints import commit, planner
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.writing import gathering, writer
from holdfast_service.storage import MemoryTier, PosixStore

DTYPES = ["F32", "BF16", "U8", "I64", "F8_E4M3", "BOOL", "F4"]


class Shards:
    """Global tensors cut over ranks: builds every rank's slot and table, as a client would."""

    def __init__(self, world: int, step: int = 7, attempt: int = 1) -> None:
        self.world, self.step, self.attempt = world, step, attempt
        self.file_bytes_max = 400
        self.data: list[bytearray] = [bytearray() for _ in range(world)]
        self.fragments: list[list[StagedFragment]] = [[] for _ in range(world)]
        self.blobs: list[list[Blob]] = [[] for _ in range(world)]
        self.bytes: dict[str, bytes] = {}
        self.groups: tuple[str, ...] = ("model",)

    def add(self, spec: TensorSpec, content: bytes, held: list[tuple[int, list[Box]]]) -> None:
        """Give each rank of `held` its boxes of the tensor with these bytes."""
        self.bytes[spec.name] = content
        view = byte_view(spec.dtype, spec.shape)
        elements = np.frombuffer(content, element_dtype(view.itemsize)).reshape(view.shape)
        for rank, boxes in held:
            self.fragments[rank].append(StagedFragment(spec, tuple(boxes), len(self.data[rank])))
            for box in boxes:
                self.data[rank] += elements[byte_box(spec.dtype, box, spec.shape).slices].tobytes()

    def round(self, spec: TensorSpec, ranks: Iterable[int]) -> None:
        """These ranks hold a weight of which nothing is in their slots: its master of the same name is."""
        self.groups = ("model", "master")
        for rank in ranks:
            self.fragments[rank].append(StagedFragment(spec, (), 0, rounded_from="master"))

    def tables(self) -> list[SlotTable]:
        return [
            SlotTable(
                "r",
                self.step,
                self.attempt,
                rank,
                self.world,
                self.groups,
                tuple(self.fragments[rank]),
                {"model": {"k": str(rank)}},
                {},
                tuple(self.blobs[rank]),
                file_bytes_max=self.file_bytes_max,
            )
            for rank in range(self.world)
        ]

    def save(self, tier: MemoryTier) -> manifests.Manifest:
        """Plan, write, publish."""
        plan = planner.plan(self.tables())
        store = PosixStore(tier)
        staged = store.begin(Place("r", self.step, self.attempt))
        writer.write(staged, plan, {r: memoryview(bytes(d)) for r, d in enumerate(self.data)}, "node")
        return commit.publish(store, plan, "2026-01-01T00:00:00Z")


def float_bits(seed: int, size: int) -> NDArray[np.uint32]:
    """Bits of any floats but NaN: of all exponents, zeros of both signs, subnormal ones, ties, and what becomes infinite."""
    chance = np.random.default_rng(seed)
    bits = chance.integers(0, 2**32, size, np.uint32)
    special = np.array([0, 0x80000000, 1, 0x807FFFFF, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x477FF000], np.uint32)
    bits = np.where(chance.random(size) < 0.3, chance.choice(special, size), bits)
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, bits & 0xBFFFFFFF, bits).astype("<u4")


def rounded(bits: NDArray[np.uint32], dtype: str) -> bytes:
    """The elements, rounded: BF16 in integers, as its definition says; F16 as NumPy does it, which is tested by its own."""
    if dtype == "BF16":
        return ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    with np.errstate(all="ignore"):
        return bits.view("<f4").astype("<f2").tobytes()


def draw_masters(data: st.DataObject, world: int) -> tuple[Shards, Shards]:
    """Masters cut at random and held by random ranks, whose weights are rounded; and one rank that holds all as it is."""
    sharded, single = Shards(world), Shards(1)
    single.groups = ("model", "master")
    for index in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(0, 12), max_size=3)))
        master = TensorSpec("master", f"t.{index}", "F32", shape)
        weight = TensorSpec("model", f"t.{index}", data.draw(st.sampled_from(["BF16", "F16"])), shape)
        bits = float_bits(index, int(np.prod(shape)))
        owned: dict[int, list[Box]] = {}
        for box in data.draw(cuts(shape, "F32")):
            for rank in data.draw(st.sets(st.integers(0, world - 1), min_size=1)):
                owned.setdefault(rank, []).append(box)
        sharded.add(master, bits.tobytes(), list(owned.items()) or [(0, [])])
        sharded.round(weight, data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
        single.add(master, bits.tobytes(), [(0, [Box((0,) * len(shape), shape)])])
        single.add(weight, rounded(bits, weight.dtype), [(0, [Box((0,) * len(shape), shape)])])
    return sharded, single


def files_of(tier: MemoryTier, step: int = 7) -> dict[str, bytes]:
    directory = naming.checkpoint_path("r", step)
    return {name: tier.read(f"{directory}/{name}") for name in tier.list(directory)}


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> list[Box]:
    """Boxes that tile a shape: a ragged grid, or flat ranges."""
    if dtype == "F4" or draw(st.booleans()):
        return [Box((0,) * len(shape), shape)]
    total = int(np.prod(shape))
    if draw(st.booleans()):
        points = [0, *sorted(draw(st.sets(st.integers(0, total), max_size=3))), total]
        return [box for a, b in pairwise(points) for box in flat_boxes(a, b, shape)]
    axes = []
    for size in shape:
        inner = sorted(c for c in draw(st.sets(st.integers(1, max(size, 1)), max_size=2)) if c < size)
        axes.append(list(pairwise([0, *inner, size])))
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*axes)]


@given(st.data(), st.integers(1, 4))
def test_the_bytes_on_disk_do_not_depend_on_the_sharding(data: st.DataObject, world: int) -> None:
    """Random tensors cut at random and held by random ranks give the same files as one rank that holds everything."""
    sharded, single = Shards(world), Shards(1)
    for index in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
        if dtype == "F4":
            shape = (*shape, 4)
        spec = TensorSpec("model", f"t.{index}", dtype, shape)
        content = np.random.default_rng(index).integers(0, 2, spec.nbytes, np.uint8).tobytes()
        owned: dict[int, list[Box]] = {}
        for box in data.draw(cuts(shape, dtype)):
            for rank in data.draw(st.sets(st.integers(0, world - 1), min_size=1)):
                owned.setdefault(rank, []).append(box)
        sharded.add(spec, content, list(owned.items()) or [(0, [])])
        single.add(spec, content, [(0, [Box((0,) * len(shape), shape)])])
    tier, reference = MemoryTier(alignment=data.draw(st.sampled_from([1, 64, 4096]))), MemoryTier()
    made = sharded.save(tier)
    single.save(reference)
    written, expected = files_of(tier), files_of(reference)
    assert {n: b for n, b in written.items() if n.endswith((".safetensors", ".index.json"))} == {
        n: b for n, b in expected.items() if n.endswith((".safetensors", ".index.json"))
    }
    for name, entry in made.tensors["model"].items():
        assert written[entry.file][entry.start : entry.start + entry.nbytes] == sharded.bytes[name]
    assert verify(tier, naming.checkpoint_path("r", 7)) == made


@given(st.data(), st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("window", [None, 1024])
def test_weights_are_their_masters_rounded(
    monkeypatch: pytest.MonkeyPatch, window: int | None, data: st.DataObject, world: int
) -> None:
    """Whatever ranks hold of masters, whatever a window takes: the files of weights that were copied themselves."""
    if window:
        monkeypatch.setattr(gathering, "EXTENT_BYTES_MAX", window)
        monkeypatch.setattr(gathering, "WRITE_BYTES", window)
        monkeypatch.setattr(gathering, "CACHED_BYTES", window // 2)
        monkeypatch.setattr(packing, "EXTENT_BYTES_MIN", window)
    sharded, single = draw_masters(data, world)
    tier, reference = MemoryTier(alignment=data.draw(st.sampled_from([1, 100, 101, 4096]))), MemoryTier()
    made, expected = sharded.save(tier), single.save(reference)
    names = [
        file.name for file in expected.files if file.name.endswith((".safetensors", ".json")) and file.name != "state.json"
    ]
    assert {name: files_of(tier)[name] for name in names} == {name: files_of(reference)[name] for name in names}
    assert made.tensors == expected.tensors and verify(tier, naming.checkpoint_path("r", 7)) == made


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("element", [0, 70_000, 400_000 - 1])
def test_nan_in_a_master_is_refused_by_name(dtype: str, element: int) -> None:
    """Which of its bits the weight has is not known: nothing is committed."""
    shape = (400, 1000)
    values = np.ones(shape, "<f4")
    values.reshape(-1).view("<u4")[element] = 0xFF800001
    shards = Shards(2)
    boxes = [Box((0, 0), (400, 300)), Box((0, 300), (400, 700))]
    shards.add(TensorSpec("master", "w", "F32", shape), values.tobytes(), [(0, [boxes[0]]), (1, [boxes[1]])])
    shards.round(TensorSpec("model", "w", dtype, shape), [0, 1])
    tier = MemoryTier()
    with pytest.raises(StateMismatch, match="master of 'w' has NaN") as caught:
        shards.save(tier)
    assert "model='from-master'" in caught.value.hint


@pytest.mark.parametrize("alignment", [1, 4096, 65536])
def test_large_tensors_are_cut_into_extents_and_column_shards_are_put_together(alignment: int) -> None:
    """A tensor over several extents, held as two column shards, reads back through the safetensors library."""
    shape = (4100, 2048)
    content = np.random.default_rng(0).standard_normal(shape).astype("<f4")
    shards = Shards(2)
    boxes = [Box((0, 0), (4100, 1000)), Box((0, 1000), (4100, 1048))]
    shards.add(TensorSpec("model", "w", "F32", shape), content.tobytes(), [(0, [boxes[0]]), (1, [boxes[1]])])
    tier = MemoryTier(alignment=alignment)
    made = shards.save(tier)
    assert len(made.tensors["model"]["w"].extents) == -(-made.tensors["model"]["w"].nbytes // EXTENT_BYTES_MIN)
    assert np.array_equal(load(files_of(tier)["model.safetensors"])["w"], content)


def test_assets_and_state_are_written_and_proven() -> None:
    """An asset's bytes arrive as they were; state.json merges what ranks said."""
    shards = Shards(2)
    shards.data[1] += b"{}config"
    shards.blobs[1].append(Blob("config.json", 0, 8))
    tier = MemoryTier()
    shards.save(tier)
    assert files_of(tier)["config.json"] == b"{}config"
    assert b'"ranks"' in files_of(tier)[naming.STATE]


def test_a_step_is_published_once() -> None:
    """A second commit of a step is refused and the first one stays as it was."""
    tier = MemoryTier()
    Shards(1).save(tier)
    before = files_of(tier)
    with pytest.raises(AlreadyCommitted):
        Shards(1, attempt=2).save(tier)
    assert files_of(tier) == before


def test_receipts_that_do_not_cover_the_plan_publish_nothing() -> None:
    """Without its receipt a plan is refused and no checkpoint becomes visible."""
    shards = Shards(1)
    shards.add(TensorSpec("model", "w", "U8", (9,)), bytes(9), [(0, [Box((0,), (9,))])])
    tier = MemoryTier()
    with pytest.raises(StateMismatch, match=r"model\.safetensors"):
        commit.publish(PosixStore(tier), planner.plan(shards.tables()), "2026-01-01T00:00:00Z")
    assert tier.list("r/checkpoints") == []


@pytest.mark.parametrize("position", [0, 100, 4096, 4100, -1])
def test_a_flipped_bit_is_found(position: int) -> None:
    """In the header, its padding, the first and the last data byte: verification names the file."""
    shards = Shards(1)
    shards.add(TensorSpec("model", "w", "U8", (99,)), bytes(range(99)), [(0, [Box((0,), (99,))])])
    tier = MemoryTier()
    shards.save(tier)
    path = f"{naming.checkpoint_path('r', 7)}/model.safetensors"
    broken = bytearray(tier.read(path))
    broken[position] ^= 1
    tier.remove_file(path)
    tier.put(path, bytes(broken))
    with pytest.raises((CorruptExtent, CorruptManifest), match=r"model\.safetensors"):
        verify(tier, naming.checkpoint_path("r", 7))


def test_every_dtype_is_written() -> None:
    """One tensor of each safetensors dtype, sub-byte ones included, survives with its bytes."""
    shards = Shards(1)
    for name in dtypes.BITS:
        spec = TensorSpec("model", name.lower(), name, (2, 8))
        content = np.random.default_rng(1).integers(0, 2, spec.nbytes, np.uint8).tobytes()
        shards.add(spec, content, [(0, [Box((0, 0), (2, 8))])])
    tier = MemoryTier()
    made = shards.save(tier)
    stored = files_of(tier)
    for name, entry in made.tensors["model"].items():
        assert stored[entry.file][entry.start : entry.start + entry.nbytes] == shards.bytes[name]
