"""Computes digests of boxes that other ranks may hold too, in the slot before the seal, to compare replicas.

They are computed in the background from the copied bytes, so they do not slow training, and cover exactly what is
saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast.stage.staging import SlotLayout, common
from holdfast.state.extras import GROUP as EXTRA
from holdfast.state.named import modules_of
from holdfast.tensors.fragments import local_tensor
from holdfast.tensors.leaves import RANK_PREFIX, Key, Leaf
from holdfast.tickets import SaveTicket
from holdfast_formats import digest
from holdfast_formats.staging import replica_claims, slot_table


class Kind(IntEnum):
    NOTHING = 0  # no other rank holds any of it, or its name says that it is one rank's own
    CLAIM = 1  # every rank that holds it holds these bytes
    OWN = 2  # it may differ between ranks


class Statement:
    """The digests of one save, of boxes that follow one another in the slot."""

    def __init__(self, places: NDArray[np.uint64], sampled: NDArray[np.bool_], entire: NDArray[np.bool_], step: int) -> None:
        """`places` are each box's offset in the slot and its length; the other arrays select the digests."""
        self._places, self._sampled, self._entire, self._step = places, sampled, entire, step

    @property
    def table_bytes(self) -> int:
        return slot_table.digests_bytes(len(self._places))

    def digests(self, data: memoryview) -> bytes:
        """The digests as a table stores them. Call it once everything is in the slot."""
        octets = np.frombuffer(data, np.uint8)
        rows = np.zeros((len(self._places), 2), np.uint64)
        rows[:, 0] = _taken(octets, self._places, self._sampled, self._step)
        rows[:, 1] = _taken(octets, self._places, self._entire, None)
        return rows.astype("<u8", copy=False).tobytes()


def _taken(
    octets: NDArray[Any], places: NDArray[np.uint64], wanted: NDArray[np.bool_], step: int | None
) -> NDArray[np.uint64]:
    """Digests of the selected boxes, of a sample for `step`, or of all bytes if it is None; 0 for the others."""
    arrangement = np.zeros(len(wanted), np.uint64)
    chosen = np.flatnonzero(wanted & (places[:, 1] != 0))
    if not len(chosen):
        return arrangement
    boxes = places[chosen]
    native = digest.native()
    if native_copy.available() and native is not None:
        boxes[:, 0] += np.uint64(octets.ctypes.data)
        values = native_copy.digests(boxes, native, step)
    else:
        values = np.array([_one(octets[at : at + size], step) for at, size in boxes.tolist()], np.uint64)
    arrangement[chosen] = values
    return arrangement


def _one(box: NDArray[Any], step: int | None) -> int:
    """The digest of one box, equal to that of `native_copy.c`."""
    return digest.number(box) if step is None else replica_claims.sample(box, step)


class _Rows(NamedTuple):
    """The boxes of a layout, in its order, as NumPy arrays because there may be many."""

    places: NDArray[np.uint64]  # offset and bytes
    kinds: NDArray[np.uint8]
    reported: NDArray[np.bool_]  # a save that digested the whole box was committed

    def first(self, count: int) -> _Rows:
        return _Rows(self.places[:count], self.kinds[:count], self.reported[:count])

    def joined(self, more: _Rows) -> _Rows:
        return _Rows(
            np.concatenate([self.places, more.places]),
            np.concatenate([self.kinds, more.kinds]),
            np.concatenate([self.reported, more.reported]),
        )


_NO_ROWS = _Rows(np.empty((0, 2), np.uint64), np.empty(0, np.uint8), np.empty(0, np.bool_))


class Claims:
    """Decides which digests of this rank's state each save states.

    A box is digested as a whole until a save with its whole digest is committed, and by a sample from then on.
    """

    def __init__(self, state: Mapping[str, Any], world: int) -> None:
        self._state, self._alone = state, world == 1
        self._leaves: tuple[Leaf, ...] = ()
        self._ends: list[int] = []  # the number of boxes up to each leaf
        self._rows = _NO_ROWS
        self._told: set[Key] = set()
        self._telling: tuple[SaveTicket, tuple[Leaf, ...]] | None = None

    def of(self, layout: SlotLayout, ticket: SaveTicket) -> Statement | None:
        """The digests to state for a save's layout; None in a world of one rank, which has no replicas."""
        if self._alone:
            return None
        self._note_told()
        self._look_at(layout)
        rows = self._rows
        claimed = rows.kinds == Kind.CLAIM
        entire = (rows.kinds == Kind.OWN) | (claimed & ~rows.reported)
        if (claimed & ~rows.reported).any():
            self._telling = ticket, layout.leaves
        return Statement(rows.places, claimed, entire, ticket.step)

    def _note_told(self) -> None:
        if self._telling is None or not self._telling[0].done:
            return
        ticket, leaves = self._telling
        self._telling = None
        if ticket.error is None:
            self._told.update([leaf.key for leaf in leaves])
            kept = common(self._leaves, leaves)
            self._leaves, self._ends = self._leaves[:kept], self._ends[:kept]  # the others are determined again
            self._rows = self._rows.first(self._ends[-1] if kept else 0)
            self._rows.reported[:] = True

    def _look_at(self, layout: SlotLayout) -> None:
        """Determine the kinds of boxes, except for leaves with which the last layout began too."""
        kept = common(self._leaves, layout.leaves)
        boxes = self._ends[kept - 1] if kept else 0
        places: list[tuple[int, int]] = []
        kinds: list[int] = []
        stated: list[bool] = []
        ends = self._ends[:kept]
        buffers = buffers_of(self._state) if kept < len(layout.leaves) else frozenset()
        for leaf, fragment in zip(layout.leaves[kept:], layout.fragments[kept:], strict=True):
            kind, at = _kind(leaf, buffers), fragment.slot_offset
            for piece in leaf.pieces:
                places.append((at, piece.tensor.nbytes))
                kinds.append(int(kind))
                stated.append(leaf.key in self._told)
                at += piece.tensor.nbytes
            ends.append(boxes + len(places))
        more = _Rows(np.array(places, np.uint64).reshape(-1, 2), np.array(kinds, np.uint8), np.array(stated, np.bool_))
        self._leaves, self._ends, self._rows = layout.leaves, ends, self._rows.first(boxes).joined(more)


def _kind(leaf: Leaf, buffers: frozenset[int]) -> Kind:
    if leaf.name.startswith(RANK_PREFIX) or leaf.alone:
        return Kind.NOTHING
    if leaf.group == EXTRA or any(piece.tensor.data_ptr() in buffers for piece in leaf.pieces):
        return Kind.OWN
    return Kind.CLAIM


def buffers_of(state: Mapping[str, Any]) -> frozenset[int]:
    """The memory of all buffers of the state's modules."""
    modules = [module for value in state.values() for module in modules_of(value)]
    buffers = (local_tensor(buffer) for module in modules for buffer in module.buffers())
    return frozenset(buffer.data_ptr() for buffer in buffers if buffer.numel())
