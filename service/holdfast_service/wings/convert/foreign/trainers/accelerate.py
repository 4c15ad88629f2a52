"""A directory of Accelerate's `save_state()`, with the keys of `holdfast.integrations.accelerate`.

Models are numbered from the second on (`model_1.safetensors`), and so are optimizers, schedulers and registered objects.
Accelerate keeps no position of a plain loader: as with its own files, a script skips the batches that it has seen.
"""

from __future__ import annotations

import re
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import hugging_face, torch_values
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing
from holdfast_service.wings.convert.foreign.hugging_face import TakenTensors
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.leaving_out import HidingFiles
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.trainers import beside, numbered_optimizers, signs
from holdfast_service.wings.convert.foreign.trainers.numbered_optimizers import HeldOptimizer
from holdfast_service.wings.convert.foreign.trainers.random_states import SavedStreams

KEY = "accelerate"
_SAFE = re.compile(r"model(_\d+)?\.safetensors")
_PICKLED = re.compile(r"pytorch_model(_\d+)?\.bin")
_OPTIMIZER = re.compile(r"optimizer(_\d+)?\.bin")
_OBJECTS = {  # by the key of each, and whether the first file has a number too
    "scheduler": re.compile(r"scheduler(_\d+)?\.bin"),
    "registered": re.compile(r"custom_checkpoint_\d+\.pkl"),
    "scaler": re.compile(r"scaler\.pt"),
}
_LOADERS = re.compile(r"(sampler|dl_state_dict)(_\d+)?\.bin")
_WRAPPERS = ("module.", "_orig_mod.")


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Everything that was prepared or registered. Errors by file and key: `StateMismatch`, `CorruptManifest`."""
    names = files.list("")
    models = _numbered(names, _SAFE) or _numbered(names, _PICKLED)
    if not models:
        raise StateMismatch(
            "there is neither model.safetensors nor pytorch_model.bin", hint="save_state() writes one of both: copy it too"
        )
    optimizers = _numbered(names, _OPTIMIZER)
    objects = {key: _numbered(names, pattern) for key, pattern in _OBJECTS.items()}
    random = _numbered(names, signs.RANDOM_OF_ACCELERATE)
    loaders = [name for name in names if _LOADERS.fullmatch(name)]
    gathered = GatheredListing(files)
    tensors = [tensor for number, file in models.items() for tensor in _model(files, file, number)]
    state = [*optimizers.values(), *(file for held in objects.values() for file in held.values()), *random.values()]
    weights = [FileUse(file, "tensors") for file in models.values()]
    view = HidingFiles(files, [*state, *loaders])
    listing = hugging_face.listed(KIND.name, view, TakenTensors(tuple(tensors), ()), weights)
    gathered.tensors.update(listing.tensors)
    steps = None
    with beside.refusing(gathered, *optimizers.values()):
        held = [HeldOptimizer(read_torch(files, file), file) for file in optimizers.values()]
        steps = numbered_optimizers.collect(gathered, held) if held else None
    for key, held_files in objects.items():
        for number, file in held_files.items():
            beside.keep(gathered, file, _key(key, number))
    counts = {"step": 0, **({} if steps is None else {"optimizer_steps": steps})}
    with beside.refusing(gathered, *random.values()):
        counted = beside.mapping(read_torch(files, random[0]), random[0]).get("step") if random else None
        counts["step"] = counted if type(counted) is int else 0
    gathered.document(beside.GROUP, KEY, dict(sorted(counts.items())))
    whole = beside.with_random_states(listing, gathered, random, _streams)
    uses = [*listing.files, *(FileUse(file, "tensors" if file in optimizers.values() else "state") for file in state)]
    uses += [FileUse(file, "unused", "the order of a loader, as Python objects: a script skips batches") for file in loaders]
    return whole._replace(files=tuple(uses), step=steps)


def _numbered(names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
    return beside.numbers([name for name in names if pattern.fullmatch(name)])


def _key(key: str, number: int) -> str:
    return key if number == 0 else f"{key}_{number}"


def _model(files: Files, file: str, number: int) -> list[ForeignTensor]:
    """A model's tensors, without the prefixes of wrappers that all of them have."""
    group = _key(hugging_face.GROUP, number)
    if file.endswith(".bin"):
        tensors = list(torch_values.state_dict(read_torch(files, file), file, group).whole())
    else:
        tensors = hugging_face.in_file(files, file, group)
    for prefix in _WRAPPERS:
        if tensors and all(tensor.spec.name.startswith(prefix) for tensor in tensors):
            tensors = [_renamed(tensor, tensor.spec.name.removeprefix(prefix)) for tensor in tensors]
    return tensors


def _renamed(tensor: ForeignTensor, name: str) -> ForeignTensor:
    spec = tensor.spec
    return tensor._replace(spec=TensorSpec(spec.group, name, spec.dtype, spec.shape))


def _streams(value: Any, file: str) -> SavedStreams:
    held = beside.mapping(value, file)
    numpy, torch = held.get("numpy_random_seed"), held.get("torch_manual_seed")
    return SavedStreams(held.get("random_state"), numpy, torch, held.get("torch_cuda_manual_seed", ()))


KIND = ForeignKind("accelerate", IMPORT_KINDS["accelerate"], signs.is_accelerate, read)
