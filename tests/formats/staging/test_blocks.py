"""blocks: the parts of files, what nodes hold of them, and which node writes each."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging import blocks
from holdfast_formats.staging.blocks import BLOCK_BYTES, Grid, HeldSpans, Holders

Triples = list[tuple[int, int, int]]  # block, node, bytes
SIZES = st.lists(st.integers(0, 60), max_size=8)


class Case(NamedTuple):
    """Blocks, what nodes hold of them, and how many nodes there are."""

    grid: Grid
    rows: Triples
    nodes: int

    @property
    def table(self) -> Holders:
        return table_of(self.rows)

    @property
    def held(self) -> dict[int, dict[int, int]]:
        """Block -> node -> bytes, of what is more than none."""
        found: dict[int, dict[int, int]] = {}
        for block, node, count in self.rows:
            if count:
                there = found.setdefault(block, {})
                there[node] = there.get(node, 0) + count
        return found


def table_of(rows: Triples, dtype: type[np.integer] = np.int64) -> Holders:
    return Holders(*np.array(rows, dtype).reshape(-1, 3).T)


def spans_of(rows: list[tuple[int, int, int, int, int]], dtype: type[np.integer] = np.int64) -> HeldSpans:
    return HeldSpans(*np.array(rows, dtype).reshape(-1, 5).T)


def triples(table: Holders) -> Triples:
    return list(zip(*(column.tolist() for column in table), strict=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any blocks and holders; counts of bytes are few, so that many nodes hold equally much."""
    grid = blocks.grid(draw(SIZES), draw(st.integers(1, 20)))
    nodes = draw(st.integers(1, 5))
    if not len(grid.file):
        return Case(grid, [], nodes)
    row = st.tuples(st.integers(0, len(grid.file) - 1), st.integers(0, nodes - 1), st.integers(0, 4))
    return Case(grid, draw(st.lists(row, max_size=60)), nodes)


def loads_of(case: Case, found: np.ndarray) -> list[int]:
    lengths = case.grid.lengths.tolist()
    loads = [0] * case.nodes
    for owner, length in zip(found.tolist(), lengths, strict=True):
        loads[owner] += length
    return loads


