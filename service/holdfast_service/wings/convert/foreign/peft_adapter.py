"""A PEFT adapter: `adapter_model.safetensors` or `.bin` beside `adapter_config.json`."""

from __future__ import annotations

import json
from typing import Any

from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import hugging_face, hugging_face_names, torch_values
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.pickles import read_torch

GROUP = "adapter"
CONFIG = "adapter_config.json"
CONFIG_BYTES_MAX = 2**24
SAFE, PICKLED = "adapter_model.safetensors", "adapter_model.bin"


def recognises(files: Files) -> bool:
    return files.size(CONFIG) is not None and any(files.size(name) is not None for name in (SAFE, PICKLED))


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
        tensors, notes = hugging_face.as_bfloat16(hugging_face.in_file(files, file, GROUP), {}, options)
    else:
        tensors, notes = tuple(torch_values.state_dict(read_torch(files, file), file, GROUP)), ()
    if not tensors:
        raise StateMismatch(f"{file} has no tensors", file=file)
    hugging_face_names.check_tensors([(tensor.spec, file) for tensor in tensors], {})
    twice = [name for name in (PICKLED,) if name in names and name != file]
    copies = hugging_face_names.check_names(names, {file, *twice})
    assets = hugging_face.assets_of(files, [name for name in names if name != file])
    uses = [FileUse(file, "tensors"), *copies, *(FileUse(name, "asset") for name in assets)]
    uses += [FileUse(name, "unused", f"the adapter once more; {file} is read") for name in twice]
    known = {use.file for use in uses}
    uses += [FileUse(name, "unused", hugging_face.why_unused(files, name)) for name in names if name not in known]
    return ForeignListing(KIND.name, {tensor.key: tensor for tensor in tensors}, tuple(uses), assets=assets, notes=notes)


def _check_config(files: Files) -> None:
    size = files.size(CONFIG)
    if size is None:
        raise StateMismatch(f"there is no {CONFIG}, without which the base model of the adapter is unknown", file=CONFIG)
    try:
        config: Any = json.loads(files.read(CONFIG, 0, CONFIG_BYTES_MAX + 1)) if size <= CONFIG_BYTES_MAX else None
    except (ValueError, RecursionError) as error:
        raise CorruptManifest(f"cannot read {CONFIG}: {error}", file=CONFIG) from error
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise CorruptManifest(f"{CONFIG} is no configuration of an adapter: it has no peft_type", file=CONFIG)


KIND = ForeignKind("peft", IMPORT_KINDS["peft"], recognises, read)
