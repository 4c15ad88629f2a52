"""Joins the parts of tensor-parallel ranks in Paddle's layout, where a column cut is along the last dimension.

Fused layers need care: of gate|up, each rank has its part of the gate and then its part of the up projection, while the
whole has all of the gate first. QKV fused by groups of heads is cut between groups, like any other column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import Decoder, ForeignPiece, ForeignTensor
from holdfast_formats.region import Box, Shape, intersect
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

# Layers that Paddle cuts along the last dimension and along the first one; a column's bias is cut, a row's is not.
_COLUMNS = frozenset(
    [
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "q_b_proj",
        "kv_b_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "gate_up_fused_proj",
        "up_gate_proj",
    ]
)
_ROWS = frozenset(["o_proj", "down_proj", "embed_tokens", "lm_head"])
_GATE_UP = frozenset({"gate_up_proj", "gate_up_fused_proj", "up_gate_proj"})


class LocalTensorParts(NamedTuple):
    """A rank's part of a tensor: its shape, its elements' places, copies of the same bytes, and the file and key for
    messages.
    """

    dtype: str
    shape: Shape
    pieces: tuple[ForeignPiece, ...]
    copies: tuple[ForeignPiece, ...]
    file: str
    key: str
    decoder: Decoder | None = None  # instead of pieces

    def tensor(self, group: str, name: str) -> ForeignTensor:
        return ForeignTensor(TensorSpec(group, name, self.dtype, self.shape), self.pieces, self.copies, self.decoder)

    def stored(self) -> StoredArray:
        """The array of a part that is one piece."""
        (piece,) = self.pieces
        return StoredArray(self.file, self.key, self.dtype, self.shape, piece.start, piece.strides, piece.member)

    def odd(self, why: str) -> StateMismatch:
        return StateMismatch(
            f"{self.file}: {self.key!r} is {self.dtype} of shape {list(self.shape)}: {why}", file=self.file, tensor=self.key
        )


def of_arrays(arrays: Sequence[StoredArray]) -> LocalTensorParts:
    """The first array; the others are copies of it. `StateMismatch` if they cannot be."""
    first = arrays[0]
    for array in arrays[1:]:
        if (array.dtype, array.shape) != (first.dtype, first.shape):
            raise array.odd(f"but {first.dtype} of shape {list(first.shape)} in {first.file}")
    copies = tuple(array.all() for array in arrays[1:])
    return LocalTensorParts(first.dtype, first.shape, (first.all(),), copies, first.file, first.key)


def proportions(name: str, config: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The relative sizes of a layer's fused parts, each cut by itself: (1,) if it is cut as one."""
    layer = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    model = (config or {}).get("model_type")
    if layer in _GATE_UP and model != "gpt_oss":  # which has them interleaved
        return (1, 1)
    if layer == "qkv_proj" and model == "phi3":
        heads, groups = ((config or {}).get(key) for key in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups == 0:
            return (heads // groups, 1, 1)
    return (1,)


def local_shape(name: str, shape: Shape, degree: int) -> Shape:
    """The shape of a rank's part, by the name of its layer; that of the whole if no cut is known."""
    larger = whole_shape(name, shape, degree)
    if larger is None:
        return shape
    return tuple(n if n == m else n // degree for n, m in zip(shape, larger, strict=True))


def whole_shape(name: str, local: Shape, degree: int) -> Shape | None:
    """The shape of a tensor whose parts of `degree` ranks have shape `local`, by the name of its layer; None if unknown."""
    layer, _, kind = name.rpartition(".")
    layer = layer.rpartition(".")[2]
    if layer in _COLUMNS and kind in ("weight", "bias"):
        return (*local[:-1], local[-1] * degree) if local else None
    if layer in _ROWS and kind == "weight":
        return (local[0] * degree, *local[1:]) if local else None
    return None


def joined(
    held: Mapping[int, LocalTensorParts], degree: int, shape: Shape, parts: tuple[int, ...] = (1,)
) -> LocalTensorParts:
    """The tensor of `shape` of which each rank has a part, or everything. `parts` are the `proportions` of its layer.

    Raises `StateMismatch` if the ranks' shapes do not make up the whole.
    """
    ranks = [held[rank] for rank in sorted(held)]
    first = ranks[0]
    for other in ranks:
        if other.dtype != first.dtype or other.shape != first.shape:
            raise other.odd(f"another rank has {first.dtype} of shape {list(first.shape)} in {first.file}")
    if any(other.decoder is not None for other in ranks) and len(ranks) > 1:
        raise first.odd("pickles of protocol 2 cannot be combined: save it again with a newer Paddle")
    if first.shape == shape:
        again = [piece for other in ranks for piece in (*other.pieces, *other.copies)]
        return first._replace(copies=tuple(again[len(first.pieces) :]))
    missing = [rank for rank in range(degree) if rank not in held]
    if missing:
        raise first.odd(f"the whole tensor has shape {list(shape)}, but tensor-parallel rank {missing[0]} has no part of it")
    cut = [d for d, (n, local) in enumerate(zip(shape, first.shape, strict=False)) if n != local]
    if len(first.shape) != len(shape) or len(cut) != 1 or first.shape[cut[0]] * degree != shape[cut[0]]:
        raise first.odd(f"it is not one of {degree} parts of {list(shape)}")
    if cut[0] != len(shape) - 1:
        parts = (1,)
    if first.shape[cut[0]] % sum(parts):
        raise first.odd(f"{first.shape[cut[0]]} columns cannot be split into {' : '.join(map(str, parts))}")
    cutting = Cutting(cut[0], [first.shape[cut[0]] // sum(parts) * part for part in parts], degree)
    pieces = tuple(piece for rank, part in sorted(held.items()) for piece in cutting.placed(part, part.pieces, rank))
    copies = tuple(piece for rank, part in sorted(held.items()) for piece in cutting.placed(part, part.copies, rank))
    return LocalTensorParts(first.dtype, shape, pieces, copies, first.file, first.key)


class Cutting(NamedTuple):
    """A cut along a dimension into `degree` parts, each with a part of every fused tensor."""

    dimension: int
    sizes: Sequence[int]  # of what is fused, in one part
    degree: int

    def placed(self, part: LocalTensorParts, pieces: Sequence[ForeignPiece], rank: int) -> list[ForeignPiece]:
        moved_parts = []
        for before, size in zip(accumulate((0, *self.sizes)), self.sizes, strict=False):
            offset, extent = [0] * len(part.shape), list(part.shape)
            offset[self.dimension], extent[self.dimension] = before, size
            shift = before * self.degree + rank * size - before
            fused = Box(tuple(offset), tuple(extent))
            for piece in pieces:
                clipped = clip(piece, fused, part.dtype)
                if clipped is not None:
                    moved = list(clipped.box.offset)
                    moved[self.dimension] += shift
                    moved_parts.append(clipped._replace(box=Box(tuple(moved), clipped.box.shape)))
        return moved_parts


def clip(piece: ForeignPiece, box: Box, dtype: str) -> ForeignPiece | None:
    """The part of a piece in `box`, if any."""
    common = intersect(piece.box, box)
    if common is None:
        return None
    steps = zip(common.offset, piece.box.offset, piece.strides, strict=True)
    first = sum((here - low) * step for here, low, step in steps)
    return piece._replace(start=piece.start + first * dtypes.to_numpy(dtype).itemsize, box=common)
