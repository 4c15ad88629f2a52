"""The rest of a DeepSpeed checkpoint: schedules, counters, the caller's own state; and its other files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import FileUse
from holdfast_service.wings.convert.foreign import directories, hugging_face, json_values, torch_values
from holdfast_service.wings.convert.foreign.deepspeed.files import LATEST, LATEST_UNIVERSAL, ZeroFiles, refused
from holdfast_service.wings.convert.foreign.deepspeed.optimizer import ZeroRank
from holdfast_service.wings.convert.foreign.pickles import PickledGlobal

GROUP = "extra"
# DeepSpeed's own counters, schedule and loss scale. A torch scheduler or scaler would take these for its own, and go on
# from the beginning without a word; so they are not under keys that a trainer has.
KEY = "deepspeed_checkpoint"
_OF_TORCH = {"last_epoch", "_step_count"}  # what the state of any torch scheduler has
_READ = {"module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version", "ds_config")
_MORE_COUNTERS = ("checkpoint_parallel_dimensions",)
_EMPTY = ("optimizer", "data_sampler", "random_ltd", "sparse_tensor_module_names")  # None or empty, unless a feature is used
_SCRIPTS = {"zero_to_fp32.py": "DeepSpeed's own script", "zero_to_torch.py": "DeepSpeed's own script"}
_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|.*\.(safetensors|bin)\.index\.json"
)
_OTHER_STEP = re.compile(r"global_step\d+(_universal)?")
_RANDOM = re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl")


def documents(model: Mapping[str, Any], rank: ZeroRank, path: str) -> dict[str, dict[str, Any]]:
    """Schedules, counters and the caller's state as JSON; `StateMismatch` for a value that is not plain."""
    made: dict[str, Any] = {}
    counters = {key: model[key] for key in (*_COUNTERS, *_MORE_COUNTERS) if key in model}
    schedule = model.get("lr_scheduler")
    if isinstance(schedule, dict) and schedule.keys() >= _OF_TORCH:
        made["lr_scheduler"] = torch_values.plain(schedule, path, "lr_scheduler")
    elif schedule is not None:
        counters["lr_scheduler"] = schedule
    theirs = {key: torch_values.plain(one, path, key) for key, one in counters.items()}
    if rank.loss_scaler is not None and isinstance(rank.loss_scaler.state, dict):
        kept = {key: one.name if isinstance(one, PickledGlobal) else one for key, one in rank.loss_scaler.state.items()}
        theirs["loss_scaler"] = torch_values.plain(kept, rank.path, "loss_scaler")
    made[KEY] = json_values.ordered(theirs)
    for key in _EMPTY:
        if model.get(key):
            raise torch_values.mismatch(path, key, f"has {key!r}, which Holdfast cannot import")
    own = {key: one for key, one in model.items() if key not in (*_READ, *counters, *_EMPTY, "lr_scheduler")}
    if own:
        made["client_state"] = torch_values.plain(own, path, "client_state")
    return {GROUP: made}


def uses(files: Files, held: ZeroFiles, universal: Sequence[FileUse] = ()) -> tuple[tuple[FileUse, ...], tuple[str, ...]]:
    """The use of every file, and copied ones; those of a `universal` checkpoint are known. `StateMismatch` for a file that
    may hold more of the training.
    """
    listed = [*universal] or [FileUse(held.path(name), "tensors") for name in (*held.models, *held.optimizers)]
    own = {use.file.partition("/")[0] for use in listed} if not held.directory else {held.directory}
    names = [name for name in files.list("") if name not in own]
    assets = hugging_face.assets_of(files, [name for name in names if _plain(name)])
    for name in names:
        if name in assets:
            listed.append(FileUse(name, "asset"))
        elif name in (LATEST, LATEST_UNIVERSAL):
            listed.append(FileUse(name, "signal", "the name of the newest checkpoint"))
        elif name in _SCRIPTS or name == "training_args.bin":
            listed.append(FileUse(name, "unused", _SCRIPTS.get(name, "the arguments of a trainer, as Python objects")))
        elif _OTHER_STEP.fullmatch(name) and files.size(name) is None:
            listed.append(FileUse(name, "unused", "a separate checkpoint; import its directory separately"))
        elif _WEIGHTS.fullmatch(name):
            listed.append(FileUse(name, "unused", "a second copy of the weights; those in DeepSpeed's own files are read"))
        elif _RANDOM.fullmatch(name):
            listed.append(FileUse(name, "unused", "random number states of the ranks, as Python objects"))
        elif files.size(name) is None:
            listed.append(FileUse(name, "unused", directories.why_unused(files, name)))
        else:
            raise refused(
                name, "is not known in this kind of checkpoint", "move it out of the directory if it does not belong there"
            )
    return tuple(listed), assets


def _plain(name: str) -> bool:
    """Whether a file can be copied without interpreting it."""
    known = name in (LATEST, LATEST_UNIVERSAL, *_SCRIPTS)
    return not (known or name.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".index.json")))
