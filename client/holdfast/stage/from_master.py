"""Leaves weights that are rounded masters out of slots: the daemon writes them from the masters in the slot.

Before the first save that leaves them out, their bits are compared with the rounded masters. Each rank compares the
elements of which it holds the master, so all elements are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from holdfast.stage.replica_claims import buffers_of
from holdfast.stage.staging import common
from holdfast.state.modules import MODEL
from holdfast.state.train_state import MASTER, Snapshot
from holdfast.tensors.leaves import Key, Leaf
from holdfast.tensors.torch_dtypes import safetensors_name
from holdfast_formats import rounding
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import intersect
from holdfast_formats.tensors import TensorSpec

ModelSource = Literal["from-master"]

CHUNK_ELEMENTS = 2**16  # compared at a time: what a core's cache holds
DEVICE_CHUNK_ELEMENTS = 2**22  # the same on a device, with temporary tensors of some 20 bytes an element
LISTED_MAX = 5


class _Pair(NamedTuple):
    """A weight of the state, its master, and the leaf that replaces it in the slot."""

    weight: Leaf
    master: Leaf
    rounded: Leaf


class FromMasters:
    """Which weights are left out, and which were compared. Not thread-safe: guarded by its owner's lock."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._before: tuple[Leaf, ...] = ()  # of the last save, as the state has them, and as they are saved
        self._after: tuple[Leaf, ...] = ()
        self._notes: tuple[str, ...] = ()
        self._pairs: dict[Key, _Pair] = {}
        self._compared: set[Key] = set()

    def apply(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot without weights that the daemon rounds from its masters. Notes list model weights copied for
        want of a master.
        """
        kept = common(self._before, snapshot.leaves)
        if any(leaf.group in (MODEL, MASTER) for leaf in (*self._before[kept:], *snapshot.leaves[kept:])):
            self._pair(snapshot.leaves)
            after = [self._pairs[leaf.key].rounded if leaf.key in self._pairs else leaf for leaf in snapshot.leaves]
            self._after = tuple(after)
        else:
            self._after = self._after[:kept] + snapshot.leaves[kept:]
        self._before = snapshot.leaves
        return snapshot._replace(leaves=self._after, notes=(*snapshot.notes, *self._notes))

    def check(self) -> None:
        """Compare each weight that the last snapshot left out, once after every restore.

        Raises `StateMismatch` with names and element counts of those that differ from their rounded masters, for
        masters with NaN, and if this rank holds master elements without the weights.
        """
        if self._pairs.keys() <= self._compared:
            return
        new = [pair for key, pair in self._pairs.items() if key not in self._compared]
        with torch.no_grad():
            mismatched = {pair.weight.path: differing for pair in new if (differing := _differing(pair))}
        if mismatched:
            raise _refusal(mismatched)
        self._compared |= self._pairs.keys()

    def restored(self) -> None:
        """Compare everything again before the next save."""
        self._compared.clear()

    def _pair(self, leaves: Sequence[Leaf]) -> None:
        masters = {leaf.name: leaf for leaf in leaves if leaf.group == MASTER}
        weights = [leaf for leaf in leaves if leaf.group == MODEL and leaf.dtype in rounding.DTYPES]
        buffers = buffers_of(self._state) if masters and weights else frozenset[int]()
        pairs: dict[Key, _Pair] = {}
        copied: list[str] = []
        for weight in weights:
            master = masters.get(weight.name)
            is_buffer = any(piece.tensor.data_ptr() in buffers for piece in weight.pieces)
            if master is None or is_buffer or not rounding.possible(_spec(weight), _spec(master)):
                copied.append(weight.name)
                continue
            known = self._pairs.get(weight.key)
            if known is None or known.weight is not weight or known.master is not master:
                known = _Pair(weight, master, weight._replace(pieces=(), rounded_from=MASTER))
            pairs[weight.key] = known
        self._pairs = pairs
        self._notes = (_note(copied, bool(masters)),) if copied else ()
        if not weights and any(leaf.group == MODEL for leaf in leaves):
            self._notes = ("model='from-master': nothing is left out, because the model has no BF16 or FP16 tensors",)


def _note(copied: Sequence[str], masters: bool) -> str:
    why = f"has no parameter with an {rounding.HELD_AS} tensor of its name and shape in group {MASTER}"
    if not masters:
        why = f"this save has no tensor in group {MASTER}"
    which = f"{len(copied)} of the model's tensors were copied" + (f" ({_listed(copied)})" if masters else "")
    return f"model='from-master': {which}, because {'the state ' if masters else ''}{why}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED_MAX]) + (", …" if len(names) > LISTED_MAX else "")


def _spec(leaf: Leaf) -> TensorSpec:
    return TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape)


def _refusal(mismatched: Mapping[str, str]) -> StateMismatch:
    texts = [f"{path} ({differing})" for path, differing in mismatched.items()]
    return StateMismatch(
        f"{len(mismatched)} of the model's tensors are not their masters rounded to nearest even: {_listed(texts)}",
        hint=f"{rounding.HINT}, if the trainer rounds in another way or changes weights without their masters. "
        "If the trainer sets weights from masters after optimizer.step(), save after that",
        tensors=list(mismatched),
    )


def _differing(pair: _Pair) -> str:
    """Describes how a weight differs from its rounded master where this rank holds it; "" if it does not."""
    differ = elements = nan = 0
    for box, master in pair.master.pieces:
        elements += box.volume
        seen = 0
        for held, weight in pair.weight.pieces:
            inner = intersect(box, held)
            if inner is not None and box.volume:
                seen += inner.volume
                for w, m in _chunks(weight[inner.within(held).slices], master[inner.within(box).slices]):
                    wrong, strange = _compare(w, m)
                    differ, nan = differ + wrong, nan + strange
        if seen < box.volume:
            return f"this rank has {box.volume - seen} elements of the master but not of the weight"
    if nan:
        return f"NaN in {nan} of {elements} elements of its master"
    return f"{differ} of {elements} elements differ" if differ else ""


def _chunks(weight: torch.Tensor, master: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if weight.is_contiguous() and master.is_contiguous():
        weight, master = weight.view(-1), master.view(-1)
    if weight.dim() == 0:
        weight, master = weight[None], master[None]
    step = max(
        (CHUNK_ELEMENTS if master.device.type == "cpu" else DEVICE_CHUNK_ELEMENTS) * weight.shape[0] // weight.numel(), 1
    )
    for at in range(0, weight.shape[0], step):
        yield weight[at : at + step], master[at : at + step]


def _compare(weight: torch.Tensor, master: torch.Tensor) -> tuple[int, int]:
    """Number of elements whose bits differ, and of NaN masters."""
    if master.device.type == "cpu":  # as the daemon rounds; many short calls to torch would wait for its threads
        bits = weight.cpu().view(torch.int16).numpy().view(np.uint16)
        return rounding.differing(bits, master.numpy(), safetensors_name(weight.dtype))
    return _compare_there(weight, master)


def _compare_there(weight: torch.Tensor, master: torch.Tensor) -> tuple[int, int]:
    """`_compare` on the master's device. BF16 is computed in integers: instructions that round to it may flush
    subnormals to zero.
    """
    bits = master.view(torch.int32)
    if weight.dtype is torch.bfloat16:
        rounded = (((bits >> 16) & 1) + 0x7FFF + bits) >> 16
    else:
        rounded = master.to(weight.dtype).view(torch.int16)
    differ = rounded != weight.to(master.device).view(torch.int16)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    wrong, strange = torch.stack((differ.sum(), nan.sum())).tolist()
    return wrong, strange
