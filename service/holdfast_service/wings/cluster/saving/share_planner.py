"""Plan a save whose ranks are on several nodes: the files, the writer of each block, and the ranks that a node reads.

The files, their headers and offsets are those of `planner.plan`, but frozen tensors are among the others: no file is taken
from an earlier checkpoint here. All nodes compute the same owners from all nodes' holdings; a node chooses the ranks that it
reads: its own as far as they hold the bytes. What depends only on the ranks' holdings is cached for the next save.

Where storage lets only one node write a file, files are whole: one owner each, and shorter ones the more nodes there are.
Then the files are not those of one node's plan, but the tensors and their bytes are.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast_formats.disk.packing import FILE_BYTES_MAX, FilePlan, pack
from holdfast_formats.errors import ReplicasDiffer
from holdfast_formats.staging import blocks, replica_claims
from holdfast_formats.staging.blocks import Grid, HeldSpans, Mask, Numbers, Share, SharePlan
from holdfast_formats.staging.part import DecodedPart
from holdfast_formats.staging.plan import PlannedFile, PlannedTensor
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_service.control.checkpoints.planner import check_world, merged
from holdfast_service.control.checkpoints.replica_claims import Apart, SharedBoxes, only_averages
from holdfast_service.wings.cluster.saving import joint_averages
from holdfast_service.wings.cluster.saving import world as worlds
from holdfast_service.wings.cluster.saving.world import Holdings, Stretch, World

REMEMBERED_MAX = 2  # all groups, and some of them


class _FileLimit(NamedTuple):
    """The longest file that ranks ask for, in bytes, and whether files are `whole`: one node's each."""

    asked_bytes: int
    whole: bool

    def bytes_max(self, data_bytes: int, nodes: int) -> int:
        return min(self.asked_bytes, blocks.whole_file_bytes(data_bytes, nodes)) if self.whole else self.asked_bytes


class _Placed:
    """The files of a world, and the owners of their blocks."""

    def __init__(self, world: World, holdings: Holdings, node_of: Numbers, limit: _FileLimit) -> None:
        self.world, self._holdings, self._node_of = world, holdings, node_of
        self._nodes = int(node_of.max()) + 1
        self._numbers = worlds.numbers(world)
        layouts = pack(world.specs, limit.bytes_max(sum(spec.nbytes for spec in world.specs), self._nodes))
        sizes = [layout.bytes for layout in layouts]
        self.grid: Grid = blocks.grid(sizes, blocks.block_bytes(sum(sizes)))
        held = blocks.holders(self.grid, self._spans(layouts), self._nodes)
        self.owners = (blocks.file_owners if limit.whole else blocks.owners)(self.grid, held, self._nodes)
        self._files = tuple(PlannedFile(layout, self._without_origins(layout)) for layout in layouts)
        self._own: dict[int, tuple[PlannedFile, ...]] = {}
        self._lock = threading.Lock()

    def _without_origins(self, layout: FilePlan) -> tuple[PlannedTensor, ...]:
        placements = self.world.placements
        return tuple(
            PlannedTensor(spec, start, (), placements[self._numbers[spec.group, spec.name]])
            for spec, start in layout.tensors
        )

    def _spans(self, layouts: Sequence[FilePlan]) -> HeldSpans:
        """All nodes' spans of the files, computed once per family and then placed for each of its tensors."""
        known: dict[int, worlds.Spans] = {}
        spans: list[worlds.Spans] = []
        places: list[tuple[int, int, int]] = []  # rows, file, begin
        for number, layout in enumerate(layouts):
            for spec, start in layout.tensors:
                family = self._holdings.family[self._numbers[spec.group, spec.name]]
                if family not in known:
                    known[family] = self._holdings.spans(family, self._node_of, self._nodes)
                spans.append(known[family])
                places.append((len(known[family].begin), number, start))
        if not spans:
            return HeldSpans(*np.empty((5, 0), np.int64))
        begin, end, size, node = (np.concatenate(columns) for columns in zip(*spans, strict=True))
        counts, files, starts = np.array(places, np.int64).T
        shift = np.repeat(starts, counts)
        return HeldSpans(np.repeat(files, counts), begin + shift, end + shift, size, node)

    def own(self, me: int, shares: Sequence[Share]) -> tuple[PlannedFile, ...]:
        """The files; tensors of which this node writes a part have their origins."""
        with self._lock:
            known = self._own.get(me)
        if known is None:
            files = list(self._files)
            near = self._node_of == me
            for number in sorted({share.file for share in shares}):
                files[number] = self._with_origins(files[number], [one for one in shares if one.file == number], near, me)
            known = tuple(files)
            with self._lock:
                self._own[me] = known
        return known

    def _with_origins(self, file: PlannedFile, shares: Sequence[Share], near: Mask, me: int) -> PlannedFile:
        begins = np.array([tensor.start for tensor in file.tensors], np.int64)
        ends = begins + np.array([tensor.spec.nbytes for tensor in file.tensors], np.int64)
        touched = np.zeros(len(begins), np.bool_)
        for share in shares:
            touched |= (begins < share.end) & (ends > share.begin)
        tensors = list(file.tensors)
        for position in np.flatnonzero(touched).tolist():
            spec, start = tensors[position].spec, tensors[position].start
            parts = [Stretch(share.begin - start, share.end - start) for share in shares]
            origins = self._holdings.origins(self._numbers[spec.group, spec.name], parts, near, me)
            tensors[position] = tensors[position]._replace(origins=origins)
        return file._replace(tensors=tuple(tensors))


