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

GROUP = "extra"
# What the adapter `holdfast.integrations.deepspeed` resumes from, and what only DeepSpeed could use.
ADAPTER, SCHEDULER, KEY = "deepspeed", "scheduler", "deepspeed_checkpoint"
_READ = {"module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_ABOUT = ("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version", "ds_config")
_NUMBERS = (bool, int, float)
_EMPTY = ("optimizer", "data_sampler", "random_ltd", "sparse_tensor_module_names")  # None or empty, unless a feature is used
_SCRIPTS = {"zero_to_fp32.py": "DeepSpeed's own script", "zero_to_torch.py": "DeepSpeed's own script"}
_WEIGHTS = re.compile(
    r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?|.*\.(safetensors|bin)\.index\.json"
)
_OTHER_STEP = re.compile(r"global_step\d+(_universal)?")
_RANDOM = re.compile(r"rng_state(_\d+)?\.pth|random_states_\d+\.pkl")


def documents(model: Mapping[str, Any], rank: ZeroRank, path: str) -> dict[str, dict[str, Any]]:
    """Schedule, counters and the caller's state as JSON, under the keys of our adapter; `StateMismatch` for a value that is
    not plain.
    """
    for key in _EMPTY:
        if model.get(key):
            raise torch_values.mismatch(path, key, f"has {key!r}, which Holdfast cannot import")
    scaler = rank.loss_scaler.state if rank.loss_scaler is not None else None
    numbers = {key: one for key, one in scaler.items() if type(one) in _NUMBERS} if isinstance(scaler, dict) else {}
    known = {*_READ, *_COUNTERS, *_ABOUT, *_EMPTY, "lr_scheduler"}
    own = {key: one for key, one in model.items() if key not in known}
    resumed = {
        "counters": {key: model[key] for key in _COUNTERS if key in model},
        "loss_scale": torch_values.plain(numbers, rank.path, "loss_scaler"),
        "tag": "",
        "client_state": torch_values.plain(own, path, "client_state"),
    }
    about = {key: torch_values.plain(model[key], path, key) for key in _ABOUT if key in model}
    made = {ADAPTER: resumed, KEY: json_values.ordered(about)}
    if model.get("lr_scheduler") is not None:
        made[SCHEDULER] = torch_values.plain(model["lr_scheduler"], path, "lr_scheduler")
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
