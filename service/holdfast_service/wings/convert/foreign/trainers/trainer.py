"""A directory `checkpoint-N` of the Hugging Face Trainer, of which training goes on.

Model or adapter, optimizer, scheduler, scaler and random states get the keys of `holdfast.integrations.transformers`, and
trainer_state.json is an asset, as that adapter has it. training_args.bin holds Python objects: it is not read.
"""

from __future__ import annotations

from typing import Any

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing, ForeignTensor
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import file_signs, hugging_face, peft_adapter, torch_weights
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.leaving_out import HidingFiles
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.trainers import beside, numbered_optimizers, signs
from holdfast_service.wings.convert.foreign.trainers.numbered_optimizers import HeldOptimizer
from holdfast_service.wings.convert.foreign.trainers.random_states import SavedStreams

ADAPTER_GROUP = "adapter_model"  # of an adapter that a Trainer trains
_OBJECTS = {signs.SCHEDULER: "scheduler", signs.SCALER: "scaler"}
_STREAMS = {"python", "numpy", "cpu", "cuda"}


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """Everything that the Trainer resumes from. Errors by file and key: `StateMismatch`, `CorruptManifest`."""
    step = file_signs.read_object(files, signs.TRAINER_STATE).get("global_step")
    if type(step) is not int or step < 0:
        raise CorruptManifest(f"{signs.TRAINER_STATE} has no global_step", file=signs.TRAINER_STATE)
    names = files.list("")
    random = [name for name in names if signs.RANDOM_OF_TRAINER.fullmatch(name)]
    own = [name for name in names if name in (signs.OPTIMIZER, *_OBJECTS) or name in random]
    listing = _weights(HidingFiles(files, own), options)
    gathered = GatheredListing(files)
    gathered.tensors.update(listing.tensors)
    if signs.OPTIMIZER in own:
        with beside.refusing(gathered, signs.OPTIMIZER):
            numbered_optimizers.collect(gathered, [HeldOptimizer(read_torch(files, signs.OPTIMIZER), signs.OPTIMIZER)])
    else:
        gathered.notes.append(f"there is no {signs.OPTIMIZER}: a Trainer can start from this checkpoint, but not resume")
    for name, key in _OBJECTS.items():
        if name in own:
            beside.keep(gathered, name, key)
    whole = beside.with_random_states(listing, gathered, beside.numbers(random), _streams)
    uses = [*listing.files, *(FileUse(name, "tensors" if name == signs.OPTIMIZER else "state") for name in own)]
    return whole._replace(kind=KIND.name, files=tuple(uses), step=step)


def _weights(files: Files, options: ReadOptions) -> ForeignListing:
    """The model, or the adapter under the group that a Trainer saves it in."""
    if peft_adapter.recognises(files):
        listing = peft_adapter.read(files, options)
        tensors = [_regrouped(tensor) for tensor in listing.tensors.values()]
        return listing._replace(tensors={tensor.key: tensor for tensor in tensors})
    if hugging_face.recognises(files):
        return hugging_face.read(files, options)
    if torch_weights.recognises_directory(files):
        return torch_weights.read_directory(files, options)
    raise StateMismatch(
        "there are no weights beside the Trainer's state", hint="copy model.safetensors or adapter_model.safetensors too"
    )


def _regrouped(tensor: ForeignTensor) -> ForeignTensor:
    spec = type(tensor.spec)(ADAPTER_GROUP, tensor.spec.name, tensor.spec.dtype, tensor.spec.shape)
    return tensor._replace(spec=spec)


def _streams(value: Any, file: str) -> SavedStreams:
    held = beside.mapping(value, file)
    return SavedStreams(held.get("python"), held.get("numpy"), held.get("cpu"), held.get("cuda", ()))


KIND = ForeignKind("trainer", IMPORT_KINDS["trainer"], signs.is_trainer, read)
