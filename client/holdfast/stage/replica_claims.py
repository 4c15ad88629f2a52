"""Computes digests of boxes that other ranks may hold too, in the slot before the seal, to compare replicas.

They are computed in the background from the copied bytes, so they do not slow training, and cover exactly what is
saved. What another rank stages for this one is sampled in live memory, before the fence opens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast.stage.background_copy import Turn, torn, version
from holdfast.stage.staging import SlotLayout, Spared, common
from holdfast.state.extras import GROUP as EXTRA
from holdfast.state.named import modules_of
from holdfast.tensors.fragments import local_tensor
from holdfast.tensors.leaves import RANK_PREFIX, Key, Leaf
from holdfast.tickets import SaveTicket
from holdfast_formats import digest
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box
from holdfast_formats.staging import replica_claims, slot_table


class Kind(IntEnum):
    NOTHING = 0  # no other rank holds any of it, or its name says that it is one rank's own
    CLAIM = 1  # every rank that holds it holds these bytes
    OWN = 2  # it may differ between ranks


class LiveSamples:
    """Samples of live tensors that another rank stages: a turn of the copy of one save."""

    def __init__(self, spared: Sequence[Spared], step: int) -> None:
        """Record the version of every tensor."""
        self._spared, self._step = spared, step
        self._versions = [version(one.octets) for one in spared]
        self.values = np.zeros(len(spared), np.uint64)

    def do(self) -> None:
        """Take the samples; raise `TornSnapshot` with the names of tensors that were written since the call of `save()`."""
        native = digest.native()
        if native_copy.available() and native is not None:
            boxes = np.array([(one.octets.data_ptr(), one.octets.numel()) for one in self._spared], np.uint64)
            self.values = native_copy.digests(boxes, native, self._step)
        else:
            found = [replica_claims.sample(one.octets.numpy(), self._step) for one in self._spared]
            self.values = np.array(found, np.uint64)
        now = [version(one.octets) for one in self._spared]
        names = [one.name for one, a, b in zip(self._spared, self._versions, now, strict=True) if a != b]
        if names:
            raise torn(names)


class Statement:
    """The digests of one save, of boxes that follow one another in the slot, and of what another rank stages."""

    def __init__(
        self,
        places: NDArray[np.uint64],
        sampled: NDArray[np.bool_],
        entire: NDArray[np.bool_],
        step: int,
        spared: Sequence[Spared] = (),
    ) -> None:
        """`places` are each box's offset in the slot and its length; the other arrays select the digests."""
        self._places, self._sampled, self._entire, self._step = places, sampled, entire, step
        self._live = LiveSamples(spared, step) if spared else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What the copy of the save has to do besides."""
        return () if self._live is None else (self._live,)

    @property
    def table_bytes(self) -> int:
        return slot_table.digests_bytes(len(self._places) + (0 if self._live is None else len(self._live.values)))

    def digests(self, data: memoryview) -> bytes:
        """The digests as a table stores them. Call it once everything is in the slot, and the turns are done."""
        octets = np.frombuffer(data, np.uint8)
        rows = np.zeros((len(self._places), 2), np.uint64)
        rows[:, 0] = _taken(octets, self._places, self._sampled, self._step)
        rows[:, 1] = _taken(octets, self._places, self._entire, None)
        if self._live is not None:
            rows = np.concatenate([rows, np.stack([self._live.values, np.zeros_like(self._live.values)], axis=1)])
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


class _Telling(NamedTuple):
    """A save that digests whole boxes: its leaves, and the leaf of each box in its slot."""

    ticket: SaveTicket
    leaves: tuple[Leaf, ...]
    staged: tuple[Leaf, ...]


class Claims:
    """Decides which digests of this rank's state each save states, and which tensors another rank of this node stages.

    A box is digested as a whole until a save with its whole digest is committed, and by a sample from then on. What the
    daemon spares this rank with that commit stays so: ranks that learn of it later stage more than they need, which is
    always right. If a save finds that ranks disagree, each stages everything from then on.
    """

    def __init__(self, state: Mapping[str, Any], world: int, spares: bool = True) -> None:
        """`spares`: whether other ranks may stage tensors for this one."""
        self._state, self._alone, self._spares = state, world == 1, spares
        self._leaves: tuple[Leaf, ...] = ()
        self._ends: list[int] = []  # the number of boxes up to each leaf
        self._rows = _NO_ROWS
        self._told: set[Key] = set()
        self._telling: list[_Telling] = []
        self._relying: list[SaveTicket] = []  # on other ranks
        self._spared: dict[Key, Box] = {}

    def look(self) -> int:
        """Learn from the saves that have ended. Returns the number of tensors that another rank of this node stages."""
        before = len(self._spared)
        self._note_told()
        if len(self._spared) != before:
            self._leaves, self._ends, self._rows = (), [], _NO_ROWS
        return len(self._spared)

    def is_spared(self, leaf: Leaf) -> bool:
        """Whether another rank of this node stages the leaf, and this one can sample it where it is."""
        box = self._spared.get(leaf.key)
        if box is None or len(leaf.pieces) != 1 or leaf.pieces[0].box != box:
            return False
        tensor = leaf.pieces[0].tensor
        return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())

    def of(self, layout: SlotLayout, ticket: SaveTicket) -> Statement | None:
        """The digests to state for a save's layout; None in a world of one rank, which has no replicas."""
        if self._alone:
            return None
        self._look_at(layout)
        rows = self._rows
        claimed = rows.kinds == Kind.CLAIM
        entire = (rows.kinds == Kind.OWN) | (claimed & ~rows.reported)
        if (claimed & ~rows.reported).any():
            staged = zip(layout.leaves, layout.fragments, strict=True)
            self._telling.append(_Telling(ticket, layout.leaves, tuple(leaf for leaf, of in staged for _ in of.boxes)))
        if layout.spared:
            self._relying.append(ticket)
        return Statement(rows.places, claimed, entire, ticket.step, layout.spared)

    def _note_told(self) -> None:
        ended = [said for said in self._telling if said.ticket.done]
        self._telling = [said for said in self._telling if said not in ended]
        for said in ended:
            if said.ticket.error is None:
                self._spare(said)
                self._told.update([leaf.key for leaf in said.leaves])
                kept = common(self._leaves, said.leaves)
                self._leaves, self._ends = self._leaves[:kept], self._ends[:kept]  # the others are determined again
                self._rows = self._rows.first(self._ends[-1] if kept else 0)
                self._rows.reported[:] = True
        over = [ticket for ticket in self._relying if ticket.done]
        self._relying = [ticket for ticket in self._relying if ticket not in over]
        if any(isinstance(ticket.error, StateMismatch) for ticket in over):
            self._spares = False
            self._spared.clear()

    def _spare(self, said: _Telling) -> None:
        """What the first committed save decides stays so: then one of its ranks stages the box for good."""
        if self._spares and said.ticket.spares:
            spared = replica_claims.decode_bits(said.ticket.spares, len(said.staged))
            for number in np.flatnonzero(spared).tolist():
                leaf = said.staged[number]
                if len(leaf.pieces) == 1 and leaf.key not in self._told:
                    self._spared[leaf.key] = leaf.pieces[0].box

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
            for piece in leaf.pieces if fragment.boxes else ():
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
