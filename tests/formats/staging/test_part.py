"""A node's part of a save of several nodes: read back as it was, and refused by name where it is not one."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.region import Box
from holdfast_formats.staging import part
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec


def table(rank: int, step: int = 1) -> SlotTable:
    held = (StagedFragment(TensorSpec("model", "w", "F32", (4, 4)), (Box((rank, 0), (1, 4)),), 64 * rank, "rows"),)
    values = {"model": {"note": f'"{rank}"'}}
    return SlotTable("run", step, 1, rank, 4, ("model",), held, values, {}, digests=bytes(range(16)))


def test_a_part_reads_back() -> None:
    """The tables of two ranks, in the order of ranks, whatever order they came in."""
    encoded = part.encode([table(3), table(1)])
    assert list(part.decode(part.decode_declaration(encoded.declaration), encoded.said)) == [table(1), table(3)]


def test_the_declaration_is_the_same_at_every_step() -> None:
    """What the ranks hold is stored once; what they say is not."""
    first, second = part.encode([table(0), table(1)]), part.encode([table(1, 2), table(0, 2)])
    assert first.declaration == second.declaration and first.said != second.said
    assert part.encode([table(0)]).declaration != first.declaration


@pytest.mark.parametrize("broken", [b"", b"{}", b"[", b"[[0]]", b'[["0",[]]]', b"[" * 100_000])
def test_what_is_no_part_is_refused(broken: bytes) -> None:
    """Whatever a catalog gives back."""
    with pytest.raises(InvalidRequest, match="cannot be read"):
        part.decode_declaration(broken)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        part.decode({}, broken if broken != b"[]" else b"{")


def test_a_box_outside_of_its_tensor_is_refused() -> None:
    """As in a slot's own table."""
    outside = StagedFragment(TensorSpec("model", "w", "F32", (4, 4)), (Box((4, 0), (1, 4)),), 0)
    encoded = part.encode([SlotTable("run", 1, 1, 0, 1, ("model",), (outside,), {}, {})])
    with pytest.raises(CheckpointError, match="'w'"):
        part.decode_declaration(encoded.declaration)


def test_what_does_not_belong_together_is_refused() -> None:
    """A declaration of other ranks."""
    fragments = part.decode_declaration(part.encode([table(0)]).declaration)
    with pytest.raises(InvalidRequest, match="same ranks"):
        part.decode(fragments, part.encode([table(1)]).said)
