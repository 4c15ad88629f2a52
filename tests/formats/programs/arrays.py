"""Runs compiled programs over arrays, as the executor runs them over files."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping import box_moves, reading
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.programs import CompiledProgram
from holdfast_formats.region import whole
from holdfast_formats.tensors import TensorSpec
from tests.kit.files import FilesInMemory

Arrays = dict[TensorKey, NDArray[Any]]
_NAMES = {dtypes.to_numpy(name): name for name in ("BF16", "F16", "F32", "F64", "I8", "I32", "I64", "U8", "F8_E4M3")}


def key(name: str, group: str = "model") -> TensorKey:
    return TensorKey(group, name)


def specs(arrays: Mapping[TensorKey, NDArray[Any]]) -> dict[TensorKey, TensorSpec]:
    return {each: TensorSpec(each.group, each.name, _NAMES[values.dtype], values.shape) for each, values in arrays.items()}


def applied(compiled: CompiledProgram, arrays: Mapping[TensorKey, NDArray[Any]]) -> Arrays:
    """What the program makes of these arrays; every map is checked before it is used."""
    known = specs(arrays)
    files = FilesInMemory({f"{each.group}/{each.name}": values.tobytes() for each, values in arrays.items()})
    tensors = {
        each: ForeignTensor(spec, (ForeignPiece(f"{each.group}/{each.name}", 0, whole(spec.shape), strides(spec.shape)),))
        for each, spec in known.items()
    }
    made = {}
    for each, mapped in compiled.tensors.items():
        box_moves.check(mapped, known)
        values = reading.elements(files, tensors, mapped, 0, prod(mapped.spec.shape))
        made[each] = values.reshape(mapped.spec.shape)
    for equal in compiled.equal:
        assert all(arrays[each].tobytes() == arrays[equal[0]].tobytes() for each in equal)
    for each in compiled.zeros:
        assert not arrays[each].any()
    return made


def same(a: Mapping[TensorKey, NDArray[Any]], b: Mapping[TensorKey, NDArray[Any]]) -> None:
    """Both have the same tensors, bit for bit."""
    assert sorted(a) == sorted(b)
    for each, values in a.items():
        assert (values.dtype, values.shape) == (b[each].dtype, b[each].shape), each
        assert values.tobytes() == np.ascontiguousarray(b[each]).tobytes(), each
