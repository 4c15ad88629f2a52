"""Ensures that full-precision copies fit restored weights: the next optimizer step would overwrite the weights with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, NoReturn, Protocol

import torch

from holdfast.left_out import LeftOutNote
from holdfast.tensors import live_pieces
from holdfast.tensors.fragments import Storable, global_shape, is_sharded, local_tensors
from holdfast.tensors.matching import MatchedLeaves
from holdfast.tensors.torch_dtypes import MemorySpans, has_memory, memory_span
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box, intersect

Masters = Literal["from-model"]
LISTED_MAX = 5
PROBED = 512  # rows of which one element is compared first
MASTER_GROUP = "master"


class HasMasters(Protocol):
    """An optimizer that may keep full-precision copies."""

    def parameter_names(self) -> Iterable[str]: ...
    def masters(self) -> Iterable[tuple[str, Storable, Storable]]: ...


class MasterPair(NamedTuple):
    """A weight and its full-precision copy."""

    name: str
    weight: Storable
    master: Storable


class BesideWeights(NamedTuple):
    """State beside the weights that must be restored with them.

    `nameless` are full-precision copies without a weight of their name, by name; `averages` are those of EMA.
    """

    weights: tuple[Storable, ...]
    pairs: tuple[MasterPair, ...]
    nameless: tuple[MasterPair, ...]
    averages: tuple[Storable, ...]


def beside(
    optimizers: Sequence[HasMasters],
    weights: Mapping[str, Storable],
    masters: Mapping[str, Storable],
    averages: Iterable[Storable],
) -> BesideWeights:
    """Find every full-precision copy of a weight: in an optimizer's state, in the mapping of masters, and tensors of another
    module that an optimizer steps in place of the weights of the same names.

    `weights` have their names in the group `model`, and others the name of their group in front.
    """
    pairs = [MasterPair(*one) for optimizer in optimizers for one in optimizer.masters()]
    pairs += [MasterPair(name, weights[name], masters[name]) for name in masters if name in weights]
    pairs += in_place_of(weights, {name for optimizer in optimizers for name in optimizer.parameter_names()})
    nameless = tuple(MasterPair(name, value, value) for name, value in masters.items() if name not in weights)
    return BesideWeights(tuple(weights.values()), tuple(pairs), nameless, tuple(averages))


def in_place_of(weights: Mapping[str, Storable], stepped: Collection[str]) -> Iterator[MasterPair]:
    """Weights that an optimizer does not step, each with the wider tensor of another module that it steps instead."""
    for name in (name for name in weights if name in stepped):
        weight = weights.get(inner := name.partition(".")[2])
        if weight is not None and inner not in stepped and is_wider(weights[name], weight):
            yield MasterPair(inner, weight, weights[name])


def is_wider(copy: Storable, weight: Storable) -> bool:
    """Whether both are floats of one shape, and the copy has more bits."""
    return (
        copy.dtype.is_floating_point
        and weight.dtype.is_floating_point
        and copy.dtype.itemsize > weight.dtype.itemsize
        and global_shape(copy) == global_shape(weight)
    )


def is_copy(value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an optimizer's tensor, under any key, is the weight in more bits: rounded it equals it."""
    if not is_wider(value, weight) or value.shape != weight.shape or not weight.numel():
        return False
    if not has_memory(value) or not has_memory(weight):  # a class of its own may not know how to compare
        return False
    with torch.no_grad():
        value, weight = value.detach(), weight.detach()
        few = tuple(slice(0, PROBED) if not i else slice(0, 1) for i in range(weight.dim()))
        return _rounds_to(value[few], weight[few]) and _rounds_to(value, weight) and bool(weight.nan_to_num().any())


