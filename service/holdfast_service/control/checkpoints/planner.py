"""Plan one save: from every rank's declaration to which bytes are written where and read from which rank.

Pure: the same tables give the same plan. What depends only on the fragments is cached, since most saves of a run differ only
in step and values.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from holdfast_formats import rounding
from holdfast_formats.disk import state_json
from holdfast_formats.disk.packing import FILE_BYTES_MAX, pack
from holdfast_formats.errors import ReplicasDiffer, StateMismatch
from holdfast_formats.region import Box, first_overlap, whole
from holdfast_formats.staging import replica_claims, slot_table
from holdfast_formats.staging.average import GROUP as EMA
from holdfast_formats.staging.plan import BoxOrigin, PlannedAsset, PlannedFile, PlannedTensor, WritePlan
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec, box_bytes
from holdfast_service.control.checkpoints.replica_claims import Apart, SharedBoxes, only_averages, own_spec

_Key = tuple[str, str]
_Holders = dict[Box, list[tuple[int, int]]]  # box -> (rank, slot offset) of every rank that holds it


class _Held:
    """Everything the ranks declare about one tensor."""

    def __init__(self, spec: TensorSpec, placement: str, rank: int, frozen: bool = True) -> None:
        self.spec = spec
        self.placement = placement
        self.declared_by = rank
        self.boxes: _Holders = {}
        self.rounded_from = ""
        self.held_as = ""
        self.frozen = frozen  # as long as all ranks say so

    def add(self, fragment: StagedFragment, rank: int) -> None:
        """Take in what a rank declares."""
        self.rounded_from = self.rounded_from or fragment.rounded_from
        self.frozen = self.frozen and fragment.frozen
        offset = fragment.slot_offset
        for box in fragment.boxes:
            if box.volume:
                self.boxes.setdefault(box, []).append((rank, offset))
            offset += box_bytes(self.spec, box)

    def round_from(self, master: _Held) -> None:
        """Read the master's bytes in its place, which are rounded when they are written."""
        self.boxes, self.held_as = master.boxes, rounding.HELD_AS


def plan(tables: Sequence[SlotTable]) -> WritePlan:
    """The plan for one step from the tables of all ranks of the world, in any order.

    Boxes that several ranks hold are replicas: one holder is read, so that bytes are balanced over ranks. What ranks do not
    hold alike, and need not, each has as a tensor of its own besides (`claims`). An average of which ranks have different
    parts is left out. Raises `StateMismatch` when the tables are not one world's, disagree on a tensor, or do not tile one
    exactly; `ReplicasDiffer` where replicas are none.
    """
    ordered = sorted(tables, key=lambda t: t.rank)
    check_world(ordered)
    try:
        return merged(ordered, _placed(ordered))
    except ReplicasDiffer as error:
        if not only_averages(error, ordered):
            raise
    ordered = [slot_table.without(table, EMA) for table in ordered]
    return merged(ordered, _placed(ordered))


def merged(ordered: Sequence[SlotTable], files: tuple[PlannedFile, ...]) -> WritePlan:
    """The plan of these files, with the ranks' other values of this step."""
    first = ordered[0]
    metrics = next((known for t in ordered if (known := t.all_metrics)), {})
    return WritePlan(
        run=first.run,
        step=first.step,
        attempt=first.attempt,
        world=first.world,
        groups=first.groups,
        files=files,
        aliases=_merge_aliases(ordered, files) if any(t.aliases for t in ordered) else {},
        assets=_collect_assets(ordered),
        metrics=metrics,
        mesh=next((t.mesh for t in ordered if t.mesh), {}),
        intent=first.intent,
        lacks_average=EMA not in first.groups and any(t.average is not None for t in ordered),
        state=state_json.merge(first.step, metrics, first.groups, {t.rank: t.values for t in ordered}),
    )


class _Known(NamedTuple):
    """What follows from the fragments: what ranks share, and the files, for what differed the last time."""

    shared: SharedBoxes
    apart: Apart
    files: tuple[PlannedFile, ...]


_REMEMBERED_MAX = 2  # all groups, and some of them; a plan of many tensors is tens of megabytes
_remembered: OrderedDict[bytes, _Known] = OrderedDict()
_lock = threading.Lock()


