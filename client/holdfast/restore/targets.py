"""Live tensors as targets of a restore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from holdfast.read.requests import Want
from holdfast.tensors.leaves import Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.torch_dtypes import UNSIGNED, as_integers


class RestoreTarget(NamedTuple):
    """A wanted tensor part, and the device copy that follows if the CPU cannot write the live tensor."""

    want: Want
    piece: LivePiece
    bounce: torch.Tensor | None


def targets_of(leaves: Sequence[Leaf]) -> list[RestoreTarget]:
    """The target of every leaf's bytes: live CPU memory, or a bounce buffer for a device tensor."""
    targets = []
    for leaf in leaves:
        for piece in leaf.pieces:
            raw = as_integers(piece.tensor, UNSIGNED)
            bounce = None if raw.device.type == "cpu" else torch.empty(raw.shape, dtype=raw.dtype, device="cpu")
            array = (raw if bounce is None else bounce).numpy()
            targets.append(RestoreTarget(Want(leaf.group, leaf.name, piece.box, array), piece, bounce))
    return targets


def finish(targets: Sequence[RestoreTarget]) -> None:
    with torch.no_grad():
        for target in targets:
            if target.bounce is not None:
                as_integers(target.piece.tensor, UNSIGNED).copy_(target.bounce)
