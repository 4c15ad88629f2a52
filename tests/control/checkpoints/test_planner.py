"""Plans: every byte once, from one of its holders, and the same files whoever saves."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import packing
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, whole
from holdfast_formats.staging.slot_table import Blob, SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control.checkpoints import planner
from tests.tiling import tiles


def table(rank: int, world: int, fragments: tuple[StagedFragment, ...], **more: object) -> SlotTable:
    """A rank's table with defaults."""
    settings: dict = {"groups": ("model",), "values": {}, "aliases": {}}
    settings.update(more)
    return SlotTable("r", 5, 1, rank, world, fragments=fragments, **settings)


def spec(name: str = "w", shape: tuple[int, ...] = (4, 6), dtype: str = "F32") -> TensorSpec:
    return TensorSpec("model", name, dtype, shape)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and a ragged grid of boxes that tiles it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=3)))
    axes = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=3)) & set(range(1, size)))
        axes.append(list(pairwise([0, *cuts, size])))
    boxes = [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*axes)]
    return shape, boxes


@given(grids(), st.integers(1, 4), st.data())
def test_every_byte_is_read_from_exactly_one_holder(grid: tuple, world: int, data: st.DataObject) -> None:
    """Whatever boxes are replicated where, the origins of a plan tile the tensor and point at real holders."""
    shape, boxes = grid
    holders = [data.draw(st.sets(st.integers(0, world - 1), min_size=1)) for _ in boxes]
    tables = []
    for rank in range(world):
        mine = tuple(b for b, ranks in zip(boxes, holders, strict=True) if rank in ranks)
        tables.append(table(rank, world, (StagedFragment(spec(shape=shape), mine, 64 * rank),)))
    plan = planner.plan(tables[::-1])
    (planned,) = [t for f in plan.files for t in f.tensors]
    assert tiles([o.box for o in planned.origins], shape)
    for origin in planned.origins:
        fragment = tables[origin.rank].fragments[0]
        position = fragment.boxes.index(origin.box)
        assert origin.slot_offset == fragment.slot_offset + sum(b.volume * 4 for b in fragment.boxes[:position])


def test_replicas_are_balanced_by_bytes() -> None:
    """Eight equal replicated tensors on four ranks: each rank is read for two of them."""
    fragments = tuple(StagedFragment(spec(f"t{i}"), (whole((4, 6)),), i * 96) for i in range(8))
    plan = planner.plan([table(r, 4, fragments) for r in range(4)])
    ranks = [o.rank for f in plan.files for t in f.tensors for o in t.origins]
    assert sorted(ranks) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_files_do_not_depend_on_who_holds_what() -> None:
    """Sharded by rows, by columns or replicated: the same names, headers and offsets."""
    rows = [Box((i * 2, 0), (2, 6)) for i in range(2)]
    columns = [Box((0, i * 3), (4, 3)) for i in range(2)]
    layouts = []
    for boxes in (rows, columns):
        plan = planner.plan([table(r, 2, (StagedFragment(spec(), (boxes[r],), 0),)) for r in range(2)])
        layouts.append([f.layout for f in plan.files])
    replicated = planner.plan([table(r, 2, (StagedFragment(spec(), (whole((4, 6)),), 0),)) for r in range(2)])
    assert layouts[0] == layouts[1] == [f.layout for f in replicated.files]


def held(*boxes: Box, **more: str) -> tuple[StagedFragment, ...]:
    return (StagedFragment(spec(**more), boxes, 0),)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([table(0, 1, held(Box((0, 0), (3, 6))))], r"'w'.*72 of its 96 bytes"),
        ([table(0, 2, held(Box((0, 0), (3, 6)))), table(1, 2, held(Box((2, 0), (2, 6))))], "overlap"),
        ([table(0, 2, ()), table(0, 2, ())], "but the world size is 2"),
        ([table(0, 2, ()), table(1, 2, (), groups=("model", "optim"))], "groups"),
        ([table(0, 2, held()), table(1, 2, held(dtype="F16"))], "rank 1 .* rank 0"),
        ([table(0, 1, held(whole((4, 6))), aliases={"model": {"head": "embed"}})], "tied"),
    ],
    ids=["a hole", "an overlap", "a rank twice", "other groups", "another dtype", "tied on one rank only"],
)
def test_ranks_that_disagree_are_refused(tables: list[SlotTable], message: str) -> None:
    """Tensors, ranks and byte counts are named; nothing is stored twice, or never, in silence."""
    with pytest.raises(StateMismatch, match=message):
        planner.plan(tables)


def test_assets_metrics_and_values_reach_the_plan() -> None:
    """The first rank that has an asset or metrics gives them; JSON state is merged over ranks."""
    a = table(0, 2, (), blobs=(Blob("config.json", 0, 2),), values={"model": {"k": "1"}})
    b = table(1, 2, (), metrics={"loss": 0.5}, nonfinite_metrics={"most": "Infinity"}, values={"model": {"k": "2"}})
    plan = planner.plan([a, b])
    assert [(x.rank, x.blob.name) for x in plan.assets] == [(0, "config.json")]
    assert plan.metrics == {"loss": 0.5, "most": math.inf}
    assert b'"ranks"' in plan.state
    assert plan.bytes == 0


def test_the_same_fragments_are_placed_once() -> None:
    """A save that differs in step and values alone gets the files of the one before; any other change is a new plan."""
    held = StagedFragment(spec(), (whole((4, 6)),), 0)
    first = planner.plan([table(0, 1, (held,))])
    again = planner.plan([table(0, 1, (held,), values={"model": {"k": "2"}})])
    assert again.files[0] is first.files[0]
    assert again.state != first.state
    moved = planner.plan([table(0, 1, (StagedFragment(spec(), (whole((4, 6)),), 64),))])
    assert moved.files[0].tensors[0].origins[0].slot_offset == 64
    smaller = planner.plan([table(0, 1, (held, StagedFragment(spec("v"), (whole((4, 6)),), 96)), file_bytes_max=100)])
    assert len(smaller.files) == 2
    assert planner.plan([table(0, 1, (held,))]).files == first.files


def test_a_tensor_is_frozen_if_all_its_ranks_say_so() -> None:
    """One that disagrees may change it, and a plan that was made before does not hold then."""
    box = whole((4, 6))

    def files(*frozen: bool) -> list[tuple[str, bool]]:
        tables = [
            table(rank, 2, (StagedFragment(spec("w"), (box,), 0, frozen=said), StagedFragment(spec("x"), (box,), 96)))
            for rank, said in enumerate(frozen)
        ]
        return [(file.tensors[0].spec.name, file.layout.frozen) for file in planner.plan(tables).files]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FROZEN_BYTES_MIN", 1)
        assert files(True, False) == files(False, False) == [("w", False)]
        assert files(True, True) == [("x", False), ("w", True)]
        assert files(True, False) == [("w", False)]