def _placed(ordered: Sequence[SlotTable]) -> tuple[PlannedFile, ...]:
    """The files with every tensor's place and origins, computed or cached from the last save of the same state."""
    file_bytes_max = ordered[0].file_bytes_max or FILE_BYTES_MAX
    state = hashlib.sha256(str(file_bytes_max).encode())
    for table in ordered:
        state.update(hashlib.sha256(msgspec.json.encode([table.fragments, table.unstaged])).digest())
    key = state.digest()
    with _lock:
        known = _remembered.pop(key, None)
    held = _collect(ordered) if known is None else {}  # which refuses what is not one tensor on all ranks
    shared = SharedBoxes.of(ordered) if known is None else known.shared
    apart = shared.compare(ordered)
    if known is None or known.apart != apart:
        held = held or _collect(ordered)
        _refuse_unstaged(held, ordered)
        _set_apart(held, apart, replica_claims.HOME in ordered[0].groups)
        _round(held)
        known = _Known(shared, apart, _place(held, len(ordered), file_bytes_max))
    with _lock:
        _remembered[key] = known
        while len(_remembered) > _REMEMBERED_MAX:
            _remembered.popitem(last=False)
    return known.files


def _place(held: Mapping[_Key, _Held], world: int, file_bytes_max: int) -> tuple[PlannedFile, ...]:
    origins = _choose_origins(held.values(), world)
    frozen = {key for key, of in held.items() if of.frozen}
    return tuple(
        PlannedFile(
            layout,
            tuple(
                PlannedTensor(spec, start, origins[spec.group, spec.name], held[spec.group, spec.name].placement)
                for spec, start in layout.tensors
            ),
        )
        for layout in pack([h.spec for h in held.values()], file_bytes_max, frozen)
    )


def check_world(tables: Sequence[SlotTable]) -> None:
    first = tables[0]
    if [t.rank for t in tables] != list(range(first.world)):
        raise StateMismatch(f"got tables of ranks {[t.rank for t in tables]}, but the world size is {first.world}")
    saved = first.run, first.step, first.attempt, first.world
    continued = first.restored, first.turn, first.existing
    for table in tables:  # of some 10 000 ranks, at every save
        if (table.run, table.step, table.attempt, table.world) != saved:
            raise StateMismatch(f"rank {table.rank} saves {table.run}@{table.step}, rank 0 saves {first.run}@{first.step}")
        if (table.restored, table.turn, table.existing) != continued:
            raise StateMismatch(
                f"rank {table.rank} continues from step {table.restored} (turn {table.turn}, "
                f"existing={table.existing!r}), but rank 0 from step {first.restored} (turn {first.turn}, "
                f"existing={first.existing!r})",
                hint="all ranks must restore the same step and save with the same options",
            )
        if table.groups != first.groups and set(table.groups) != set(first.groups):
            raise StateMismatch(
                f"rank {table.rank} saves the groups {sorted(table.groups)}, rank 0 {sorted(first.groups)}",
                hint="every rank must call save() with the same groups",
            )


def _collect(tables: Iterable[SlotTable]) -> dict[_Key, _Held]:
    held: dict[_Key, _Held] = {}
    for table in tables:
        for fragment in table.fragments:
            spec = fragment.spec
            known = held.setdefault((spec.group, spec.name), _Held(spec, fragment.placement, table.rank))
            if known.spec != spec:
                raise disagreed(spec, table.rank, known.spec, known.declared_by)
            known.add(fragment, table.rank)
    return held


def _refuse_unstaged(held: Mapping[_Key, _Held], tables: Iterable[SlotTable]) -> None:
    """`StateMismatch` for a part that ranks have left to another one which does not have it any more."""
    for table in tables:
        for fragment in table.unstaged:
            known = held.get((fragment.spec.group, fragment.spec.name))
            if known is None or not all(box in known.boxes for box in fragment.boxes):
                raise StateMismatch(
                    f"tensor {fragment.spec.name!r} of group {fragment.spec.group!r}: rank {table.rank} left it to another "
                    "rank of this node, which did not save it this time",
                    hint="save again: every rank stages all of its state from now on",
                )


def disagreed(spec: TensorSpec, rank: int, other: TensorSpec, other_rank: int) -> StateMismatch:
    return StateMismatch(
        f"tensor {spec.name!r} of group {spec.group!r} is {spec.dtype}{list(spec.shape)} on rank {rank} "
        f"and {other.dtype}{list(other.shape)} on rank {other_rank}",
        hint="ranks must declare the same global dtype and shape",
    )


