"""Makes sure that full-precision copies fit restored weights: the next optimizer step would overwrite the
weights with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch

from holdfast.tensors import live_pieces
from holdfast.tensors.fragments import Storable, global_shape, is_sharded, local_tensors
from holdfast.tensors.matching import MatchedLeaves
from holdfast.tensors.torch_dtypes import MemorySpan, has_memory, memory_span
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box, intersect

Masters = Literal["from-model"]
LISTED_MAX = 5


class HasMasters(Protocol):
    """An optimizer that may keep full-precision copies."""

    def masters(self) -> Iterable[tuple[str, Storable, Storable]]: ...


class MasterPair(NamedTuple):
    """A weight and its full-precision copy."""

    name: str
    weight: Storable
    master: Storable


def pairs(
    optimizers: Iterable[HasMasters], weights: Mapping[str, Storable], masters: Mapping[str, Storable]
) -> list[MasterPair]:
    """Every weight that has a full-precision copy: in an optimizer's state, or by name in the mapping of masters."""
    found = [MasterPair(*one) for optimizer in optimizers for one in optimizer.masters()]
    return [*found, *(MasterPair(name, weights[name], masters[name]) for name in masters if name in weights)]


def settle(restoration: MatchedLeaves, found: Sequence[MasterPair], wish: Masters | None) -> MatchedLeaves:
    """Return the restoration if every restored weight's copy is restored too; with "from-model", copies are set from the
    weights.

    Raises `StateMismatch` with the names otherwise.
    """
    if wish not in (None, "from-model"):
        raise InvalidRequest(f"masters must be 'from-model' or None, not {wish!r}")
    filled = _Spans(memory_span(piece.tensor) for leaf in restoration.leaves for piece in leaf.pieces)
    stale = [pair for pair in found if _in(pair.weight, filled) and _stays(pair.master, filled)]
    if not stale:
        return restoration
    names = ", ".join(pair.name for pair in stale[:LISTED_MAX])
    if wish is None:
        raise StateMismatch(
            f"{len(stale)} full-precision masters ({names}{', …' if len(stale) > LISTED_MAX else ''}) would "
            "not be restored with their weights: the next optimizer step would undo the restore",
            hint="restore the group master as well, or pass masters='from-model' to copy the masters from the "
            "restored weights",
            stale=[pair.name for pair in stale],
        )
    for pair in stale:
        if _copies(pair) is None:
            raise StateMismatch(
                f"the master of {pair.name} is sharded differently from its weight on this rank, so it cannot "
                "be copied from it",
                hint="restore the group master as well",
            )
    note = f"{len(stale)} full-precision masters were copied from the restored weights ({names})"
    return restoration._replace(actions=(*restoration.actions, partial(_renew, stale)), notes=[*restoration.notes, note])


def _is_alike(pair: MasterPair) -> bool:
    """Whether a copy lies as its weight does, part by part: a plain one does, a sharded one may be of other elements."""
    weight, master = ([local.shape for local in local_tensors(value)] for value in (pair.weight, pair.master))
    if weight != master or not is_sharded(pair.master):
        return weight == master
    return _boxes(pair.weight, pair.name) == _boxes(pair.master, pair.name)


def _boxes(value: Storable, name: str) -> list[Box]:
    return [piece.box for piece in live_pieces.pieces(value, name).pieces]


def _copies(pair: MasterPair) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Views of a copy, and where this rank's part of the weight has the same elements; None if it lacks some of them."""
    if _is_alike(pair):
        return list(zip(local_tensors(pair.master), local_tensors(pair.weight), strict=True))
    if global_shape(pair.weight) != global_shape(pair.master):
        return None
    held = live_pieces.pieces(pair.weight, pair.name).pieces
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for box, copy in live_pieces.pieces(pair.master, pair.name).pieces:
        common = [(inner, piece) for piece in held if (inner := intersect(box, piece.box)) is not None]
        if sum(inner.volume for inner, _ in common) != box.volume:
            return None
        found += [(copy[i.within(box).slices], piece.tensor[i.within(piece.box).slices]) for i, piece in common]
    return found


class _Spans:
    """Spans of memory. Copies of several weights may be slices of one buffer, of which only some are restored."""

    def __init__(self, spans: Iterable[MemorySpan]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(spans):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def meet(self, span: MemorySpan) -> bool:
        before = bisect_left(self._starts, span.stop) - 1
        return before >= 0 and self._stops[before] > span.start


def _in(value: Storable, filled: _Spans) -> bool:
    locals_ = local_tensors(value)
    return any(has_memory(t) and t.numel() > 0 and filled.meet(memory_span(t)) for t in locals_)


def _stays(value: Storable, filled: _Spans) -> bool:
    """Whether a copy keeps its old value. If this rank has no element of it, other ranks hold it."""
    return any(local.numel() > 0 for local in local_tensors(value)) and not _in(value, filled)


def _renew(stale: Sequence[MasterPair]) -> None:
    with torch.no_grad():
        for pair in stale:
            for master, weight in _copies(pair) or ():
                master.copy_(weight)