def limit(case: Case, length: int) -> int:
    """What a node may have to write with a block of this length, said in other words than the module's."""
    lengths: list[int] = case.grid.lengths.tolist()
    count = 1  # a short one has a place beside no other
    while length == max(lengths) and count * case.nodes < lengths.count(length):
        count += 1
    return max(count * length, sum(lengths) * 105 // (case.nodes * 100))


def plain_owners(case: Case) -> list[int]:
    """The rule, block by block, without arrays."""
    lengths = case.grid.lengths.tolist()
    held = case.held

    def turn(block: int) -> tuple[int, int, int, int]:
        here = list(held.get(block, {}).values())
        most = max(here, default=0)
        return -lengths[block], -most, here.count(most), block

    loads = [0] * case.nodes
    found = [-1] * len(lengths)
    file = case.grid.file.tolist()
    for block in sorted(range(len(lengths)), key=turn):
        here, length = held.get(block, {}), lengths[block]
        fit = [node for node in here if loads[node] + length <= limit(case, length)]
        before = found[block - 1] if block and file[block - 1] == file[block] else -1
        found[block] = min(
            fit or range(case.nodes),
            key=lambda n: (-here[n] if fit else 0, n != before if fit else False, loads[n], n),
        )
        loads[found[block]] += length
    return found


@given(SIZES, st.integers(1, 20))
def test_blocks_tile_files(sizes: list[int], block_bytes: int) -> None:
    """In file order, at multiples of their length, without a hole; only the last of a file is shorter."""
    grid = blocks.grid(sizes, block_bytes)
    expected = [(f, at, min(at + block_bytes, size)) for f, size in enumerate(sizes) for at in range(0, size, block_bytes)]
    assert list(zip(grid.file.tolist(), grid.begin.tolist(), grid.end.tolist(), strict=True)) == expected
    assert grid.lengths.sum() == sum(sizes)
    assert [grid.file.tolist().index(f) if size else None for f, size in enumerate(sizes)] == [
        first if size else None for first, size in zip(grid.firsts[:-1].tolist(), sizes, strict=True)
    ]
    assert grid.firsts[-1] == len(grid.file)


def test_a_block_has_64_mib() -> None:
    """Nodes of all versions must divide files alike."""
    grid = blocks.grid([2**26, 2**27 + 1])
    assert grid.lengths.tolist() == [2**26, 2**26, 2**26, 1]
    assert grid.block_bytes == BLOCK_BYTES == 64 * 2**20


@pytest.mark.parametrize(("sizes", "block_bytes"), [([-1], 4), ([1], 0), ([1], -4), ([1], BLOCK_BYTES + 1)])
def test_impossible_grids_are_refused(sizes: list[int], block_bytes: int) -> None:
    """Negative sizes, and blocks of no bytes or so long that counts would overflow."""
    with pytest.raises(InvalidRequest):
        blocks.grid(sizes, block_bytes)


@given(cases())
def test_owners_follow_the_rule(case: Case) -> None:
    """The arrays' answer is that of the rule applied block by block in plain Python."""
    assert blocks.owners(case.grid, case.table, case.nodes).tolist() == plain_owners(case)


@given(cases(), st.data())
def test_owners_do_not_depend_on_the_order_of_rows(case: Case, data: st.DataObject) -> None:
    """Nor on the type of integers, nor on whether bytes of a pair stand in one row or in several."""
    expected = blocks.owners(case.grid, case.table, case.nodes).tolist()
    mixed = data.draw(st.permutations(case.rows))
    merged = [(block, node, count) for block, there in sorted(case.held.items()) for node, count in sorted(there.items())]
    for rows in (mixed, merged):
        for dtype in (np.int64, np.int32, np.uint64, np.uint16):
            assert blocks.owners(case.grid, table_of(rows, dtype), case.nodes).tolist() == expected


@given(cases())
def test_every_block_has_one_owner(case: Case) -> None:
    """An owner is one of the nodes, and all bytes are written once."""
    found = blocks.owners(case.grid, case.table, case.nodes)
    assert found.shape == case.grid.file.shape and found.dtype == np.int64
    assert all(0 <= owner < case.nodes for owner in found.tolist())
    assert sum(loads_of(case, found)) == case.grid.lengths.sum()


@given(cases())
def test_an_owner_holds_most_unless_others_have_no_room(case: Case) -> None:
    """Whoever holds more of a block than its owner has so much to write that the block would be too much."""
    found = blocks.owners(case.grid, case.table, case.nodes).tolist()
    loads = loads_of(case, np.array(found, np.int64))
    for block, here in case.held.items():
        length = int(case.grid.lengths[block])
        for node, count in here.items():
            if count > here.get(found[block], 0):
                assert loads[node] + length > limit(case, length)


@given(cases())
def test_writes_balance(case: Case) -> None:
    """No node writes more than 5 %, or what is left of one block, over the mean."""
    lengths = case.grid.lengths.tolist()
    most = max(loads_of(case, blocks.owners(case.grid, case.table, case.nodes)))
    total, longest = sum(lengths), max(lengths, default=0)
    assert 100 * case.nodes * most <= max(105 * total, 100 * (total + (case.nodes - 1) * longest))
    if longest * 100 * case.nodes <= 5 * total:
        assert 100 * case.nodes * most <= 105 * total
    if len(set(lengths)) == 1:
        assert 100 * case.nodes * most <= 105 * total or most <= -(-len(lengths) // case.nodes) * longest


@given(st.integers(1, 5), st.integers(0, 99), st.integers(1, 9))
def test_writes_balance_where_blocks_are_small(nodes: int, seed: int, held_by: int) -> None:
    """However unevenly blocks are held, no node writes more than 5 % over the mean."""
    random = np.random.default_rng(seed)
    grid = blocks.grid([997, 1, 640, 13], 4)
    rows = [
        (block, int(random.integers(0, nodes) ** 2) // nodes, int(random.integers(1, 5)))
        for block in range(len(grid.file))
        for _ in range(held_by)
    ]
    case = Case(grid, rows, nodes)
    assert 100 * nodes * max(loads_of(case, blocks.owners(grid, case.table, nodes))) <= 105 * 1651


@given(cases())
def test_whole_files_are_blocks_as_long_as_files(case: Case) -> None:
    """Who writes a file is who would write it if it were one block: all its blocks have this owner."""
    sizes = [int(case.grid.end[case.grid.file == file].max(initial=0)) for file in range(len(case.grid.firsts) - 1)]
    whole = blocks.grid(sizes, BLOCK_BYTES)
    file_of = case.grid.file.tolist()
    number = {file: place for place, file in enumerate(whole.file.tolist())}
    rows = [(number[file_of[block]], node, count) for block, node, count in case.rows]
    owner = blocks.owners(whole, table_of(rows), case.nodes).tolist()
    found = blocks.file_owners(case.grid, case.table, case.nodes)
    assert found.dtype == np.int64 and found.tolist() == [owner[number[file]] for file in file_of]


def test_whole_files_become_shorter_with_more_nodes() -> None:
    """So that one file more or less is no more than an eighth of a node's share, as long as uploads have some parts."""
    assert blocks.whole_file_bytes(84 * 10**9, 4) == 84 * 10**9 // 32
    assert blocks.whole_file_bytes(84 * 10**9, 1000) == 2**27


@given(cases())
def test_one_node_writes_all(case: Case) -> None:
    """Whether it holds anything or not."""
    rows = [(block, 0, count) for block, _, count in case.rows]
    assert not blocks.owners(case.grid, table_of(rows), 1).any()


def test_replicas_are_divided_into_runs() -> None:
    """What all nodes hold is divided evenly, neighbours together; what only one holds, it writes."""
    grid = blocks.grid([12], 1)
    held = [(block, node, 1) for block in range(12) for node in range(3)]
    assert blocks.owners(grid, table_of(held), 3).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    held = [row for row in held if row[0] not in (0, 1) or row[1] == 2]
    assert blocks.owners(grid, table_of(held), 3).tolist() == [2] * 4 + [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("files", "held", "nodes", "owners"),
    [
        # Only blocks of full length may take their holder more than 5 % over the mean together.
        (
            [60, 9, 9],
            [(0, 1, 9), (1, 1, 9), (2, 2, 9), (3, 2, 9), (4, 3, 9), (5, 3, 9), (6, 0, 9), (7, 0, 9)],
            5,
            [1, 1, 2, 2, 3, 3, 0, 4],
        ),
        # The node that holds two blocks, and has room for one, gets the one of which it holds more.
        ([20], [(0, 1, 6), (1, 1, 9)], 2, [0, 1]),
        # The replica's other holder still has room when the only holder of the later block has none.
        ([20], [(0, 0, 9), (0, 1, 9), (1, 0, 9)], 2, [1, 0]),
        # Fewer blocks than nodes: those who hold them write one each.
        ([10, 5], [(0, 3, 5), (1, 3, 3), (1, 2, 1)], 4, [3, 2]),
    ],
    ids=["two short blocks are not one long", "most saved", "one holder before replicas", "longer than the mean"],
)
def test_owners(files: list[int], held: Triples, nodes: int, owners: list[int]) -> None:
    assert blocks.owners(blocks.grid(files, 10), table_of(held), nodes).tolist() == owners


def test_the_answer_is_the_same_in_every_version() -> None:
    """Nodes of two releases may write one checkpoint together, so a change of the rule must not go unnoticed."""
    grid = blocks.grid([1000, 70, 333], 64)
    held = [(b, n, (b * 37 + n * 101) % 65) for b in range(len(grid.file)) for n in range(4) if (b + n) % 3]
    found = blocks.owners(grid, table_of(held), 4).tolist()
    assert found == [1, 0, 3, 2, 3, 2, 1, 0, 2, 1, 0, 3, 2, 1, 0, 2, 3, 2, 1, 0, 2, 1, 0, 3]


@pytest.mark.parametrize(
    ("table", "nodes"),
    [
        (table_of([(0, 2, 1)]), 2),
        (table_of([(0, -1, 1)]), 2),
        (table_of([(1, 0, 1)]), 2),
        (table_of([(-1, 0, 1)]), 2),
        (table_of([(0, 0, -1)]), 2),
        (Holders(*(np.zeros(n, np.int64) for n in (1, 2, 1))), 2),
        (Holders(*(np.zeros((1, 1), np.int64) for _ in range(3))), 2),
        (table_of([]), 0),
    ],
)
def test_impossible_tables_are_refused(table: Holders, nodes: int) -> None:
    """Blocks and nodes that do not exist, negative bytes, columns that do not fit, no node."""
    with pytest.raises(InvalidRequest):
        blocks.owners(blocks.grid([5]), table, nodes)


@st.composite
def contiguous(draw: st.DrawFn) -> tuple[list[int], Triples]:
    """Sizes of files, and for each piece of their tensors: file, begin, end."""
    sizes = draw(SIZES)
    pieces = []
    for file, size in enumerate(sizes):
        edges = sorted(draw(st.sets(st.integers(0, size), max_size=6)))
        pieces += [(file, low, high) for low, high in pairwise(edges)]
    return sizes, pieces


@given(contiguous(), st.integers(1, 20), st.data())
def test_contiguous_boxes_are_counted_exactly(
    drawn: tuple[list[int], Triples], block_bytes: int, data: st.DataObject
) -> None:
    """Byte by byte, whichever nodes hold a piece; a piece that several ranks of a node hold counts once."""
    sizes, pieces = drawn
    grid = blocks.grid(sizes, block_bytes)
    nodes = [data.draw(st.lists(st.integers(0, 3), max_size=4)) for _ in pieces]
    rows = [(f, low, high, high - low, n) for (f, low, high), held_by in zip(pieces, nodes, strict=True) for n in held_by]
    expected: dict[tuple[int, int], int] = {}
    for file, low, high, _, node in sorted(set(rows)):
        for at in range(low, high):
            key = int(grid.firsts[file]) + at // block_bytes, node
            expected[key] = expected.get(key, 0) + 1
    for order in (rows, sorted(rows), data.draw(st.permutations(rows))):
        for dtype in (np.int64, np.int32, np.uint64):
            assert triples(blocks.holders(grid, spans_of(order, dtype), 4)) == [(*k, n) for k, n in sorted(expected.items())]


def test_strided_boxes_are_spread_evenly() -> None:
    """A quarter of the span is a quarter of each block. Less than a byte counts as one, an empty box as none."""
    grid = blocks.grid([100], 40)
    quarter = spans_of([(0, 20, 100, 20, 1), (0, 22, 97, 0, 0)])
    assert triples(blocks.holders(grid, quarter, 2)) == [(0, 1, 5), (1, 1, 10), (2, 1, 5)]
    sparse = spans_of([(0, 0, 100, 2, 0)])
    assert triples(blocks.holders(grid, sparse, 2)) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("exponent", [40, 43, 45])
def test_long_spans_do_not_overflow(exponent: int) -> None:
    """Products of 64-bit numbers stay within them, of spans of 32 TiB too."""
    size = 2**exponent + 5
    grid = blocks.grid([size])
    found = blocks.holders(grid, spans_of([(0, 0, size, size // 4, 0), (0, 1, size, size - 1, 1)]), 2)
    assert abs(found.bytes[found.node == 0][:-1] - BLOCK_BYTES // 4).max() <= 2**6
    assert found.bytes[found.node == 1].tolist() == [BLOCK_BYTES - 1, *[BLOCK_BYTES] * (len(grid.file) - 2), 5]


@pytest.mark.parametrize(
    "spans",
    [
        spans_of([(1, 0, 1, 1, 0)]),
        spans_of([(-1, 0, 1, 1, 0)]),
        spans_of([(0, 0, 11, 11, 0)]),
        spans_of([(0, -1, 1, 1, 0)]),
        spans_of([(0, 3, 2, 0, 0)]),
        spans_of([(0, 0, 4, 5, 0)]),
        spans_of([(0, 0, 4, -1, 0)]),
        spans_of([(0, 0, 4, 4, 2)]),
        HeldSpans(*(np.zeros(n, np.int64) for n in (1, 1, 2, 1, 1))),
    ],
)
def test_impossible_spans_are_refused(spans: HeldSpans) -> None:
    """Files and nodes that do not exist, spans outside the file, boxes longer than their span, columns that do not fit."""
    with pytest.raises(InvalidRequest):
        blocks.holders(blocks.grid([10]), spans, 2)
