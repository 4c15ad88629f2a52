"""Check that ranks which hold the same part hold the same bytes, by the digests in their slots' tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import ReplicasDiffer
from holdfast_formats.region import Box, whole
from holdfast_formats.staging import replica_claims
from holdfast_formats.staging.average import GROUP as EMA
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import TensorSpec

log = logging.getLogger(__name__)

NAMED_MAX = 5  # tensors in an error's text; its members have them all
HINT = (
    "if the ranks hold different shards, declare it with layout=, a DTensor or a Fragment; make replicas equal "
    "before save(), for example by a broadcast from one rank; pass batch statistics as buffers of their "
    "module, and per-rank tensors under a separate key of the state"
)

Key = tuple[str, str]  # group, name
Apart = dict[Key, tuple[int, ...]]  # the ranks that hold something else than the lowest rank that holds the tensor


class ReplicatedBox(NamedTuple):
    spec: TensorSpec
    box: Box
    ranks: tuple[int, ...]


class SharedBoxes:
    """Every box that several ranks hold, and the places of its digests in those of all tables; from fragments alone.

    `numbers` are those places, box by box, and `begins` where each box's begin among them. `named` returns the box.
    """

    def __init__(self, numbers: NDArray[np.int64], begins: NDArray[np.int64], named: Callable[[int], ReplicatedBox]) -> None:
        self._numbers, self._begins, self._named = numbers, begins, named

    @classmethod
    def of(cls, ordered: Sequence[SlotTable]) -> SharedBoxes:
        by_box: dict[tuple[str, str, Box], list[tuple[int, int]]] = {}  # box -> (rank, number of the box)
        specs: dict[Key, TensorSpec] = {}
        number = 0
        for table in ordered:
            for fragment in (*table.fragments, *table.unstaged):
                key = fragment.spec.group, fragment.spec.name
                specs.setdefault(key, fragment.spec)
                for box in fragment.boxes:
                    if box.volume:
                        by_box.setdefault((*key, box), []).append((table.rank, number))
                    number += 1
        several = {place: holders for place, holders in by_box.items() if len(holders) > 1}
        boxes = [
            ReplicatedBox(specs[group, name], box, tuple(rank for rank, _ in holders))
            for (group, name, box), holders in several.items()
        ]
        numbers = np.array([n for holders in several.values() for _, n in holders], np.int64)
        lengths = [len(holders) for holders in several.values()]
        begins = np.cumsum([0, *lengths[:-1]]) if lengths else np.empty(0, np.int64)
        return cls(numbers, begins, boxes.__getitem__)

    def compare(self, ordered: Sequence[SlotTable]) -> Apart:
        """What ranks hold differently and may. `ReplicasDiffer` for what they declare to be equal.

        Samples are compared with samples and whole digests with whole ones: a rank may be in its first save, others not.
        """
        rows = self._rows(ordered)
        if rows is None:
            return {}
        suspects = np.flatnonzero(self._unequal(rows[:, 0]) | self._unequal(rows[:, 1]))
        apart: Apart = {}
        wrong: dict[str, set[int]] = {}
        for index in suspects.tolist():
            replicated = self._named(index)
            begin = int(self._begins[index])
            held = rows[begin : begin + len(replicated.ranks)]
            others = _others(replicated.ranks, held)
            key = replicated.spec.group, replicated.spec.name
            if held[:, 0].any() or replicated.box != whole(replicated.spec.shape):
                wrong.setdefault("/".join(key), set()).update(others)
            else:
                apart[key] = others
        if wrong:
            _refuse(wrong)
        return apart

    def claimed(self, ordered: Sequence[SlotTable]) -> list[tuple[ReplicatedBox, tuple[int, ...]]]:
        """The boxes that all their holders claim as a whole, and their places in the digests of all tables."""
        rows = self._rows(ordered)
        if rows is None:
            return []
        every = np.logical_and.reduceat((rows != 0).all(axis=1), self._begins)
        found = []
        for index in np.flatnonzero(every).tolist():
            replicated, begin = self._named(index), int(self._begins[index])
            found.append((replicated, tuple(self._numbers[begin : begin + len(replicated.ranks)].tolist())))
        return found

    def _rows(self, ordered: Sequence[SlotTable]) -> NDArray[np.uint64] | None:
        """The digests of shared boxes, box by box; None without any."""
        if not len(self._begins) or not all(table.digests for table in ordered):
            return None
        return np.frombuffer(b"".join(table.digests for table in ordered), "<u8").reshape(-1, 2)[self._numbers]

    def _unequal(self, values: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Of which boxes the present digests are not all equal."""
        most = np.maximum.reduceat(values, self._begins)
        least = np.minimum.reduceat(np.where(values == 0, np.iinfo(np.uint64).max, values), self._begins)
        array: NDArray[np.bool_] = (most != 0) & (most != least)
        return array


def _others(ranks: Sequence[int], held: NDArray[np.uint64]) -> tuple[int, ...]:
    """The ranks whose digests differ from those of the lowest rank that has any of that kind."""
    found: set[int] = set()
    for column in held.T:
        stated = [(rank, value) for rank, value in zip(ranks, column.tolist(), strict=True) if value]
        found.update(rank for rank, value in stated if value != stated[0][1])
    return tuple(sorted(found))


def _refuse(wrong: Mapping[str, set[int]]) -> NoReturn:
    tensors, ranks = list(wrong), sorted(set().union(*wrong.values()))
    shown = ", ".join(tensors[:NAMED_MAX]) + (f" and {len(tensors) - NAMED_MAX} more" if len(tensors) > NAMED_MAX else "")
    raise ReplicasDiffer(
        f"ranks saved different values of a tensor that is replicated: {shown} on "
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} differs from lower ranks",
        hint=HINT,
        tensors=tensors,
        ranks=ranks,
    )


def only_averages(error: ReplicasDiffer, tables: Sequence[SlotTable]) -> bool:
    """Whether only the average that the daemon keeps for these ranks differs; its tensors are logged."""
    named = error.members["tensors"]
    is_so = all(table.average is not None for table in tables) and all(name.startswith(f"{EMA}/") for name in named)
    if is_so:
        log.warning("step %d of %s is saved without its average: %s", tables[0].step, tables[0].run, error.detail)
    return is_so


def own_spec(spec: TensorSpec, rank: int) -> TensorSpec:
    """The spec under which a rank's own variant of a tensor is stored."""
    return TensorSpec(replica_claims.HOME, replica_claims.apart(rank, spec.group, spec.name), spec.dtype, spec.shape)