class _Known(NamedTuple):
    """What follows from the ranks' holdings: what they share; and the files, for what differed the last time."""

    world: World
    holdings: Holdings
    shared: SharedBoxes
    apart: Apart
    placed: _Placed


_remembered: OrderedDict[bytes, _Known] = OrderedDict()
_lock = threading.Lock()


def plan_share(parts: Sequence[tuple[str, DecodedPart]], me: int, *, whole_files: bool = False) -> SharePlan:
    """The plan of a save from the parts of all nodes, in the order of their numbers, each with its declaration's digest, and
    what the node with the number `me` writes: blocks of files, or `whole_files`. Raises the errors of `planner.plan`.
    """
    parts = joint_averages.settled(parts)
    try:
        return _planned(parts, me, whole_files)
    except ReplicasDiffer as error:  # every node comes to the same end
        if not only_averages(error, [table for _, part in parts for table in part.said]):
            raise
    return _planned(joint_averages.without(parts), me, whole_files)


def _planned(parts: Sequence[tuple[str, DecodedPart]], me: int, whole_files: bool) -> SharePlan:
    slot_tables: list[SlotTable] = sorted((table for _, part in parts for table in part.said), key=lambda table: table.rank)
    check_world(slot_tables)
    limit = _FileLimit(slot_tables[0].file_bytes_max or FILE_BYTES_MAX, whole_files)
    text = "\n".join([str(limit), *(digest for digest, _ in parts)])
    key = hashlib.sha256(text.encode()).digest()
    placed = _placed(key, parts, slot_tables, limit)
    shares = blocks.shares(placed.grid, placed.owners, me)
    return SharePlan(merged(slot_tables, placed.own(me, shares)), shares, placed.grid, placed.owners)


def forget() -> None:
    with _lock:
        _remembered.clear()


def _placed(
    key: bytes, parts: Sequence[tuple[str, DecodedPart]], slot_tables: Sequence[SlotTable], limit: _FileLimit
) -> _Placed:
    with _lock:  # one at a time: two that find nothing would both work it out
        known = _remembered.pop(key, None)
        if known is None:
            world = worlds.gather([part.declaration for _, part in parts])
            holdings = Holdings(worlds.rounded(world))
            shared = holdings.shared()
        else:
            world, holdings, shared = known.world, known.holdings, known.shared
        apart = shared.compare(slot_tables)
        if known is None or known.apart != apart:
            node_of = np.empty(len(slot_tables), np.int64)
            for number, (_, part) in enumerate(parts):
                node_of[list(part.declaration.ranks)] = number
            set_apart = worlds.rounded(worlds.set_apart(world, apart, replica_claims.HOME in slot_tables[0].groups))
            held = Holdings(set_apart) if apart else holdings
            known = _Known(world, holdings, shared, apart, _Placed(set_apart, held, node_of, limit))
        _remembered[key] = known
        while len(_remembered) > REMEMBERED_MAX:
            _remembered.popitem(last=False)
        return known.placed
