"""Plans of shares: the files of the plan of one node, the same owners on all nodes, and origins that hold what is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import LimitExceeded, ReplicasDiffer, StateMismatch
from holdfast_formats.region import Box, Shape, byte_box, byte_span, byte_view, whole
from holdfast_formats.staging import blocks, declaration, part
from holdfast_formats.staging.blocks import SharePlan
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.plan import WritePlan
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes
from holdfast_service.control.checkpoints import planner
from holdfast_service.wings.cluster.saving import share_planner
from holdfast_service.wings.cluster.saving import world as worlds_planned
from tests.formats.strategies import ragged_grids

Parts = list[tuple[str, DecodedPart]]
BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that small tensors have several of."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES_MIN", BLOCK)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)


class MadeWorld(NamedTuple):
    """The tables of a world, and the node of each rank."""

    tables: list[SlotTable]
    node_of: list[int]

    def parts(self, order: Sequence[int] = ()) -> Parts:
        """What the nodes bring; with their ranks in the given order."""
        found = []
        for node in range(max(self.node_of) + 1):
            mine = [self.tables[rank] for rank in order or range(len(self.tables)) if self.node_of[rank] == node]
            encoded = part.encode(mine)
            read = part.decode(declaration.decode(encoded.declaration), encoded.said)
            found.append((hashlib.sha256(encoded.declaration).hexdigest(), read))
        return found

    def shares(self, *, whole_files: bool = False) -> list[SharePlan]:
        parts = self.parts()
        return [share_planner.plan_share(parts, node, whole_files=whole_files) for node in range(len(parts))]


def table(rank: int, world: int, held: Sequence[StagedFragment], **more: Any) -> SlotTable:
    given: dict[str, Any] = {
        "groups": ("model", "master", "extra"),
        "values": {},
        "aliases": {},
        "file_bytes_max": 500,
    } | more
    return SlotTable("r", 5, 1, rank, world, fragments=tuple(held), **given)


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """As torch.chunk: the last ones may be short, or empty."""
    step = -(-size // parts) or 1
    return [(min(part * step, size), min((part + 1) * step, size) - min(part * step, size)) for part in range(parts)]


def on_mesh(shape: Shape, mesh: Sequence[int], cuts: Mapping[int, int], rank: int) -> Box:
    """A rank's box where mesh dimension `d` cuts tensor dimension `cuts[d]`; along the others all hold the same."""
    place = np.unravel_index(rank, mesh)
    offset, size = [0] * len(shape), list(shape)
    for dimension, of in cuts.items():
        offset[of], size[of] = chunks(shape[of], mesh[dimension])[int(place[dimension])]
    return Box(tuple(offset), tuple(size))


@st.composite
def worlds(draw: st.DrawFn) -> MadeWorld:
    """Tensors on a mesh, each cut along some of its dimensions; others cut at random and held by random ranks, in several
    pieces a rank; and some that a few ranks hold whole. Some are masters, of which weights are to be rounded.
    """
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    world = prod(mesh)
    held: list[list[StagedFragment]] = [[] for _ in range(world)]
    ends = [draw(st.integers(0, 32)) for _ in range(world)]

    def put(rank: int, spec: TensorSpec, boxes: Sequence[Box]) -> None:
        held[rank].append(StagedFragment(spec, tuple(boxes), ends[rank], f"of {rank}"))
        ends[rank] += sum(box_bytes(spec, box) for box in boxes) + draw(st.sampled_from([0, 8]))

    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
        rounded = draw(st.sampled_from(["", "", "BF16", "F16"]))
        dtype = "F32" if rounded else draw(st.sampled_from(["F32", "BF16", "U8"]))
        spec = TensorSpec("master" if rounded else "model", f"t.{number}", dtype, shape)
        kind = draw(st.sampled_from(["mesh", "random", "few"]))
        if kind == "mesh":
            free = draw(st.permutations(range(len(shape))))
            cuts = dict(zip(draw(st.permutations(range(len(mesh)))), free, strict=False))
            for rank in range(world):
                put(rank, spec, [on_mesh(shape, mesh, cuts, rank)])
        elif kind == "random":
            owned: dict[int, list[Box]] = {}
            for box in draw(ragged_grids(shape)):
                for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=3)):
                    owned.setdefault(rank, []).append(box)
            for rank, boxes in sorted(owned.items()):
                put(rank, spec, boxes)
        else:
            for rank in sorted(draw(st.sets(st.integers(0, world - 1), min_size=1))):
                put(rank, spec, [whole(shape)])
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)) if rounded else ():
            weight = TensorSpec("model", spec.name, rounded, shape)
            held[rank].append(StagedFragment(weight, (), 0, f"of {rank}", "master"))
    node_of = [draw(st.integers(0, 2)) for _ in range(world)]
    nodes = sorted(set(node_of))
    return MadeWorld([table(rank, world, mine) for rank, mine in enumerate(held)], [nodes.index(n) for n in node_of])


