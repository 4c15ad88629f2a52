"""Checkpoints of Megatron-LM with `--ckpt-format torch`: `iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt`.

The parts of tensor-parallel ranks are joined by the names of Megatron's layers, layers of pipeline stages are numbered
through. What no rule splits must be equal on all ranks, which is compared. `optimizers` gives the optimizer's state names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast_files.opened import join
from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import FileUse, ForeignListing, PartLeftOut, RefusedPart
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import directories, torch_values
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, ValuePlace
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.megatron_ranks import optimizers
from holdfast_service.wings.convert.foreign.megatron_ranks.joining import (
    TORCH_DIST,
    PartName,
    Parts,
    RankFile,
    fused,
    joined,
    whole_names,
)
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord, read_torch
from holdfast_service.wings.convert.foreign.pruned_values import PrunedValue
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

GROUP, FILE, LATEST = "model", "model_optim_rng.pt", "latest_checkpointed_iteration.txt"
LATEST_BYTES_MAX = 64
DEPTH_MAX = 8  # of nested modules
VERSION = 3.0  # of a checkpoint: older ones have the rows of queries, keys and values in other orders
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_EXPERTS = re.compile(r"mp_rank_\d{2}_\d{3}_\d{3}")
_CHUNK = re.compile(r"model(\d*)")
_PLAIN = ("opt_param_scheduler", "num_floating_point_operations_so_far", "checkpoint_version")
_SCALER, EXTRA = "grad_scaler", "extra"
_OBJECTS = ("args", "content_metadata")
_ARGUMENTS = "argparse.Namespace"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")  # among the arguments
_EXTRA = "_extra_state"  # scales of FP8 and the like, as bytes of a pickle
_WAY_ON = "import only the weights: --weights-only"
_NOTE = "args of Megatron and extra states of modules (FP8) are Python objects, and were not imported"


def recognises(files: Files) -> bool:
    """Directories of ranks, or such a checkpoint below `latest_checkpointed_iteration.txt`."""
    return _directory(files) is not None


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Weights and optimizer, whole and under Megatron's names; random states are refused parts.

    Raises `StateMismatch` for missing ranks, expert parallelism, an old version, and parts that do not fit each other.
    """
    directory = _directory(files)
    if directory is None:
        raise StateMismatch("there is no directory mp_rank_00", hint="pass the directory iter_… of the checkpoint")
    places = _places(files, directory)
    pruned = {place: PrunedValue(_read(files, place.path), options, place.path) for place in places}
    held = {place: one.value for place, one in pruned.items()}
    first = held[places[0]]
    for place, value in held.items():
        if value.get("iteration") != first.get("iteration") or value.get("checkpoint_version") != VERSION:
            what = f"{place.path} is of step {value.get('iteration')} and version {value.get('checkpoint_version')}"
            raise StateMismatch(f"{what}, not of step {first.get('iteration')} and version {VERSION}", hint=TORCH_DIST)
    parts = {place: dict(_weights(value, place.path)) for place, value in held.items()}
    names = whole_names(parts, _chunks(key for value in held.values() for key in value))
    whole = {name: name if options.as_is else fused(name, set(names.values())) for name in names.values()}
    gathered = GatheredListing(files)
    gathered.tensors.update((one.key, one) for one in joined(parts, names, GROUP, whole))
    gathered.documents[EXTRA] = {key: torch_values.plain(first[key], places[0].path, key) for key in _PLAIN if key in first}
    flats = _add_optimizer(gathered, held, parts, optimizers.WholeNames(names, whole))
    uses = [FileUse(path, "tensors") for path in (*(place.path for place in places), *flats)]
    gathered.refused += [*_missing_ranks(first, places), *_refused(held), *_other_files(files, places, flats)]
    names_beside = [name for name in files.list("") if not (directory and name == directory) and not _RANK.fullmatch(name)]
    for name in names_beside:
        signal = name == LATEST
        reason = "the number of the newest checkpoint" if signal else directories.why_unused(files, name)
        uses.append(FileUse(name, "signal" if signal else "unused", reason))
    step = torch_values.integer(first, "iteration", places[0].path)
    return ForeignListing(
        KIND.name,
        gathered.tensors,
        tuple(uses),
        {group: held for group, held in gathered.documents.items() if held},
        (),
        (_NOTE, *gathered.notes),
        step,
        refused=tuple(gathered.refused),
        left_out=_all_left_out(pruned.values()),
    )


def _all_left_out(values: Iterable[PrunedValue]) -> tuple[PartLeftOut, ...]:
    """What was left out of the values of all ranks, once for each name."""
    found: dict[str, PartLeftOut] = {}
    for part in (part for value in values for part in value.left_out):
        known = found.get(part.what, part._replace(tensors=0, bytes=0))
        found[part.what] = known._replace(tensors=known.tensors + part.tensors, bytes=known.bytes + part.bytes)
    return tuple(found.values())


