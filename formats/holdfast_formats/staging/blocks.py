"""Decides which node writes which part of a checkpoint that several nodes write together.

Files are divided into blocks of up to 64 MiB. A block is written by one node, its owner: if possible the node that
holds most of it, so that few bytes cross the network, while no node writes much more than the mean.

Every node computes all owners by itself, with the same result: this is integer arithmetic on sorted arrays, independent
of the order of rows.

In a bucket an object is written by one node. There all blocks of a file have one owner, and files are shorter, so that the
nodes' shares are about equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.plan import WritePlan

BLOCK_BYTES = 2**26
BLOCK_BYTES_MIN = 2**18  # whole extents of the least length, and pages
BLOCKS_WANTED = 2**10
OVER_MEAN_PERCENT = 5  # a node may write so much more than the mean
WHOLE_FILES_WANTED = 8  # for each node, where a file is one node's: then one file more is an eighth more
WHOLE_FILE_BYTES_MIN = 2**27  # eight parts of an upload: shorter files cost more requests
_DENSITY_BITS = 20  # a box of a 16 384th of its span still has six significant bits

Ints = NDArray[np.integer[Any]]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Grid(NamedTuple):
    """All blocks of all files, in file order: int64 arrays, one element a block, and an index by position.

    Block i is the bytes [begin[i], end[i]) of the file with the index file[i]. Blocks begin at multiples of
    `block_bytes`; the last block of a file may be shorter.
    """

    file: Numbers
    begin: Numbers
    end: Numbers
    firsts: Numbers  # per file, the index of its first block; one more element with the number of blocks
    block_bytes: int

    @property
    def lengths(self) -> Numbers:
        return self.end - self.begin


class HeldSpans(NamedTuple):
    """What nodes hold of the files: integer arrays of one shape, one row for each box that some rank of a node holds.

    The box has `bytes` bytes within the bytes [begin, end) of the file. It is contiguous if these are equally many,
    else strided. A box on several nodes has a row for each; duplicate rows are ignored. Different boxes have no byte in
    common, hence different begins.
    """

    file: Ints
    begin: Ints
    end: Ints
    bytes: Ints
    node: Ints


class Holders(NamedTuple):
    """How many bytes of a block a node holds: integer arrays of one shape, a row for each such pair; other pairs hold none.

    Rows may be in any order. Bytes of rows of the same pair are added up. `owners` is fastest, and copies nothing, if the
    rows are sorted by block, then node, without repetition, as `holders` returns them.
    """

    block: Ints
    node: Ints
    bytes: Ints


def grid(files: Sequence[int], block_bytes: int = BLOCK_BYTES) -> Grid:
    """The blocks of files of these sizes in bytes; an empty file has none.

    Raises `InvalidRequest` for a negative size, or unless `block_bytes` is from 1 to `BLOCK_BYTES`.
    """
    if not 1 <= block_bytes <= BLOCK_BYTES:
        raise InvalidRequest(f"block_bytes must be from 1 to {BLOCK_BYTES}, not {block_bytes}")
    sizes = np.array(files, np.int64)
    if sizes.size and sizes.min() < 0:
        raise InvalidRequest(f"a file cannot have {sizes.min()} bytes")
    counts = -(-sizes // block_bytes)
    firsts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
    file = np.repeat(np.arange(len(sizes)), counts)
    begin = (np.arange(len(file)) - firsts[file]) * block_bytes
    return Grid(file, begin, np.minimum(begin + block_bytes, sizes[file]), firsts, block_bytes)


def holders(grid: Grid, spans: HeldSpans, nodes: int) -> Holders:
    """How many bytes of each block each of `nodes` nodes holds: int64 arrays, sorted by block, then node.

    Contiguous boxes are counted exactly. The bytes of strided ones are spread evenly over their spans, since owners need
    not be chosen by exact numbers. Time and memory grow with the number of spans and of the blocks that each touches.
    Raises `InvalidRequest` for arrays of different shapes, spans outside their file, boxes longer than their span, and
    nodes that are not from 0 to `nodes` - 1.
    """
    spans = HeldSpans(*(np.asarray(column, np.int64) for column in spans))
    _check_spans(grid, spans, nodes)
    file, begin, end, held, node = _distinct(HeldSpans(*(column[spans.bytes > 0] for column in spans)))
    first = grid.firsts[file] + begin // grid.block_bytes
    counts = grid.firsts[file] + (end - 1) // grid.block_bytes - first + 1
    row = np.repeat(np.arange(len(file)), counts)
    block = np.arange(len(row)) + np.repeat(first - np.cumsum(counts) + counts, counts)
    overlap = np.minimum(end[row], grid.end[block]) - np.maximum(begin[row], grid.begin[block])
    # A holder stays one, even if there is less than a byte of a very sparse box in the block.
    parts = np.maximum((overlap * _densities(held, end - begin)[row]) >> _DENSITY_BITS, 1)
    return _added_up(Holders(block, node[row], parts), nodes)


def _check_spans(grid: Grid, spans: HeldSpans, nodes: int) -> None:
    _check_columns(spans)
    _check_range("file", spans.file, len(grid.firsts) - 1)
    _check_range("node", spans.node, nodes)
    sizes = np.zeros(len(grid.firsts) - 1, np.int64)
    np.maximum.at(sizes, grid.file, grid.end)
    inside = (spans.begin >= 0) & (spans.begin <= spans.end) & (spans.end <= sizes[spans.file])
    if not (inside & (spans.bytes >= 0) & (spans.bytes <= spans.end - spans.begin)).all():
        raise InvalidRequest("a held span lies outside its file, or its box has more bytes than the span")


def _check_columns(columns: Sequence[Ints]) -> None:
    if any(column.ndim != 1 or column.shape != columns[0].shape for column in columns):
        raise InvalidRequest(f"columns must be one-dimensional and equally long, not {[c.shape for c in columns]}")


def _check_range(what: str, column: Ints, stop: int) -> None:
    if column.size and not 0 <= column.min() <= column.max() < stop:
        raise InvalidRequest(f"each {what} must be from 0 to {stop - 1}, not {column.min()} to {column.max()}")


def _distinct(spans: HeldSpans) -> HeldSpans:
    if _ascends(spans.file, spans.begin, spans.node):
        return spans
    order = np.lexsort((spans.bytes, spans.end, spans.node, spans.begin, spans.file))
    ordered = HeldSpans(*(column[order] for column in spans))
    return HeldSpans(*(column[_changes(ordered.file, ordered.begin, ordered.node)] for column in ordered))


def _densities(held: Ints, lengths: Ints) -> Ints:
    """Bytes of a box per byte of its span, times 2**_DENSITY_BITS."""
    # Of spans from 8 TiB on, the lowest bits are left out: the product would not fit into 64 bits.
    coarse = np.where(lengths >> (63 - _DENSITY_BITS) > 0, _DENSITY_BITS, 0)
    return ((held >> coarse) << _DENSITY_BITS) // (lengths >> coarse)


def _ascends(*columns: Ints) -> bool:
    """Whether rows are sorted lexicographically, without duplicates."""
    ascends: Mask = np.zeros(max(len(columns[0]) - 1, 0), np.bool_)
    for column in reversed(columns):
        ascends = (column[1:] > column[:-1]) | ((column[1:] == column[:-1]) & ascends)
    return bool(ascends.all())


def _changes(*columns: Ints) -> Mask:
    changes: Mask = np.zeros(len(columns[0]), np.bool_)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    return changes


def _added_up(table: Holders, nodes: int) -> Holders:
    """The same table sorted by block, then node, with one row for each nonzero pair."""
    if not table.bytes.all():
        table = Holders(*(column[table.bytes > 0] for column in table))
    if _ascends(table.block, table.node):
        return table
    pairs = table.block.astype(np.int64) * nodes + table.node.astype(np.int64)
    order = np.argsort(pairs, kind="stable")  # which is fast where rows are nearly sorted, as those of a plan are
    pairs = pairs[order]
    starts = np.flatnonzero(_changes(pairs))
    block, node = np.divmod(pairs[starts], nodes)
    return Holders(block, node, np.add.reduceat(table.bytes[order], starts, dtype=np.int64))


def owners(grid: Grid, held: Holders, nodes: int) -> Numbers:
    """The node, from 0 to `nodes` - 1, that writes each block of the grid: an int64 array.

    It is the node with room that holds most of the block; of several, the one that writes the previous block, so that
    it writes both at once, else the least loaded one. If no holder has room, it is the least loaded node of all. If a
    block is no longer than 5 % of the mean, no node gets more than 5 % over the mean; else, if all blocks are equally
    long, no more of them than the fullest node must get. It is never more than 5 % or one block over the mean. Raises
    `InvalidRequest` for blocks and nodes that do not exist, negative bytes, and arrays of different shapes.
    """
    if nodes < 1:
        raise InvalidRequest(f"there must be at least one node, not {nodes}")
    _check_columns(held)
    _check_range("block", held.block, len(grid.file))
    _check_range("node", held.node, nodes)
    if held.bytes.size and held.bytes.min() < 0:
        raise InvalidRequest(f"a node cannot hold {held.bytes.min()} bytes of a block")
    held = _added_up(held, nodes)
    bounds = np.searchsorted(held.block, np.arange(len(grid.file) + 1))
    lengths = grid.lengths
    room = _limits(lengths, nodes) - lengths  # a node that has to write at most this much may have the block
    loads = np.zeros(nodes, np.int64)
    owner_of = np.full(len(lengths), -1, np.int64)
    for block in _order(lengths, held, bounds).tolist():
        rows = slice(bounds[block], bounds[block + 1])
        before = int(owner_of[block - 1]) if block and grid.file[block - 1] == grid.file[block] else -1
        node = _choose(held.node[rows], held.bytes[rows], loads, room[block], before)
        loads[node] += lengths[block]
        owner_of[block] = node
    return owner_of


def file_owners(grid: Grid, held: Holders, nodes: int) -> Numbers:
    """As `owners`, with the same owner for all blocks of a file. A node's load differs from the mean by up to a file."""
    _check_range("block", held.block, len(grid.file))
    starts = np.flatnonzero(_changes(grid.file)) if len(grid.file) else np.empty(0, np.int64)
    counts = np.diff(np.append(starts, len(grid.file)))
    row = np.repeat(np.arange(len(starts)), counts)  # of each block, its file among those that have bytes
    ends = grid.end[starts + counts - 1] if len(starts) else grid.end
    files = Grid(grid.file[starts], np.zeros(len(starts), np.int64), ends, np.arange(len(starts) + 1), grid.block_bytes)
    return owners(files, Holders(row[held.block], held.node, held.bytes), nodes)[row]


