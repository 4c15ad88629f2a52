"""What this rank says of the bytes that it may share with others: digests of its boxes, taken in the slot before the seal.

They are taken in the background, of what was copied, so they cost the training nothing and cannot miss what was saved.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from holdfast.memory import native_copy
from holdfast.stage.staging import SlotLayout, common
from holdfast.state.extras import GROUP as EXTRA
from holdfast.tensors.fragments import local_tensor
from holdfast.tensors.leaves import RANK_PREFIX, Key, Leaf
from holdfast.tickets import SaveTicket
from holdfast_formats import digest
from holdfast_formats.staging import replica_claims, slot_table


class Kind(IntEnum):
    """What is said of a tensor."""

    NOTHING = 0  # no other rank holds any of it, or it is one rank's by its name
    CLAIM = 1  # whoever holds it holds these bytes
    OWN = 2  # it may be another one on each rank


class Statement:
    """The digests of one save: of boxes that stand behind each other in the slot."""

    def __init__(self, places: NDArray[np.uint64], sampled: NDArray[np.bool_], entire: NDArray[np.bool_], step: int) -> None:
        """`places` are the boxes' offsets in the slot and lengths; then of which a sample and of which all is digested."""
        self._places, self._sampled, self._entire, self._step = places, sampled, entire, step

    @property
    def table_bytes(self) -> int:
        """How much longer it makes a table."""
        return slot_table.digests_bytes(len(self._places))

    def digests(self, data: memoryview) -> bytes:
        """As a table has them; call it once everything is in the slot."""
        octets = np.frombuffer(data, np.uint8)
        rows = np.zeros((len(self._places), 2), np.uint64)
        rows[:, 0] = _taken(octets, self._places, self._sampled, self._step)
        rows[:, 1] = _taken(octets, self._places, self._entire, None)
        return rows.astype("<u8", copy=False).tobytes()


def _taken(
    octets: NDArray[Any], places: NDArray[np.uint64], wanted: NDArray[np.bool_], step: int | None
) -> NDArray[np.uint64]:
    """The digests of the boxes that are wanted: of a sample for this step, of all their bytes with none; else 0."""
    found = np.zeros(len(wanted), np.uint64)
    chosen = np.flatnonzero(wanted & (places[:, 1] != 0))
    if not len(chosen):
        return found
    boxes = places[chosen]
    native = digest.native()
    if native_copy.available() and native is not None:
        boxes[:, 0] += np.uint64(octets.ctypes.data)
        values = native_copy.digests(boxes, native, step)
    else:
        values = np.array([_one(octets[at : at + size], step) for at, size in boxes.tolist()], np.uint64)
    found[chosen] = values
    return found


def _one(box: NDArray[Any], step: int | None) -> int:
    """What `native_copy.c` does."""
    if step is None or len(box) <= replica_claims.SAMPLE_BYTES:
        return digest.number(box)
    parts = [digest.number(box[at : at + replica_claims.STRETCH_BYTES]) for at in replica_claims.places(len(box), step)]
    return digest.number(struct.pack(f"<{replica_claims.STRETCHES}Q", *parts))


class _Rows(NamedTuple):
    """What is to be said of each box, in the order of a layout: NumPy's, as there may be many."""

    places: NDArray[np.uint64]  # offset and bytes
    kinds: NDArray[np.uint8]
    told: NDArray[np.bool_]  # a save that said it of the whole box was committed

    def first(self, count: int) -> _Rows:
        return _Rows(self.places[:count], self.kinds[:count], self.told[:count])

    def joined(self, more: _Rows) -> _Rows:
        return _Rows(
            np.concatenate([self.places, more.places]),
            np.concatenate([self.kinds, more.kinds]),
            np.concatenate([self.told, more.told]),
        )


_NO_ROWS = _Rows(np.empty((0, 2), np.uint64), np.empty(0, np.uint8), np.empty(0, np.bool_))


class Claims:
    """What is to be said of this rank's state, from save to save.

    A claim is digested whole until a save that said so has been committed, and by a sample from then on.
    """

    def __init__(self, state: Mapping[str, Any], world: int) -> None:
        self._state, self._alone = state, world == 1
        self._leaves: tuple[Leaf, ...] = ()
        self._ends: list[int] = []  # how many boxes there are up to each leaf
        self._rows = _NO_ROWS
        self._told: set[Key] = set()
        self._telling: tuple[SaveTicket, tuple[Leaf, ...]] | None = None

    def of(self, layout: SlotLayout, ticket: SaveTicket) -> Statement | None:
        """What to say of a save's layout; None in a world of one, where nobody could say otherwise."""
        if self._alone:
            return None
        self._note_told()
        self._look_at(layout)
        rows = self._rows
        claimed = rows.kinds == Kind.CLAIM
        entire = (rows.kinds == Kind.OWN) | (claimed & ~rows.told)
        if (claimed & ~rows.told).any():
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
            self._leaves, self._ends = self._leaves[:kept], self._ends[:kept]  # of others it is asked anew
            self._rows = self._rows.first(self._ends[-1] if kept else 0)
            self._rows.told[:] = True

    def _look_at(self, layout: SlotLayout) -> None:
        """Of leaves that stood at the begin of the last layout all is known."""
        kept = common(self._leaves, layout.leaves)
        boxes = self._ends[kept - 1] if kept else 0
        places: list[tuple[int, int]] = []
        kinds: list[int] = []
        told: list[bool] = []
        ends = self._ends[:kept]
        buffers = _buffers(self._state) if kept < len(layout.leaves) else frozenset()
        for leaf, fragment in zip(layout.leaves[kept:], layout.fragments[kept:], strict=True):
            kind, at = _kind(leaf, buffers), fragment.slot_offset
            for piece in leaf.pieces:
                places.append((at, piece.tensor.nbytes))
                kinds.append(int(kind))
                told.append(leaf.key in self._told)
                at += piece.tensor.nbytes
            ends.append(boxes + len(places))
        more = _Rows(np.array(places, np.uint64).reshape(-1, 2), np.array(kinds, np.uint8), np.array(told, np.bool_))
        self._leaves, self._ends, self._rows = layout.leaves, ends, self._rows.first(boxes).joined(more)


def _kind(leaf: Leaf, buffers: frozenset[int]) -> Kind:
    if leaf.name.startswith(RANK_PREFIX) or leaf.alone:
        return Kind.NOTHING
    if leaf.group == EXTRA or any(piece.tensor.data_ptr() in buffers for piece in leaf.pieces):
        return Kind.OWN
    return Kind.CLAIM


def _buffers(state: Mapping[str, Any]) -> frozenset[int]:
    """Where the buffers of the state's modules are."""
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    found = (local_tensor(buffer) for module in modules for buffer in module.buffers())
    return frozenset(buffer.data_ptr() for buffer in found if buffer.numel())