def _add_optimizer(
    gathered: GatheredListing, held: Mapping[RankFile, dict[str, Any]], parts: Parts, naming: optimizers.WholeNames
) -> list[str]:
    """Add the optimizer, if it is understood; else it is refused. Returns its own files."""
    flats = {place: f"{place.path.removesuffix(FILE)}{optimizers.FLAT}" for place in held}
    flats = {place: path for place, path in flats.items() if gathered.files.size(path) is not None}
    if all(value.get(optimizers.KEY) is None for value in held.values()):
        return []
    before = dict(gathered.tensors)
    try:
        states = {
            place: optimizers.read(
                gathered.files,
                optimizers.RankOptimizer(value.get(optimizers.KEY), place.path, flats.get(place)),
                parts[place],
            )
            for place, value in held.items()
        }
        for tensor in optimizers.tensors(states, naming):
            gathered.tensors[tensor.key] = tensor
        gathered.document(optimizer_state.GROUP, optimizer_state.KEY, optimizers.document(states, naming))
        place, value = next(iter(held.items()))
        scaler = value[optimizers.KEY].get(_SCALER)
        if scaler is not None:
            gathered.keep(gathered.json(scaler, ValuePlace(place.path, EXTRA, _SCALER)), EXTRA, _SCALER, _SCALER)
    except CheckpointError as error:
        gathered.take_back(before)
        gathered.refused.append(RefusedPart(optimizers.KEY, error, optimizer_state.GROUP))
        return []
    return list(flats.values())


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


def _places(files: Files, directory: str) -> list[RankFile]:
    """All ranks, by stage, then by tensor rank."""
    names = files.list(directory)
    apart = next((name for name in names if _EXPERTS.fullmatch(name)), None)
    if apart is not None:
        raise StateMismatch(f"{join(directory, apart)} is of expert parallelism", hint=TORCH_DIST, file=apart)
    found = [(match, join(directory, name)) for name in names if (match := _RANK.fullmatch(name))]
    places = sorted(
        (RankFile(int(match[1]), int(match[2] or 0), f"{path}/{FILE}") for match, path in found),
        key=lambda place: (place.stage, place.tensor),
    )
    ranks, stages = 1 + max(place.tensor for place in places), 1 + max(place.stage for place in places)
    if [(place.stage, place.tensor) for place in places] != [(s, t) for s in range(stages) for t in range(ranks)]:
        what = f"{directory or 'the directory'} has {len(places)} directories of ranks, not those of {ranks} × {stages}"
        raise StateMismatch(what, hint="copy all directories mp_rank_…", file=places[0].path)
    return places


def _missing_ranks(first: Mapping[str, Any], places: Sequence[RankFile]) -> Iterator[RefusedPart]:
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
        raise StateMismatch(f"{path} does not have the content that Megatron writes", hint=TORCH_DIST, file=path)
    return value


def _weights(value: Mapping[str, Any], path: str) -> Iterator[tuple[PartName, StoredArray]]:
    """A rank's tensors, in the order of its modules."""
    for chunk in _chunks(value):
        yield from ((PartName(chunk, name), one) for name, one in _flat(value[chunk], path))


def _chunks(keys: Iterable[Any]) -> list[str]:
    """The keys of the model's parts on interleaved stages, in their order."""
    found = {str(key): int(match[1] or 0) for key in keys if (match := _CHUNK.fullmatch(str(key)))}
    return sorted(found, key=found.__getitem__)


def _flat(value: Any, path: str, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, StoredArray]]:
    """The tensors of nested modules, by their whole names. Extra states of modules that are empty are nothing."""
    if not isinstance(value, dict) or depth > DEPTH_MAX:
        raise torch_values.mismatch(path, prefix, f"has {prefix or 'a model'!r}, which is no state dict", TORCH_DIST)
    for key, one in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if one is None or str(key).endswith(_EXTRA):
            continue
        if isinstance(one, PickledArray):
            yield name, one.stored(name)
        else:
            yield from _flat(one, path, name, depth + 1)


def _refused(held: Mapping[RankFile, dict[str, Any]]) -> Iterator[RefusedPart]:
    """What is beside the model and the optimizer and no plain value: random states."""
    known = (*_PLAIN, *_OBJECTS, "iteration", optimizers.KEY)
    seen: set[str] = set()
    for place, value in held.items():
        others = {str(key) for key, one in value.items() if one is not None and key not in known} - seen
        for key in sorted(key for key in others if not _CHUNK.fullmatch(key)):
            seen.add(key)
            what = f"has {key!r}, which an import of Megatron's rank files would drop"
            yield RefusedPart(key, torch_values.mismatch(place.path, key, what, _WAY_ON))


def _other_files(files: Files, places: Sequence[RankFile], known: Sequence[str]) -> Iterator[RefusedPart]:
    for place in places:
        directory = place.path.rpartition("/")[0]
        for name in files.list(directory):
            path = f"{directory}/{name}"
            if path != place.path and path not in known:
                error = StateMismatch(f"{path} holds more of the training", hint=_WAY_ON, file=path)
                yield RefusedPart(path, error, "")


KIND = ForeignKind("megatron-torch", IMPORT_KINDS["megatron-torch"], recognises, read)
