"""The read planner: each extent that holds something wanted is read once, nothing else but small gaps, in bounded reads."""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import prod

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import dtypes
from holdfast_formats.disk import read_planner, verification
from holdfast_formats.disk.manifests import Extent, Manifest, TensorEntry
from holdfast_formats.disk.read_planner import PlannedRead, WantedBox
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, Shape, byte_box, byte_runs, byte_view, whole
from tests.formats.strategies import SAMPLE_SPECS, boxes_in, manifest_of, sample_manifest, shapes
from tests.kit.calls import counted

DIGEST = "0" * 16
CALLS_A_TENSOR_MAX = 60  # 39 now


def entry_of(dtype: str, shape: Shape, lengths: list[int], start: int = 100, file: str = "f") -> TensorEntry:
    """A tensor whose extents have these lengths in elements, the last as many as are left."""
    itemsize = max(dtypes.BITS[dtype] // 8, 1)
    size = dtypes.nbytes(dtype, prod(shape))
    ends = [min(end * itemsize, size) for end in accumulate(lengths)]
    cuts = sorted({0, *ends, size})
    return TensorEntry(dtype, shape, file, start, tuple(Extent(a, b - a, DIGEST) for a, b in pairwise(cuts)))


def manifest(**tensors: TensorEntry) -> Manifest:
    """A manifest of one group, as far as the planner looks at it."""
    return msgspec.structs.replace(manifest_of([]), tensors={"g": tensors}, aliases={"g": {"tied": next(iter(tensors))}})


@st.composite
def stored(draw: st.DrawFn) -> tuple[TensorEntry, list[Box]]:
    """A tensor in ragged extents, and boxes of it, some of them twice."""
    shape = draw(shapes(4, 6))
    lengths = draw(st.lists(st.integers(1, 40), max_size=12))
    boxes = draw(st.lists(boxes_in(shape), min_size=1, max_size=4))
    return entry_of(draw(st.sampled_from(["U8", "F32"])), shape, lengths), boxes + draw(st.sampled_from([[], boxes[:1]]))


def bytes_of(entry: TensorEntry, boxes: list[Box]) -> set[int]:
    """Every byte of the tensor that lies in one of the boxes: what the runs say, one by one."""
    view = byte_view(entry.dtype, entry.shape)
    runs = [run for box in boxes for run in byte_runs(byte_box(entry.dtype, box, entry.shape), view.shape, view.itemsize)]
    return {byte for start, _, length in runs for byte in range(start, start + length)}


@given(stored(), st.integers(0, 60), st.integers(1, 100))
def test_exactly_the_extents_that_hold_something_wanted(
    drawn: tuple[TensorEntry, list[Box]], gap_bytes: int, read_bytes_max: int
) -> None:
    """Of any boxes, the pieces are the extents that hold one of their bytes; needed counts each such byte once."""
    entry, boxes = drawn
    made = read_planner.plan(
        manifest(t=entry), [WantedBox("g", "t", box) for box in boxes], gap_bytes=gap_bytes, read_bytes_max=read_bytes_max
    )
    wanted = bytes_of(entry, boxes)
    touched = [e for e in entry.extents if not wanted.isdisjoint(range(e.offset, e.offset + e.length))]
    assert [piece for read in made.reads for piece in read.pieces] == [
        verification.tensor_piece("g", "t", entry, extent) for extent in touched
    ]
    assert made.needed == len(wanted)
    check_reads(made, gap_bytes, read_bytes_max)


def check_reads(made: read_planner.ReadPlan, gap_bytes: int, read_bytes_max: int) -> None:
    """What holds of the reads of any plan."""
    for read in made.reads:
        assert (read.start, read.stop) == (read.pieces[0].start, read.pieces[-1].stop)
        assert {piece.file for piece in read.pieces} == {read.file}
        assert len(read.pieces) == 1 or read.stop - read.start <= read_bytes_max
        gaps = [b.start - a.stop for a, b in pairwise(read.pieces)]
        assert all(0 <= gap <= gap_bytes for gap in gaps)
        assert sum(gaps) * read_planner.GAP_SHARE <= read.stop - read.start
    for before, after in pairwise(made.reads):
        assert (before.file, before.stop) <= (after.file, after.start)
    assert made.read == sum(read.stop - read.start for read in made.reads)


def test_the_boxes_of_all_ranks_of_a_node() -> None:
    """Parts that overlap, whole tensors, tied names and empty boxes: every extent once, in file order over all files."""
    a = entry_of("F32", (8, 4), [8] * 4, 1000, "b.safetensors")
    b = entry_of("BF16", (6,), [6], 0, "a.safetensors")
    c = entry_of("F32", (2,), [2], 1128, "b.safetensors")
    rows = [WantedBox("g", "a", Box((0, 0), (3, 4))), WantedBox("g", "tied", Box((2, 0), (2, 4)))]
    others = [WantedBox("g", "b", whole((6,))), WantedBox("g", "c", Box((0,), (0,))), WantedBox("g", "b", Box((1,), (2,)))]
    made = read_planner.plan(manifest(a=a, b=b, c=c), [*rows, *others])
    pieces_a = tuple(verification.tensor_piece("g", "a", a, extent) for extent in a.extents[:2])
    assert made.reads == (
        PlannedRead("a.safetensors", 0, 12, (verification.tensor_piece("g", "b", b, b.extents[0]),)),
        PlannedRead("b.safetensors", 1000, 1064, pieces_a),
    )
    assert (made.needed, made.read, made.ratio) == (64 + 12, 64 + 12, 1.0)
    nothing = read_planner.plan(manifest(a=a), [])
    assert nothing == ((), 0, 0) and nothing.ratio == 1.0


@pytest.mark.parametrize(
    ("shape", "box", "offsets"),
    [
        ((5, 40), Box((1, 12), (3, 5)), [50, 90, 130]),
        ((5, 40), Box((1, 12), (3, 15)), [50, 60, 90, 100, 130, 140]),
        ((5, 40), Box((0, 0), (5, 38)), list(range(0, 200, 10))),
        ((2, 3, 40), Box((0, 1, 0), (2, 2, 10)), [40, 80, 160, 200]),
        ((2, 3, 40), Box((0, 2, 30), (2, 1, 10)), [110, 230]),
    ],
)
def test_columns_touch_only_some_extents(shape: Shape, box: Box, offsets: list[int]) -> None:
    """Where a row is longer than an extent, those that lie between two of the box's rows are not read."""
    entry = entry_of("U8", shape, [10] * 30)
    made = read_planner.plan(manifest(t=entry), [WantedBox("g", "t", box)], gap_bytes=0)
    assert [piece.offset for read in made.reads for piece in read.pieces] == offsets


def test_small_gaps_are_read_and_dropped() -> None:
    """A gap is bridged when it is small, and a small part of what is read; it counts as read and not as needed."""
    lengths = {"a": 3200, "b": 50, "c": 3200, "d": 200, "e": 10}
    tensors, at = {}, 0
    for name, length in lengths.items():
        tensors[name] = entry_of("U8", (length,), [length], at)
        at += length
    wanted = [WantedBox("g", name, whole((lengths[name],))) for name in "ace"]
    made = read_planner.plan(manifest(**tensors), wanted, gap_bytes=100)
    assert [(read.start, read.stop) for read in made.reads] == [(0, 6450), (6650, 6660)]
    assert (made.needed, made.read) == (6410, 6460)
    assert len(read_planner.plan(manifest(**tensors), wanted, gap_bytes=49).reads) == 3
    assert len(read_planner.plan(manifest(**tensors), wanted, gap_bytes=100, read_bytes_max=6449).reads) == 3
    assert len(read_planner.plan(manifest(**tensors), wanted[1:], gap_bytes=10_000).reads) == 2  # 200 of 3200 is too much


def test_sub_byte_tensors() -> None:
    """Elements smaller than a byte are counted as the bytes they fill."""
    entry = entry_of("F4", (4, 8), [4] * 4)
    made = read_planner.plan(manifest(t=entry), [WantedBox("g", "t", Box((1, 4), (2, 4)))])
    assert [piece.offset for read in made.reads for piece in read.pieces] == [4, 8]
    assert made.needed == 4


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (WantedBox("model", "nope", whole((4, 3))), "'nope' in group 'model'"),
        (WantedBox("nope", "a", whole((4, 3))), "group 'nope'"),
        (WantedBox("model", "a", Box((1, 0), (4, 3))), r"'a': box \[1, 0\]\+\[4, 3\]"),
        (WantedBox("model", "tied", Box((0,), (4,))), r"'tied': box"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(wanted: WantedBox, named: str) -> None:
    """A tensor that is not there, and a box that does not lie in its tensor, are named."""
    with pytest.raises(StateMismatch, match=named):
        read_planner.plan(sample_manifest(), [*[WantedBox(s.group, s.name, whole(s.shape)) for s in SAMPLE_SPECS], wanted])


def calls_of_planning(count: int) -> int:
    """How many calls it takes to plan rows of each of so many tensors."""
    tensors = {f"layers.{i}.w": entry_of("F32", (128, 128), [16384], 65536 * i) for i in range(count)}
    made = manifest(**tensors)
    wanted = [WantedBox("g", name, Box((32, 0), (64, 128))) for name in tensors]
    calls, planned = counted(lambda: read_planner.plan(made, wanted))
    assert (planned.needed, planned.read) == (count * 2**15, count * 2**16)
    return calls


def test_many_tensors_are_planned_by_as_many_steps() -> None:
    """Ten times the tensors take ten times the calls, some tens for each: 100 000 take a second or so."""
    few, many = calls_of_planning(100), calls_of_planning(1000)
    assert many < 10.5 * few
    assert few < 100 * CALLS_A_TENSOR_MAX