def _rounds_to(value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a value rounds to the weight; NaN equals NaN, because weights with NaN may have copies, too."""
    rounded = value.to(weight.dtype)
    return torch.equal(rounded, weight) or bool(((rounded == weight) | (rounded.isnan() & weight.isnan())).all())


def is_varied(weight: torch.Tensor) -> bool:
    """Whether it has several values, so that an equal tensor is no coincidence."""
    with torch.no_grad():
        known = weight.detach().nan_to_num()
        return known.numel() > 1 and bool((known != known[(0,) * known.dim()]).any())


def in_form_of(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The tensor in the weight's shape, as a view, if it has the same elements in a row."""
    flat = value.dim() == 1 != weight.dim() and value.numel() == weight.numel() and has_memory(value)
    return value.view(weight.shape) if flat and value.is_contiguous() else value


def is_kept_by_fragments(name: str, weight: Storable, value: Storable) -> bool:
    """`is_copy` for a weight and a value of which this rank may hold different parts."""
    pair = MasterPair(name, weight, value)
    if not is_wider(value, weight) or not all(map(has_memory, (*local_tensors(weight), *local_tensors(value)))):
        return False
    overlapping = [(copy, part) for copy, part in _copies(pair) or () if part.numel()]
    return any(is_varied(part) and is_copy(copy, part) for copy, part in overlapping) and all(
        _rounds_to(*one) for one in overlapping
    )


def _can_hold(pair: MasterPair) -> bool:
    """Whether a copy takes every value of the weight exactly; remainders of bits, or scaled values, do not."""
    master, weight = pair.master.dtype, pair.weight.dtype
    return master.is_floating_point and (master == weight or torch.promote_types(master, weight) == master)


def settle(restoration: MatchedLeaves, beside_weights: BesideWeights, retention_request: Masters | None) -> MatchedLeaves:
    """The restoration, if every restored weight's copy is restored too; with "from-model", copies are set from the weights.
    An average that is not restored is noted.

    Raises `StateMismatch` with the names otherwise.
    """
    if retention_request not in (None, "from-model"):
        raise InvalidRequest(
            f"masters must be 'from-model' or None, not {retention_request!r}",
            hint="pass masters='from-model', or leave it out",
        )
    filled = MemorySpans([memory_span(piece.tensor) for leaf in restoration.live for piece in leaf.pieces])
    weights_filled = any(_in(weight, filled) for weight in beside_weights.weights)
    if weights_filled and any(_stays(average, filled) for average in beside_weights.averages):
        text = "the group ema was not restored with the weights: it still contains the average of the previous weights"
        restoration = restoration._replace(notes=[*restoration.notes, LeftOutNote(text)])
    nameless = [pair.name for pair in beside_weights.nameless if weights_filled and _stays(pair.master, filled)]
    if nameless:
        raise StateMismatch(
            f"{len(nameless)} tensors of the group master ({_listed(nameless)}) would not be restored with the "
            "weights, and no weight has their names, so it is unknown which weights the next optimizer step would "
            "undo",
            hint="restore the group master as well, or give the masters the names of their weights",
            stale=nameless,
        )
    stale = [pair for pair in beside_weights.pairs if _in(pair.weight, filled) and _stays(pair.master, filled)]
    lacking = [MasterPair(*one) for one in restoration.lacking]
    if not stale and not lacking:
        if retention_request is None:
            return restoration
        text = "no full-precision master was set from the weights: the state has none, or they were restored"
        return restoration._replace(notes=[*restoration.notes, text])
    return _renewing(restoration, stale, lacking) if retention_request else _refuse(stale, lacking)


def _refuse(stale: Sequence[MasterPair], lacking: Sequence[MasterPair]) -> NoReturn:
    names = [pair.name for pair in (*stale, *lacking)]
    raise StateMismatch(
        f"{len(names)} full-precision masters ({_listed(names)}) would not be restored with their "
        + ("weights: the next optimizer step would undo the restore" if stale else "moments: the optimizer has none yet"),
        hint="restore the group master as well, or the group that has them in this state; or pass "
        "masters='from-model' to copy the masters from the restored weights",
        stale=names,
    )


def _renewing(restoration: MatchedLeaves, stale: Sequence[MasterPair], lacking: Sequence[MasterPair]) -> MatchedLeaves:
    every = (*stale, *lacking)
    for pair in every:
        if not _can_hold(pair):
            raise StateMismatch(
                f"the master of {pair.name} is of {pair.master.dtype}, which cannot hold a weight of {pair.weight.dtype}, "
                "so it cannot be copied from it",
                hint="restore the group master as well",
            )
        if _copies(pair) is None:
            raise StateMismatch(
                f"the master of {pair.name} is sharded differently from its weight on this rank, so it cannot "
                "be copied from it",
                hint="restore the group master as well",
            )
    names = [pair.name for pair in every]
    note = LeftOutNote(f"{len(every)} full-precision masters were copied from the restored weights ({_listed(names)})")
    return restoration._replace(
        actions=(*restoration.actions, partial(_renew, every)),
        notes=[*restoration.notes, note],
        renewed=tuple(f"{MASTER_GROUP}/{name}" for name in names),
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED_MAX]) + (", …" if len(names) > LISTED_MAX else "")


def _is_alike(pair: MasterPair) -> bool:
    """Whether a copy lies as its weight does, part by part: a plain one does, a sharded one may be of other elements."""
    weight, master = ([local.shape for local in local_tensors(value)] for value in (pair.weight, pair.master))
    if weight != master or not is_sharded(pair.master):
        return weight == master
    return _boxes(pair.weight, pair.name) == _boxes(pair.master, pair.name)


def _boxes(value: Storable, name: str) -> list[Box]:
    return [piece.box for piece in live_pieces.pieces(value, name).pieces]


def _copies(pair: MasterPair) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Views of a copy, and of the same elements in this rank's part of the weight; None if it lacks some of them."""
    if _is_alike(pair):
        return list(zip(local_tensors(pair.master), local_tensors(pair.weight), strict=True))
    if global_shape(pair.weight) != global_shape(pair.master):
        return None
    held = live_pieces.pieces(pair.weight, pair.name).pieces
    overlapping: list[tuple[torch.Tensor, torch.Tensor]] = []
    for box, copy in live_pieces.pieces(pair.master, pair.name).pieces:
        common = [(inner, piece) for piece in held if (inner := intersect(box, piece.box)) is not None]
        if sum(inner.volume for inner, _ in common) != box.volume:
            return None
        overlapping += [(copy[i.within(box).slices], piece.tensor[i.within(piece.box).slices]) for i, piece in common]
    return overlapping


def _in(value: Storable, filled: MemorySpans) -> bool:
    locals_ = local_tensors(value)
    return any(has_memory(t) and t.numel() > 0 and filled.meet(memory_span(t)) for t in locals_)


def _stays(value: Storable, filled: MemorySpans) -> bool:
    """Whether a copy keeps its old value. If this rank has no element of it, other ranks hold it."""
    return any(local.numel() > 0 for local in local_tensors(value)) and not _in(value, filled)


def _renew(stale: Sequence[MasterPair]) -> None:
    with torch.no_grad():
        for pair in stale:
            for master, weight in _copies(pair) or ():
                master.copy_(weight)
