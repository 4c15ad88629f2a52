"""Joins the parts that Megatron's ranks hold of a tensor: by the names of its layers for tensor parallelism, and with the
layers of pipeline stages numbered through.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

TORCH_DIST = "convert it with Megatron: --ckpt-convert-format torch_dist; then import that"
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..+)")
_ROWS = re.compile(r".*(word_embeddings|output_layer|lm_head|linear_qkv|query_key_value)\.(weight|bias)")
_GATED = re.compile(r"(.*)(linear_fc1|dense_h_to_4h)\.(weight|bias)")
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2|dense_4h_to_h|attention\.dense)\.weight")
_SECOND = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
# A norm of its own before a layer's matrix, under the name of the fused one, as `torch_dist` has it.
_NORM = re.compile(r"(.*\blayers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)")
_FUSED = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}


class RankFile(NamedTuple):
    """A rank's file, and its numbers among the ranks of tensor and of pipeline parallelism."""

    tensor: int
    stage: int
    path: str


class PartName(NamedTuple):
    """A tensor's name on its ranks: the part of the model on an interleaved stage, and the name in it."""

    chunk: str
    name: str


Parts = Mapping[RankFile, Mapping[PartName, StoredArray]]


def whole_names(parts: Parts, chunks: Sequence[str]) -> dict[tuple[int, PartName], str]:
    """The name in the whole model, for each stage and name there. `StateMismatch` if the ranks of a stage differ."""
    names: dict[tuple[int, PartName], str] = {}
    before: dict[str, int] = {}  # layers of earlier stages, for each part of the model that has layers
    for chunk in chunks:
        for stage in sorted({place.stage for place in parts}):
            ranks = [[key for key in held if key.chunk == chunk] for place, held in parts.items() if place.stage == stage]
            if any(set(rank) != set(ranks[0]) for rank in ranks):
                raise StateMismatch(f"the ranks of stage {stage} have different tensors in {chunk!r}", hint=TORCH_DIST)
            ends = dict(before)
            for key in ranks[0]:
                found = _LAYER.fullmatch(key.name)
                names[stage, key] = key.name
                if found is not None:
                    number = int(found[2]) + before.get(found[1], 0)
                    ends[found[1]] = max(ends.get(found[1], 0), number + 1)
                    names[stage, key] = f"{found[1]}{number}{found[3]}"
            before = ends
    return names


def joined(
    parts: Parts, names: Mapping[tuple[int, PartName], str], group: str, stored: Mapping[str, str]
) -> Iterator[ForeignTensor]:
    """Every tensor out of the parts of all ranks of its stage, in this group and `stored` under a name."""
    named: dict[str, dict[int, list[StoredArray]]] = {}
    for place, held in parts.items():
        for key, array in held.items():
            named.setdefault(names[place.stage, key], {}).setdefault(place.stage, []).append(array)
    columns = {
        name: sum(one.shape[-1] for one in next(iter(stages.values())))
        for name, stages in named.items()
        if _COLUMNS.fullmatch(name)
    }
    for name, stages in named.items():
        first, *others = [_joined(name, ranks, columns) for ranks in stages.values()]
        for other in others:
            if other.spec != first.spec:
                raise next(iter(stages.values()))[0].odd("another stage has it, too, in another shape")
        spec = TensorSpec(group, stored[name], first.spec.dtype, first.spec.shape)
        copies = (*first.copies, *(piece for other in others for piece in other.pieces))
        yield first._replace(spec=spec, copies=copies)


def fused(name: str, named: Collection[str]) -> str:
    """The name of a norm in `torch_dist`; of other tensors their own."""
    found = _NORM.fullmatch(name)
    matrix = f"{found[1]}{_FUSED[found[2]]}" if found is not None else ""
    return f"{matrix}.layer_norm_{found[3]}" if found is not None and f"{matrix}.weight" in named else name


def _joined(name: str, parts: Sequence[StoredArray], columns: Mapping[str, int]) -> ForeignTensor:
    """One tensor of the parts of all tensor-parallel ranks."""
    first = parts[0]
    if len(parts) == 1:
        return first.tensor("", name)
    gated, axis = _GATED.fullmatch(name), 1 if _COLUMNS.fullmatch(name) else 0
    if not first.shape or not (gated or axis or _ROWS.fullmatch(name)):
        whole = first.tensor("", name)
        if any(one.shape != first.shape or one.dtype != first.dtype for one in parts):
            raise first.odd("other ranks have it in another shape, and no rule says how it is divided")
        return whole._replace(copies=tuple(one.all() for one in parts[1:]))
    if any(
        one.dtype != first.dtype or len(one.shape) <= axis or _without(one, axis) != _without(first, axis) for one in parts
    ):
        raise first.odd("the parts of other ranks do not fit")
    halves = 2 if gated is not None and _is_gated(gated, parts, columns) else 1
    if any(one.shape[axis] % halves for one in parts):
        raise first.odd("its rows are not those of two matrices")
    pieces, at = list[ForeignPiece](), 0
    for half in range(halves):
        for one in parts:
            length = one.shape[axis] // halves
            offset = tuple(half * length if n == axis else 0 for n in range(len(one.shape)))
            size = tuple(length if n == axis else m for n, m in enumerate(one.shape))
            pieces.append(one.piece(Box(offset, size), tuple(at if n == axis else 0 for n in range(len(size)))))
            at += length
    shape = tuple(at if n == axis else m for n, m in enumerate(first.shape))
    return ForeignTensor(TensorSpec("", name, first.dtype, shape), tuple(pieces))


def _without(array: StoredArray, axis: int) -> tuple[int, ...]:
    return (*array.shape[:axis], *array.shape[axis + 1 :])


def _is_gated(found: re.Match[str], parts: Sequence[StoredArray], columns: Mapping[str, int]) -> bool:
    """Whether the first matrix of an MLP is two, gate and up: it has twice the rows that the second has columns."""
    rows, second = sum(one.shape[0] for one in parts), columns.get(f"{found[1]}{_SECOND[found[2]]}.weight", 0)
    if rows not in (second, 2 * second):
        raise parts[0].odd("its rows do not belong to the second matrix of its layer")
    return rows == 2 * second
