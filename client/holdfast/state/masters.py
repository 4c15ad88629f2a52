"""Makes sure that full-precision copies fit restored weights: the next optimizer step would overwrite the
weights with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch

from holdfast.state.optimizers import OptimizerState
from holdfast.tensors.fragments import Storable, local_tensor
from holdfast.tensors.matching import MatchedLeaves
from holdfast.tensors.torch_dtypes import has_memory
from holdfast_formats.errors import InvalidRequest, StateMismatch

Masters = Literal["from-model"]
LISTED_MAX = 5


class MasterPair(NamedTuple):
    """A weight and its full-precision copy."""

    name: str
    weight: Storable
    master: Storable


def pairs(
    optimizers: Iterable[OptimizerState], weights: Mapping[str, Storable], masters: Mapping[str, Storable]
) -> list[MasterPair]:
    """Every weight that has a full-precision copy: in an optimizer's state, or by name in the mapping of masters."""
    found = [
        MasterPair(parameter.name, parameter.value, kept) for state in optimizers for parameter, kept in state.masters()
    ]
    return [*found, *(MasterPair(name, weights[name], masters[name]) for name in masters if name in weights)]


def settle(restoration: MatchedLeaves, found: Sequence[MasterPair], wish: Masters | None) -> MatchedLeaves:
    """Return the restoration if every restored weight's copy is restored too; with "from-model", copies are set from the
    weights.

    Raises `StateMismatch` with the names otherwise.
    """
    if wish not in (None, "from-model"):
        raise InvalidRequest(f"masters must be 'from-model' or None, not {wish!r}")
    filled = {piece.tensor.untyped_storage().data_ptr() for leaf in restoration.leaves for piece in leaf.pieces}
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
        if local_tensor(pair.weight).shape != local_tensor(pair.master).shape:
            raise StateMismatch(
                f"the master of {pair.name} is sharded differently from its weight on this rank, so it cannot "
                "be copied from it",
                hint="restore the group master as well",
            )
    note = f"{len(stale)} full-precision masters were copied from the restored weights ({names})"
    return restoration._replace(actions=(*restoration.actions, partial(_renew, stale)), notes=[*restoration.notes, note])


def _in(value: Storable, filled: set[int]) -> bool:
    local = local_tensor(value)
    return has_memory(local) and local.numel() > 0 and local.untyped_storage().data_ptr() in filled


def _stays(value: Storable, filled: set[int]) -> bool:
    """Whether a copy keeps its old value. If this rank has no element of it, other ranks hold it."""
    return local_tensor(value).numel() > 0 and not _in(value, filled)


def _renew(stale: Sequence[MasterPair]) -> None:
    with torch.no_grad():
        for pair in stale:
            local_tensor(pair.master).copy_(local_tensor(pair.weight))