def bare(plan: WritePlan) -> WritePlan:
    """The plan without where it is read from."""
    files = tuple(file._replace(tensors=tuple(one._replace(origins=()) for one in file.tensors)) for file in plan.files)
    return plan._replace(files=files)


@given(worlds())
def test_the_plan_is_that_of_one_node(made: MadeWorld) -> None:
    """Whatever is held where: the same files, headers and offsets as if all tables were at one daemon. The boxes that a
    node's blocks touch are those of that plan, each read from a rank that has it there: one of its own if any does.
    """
    single = planner.plan(made.tables)
    held = {
        (rank, fragment.spec.name, box, place)
        for rank, one in enumerate(made.tables)
        for fragment in one.fragments
        for box, place in _placed(fragment)
    }
    for node, (plan, shares, *_) in enumerate(made.shares()):
        assert bare(plan) == bare(single)
        for number, (mine, theirs) in enumerate(zip(plan.files, single.files, strict=True)):
            for tensor, reference in zip(mine.tensors, theirs.tensors, strict=True):
                wanted = [
                    origin.box
                    for origin in reference.origins
                    if any(_touches(reference.spec, reference.start, origin.box, s) for s in shares if s.file == number)
                ]
                assert [origin.box for origin in tensor.origins] == wanted
                assert {origin.held_as for origin in tensor.origins} == {
                    origin.held_as for origin in reference.origins if origin.box in wanted
                }
                for rank, box, place, _ in tensor.origins:
                    assert (rank, tensor.spec.name, box, place) in held
                    near = {r for r, name, b, _ in held if (name, b) == (tensor.spec.name, box) and made.node_of[r] == node}
                    assert not near or rank == min(near)


def _placed(fragment: StagedFragment) -> list[tuple[Box, int]]:
    found, place = [], fragment.slot_offset
    for box in fragment.boxes:
        found.append((box, place))
        place += box_bytes(fragment.spec, box)
    return found


def _touches(spec: TensorSpec, start: int, box: Box, share: blocks.Share) -> bool:
    view = byte_view(spec.dtype, spec.shape)
    begin, end = byte_span(byte_box(spec.dtype, box, spec.shape), view.shape, view.itemsize)
    return start + begin < share.end and start + end > share.begin


@given(worlds(), st.randoms(use_true_random=False))
def test_every_block_has_one_owner_on_all_nodes(made: MadeWorld, random: Any) -> None:
    """The shares of all nodes are all files, each byte once; in whatever order ranks come, and whoever plans first."""
    found = made.shares()
    for number, file in enumerate(found[0].plan.files):
        taken = sorted((s.begin, s.end) for one in found for s in one.shares if s.file == number)
        assert [begin for begin, _ in taken] == [0, *(end for _, end in taken[:-1])]
        assert taken[-1][1] == file.layout.bytes
    order = list(range(len(made.tables)))
    random.shuffle(order)
    share_planner.forget()
    parts = made.parts(order)
    for node in reversed(range(len(parts))):
        again = share_planner.plan_share(parts, node)
        assert (again.shares, again.block_bytes) == (found[node].shares, found[node].block_bytes)
        assert again.plan == found[node].plan


