"""Where things stand in a slot: apart from each other, and long ones as far from the begin of a page as in their file."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from holdfast import Fragment
from holdfast.stage.background_safe import expected_growth
from holdfast.stage.staging import LONG_BYTES_MIN, NOTHING, SaveIdentity, SlotLayout, encode_table, lay_out
from holdfast.state.train_state import TrainState
from holdfast_formats.disk.packing import FILE_BYTES_MAX
from holdfast_formats.staging import slot_table
from holdfast_formats.staging.arena import PAGE_BYTES
from holdfast_formats.tensors import box_bytes
from holdfast_service.control.checkpoints import planner


def trained(parameters: int = 4, odd: int = 3) -> dict:
    """A model with long and short parameters of odd sizes, and Adam after a step: a moment pair and a scalar for each."""
    torch.manual_seed(0)
    layers = [nn.Linear(300 + odd * n, 301, bias=True) for n in range(parameters)]
    model = nn.Sequential(*layers)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return {"model": model, "optim": optim, "note": {"text": "x"}}


def laid_out(state: dict, rank: int = 0, world: int = 1, before: SlotLayout = NOTHING, file_bytes_max: int = FILE_BYTES_MAX):
    """The layout of a rank's slot, and its table."""
    snapshot = TrainState(state, rank, world, None).snapshot(None)
    layout = lay_out(snapshot, {}, lambda leaf, piece: True, before, file_bytes_max)
    encoded = encode_table(SaveIdentity("r", 1, 0, rank, world), snapshot, layout, {}, file_bytes_max)
    return layout, slot_table.decode(encoded, layout.data_bytes)


def misplaced(tables: list) -> tuple[int, int]:
    """Of the long pieces that a plan reads: how many cannot be written from where they stand, and how many there are."""
    wrong = total = 0
    for file in planner.plan(tables).files:
        for tensor in file.tensors:
            before = 0
            for origin in tensor.origins:
                size = box_bytes(tensor.spec, origin.box)
                if size >= LONG_BYTES_MIN:
                    total += 1
                    wrong += (origin.slot_offset - tensor.start - before) % PAGE_BYTES != 0
                before += size
    return wrong, total


@pytest.mark.parametrize("file_bytes_max", [FILE_BYTES_MAX, 2**20])
def test_long_tensors_stand_in_a_slot_as_in_their_files(file_bytes_max: int) -> None:
    """Also behind the scalars of an optimizer, which leave nothing in a file at a round place, and in files of any size."""
    layout, encoded = laid_out(trained(), file_bytes_max=file_bytes_max)
    wrong, total = misplaced([encoded])
    assert total == 12 and not wrong
    places = sorted((c.slot_offset, c.tensor.nbytes) for c in layout.copies)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))
    assert layout.data_bytes <= sum(size for _, size in places) + total * PAGE_BYTES + 64 * len(places)


def test_rows_of_a_tensor_too() -> None:
    """Two ranks that hold the rows of every tensor lay them out as they will stand in its file."""
    tables = []
    for rank in range(2):
        rows = {f"w{n}": Fragment(torch.ones(151, 701 + n), (302, 701 + n), offset=(151 * rank, 0)) for n in range(5)}
        tables.append(laid_out({"model": rows, "odd": {"s": torch.ones(3)}} if rank == 0 else {"model": rows}, rank, 2)[1])
    wrong, total = misplaced(tables)
    assert total == 10 and not wrong


def test_what_is_only_added_leaves_the_rest_in_its_place() -> None:
    """An optimizer's first step adds tensors behind what an earlier layout began with; nothing of that moves."""
    state = trained()
    plain = {"model": state["model"]}
    train = TrainState(plain, 0, 1, None)
    first = lay_out(train.snapshot(None), {}, lambda leaf, piece: True)
    again = lay_out(train.snapshot(None), {}, lambda leaf, piece: True, first)
    assert [c.slot_offset for c in again.copies] == [c.slot_offset for c in first.copies]


def test_what_another_rank_stages_gets_no_place() -> None:
    """Its boxes are named apart, none of its bytes has a copy, and what is restless is staged all the same."""
    state = trained()
    train = TrainState(state, 0, 2, None)
    snapshot = train.snapshot(None)
    first = lay_out(snapshot, {}, lambda leaf, piece: True)
    names = {leaf.path for leaf in snapshot.leaves if leaf.pieces[0].tensor.nbytes >= LONG_BYTES_MIN}
    restless = min(names)
    for before in (NOTHING, first._replace(leaves=(), marks=())):
        layout = lay_out(
            snapshot, {}, lambda leaf, piece: leaf.path != restless, before, spared=lambda leaf: leaf.path in names
        )
        assert {one.name for one in layout.spared} == names - {restless}
        assert {copy.name for copy in layout.copies} == {copy.name for copy in first.copies} - names | {restless}
        assert first.data_bytes - layout.data_bytes >= sum(one.octets.numel() for one in layout.spared)
        encoded = encode_table(SaveIdentity("r", 1, 0, 0, 2), snapshot, layout, {}, FILE_BYTES_MAX)
        table = slot_table.decode(encoded, layout.data_bytes)
        assert table.unstaged == tuple(one.fragment for one in layout.spared)
        staged = {(f.spec, f.boxes) for f in (*table.fragments, *table.unstaged) if f.boxes}
        assert staged == {(f.spec, f.boxes) for f in first.fragments if f.boxes}
    again = lay_out(
        train.snapshot(None), {}, lambda leaf, piece: leaf.path != restless, layout, spared=lambda leaf: leaf.path in names
    )
    assert list(map(id, again.spared)) == list(map(id, layout.spared))
    assert list(map(id, again.copies[: again.steady])) == list(map(id, layout.copies[: layout.steady]))
    assert again.steady == layout.steady > 0


def test_what_an_optimizer_will_add_is_not_underestimated() -> None:
    """Or the first save would need a larger slot than was made ready, and wait for it."""
    model = nn.Sequential(*(nn.Linear(257 + n, 1021, bias=True) for n in range(8)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim}
    before, _ = laid_out(state)
    expected = expected_growth(state)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    after, _ = laid_out(state)
    assert before.data_bytes < after.data_bytes <= before.data_bytes + expected.bytes
