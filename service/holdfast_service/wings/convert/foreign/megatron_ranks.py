"""Checkpoints of Megatron-LM with `--ckpt-format torch`: `iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt`.

The parts of tensor-parallel ranks are joined by the names of Megatron's layers, layers of pipeline stages are numbered
through. What no rule splits must be equal on all ranks, which is compared. The optimizer's state is in the order of
parameters, which no file names, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_files.opened import join
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignPiece, ForeignTensor, RefusedPart
from holdfast_formats.region import Box
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import directories, torch_values
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord, read_torch
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

GROUP, FILE, LATEST = "model", "model_optim_rng.pt", "latest_checkpointed_iteration.txt"
LATEST_BYTES_MAX = 64
DEPTH_MAX = 8  # of nested modules
VERSION = 3.0  # of a checkpoint: older ones have the rows of queries, keys and values in other orders
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_EXPERTS = re.compile(r"mp_rank_\d{2}_\d{3}_\d{3}")
_CHUNK = re.compile(r"model(\d*)")
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..+)")
_ROWS = re.compile(r".*(word_embeddings|output_layer|lm_head|linear_qkv|query_key_value)\.(weight|bias)")
_GATED = re.compile(r"(.*)(linear_fc1|dense_h_to_4h)\.(weight|bias)")
_COLUMNS = re.compile(r".*(linear_proj|linear_fc2|dense_4h_to_h|attention\.dense)\.weight")
_SECOND = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
# A norm of its own before a layer's matrix, under the name of the fused one, as `torch_dist` has it.
_NORM = re.compile(r"(.*\blayers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)")
_FUSED = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
_PLAIN = ("opt_param_scheduler", "num_floating_point_operations_so_far", "checkpoint_version")
_OBJECTS = ("args", "content_metadata")
_ARGUMENTS = "argparse.Namespace"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")  # among the arguments
_EXTRA = "_extra_state"  # scales of FP8 and the like, as bytes of a pickle
_WAY_ON = "import only the weights: --weights-only"
_NOTE = "args of Megatron and extra states of modules (FP8) are Python objects, and were not imported"
_TORCH_DIST = "convert it with Megatron: --ckpt-convert-format torch_dist; then import that"


class _Place(NamedTuple):
    """A rank's file, and its numbers among the ranks of tensor and of pipeline parallelism."""

    tensor: int
    stage: int
    path: str