@given(worlds())
def test_a_whole_file_has_one_writer(made: MadeWorld) -> None:
    """Where storage wants that: each file is one node's, and has the tensors that it would have on one node."""
    found = made.shares(whole_files=True)
    for number, file in enumerate(found[0].plan.files):
        (writer,) = [one for one in found if any(share.file == number for share in one.shares)]
        mine = [share for share in writer.shares if share.file == number]
        assert [share.begin for share in mine] == [0, *(share.end for share in mine[:-1])]
        assert mine[-1].end == file.layout.bytes
    assert [bare(one.plan) for one in found] == [bare(planner.plan(made.tables))] * len(found)


def test_whole_files_are_divided_about_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that would be fewer than nodes are cut between tensors, and each node writes about as much."""
    monkeypatch.setattr(blocks, "WHOLE_FILE_BYTES_MIN", 1)
    specs = [TensorSpec("model", f"t.{number}", "F32", (64, 64)) for number in range(128)]
    tables = []
    for rank in range(4):
        held = [StagedFragment(s, (Box((16 * rank, 0), (16, 64)),), n * 2**12) for n, s in enumerate(specs)]
        tables.append(table(rank, 4, held, file_bytes_max=2**40))
    found = MadeWorld(tables, [0, 1, 2, 3]).shares(whole_files=True)
    written = [sum(share.end - share.begin for share in one.shares) for one in found]
    assert len(found[0].plan.files) >= 4 * blocks.WHOLE_FILES_WANTED
    assert max(written) <= sum(written) / len(written) * (1 + 1 / blocks.WHOLE_FILES_WANTED)


@pytest.mark.parametrize(("mesh", "cuts"), [((8, 4), {0: 0}), ((8, 4), {0: 0, 1: 1}), ((4, 8), {1: 1}), ((32,), {})])
def test_nodes_write_equally_much(mesh: tuple[int, ...], cuts: dict[int, int]) -> None:
    """Thirty-two ranks on eight nodes, sharded and replicated: nobody writes more than 5 % over the mean."""
    world, specs = prod(mesh), [TensorSpec("model", f"t.{number}", "F32", (64, 64)) for number in range(24)]
    tables = []
    for rank in range(world):
        box = on_mesh((64, 64), mesh, cuts, rank)
        tables.append(table(rank, world, [StagedFragment(s, (box,), n * 2**15) for n, s in enumerate(specs)]))
    found = MadeWorld(tables, [rank // 4 for rank in range(world)]).shares()
    written = [sum(share.end - share.begin for share in one.shares) for one in found]
    assert max(written) <= sum(written) / len(written) * 1.05


def test_a_replica_of_this_node_is_read_here() -> None:
    """What every node holds whole, no node asks another for."""
    spec = TensorSpec("model", "w", "F32", (64, 64))
    tables = [table(rank, 4, [StagedFragment(spec, (whole(spec.shape),), 64 * rank)]) for rank in range(4)]
    for node, one in enumerate(MadeWorld(tables, [0, 1, 2, 3]).shares()):
        assert one.shares
        assert {origin.rank for file in one.plan.files for t in file.tensors for origin in t.origins} == {node}


def claimed(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def test_what_ranks_hold_apart_is_kept_for_each() -> None:
    """A buffer that differs on rank 1: the tensor is read from ranks that have what rank 0 has, and rank 1 keeps its own; in
    the next save all are alike again.
    """
    spec = TensorSpec("model", "running_mean", "F32", (64,))
    held = [StagedFragment(spec, (whole(spec.shape),), 0)]

    def save(step: int, *whole_digests: int) -> list[SharePlan]:
        tables = [table(rank, 3, held, digests=claimed(0, value)) for rank, value in enumerate(whole_digests)]
        made = MadeWorld([msgspec.structs.replace(one, step=step) for one in tables], [0, 1, 2])
        single = planner.plan(made.tables)
        found = made.shares()
        assert all(bare(one.plan) == bare(single) for one in found)
        return found

    def read(found: Sequence[SharePlan]) -> dict[str, set[int]]:
        origins: dict[str, set[int]] = {}
        for one in found:
            for tensor in (tensor for file in one.plan.files for tensor in file.tensors):
                origins.setdefault(tensor.spec.name, set()).update(origin.rank for origin in tensor.origins)
        return origins

    first = read(save(1, 7, 8, 7))
    assert first["running_mean"] <= {0, 2} and first["ranks/00001/$model/running_mean"] == {1}
    assert read(save(2, 7, 7, 7)).keys() == {"running_mean"}
    assert read(save(3, 7, 7, 8))["ranks/00002/$model/running_mean"] == {2}


def test_replicas_that_differ_are_refused() -> None:
    """As by the plan of one node: by name, and by rank."""
    spec = TensorSpec("model", "w", "F32", (8,))
    held = [StagedFragment(spec, (whole(spec.shape),), 0)]
    tables = [table(rank, 3, held, digests=claimed(7 + (rank == 2), 0)) for rank in range(3)]
    with pytest.raises(ReplicasDiffer, match=r"model/w on rank 2 differs") as single:
        planner.plan(tables)
    with pytest.raises(ReplicasDiffer) as several:
        MadeWorld(tables, [0, 0, 1]).shares()
    assert several.value.problem() == single.value.problem()


def _rows(low: int, high: int, spec: TensorSpec | None = None) -> list[StagedFragment]:
    spec = spec or TensorSpec("model", "w", "F32", (4, 6))
    return [StagedFragment(spec, (Box((low, 0), (high - low, *spec.shape[1:])),), 0)]


@pytest.mark.parametrize(
    "tables",
    [
        [table(0, 2, _rows(0, 2)), table(1, 2, _rows(2, 3))],
        [table(0, 2, _rows(0, 3)), table(1, 2, _rows(2, 4))],
        [table(0, 2, _rows(0, 2)), table(1, 2, _rows(2, 4, TensorSpec("model", "w", "F16", (4, 6))))],
        [table(0, 2, _rows(0, 2)), table(1, 2, _rows(2, 4), groups=("model",))],
        [table(0, 3, _rows(0, 2)), table(1, 3, _rows(2, 4))],
        [table(0, 2, _rows(0, 2)), table(1, 2, _rows(2, 4), aliases={"model": {"head": "embed"}})],
    ],
    ids=["a hole", "an overlap", "another dtype", "other groups", "a rank is missing", "an alias of nothing"],
)
def test_what_is_no_state_is_refused_as_by_one_node(tables: list[SlotTable]) -> None:
    """With the same words."""
    with pytest.raises(StateMismatch) as single:
        planner.plan(tables)
    with pytest.raises(StateMismatch) as several:
        MadeWorld(tables, [0, 1]).shares()
    assert several.value.detail == single.value.detail


def test_the_next_save_is_not_planned_anew() -> None:
    """It differs in step and values alone. Other ranks at the nodes are another plan."""
    spec = TensorSpec("model", "w", "F32", (4, 6))
    tables = [table(rank, 2, _rows(2 * rank, 2 * rank + 2, spec)) for rank in range(2)]
    first = MadeWorld(tables, [0, 1]).shares()
    later = [msgspec.structs.replace(one, step=6, values={"model": {"k": "2"}}) for one in tables]
    again = MadeWorld(later, [0, 1]).shares()
    assert again[0].plan.files is first[0].plan.files and again[0].plan.state != first[0].plan.state
    swapped = MadeWorld(tables, [1, 0]).shares()
    assert [origin.rank for one in swapped[:1] for t in one.plan.files[0].tensors for origin in t.origins] in ([1], [0, 1])


def test_a_world_that_nobody_can_plan_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its size, with what to do."""
    monkeypatch.setattr(worlds_planned, "BOXES_MAX", 3)
    spec = TensorSpec("model", "w", "F32", (4, 6))
    tables = [table(rank, 4, _rows(rank, rank + 1, spec)) for rank in range(4)]
    with pytest.raises(LimitExceeded, match="hold 4 tensor parts in total, over the limit of 3") as refused:
        MadeWorld(tables, [0, 0, 1, 1]).shares()
    assert "HSDP" in (refused.value.hint or "")