def whole_file_bytes(data_bytes: int, nodes: int) -> int:
    """How long files should be where each is written by one of `nodes` nodes; longer tensors are not cut. In bytes."""
    return max(data_bytes // (nodes * WHOLE_FILES_WANTED), WHOLE_FILE_BYTES_MIN)


def _limits(lengths: Numbers, nodes: int) -> Numbers:
    """The load that a node may reach with a block of each of these lengths, unless every node has so much."""
    least = int(lengths.sum()) * (100 + OVER_MEAN_PERCENT) // (100 * nodes)
    longest = lengths == lengths.max(initial=0)
    # Where few blocks come to a node, even the best division of the longest gives some nodes so many of them.
    count = -(-int(np.count_nonzero(longest)) // nodes)
    return np.maximum(np.where(longest, lengths * count, lengths), least)


def _order(lengths: Numbers, held: Holders, bounds: Ints) -> Ints:
    """The order in which blocks are assigned.

    Longer blocks come first, since the short ones at the ends of files then fill the gaps. Equally long blocks come in
    the order of their largest holding, because a well-held one loses most when its node is full; then those with the
    fewest such holders, because the others still have a choice.
    """
    most, choices = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    some = np.flatnonzero(np.diff(bounds))
    if some.size:
        most[some] = np.maximum.reduceat(held.bytes, bounds[some])
        choices[some] = np.add.reduceat(held.bytes == most[held.block], bounds[some], dtype=np.int64)
    return np.lexsort((choices, -most, -lengths))  # stable: equal ones stay in file order


def _choose(nodes: Ints, held: Ints, loads: Numbers, room: int, before: int) -> int:
    """The owner of a block, given the nodes that hold some of it, in order, each node's load, and the previous block's
    owner (-1: none).
    """
    node_loads = loads[nodes]
    fits = node_loads <= room
    if not fits.any():
        return int(loads.argmin())
    nodes, held, node_loads = nodes[fits], held[fits], node_loads[fits]
    equal = np.flatnonzero(held == held.max())
    if before in nodes[equal]:
        return before
    return int(nodes[equal[node_loads[equal].argmin()]])


def block_bytes(data_bytes: int) -> int:
    """The block length for files of so many bytes: a power of two up to `BLOCK_BYTES`, giving a thousand or more blocks
    to divide.

    It depends only on the tensors' bytes, so it is the same whichever nodes save them.
    """
    least = max(data_bytes // BLOCKS_WANTED, 1)
    return min(max(1 << (least - 1).bit_length(), BLOCK_BYTES_MIN), BLOCK_BYTES)


class Share(NamedTuple):
    """A node's part of one file: the bytes [begin, end), whole blocks."""

    file: int
    begin: int
    end: int


class SharePlan(NamedTuple):
    """A plan with the origins of the tensors that a node writes some of, its shares of files, and the owner of each
    block.
    """

    plan: WritePlan
    shares: Sequence[Share]
    grid: Grid
    owners: Numbers

    @property
    def block_bytes(self) -> int:
        return self.grid.block_bytes


def shares(grid: Grid, owned: Numbers, node: int, share_bytes: int = BLOCK_BYTES) -> list[Share]:
    """The shares of `node`, in file order: neighbouring blocks together, up to `share_bytes`, and at least one."""
    found: list[Share] = []
    for block in np.flatnonzero(owned == node).tolist():
        file, begin, end = int(grid.file[block]), int(grid.begin[block]), int(grid.end[block])
        last = found[-1] if found else None
        if last is not None and (last.file, last.end) == (file, begin) and end - last.begin <= share_bytes:
            found[-1] = last._replace(end=end)
        else:
            found.append(Share(file, begin, end))
    return found
