"""Exports a model as a GGUF file, for llama.cpp and the programs that are built on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.mapping.target_files import GrowingFile, TargetFile
from holdfast_formats.region import whole
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports import gguf_metadata, gguf_tokenizer, weights
from holdfast_service.wings.convert.exports.gguf_metadata import ModelShape, refused
from holdfast_service.wings.convert.exports.ordered_tensors import Arranged, arrange, config_of
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    LeftOut,
    copied_assets,
    other_groups,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import renamed
from holdfast_service.wings.convert.foreign.computed import shifted
from holdfast_service.wings.convert.foreign.gguf import encoding
from holdfast_service.wings.convert.foreign.gguf.encoding import TYPES, Unsigned, Value
from holdfast_service.wings.convert.foreign.gguf.names import interleaved

FILE = "model.gguf"
GROUP = "gguf"  # of computed tensors
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's numbers of what most weights are
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_BUFFER = ".rotary_emb.inv_freq"  # which programs compute themselves
_QUANTISATION_VERSION = 2


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """model.gguf, and the checkpoint's small files beside it.

    Vectors are in F32, as llama.cpp needs them, other weights in `options.dtype` or the model's dtype. Raises
    `StateMismatch` and `NoSuchResource` for models that GGUF cannot express.
    """
    if options.layout is not None:
        raise InvalidRequest("--layout does not apply to GGUF", hint="leave --layout out")
    config = config_of(source)
    shape = gguf_metadata.read(config)
    arranged = arrange(source, options.program)
    chosen = weights.choose(source, arranged, options._replace(dtype=None), as_stored=True)
    dtypes = _dtypes(arranged, chosen.tensors, options)
    model = {name: _cast(one, dtypes[name]) for name, one in chosen.tensors.items() if not name.endswith(_BUFFER)}
    notes = [*chosen.notes, *weights.roundings(source, model.values())]
    computed: dict[TensorKey, ForeignTensor] = {}
    placed: list[MappedTensor | KnownTensor] = [_placed(source, shape, name, one, computed) for name, one in model.items()]
    placed += [_rope_factors(shape)] if shape.rope_factors else []
    _check_complete(shape, {one.spec.name for one in placed})
    tokenizer = gguf_tokenizer.read(source, config)
    left_out = [*chosen.left_out, *shape.left_out]
    metadata: dict[str, Value] = {**shape.metadata, "general.file_type": Unsigned(_file_type(placed))}
    metadata["general.quantization_version"] = Unsigned(_QUANTISATION_VERSION)
    if isinstance(tokenizer, str):
        left_out.append(LeftOut(f"the tokenizer in {FILE}", f"{tokenizer}; {gguf_metadata.HINT}"))
    else:
        metadata |= tokenizer
    used = frozenset({weights.GROUP, options.weights})
    left_out += other_groups(source, used, "a GGUF file holds only a model") + values_of_weights(source, used)
    left_out += [LeftOut(name, "programs compute it") for name in chosen.tensors if name.endswith(_BUFFER)]
    files = (_file(metadata, placed), *copied_assets(source))
    return ExportPlan(files, tuple(notes), tuple(left_out), computed)


def _dtypes(arranged: Arranged, chosen: Mapping[str, MappedTensor], options: ExportOptions) -> dict[str, str]:
    model = arranged.group(weights.GROUP)
    dtypes = {name: options.dtype or model[name].spec.dtype for name in chosen}
    unknown = next((name for name in chosen if dtypes[name] not in TYPES), None)
    if unknown is not None:
        raise InvalidRequest(f"GGUF has no {dtypes[unknown]} ({unknown!r})", hint="convert the weights: --dtype bf16")
    return {name: dtypes[name] if len(one.spec.shape) > 1 else "F32" for name, one in chosen.items()}


def _cast(mapped: MappedTensor, dtype: str) -> MappedTensor:
    return mapped._replace(spec=msgspec.structs.replace(mapped.spec, dtype=dtype))


def _placed(
    source: ExportSource, shape: ModelShape, name: str, mapped: MappedTensor, computed: dict[TensorKey, ForeignTensor]
) -> MappedTensor:
    """The tensor under GGUF's name and in its layout. Adds to `computed` what must be calculated."""
    made = shape.architecture.gguf_name(name)
    if made is None:
        raise refused(f"{shape.architecture.name} of GGUF has no tensor for {name!r}")
    mapped = renamed(mapped, GROUP, made)
    if shape.architecture.is_permuted(made):
        heads = shape.heads if ".attn_q." in made else shape.key_heads
        if mapped.spec.shape[0] != heads * shape.head_size:
            raise refused(f"{name!r} has {mapped.spec.shape[0]} rows, not {heads} heads of {shape.head_size} in config.json")
        return interleaved(_unchanged(mapped, name), heads)
    if shape.architecture.is_shifted(made):
        tensor = source.listing.tensors[_unchanged(mapped, name).moves[0].source]
        one = shifted(tensor, mapped.key, 1.0)
        computed[one.key] = one
        return same(one)
    return mapped


def _unchanged(mapped: MappedTensor, name: str) -> MappedTensor:
    """`StateMismatch` for a tensor that a program puts together, of which no other order can be made at once."""
    shape = mapped.spec.shape
    if len(mapped.moves) != 1 or mapped.moves[0].target != whole(shape) or mapped.moves[0].box != whole(shape):
        raise refused(f"program and GGUF both rearrange {name!r}")
    return mapped


def _rope_factors(shape: ModelShape) -> KnownTensor:
    data = np.asarray(shape.rope_factors, "<f4")
    return KnownTensor(TensorSpec(GROUP, gguf_metadata.ROPE_FACTORS, "F32", data.shape), data.tobytes())


def _check_complete(shape: ModelShape, names: set[str]) -> None:
    """`StateMismatch` for a model without all of its tensors, which llama.cpp would not load. A tied head has none."""
    layer = {f"{name}.weight" for name in shape.architecture.layer.values()}
    wanted = {f"blk.{number}.{name}" for number in range(shape.layers) for name in layer}
    wanted |= {_EMBEDDING, "output_norm.weight"}
    more = {name for name in names if name.startswith("blk.") and name.endswith(".weight")} - wanted
    if wanted - names or more:
        odd = min(wanted - names or more)
        raise refused(f"{odd} is {'missing' if odd in wanted else 'not'} in a model of {shape.layers} layers (config.json)")


def _file_type(tensors: Iterable[MappedTensor | KnownTensor]) -> int:
    counted: Counter[str] = Counter()
    for one in tensors:
        counted[one.spec.dtype] += one.spec.nbytes if len(one.spec.shape) > 1 else 0
    return _FILE_TYPES[counted.most_common(1)[0][0]]


def _file(metadata: Mapping[str, Value], tensors: list[MappedTensor | KnownTensor]) -> TargetFile:
    file = GrowingFile()
    file.put(encoding.header(metadata, [one.spec for one in tensors]))
    for one in tensors:
        if isinstance(one, KnownTensor):
            file.put(one.data)
        else:
            file.stream(one)
        file.put(bytes(encoding.aligned(one.spec.nbytes) - one.spec.nbytes))
    return file.made(FILE)


KIND = ExportKind("gguf", EXPORT_KINDS["gguf"], plan)
