"""A node's part of a save of several nodes: read back as it was, and refused by name where it is not one."""

from __future__ import annotations

import msgspec
import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Box
from holdfast_formats.staging import declaration, part
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec


def table(rank: int, step: int = 1) -> SlotTable:
    held = (StagedFragment(TensorSpec("model", "w", "F32", (4, 4)), (Box((rank, 0), (1, 4)),), 64 * rank, "rows"),)
    values = {"model": {"note": f'"{rank}"'}}
    return SlotTable("run", step, 1, rank, 4, ("model",), held, values, {}, digests=bytes(range(16)))


def read(encoded: part.EncodedPart) -> part.DecodedPart:
    return part.decode(declaration.decode(encoded.declaration), encoded.said)


def test_a_part_reads_back() -> None:
    """The tables of two ranks, in the order of ranks, whatever order they came in."""
    assert read(part.encode([table(3), table(1)])).tables == [table(1), table(3)]


def test_the_declaration_is_the_same_at_every_step() -> None:
    """What the ranks hold is stored once; what they say is not."""
    first, second = part.encode([table(0), table(1)]), part.encode([table(1, 2), table(0, 2)])
    assert first.declaration == second.declaration and first.said != second.said
    assert part.encode([table(0)]).declaration != first.declaration


@pytest.mark.parametrize("broken", [b"", b"{", b"[", b"[[0]]", b"[" * 100_000])
def test_what_is_no_part_is_refused(broken: bytes) -> None:
    """Whatever a catalog gives back."""
    declared = declaration.decode(declaration.encode({}))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        part.decode(declared, broken)


def test_what_does_not_belong_together_is_refused() -> None:
    """A declaration of other ranks, or digests of other boxes."""
    one, other = part.encode([table(0)]), part.encode([table(1)])
    with pytest.raises(InvalidRequest, match="same ranks"):
        part.decode(declaration.decode(one.declaration), other.said)
    long = part.encode([msgspec.structs.replace(table(0), digests=bytes(32))])
    with pytest.raises(InvalidRequest, match="not those of 1 boxes"):
        read(long)
