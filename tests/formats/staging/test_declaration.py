"""Declarations: read back as they were, the same for the same fragments, and refused where they are none."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.region import Box
from holdfast_formats.staging import declaration
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes
from tests.formats.strategies import ragged_grids

W = TensorSpec("model", "w", "F32", (4, 4))
Held = dict[int, list[StagedFragment]]


@st.composite
def holdings(draw: st.DrawFn) -> Held:
    """What a few ranks hold: several boxes of a tensor, none, or the whole."""
    held: Held = {rank: [] for rank in draw(st.sets(st.integers(0, 20_000), max_size=4))}
    for number, rank in product(range(draw(st.integers(0, 4))), held):
        shape = (number, 3)
        boxes = draw(ragged_grids(shape))
        mine = tuple(boxes[: draw(st.integers(0, len(boxes)))])
        spec = TensorSpec(("model", "ema")[number % 2], f"t.{number}", "BF16", shape)
        placement, frozen = draw(st.sampled_from(["", "rows"])), draw(st.booleans())
        held[rank].append(StagedFragment(spec, mine, draw(st.integers(0, 2**40)), placement, frozen=frozen))
        if draw(st.booleans()):
            held[rank].append(StagedFragment(spec, (), 0, draw(st.sampled_from(["", "rows"])), "master"))
    return held


@given(holdings(), st.randoms(use_true_random=False))
def test_a_declaration_reads_back(held: Held, random: object) -> None:
    """The fragments of each rank, and its boxes in rows with their places in the slot; whatever order ranks came in."""
    encoded = declaration.encode(held)
    assert declaration.encode(dict(reversed(list(held.items())))) == encoded
    read = declaration.decode(encoded)
    assert read.ranks == tuple(sorted(held))
    expected = []
    for position, rank in enumerate(read.ranks):
        assert list(read.fragments(position)) == held[rank]
        for fragment in held[rank]:
            place = fragment.slot_offset
            for box in fragment.boxes:
                expected.append((fragment.spec, box, place))
                place += box_bytes(fragment.spec, box)
    rows = declaration.rows(read)
    columns = (column.tolist() for column in rows)
    assert [(read.tensors[t].spec, read.different[b], p) for t, b, p in zip(*columns, strict=True)] == expected


@given(holdings())
def test_a_declaration_without_a_group(held: Held) -> None:
    """It is that of ranks which never had the group."""
    made = declaration.decode(declaration.encode(held))
    for group in {fragment.spec.group for of in held.values() for fragment in of} | {"none"}:
        kept = {rank: [one for one in of if one.spec.group != group] for rank, of in held.items()}
        found = declaration.without(made, group)
        assert found.ranks == tuple(sorted(held))
        for position, rank in enumerate(found.ranks):
            assert list(found.fragments(position)) == list(kept[rank])
        assert all(one.spec.group != group for one in found.tensors)


def test_ranks_of_one_program_take_few_bytes() -> None:
    """Eight ranks with three thousand tensors, each cut over a thousand ranks: less than ten bytes a tensor."""
    specs = [TensorSpec("model", f"layers.{number}.weight", "F32", (4096, 1024)) for number in range(3000)]
    held = {
        rank: [StagedFragment(spec, (Box((rank * 4, 0), (4, 1024)),), number * 2**14) for number, spec in enumerate(specs)]
        for rank in range(512, 520)
    }
    assert len(zstandard.compress(declaration.encode(held))) < 30_000


@pytest.mark.parametrize("broken", [b"", b"{}", b"\x90", b"\x98" * 9, b"\x91" * 100_000, msgspec.msgpack.encode([1] * 8)])
def test_what_is_no_declaration_is_refused(broken: bytes) -> None:
    """Whatever a catalog gives back."""
    with pytest.raises(InvalidRequest, match="cannot read the declaration"):
        declaration.decode(broken)


@pytest.mark.parametrize(
    ("column", "value"),
    [("tensor", [1]), ("tensor", [-1]), ("box", [1]), ("box", [-1]), ("boxes", [2]), ("boxes", [-1]), ("place", [-8]),
     ("place", [0, 0]), ("ranks", (3, 3)), ("ranks", ())],
)  # fmt: skip
def test_columns_that_do_not_belong_together_are_refused(column: str, value: object) -> None:
    """A number of a tensor or box that is not there, more boxes than there are, a rank twice."""
    made = declaration.decode(declaration.encode({3: [StagedFragment(W, (Box((0, 0), (4, 4)),), 0)]}))
    changed = value if isinstance(value, tuple) else np.array(value, np.int64)
    with pytest.raises(InvalidRequest, match="do not match"):
        declaration.decode(declaration.encode_columns(made._replace(**{column: changed})))


@pytest.mark.parametrize(
    ("spec", "box"),
    [
        (W, Box((4, 0), (1, 4))),
        (W, Box((0,), (4,))),
        (TensorSpec("model", "w", "F4", (4, 4)), Box((0, 0), (4, 1))),
        (TensorSpec("model", "w", "none", (4, 4)), Box((0, 0), (4, 4))),
    ],
)
def test_a_box_that_no_tensor_has_is_refused(spec: TensorSpec, box: Box) -> None:
    """As in a slot's own table, by the tensor's name or dtype."""
    encoded = declaration.encode({0: [StagedFragment(spec, (box,), 0)]})
    with pytest.raises(CheckpointError, match=r"'w'|none"):
        declaration.decode(encoded)