def _set_apart(held: dict[_Key, _Held], apart: Apart, kept: bool) -> None:
    """Read tensors that differ between ranks only from the ranks that agree with the lowest; `kept`: store the others' as
    well.
    """
    for key, ranks in apart.items():
        of = held[key]
        box = whole(of.spec.shape)
        for rank, offset in of.boxes[box]:
            if rank in ranks and kept:
                own = _Held(own_spec(of.spec, rank), of.placement, rank, of.frozen)
                own.boxes[box] = [(rank, offset)]
                held[own.spec.group, own.spec.name] = own
        of.boxes[box] = [holder for holder in of.boxes[box] if holder[0] not in ranks]


def _round(held: Mapping[_Key, _Held]) -> None:
    for (_, name), of in held.items():
        if of.rounded_from:
            master = held.get((of.rounded_from, name))
            whole_master = None if master is None or master.rounded_from else master.spec
            rounding.check(of.spec, of.rounded_from, whole_master, copied=bool(of.boxes))
            assert master is not None
            of.round_from(master)


def _choose_origins(held: Iterable[_Held], world: int) -> dict[_Key, tuple[BoxOrigin, ...]]:
    """One holder for every box: boxes with no choice first, then the largest replicas go to the least loaded holder."""
    load = [0] * world
    chosen: dict[_Key, list[BoxOrigin]] = {}
    replicas: list[tuple[int, _Key, Box, list[tuple[int, int]], str]] = []
    for tensor in held:
        key = (tensor.spec.group, tensor.spec.name)
        chosen[key] = []
        if not tensor.held_as:  # else its master is
            check_tiling(tensor.spec, list(tensor.boxes))
        for box, holders in tensor.boxes.items():
            size = box_bytes(tensor.spec, box)
            if len(holders) > 1:
                replicas.append((size, key, box, holders, tensor.held_as))
                continue
            rank, offset = holders[0]
            load[rank] += size
            chosen[key].append(BoxOrigin(rank, box, offset, tensor.held_as))
    for size, key, box, holders, held_as in sorted(replicas, key=lambda r: (-r[0], r[1], r[2])):
        rank, offset = min(holders, key=lambda h: (load[h[0]], h[0]))
        load[rank] += size
        chosen[key].append(BoxOrigin(rank, box, offset, held_as))
    return {key: tuple(sorted(origins, key=lambda o: o.box)) for key, origins in chosen.items()}


def check_tiling(spec: TensorSpec, boxes: Sequence[Box]) -> None:
    """`StateMismatch` by name unless these boxes, all different, are the whole tensor, each byte once."""
    overlap = first_overlap(boxes) if len(boxes) > 1 else None
    if overlap is not None:
        a, b = overlap
        raise StateMismatch(
            f"tensor {spec.name!r}: the parts {list(a.offset)}+{list(a.shape)} and "
            f"{list(b.offset)}+{list(b.shape)} overlap, but are not equal",
            hint="parts that several ranks hold must be identical on all of them",
        )
    covered = sum(box_bytes(spec, box) for box in boxes)
    if covered != spec.nbytes:
        raise StateMismatch(
            f"tensor {spec.name!r} of group {spec.group!r}: the ranks hold {covered} of its {spec.nbytes} bytes",
            hint="a shard is missing: every rank must pass its own part",
        )


def _merge_aliases(tables: Iterable[SlotTable], files: Iterable[PlannedFile]) -> dict[str, dict[str, str]]:
    held = {(tensor.spec.group, tensor.spec.name) for file in files for tensor in file.tensors}
    merged: dict[str, dict[str, str]] = {}
    for table in tables:
        for group, aliases in table.aliases.items():
            for alias, target in aliases.items():
                if (group, target) not in held or (group, alias) in held:
                    raise StateMismatch(f"{alias!r} is tied to {target!r} on rank {table.rank}, but not on every rank")
                if merged.setdefault(group, {}).setdefault(alias, target) != target:
                    raise StateMismatch(f"{alias!r} is tied to different tensors on different ranks")
    return merged


def _collect_assets(tables: Iterable[SlotTable]) -> tuple[PlannedAsset, ...]:
    planned_assets: dict[str, PlannedAsset] = {}
    for table in tables:
        for blob in table.blobs:
            planned_assets.setdefault(blob.name, PlannedAsset(table.rank, blob))
    return tuple(planned_assets.values())
