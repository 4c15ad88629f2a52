"""Checkpoints of NeMo: an archive's files (`model_config.yaml` and weights), and the directories of NeMo 2.

model_weights.ckpt        a torch file with the model's state dict: group model, under its names
model_weights/, weights/  a torch_dist checkpoint of Megatron-core
context/                  of NeMo 2: configures the model
"""

from __future__ import annotations

import re

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse, ForeignListing
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import hugging_face, torch_values
from holdfast_service.wings.convert.foreign.dcp import directories
from holdfast_service.wings.convert.foreign.dcp import kinds as dcp
from holdfast_service.wings.convert.foreign.hugging_face import TakenTensors
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.pickles import read_torch
from holdfast_service.wings.convert.foreign.pruned_values import PrunedValue

CONFIG, FILE, DISTRIBUTED = "model_config.yaml", "model_weights.ckpt", "model_weights"
WEIGHTS, CONTEXT = "weights", "context"
GROUP = "model"
_RANK = re.compile(r"(tp_rank_\d+_pp_rank_\d+|mp_rank_\d+)")
_ONE_RANK = (
    "divide it for one rank with NeMo: megatron_change_num_partitions.py --target_tensor_model_parallel_size=1 "
    "--target_pipeline_model_parallel_size=1"
)
_AGAIN = "save it again with NeMo: model.save_to('model.nemo'), with dist_ckpt_format: torch_dist in its configuration"


def recognises(files: Files) -> bool:
    """A directory of NeMo 2, or what an archive holds, packed or not."""
    if dcp.backend(files, WEIGHTS) is not None:
        return True
    names = files.list("")
    return CONFIG in names and any(name in (FILE, DISTRIBUTED) or _RANK.fullmatch(name) for name in names)


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The model's weights, and of NeMo 2 the optimizer; configuration and tokenizers as assets.

    Errors by key and file: `StateMismatch`, `NotCommitted`, `CorruptManifest`.
    """
    names = files.list("")
    if CONFIG not in names:
        context = {path: _of_context(path) for path in directories.walk(files) if path.startswith(f"{CONTEXT}/")}
        return dcp.read_torch_dist(files, options, KIND.name, WEIGHTS, _AGAIN, context)
    rank = next((name for name in names if _RANK.fullmatch(name)), None)
    if rank is not None:
        raise StateMismatch(f"{rank} holds one rank's part of the weights", hint=_ONE_RANK, file=rank)
    if DISTRIBUTED in names:
        return dcp.read_torch_dist(files, options, KIND.name, DISTRIBUTED, _AGAIN)
    if FILE not in names:
        raise StateMismatch(f"it has neither {FILE} nor {DISTRIBUTED}/", hint=_AGAIN, file=FILE)
    pruned = PrunedValue(read_torch(files, FILE, opaque=True), options, FILE)
    held = torch_values.state_dict(pruned.value, FILE, GROUP)
    taken = TakenTensors(held.tensors, (), held.refused, pruned.left_out)
    return hugging_face.listed(KIND.name, files, taken, [FileUse(FILE, "tensors")])


def _of_context(path: str) -> FileUse:
    return FileUse(path, "unused", "it configures NeMo and is not training state")


KIND = ForeignKind("nemo", IMPORT_KINDS["nemo"], recognises, read)