def recognises(files: Files) -> bool:
    """Directories of ranks, or such a checkpoint below `latest_checkpointed_iteration.txt`."""
    return _directory(files) is not None


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The weights, whole and under Megatron's names; the optimizer and random states are refused parts.

    Raises `StateMismatch` for missing ranks, expert parallelism, an old version, and parts that do not fit each other.
    """
    directory = _directory(files)
    if directory is None:
        raise StateMismatch("there is no directory mp_rank_00", hint="pass the directory iter_… of the checkpoint")
    places = _places(files, directory)
    held = {place: _read(files, place.path) for place in places}
    first = held[places[0]]
    for place, value in held.items():
        if value.get("iteration") != first.get("iteration") or value.get("checkpoint_version") != VERSION:
            what = f"{place.path} is of step {value.get('iteration')} and version {value.get('checkpoint_version')}"
            raise StateMismatch(f"{what}, not of step {first.get('iteration')} and version {VERSION}", hint=_TORCH_DIST)
    tensors = {one.key: one for one in _weights(held, options.as_is)}
    uses = [FileUse(place.path, "tensors") for place in places]
    refused = [*_missing_ranks(first, places), *_refused(held), *_other_files(files, places)]
    documents = {key: torch_values.plain(first[key], places[0].path, key) for key in _PLAIN if key in first}
    names = [name for name in files.list("") if not (directory and name == directory) and not _RANK.fullmatch(name)]
    for name in names:
        signal = name == LATEST
        reason = "the number of the newest checkpoint" if signal else directories.why_unused(files, name)
        uses.append(FileUse(name, "signal" if signal else "unused", reason))
    notes = [_NOTE]
    step = torch_values.integer(first, "iteration", places[0].path)
    extra = {"extra": documents} if documents else {}
    return ForeignListing(KIND.name, tensors, tuple(uses), extra, (), tuple(notes), step, refused=tuple(refused))


def _directory(files: Files) -> str | None:
    names = files.list("")
    if _has_ranks(files, ""):
        return ""
    if LATEST in names:
        latest = files.read(LATEST, 0, LATEST_BYTES_MAX).decode("utf-8", "replace").strip()
        latest = f"iter_{int(latest):07}" if latest.isascii() and latest.isdigit() else latest
        return latest if latest in names and _has_ranks(files, latest) else None
    found = [name for name in names if name.startswith("iter_") and _has_ranks(files, name)]
    return found[0] if len(found) == 1 else None


def _has_ranks(files: Files, directory: str) -> bool:
    names = (join(directory, name) for name in files.list(directory) if _RANK.fullmatch(name))
    return any(files.size(f"{name}/{FILE}") is not None for name in names)


def _places(files: Files, directory: str) -> list[_Place]:
    """All ranks, by stage, then by tensor rank."""
    names = files.list(directory)
    apart = next((name for name in names if _EXPERTS.fullmatch(name)), None)
    if apart is not None:
        raise StateMismatch(f"{join(directory, apart)} is of expert parallelism", hint=_TORCH_DIST, file=apart)
    found = [(match, join(directory, name)) for name in names if (match := _RANK.fullmatch(name))]
    places = sorted(
        (_Place(int(match[1]), int(match[2] or 0), f"{path}/{FILE}") for match, path in found),
        key=lambda place: (place.stage, place.tensor),
    )
    ranks, stages = 1 + max(place.tensor for place in places), 1 + max(place.stage for place in places)
    if [(place.stage, place.tensor) for place in places] != [(s, t) for s in range(stages) for t in range(ranks)]:
        what = f"{directory or 'the directory'} has {len(places)} directories of ranks, not those of {ranks} × {stages}"
        raise StateMismatch(what, hint="copy all directories mp_rank_…", file=places[0].path)
    return places


def _missing_ranks(first: Mapping[str, Any], places: Sequence[_Place]) -> Iterator[RefusedPart]:
    """Refuses a checkpoint of fewer ranks than its arguments state: without the others, the weights are not whole."""
    arguments = first.get("args")
    stated = arguments.state if isinstance(arguments, PickledRecord) and isinstance(arguments.state, dict) else {}
    found = 1 + max(place.tensor for place in places), 1 + max(place.stage for place in places)
    sizes = [stated.get(key, size) for key, size in zip(_SIZES, found, strict=True)]
    if sizes != list(found):
        what = f"{places[0].path} is of {sizes[0]} × {sizes[1]} ranks, but there are directories of {found[0]} × {found[1]}"
        error = StateMismatch(what, hint="copy all directories mp_rank_…", file=places[0].path)
        yield RefusedPart("args", error, GROUP)


def _read(files: Files, path: str) -> dict[str, Any]:
    value = read_torch(files, path, (_ARGUMENTS,), opaque=True)
    if not isinstance(value, dict) or not any(_CHUNK.fullmatch(str(key)) for key in value):
        raise StateMismatch(f"{path} does not have the content that Megatron writes", hint=_TORCH_DIST, file=path)
    return value


def _weights(held: Mapping[_Place, dict[str, Any]], as_is: bool) -> Iterator[ForeignTensor]:
    """Every tensor of the model, out of the parts of the ranks of its stage."""
    named: dict[str, list[list[StoredArray]]] = {}
    before: dict[str, int] = {}  # layers of earlier stages, for each part of the model that has layers
    chunks = {
        found[0]: int(found[1] or 0) for value in held.values() for key in value if (found := _CHUNK.fullmatch(str(key)))
    }
    for chunk in sorted(chunks, key=chunks.__getitem__):
        for stage in sorted({place.stage for place in held}):
            ranks = [dict(_flat(value.get(chunk), place.path)) for place, value in held.items() if place.stage == stage]
            if any(rank.keys() != ranks[0].keys() for rank in ranks):
                raise StateMismatch(f"the ranks of stage {stage} have different tensors in {chunk!r}", hint=_TORCH_DIST)
            ends = dict(before)
            for name in ranks[0]:
                found = _LAYER.fullmatch(name)
                if found is not None:
                    number = int(found[2]) + before.get(found[1], 0)
                    ends[found[1]] = max(ends.get(found[1], 0), number + 1)
                through = name if found is None else f"{found[1]}{number}{found[3]}"
                named.setdefault(through, []).append([rank[name] for rank in ranks])
            before = ends
    for name, stages in named.items():
        made = [_joined(name, parts, named) for parts in stages]
        for other in made[1:]:
            if other.spec != made[0].spec:
                raise stages[1][0].odd("another stage has it, too, in another shape")
        spec = made[0].spec
        spec = TensorSpec(GROUP, name if as_is else _fused(name, named), spec.dtype, spec.shape)
        yield made[0]._replace(spec=spec, copies=(*made[0].copies, *(piece for other in made[1:] for piece in other.pieces)))


def _flat(value: Any, path: str, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, StoredArray]]:
    """The tensors of nested modules, by their whole names. Extra states of modules that are empty are nothing."""
    if not isinstance(value, dict) or depth > DEPTH_MAX:
        raise torch_values.mismatch(path, prefix, f"has {prefix or 'a model'!r}, which is no state dict", _TORCH_DIST)
    for key, one in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if one is None or str(key).endswith(_EXTRA):
            continue
        if isinstance(one, PickledArray):
            yield name, one.stored(name)
        else:
            yield from _flat(one, path, name, depth + 1)


def _fused(name: str, named: Collection[str]) -> str:
    """The name of a norm in `torch_dist`; of other tensors their own."""
    found = _NORM.fullmatch(name)
    matrix = f"{found[1]}{_FUSED[found[2]]}" if found is not None else ""
    return f"{matrix}.layer_norm_{found[3]}" if found is not None and f"{matrix}.weight" in named else name


def _joined(name: str, parts: Sequence[StoredArray], named: Mapping[str, Sequence[Sequence[StoredArray]]]) -> ForeignTensor:
    """One tensor of the parts of all tensor-parallel ranks."""
    first = parts[0]
    if len(parts) == 1:
        return first.tensor(GROUP, name)
    gated, axis = _GATED.fullmatch(name), 1 if _COLUMNS.fullmatch(name) else 0
    if not first.shape or not (gated or axis or _ROWS.fullmatch(name)):
        whole = first.tensor(GROUP, name)
        if any(one.shape != first.shape or one.dtype != first.dtype for one in parts):
            raise first.odd("other ranks have it in another shape, and no rule says how it is divided")
        return whole._replace(copies=tuple(one.all() for one in parts[1:]))
    if any(
        one.dtype != first.dtype or len(one.shape) <= axis or _without(one, axis) != _without(first, axis) for one in parts
    ):
        raise first.odd("the parts of other ranks do not fit")
    halves = 2 if gated is not None and _is_gated(gated, parts, named) else 1
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
    return ForeignTensor(TensorSpec(GROUP, name, first.dtype, shape), tuple(pieces))


def _without(array: StoredArray, axis: int) -> tuple[int, ...]:
    return (*array.shape[:axis], *array.shape[axis + 1 :])


def _is_gated(
    found: re.Match[str], parts: Sequence[StoredArray], named: Mapping[str, Sequence[Sequence[StoredArray]]]
) -> bool:
    """Whether the first matrix of an MLP is two, gate and up: it has twice the rows that the second has columns."""
    second = named.get(f"{found[1]}{_SECOND[found[2]]}.weight")
    rows, columns = sum(one.shape[0] for one in parts), sum(one.shape[-1] for one in second[0]) if second else 0
    if rows not in (columns, 2 * columns):
        raise parts[0].odd("its rows do not belong to the second matrix of its layer")
    return rows == 2 * columns


def _refused(held: Mapping[_Place, dict[str, Any]]) -> Iterator[RefusedPart]:
    """What is beside the weights and no plain value: the optimizer, and random states."""
    known = (*_PLAIN, *_OBJECTS, "iteration")
    seen: set[str] = set()
    for place, value in held.items():
        others = {str(key) for key, one in value.items() if one is not None and key not in known} - seen
        for key in sorted(key for key in others if not _CHUNK.fullmatch(key)):
            seen.add(key)
            what = f"has {key!r}, which an import of Megatron's rank files would drop"
            group = "optim" if key.startswith("optim") else "extra"
            yield RefusedPart(key, torch_values.mismatch(place.path, key, what, _WAY_ON), group)


def _other_files(files: Files, places: Sequence[_Place]) -> Iterator[RefusedPart]:
    for place in places:
        directory = place.path.rpartition("/")[0]
        for name in files.list(directory):
            path = f"{directory}/{name}"
            if path != place.path:
                error = StateMismatch(f"{path} holds more of the training", hint=_WAY_ON, file=path)
                yield RefusedPart(path, error, "")


KIND = ForeignKind("megatron-torch", IMPORT_KINDS["megatron-torch"], recognises, read)
