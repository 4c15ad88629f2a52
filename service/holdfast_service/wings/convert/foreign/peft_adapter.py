"""A PEFT adapter: `adapter_model.safetensors` or `.bin` beside `adapter_config.json`."""

from __future__ import annotations

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import file_signs, hugging_face, quantisation, torch_values
from holdfast_service.wings.convert.foreign.hugging_face import TakenTensors
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.pruned_values import PrunedValue
from holdfast_service.wings.convert.foreign.trainers import signs

GROUP = "adapter"
CONFIG = "adapter_config.json"
SAFE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"


def recognises(files: Files) -> bool:
    """An adapter's directory, unless a Trainer's own state is in it."""
    found = files.size(CONFIG) is not None and any(files.size(name) is not None for name in (SAFE, PICKLED))
    return found and not signs.is_trainer(files)


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The adapter's tensors under PEFT's names, in group `adapter`; its configuration is an asset.

    Raises `StateMismatch` for other content, `CorruptManifest` for an unreadable configuration.
    """
    names = files.list("")
    _check_config(files)
    file = next((name for name in (SAFE, PICKLED) if files.size(name) is not None), None)
    if file is None:
        raise StateMismatch(f"there is neither {SAFE} nor {PICKLED}", file=SAFE)
    if file == SAFE:
        taken = hugging_face.as_bfloat16(hugging_face.in_file(files, file, GROUP), {}, options)
    else:
        pruned = PrunedValue(read_torch(files, file, opaque=True), options, file)
        read = torch_values.state_dict(pruned.value, file, GROUP)
        taken = TakenTensors(read.tensors, (), read.refused, pruned.left_out)
    if not taken.tensors:
        raise StateMismatch(f"{file} has no tensors", file=file)
    again = (
        [FileUse(PICKLED, "unused", f"a second copy of the adapter; {file} is read")]
        if PICKLED in names and file != PICKLED
        else []
    )
    taken = taken.noting(quantisation.notes(taken.tensors, {}, names, options))
    return hugging_face.listed(KIND.name, files, taken, [FileUse(file, "tensors")], again)


def _check_config(files: Files) -> None:
    if files.size(CONFIG) is None:
        raise StateMismatch(f"{CONFIG} is missing, which names the adapter's base model", file=CONFIG)
    config = file_signs.read_object(files, CONFIG)
    if not isinstance(config.get("peft_type"), str):
        raise CorruptManifest(f"{CONFIG} is not an adapter configuration: it has no peft_type", file=CONFIG)


KIND = ForeignKind("peft", IMPORT_KINDS["peft"], recognises, read)
