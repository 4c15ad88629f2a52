"""LoRA adapters of PaddleNLP and PaddleFormers, listed in group `adapter` under PEFT's names.

Paddle's A is [in, r] and B [r, out], whatever layout the file states; PEFT has both transposed. Masters and optimizer are
sets as those of a unified checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_service.wings.convert.foreign import sixteen_bits
from holdfast_service.wings.convert.foreign.kinds import ForeignKind
from holdfast_service.wings.convert.foreign.paddle import unused_files
from holdfast_service.wings.convert.foreign.paddle.gathering import Gathering, read_json, renamed
from holdfast_service.wings.convert.foreign.paddle.pickled_dicts import read_dict, refuse_rest
from holdfast_service.wings.convert.foreign.paddle.safetensors_sets import FileSet, find_set, is_of_set
from holdfast_service.wings.convert.foreign.paddle.transposition import turned
from holdfast_service.wings.convert.foreign.paddle.unified import MASTERS, OPTIMIZER, UnifiedReader

NAME = "paddle-lora"
CONFIG = "lora_config.json"
PICKLE = "lora_model_state.pdparams"
PEFT_CONFIG = "adapter_config.json"  # the key of its document in group `adapter`
_STEM = "peft_model"
# Keys translated for PEFT, and keys that do not affect how the adapter is added: training, and its division among ranks.
_UNDERSTOOD = frozenset(
    {
        "r",
        "lora_alpha",
        "lora_dropout",
        "rslora",
        "scaling",
        "target_modules",
        "trainable_bias",
        "base_model_name_or_path",
        "dtype",
        "head_dim",
        "lora_plus_scale",
        "merge_weights",
        "tensor_model_parallel_size",
        "tensor_parallel_degree",
    }
)
_PREFIX = "base_model.model."


def recognises(files: Files) -> bool:
    names = files.list("")
    return any(is_of_set(name, _STEM) for name in names) or PICKLE in names


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The listing of an adapter; `StateMismatch` and `CorruptManifest` by key and file."""
    names = files.list("")
    if CONFIG not in names:
        raise StateMismatch(f"{CONFIG}, which contains the adapter's rank and scale, is missing", file=CONFIG)
    config = read_json(files, CONFIG)
    sets = {stem: find_set(files, names, stem, options.int16) for stem in (_STEM, MASTERS, OPTIMIZER)}
    kinds = {_STEM: "model", MASTERS: "master", OPTIMIZER: "optimizer"}
    writers = max(held.writers for held in sets.values())
    unused_files.check_signals(names, writers, [kinds[stem] for stem, held in sets.items() if held.arrays])
    gathering = Gathering(files, options)
    used = {file for held in sets.values() for file in held.used}
    reader = UnifiedReader(gathering, options)
    if PICKLE in names:
        saved = read_dict(files, PICKLE)
        refuse_rest(PICKLE, saved.rest)
        used.add(PICKLE)
        for key, tensor in saved.tensors.items():
            gathering.shapes[key] = tensor.shape
            gathering.weight(tensor.tensor("model", key), key)
    if (dtype := sets[_STEM].numpy_bits) is not None:
        gathering.notes.append(sixteen_bits.note(dtype))
    reader.weights(_in_paddle(sets[_STEM]), "model")
    reader.weights(sets[MASTERS], "master")
    reader.optimizer(sets[OPTIMIZER])
    gathering.convert(lambda tensor: _of_peft(tensor, options))
    listing = gathering.listing(NAME, names, sorted(used))
    made = {} if options.as_is or PEFT_CONFIG in names else {PEFT_CONFIG: _peft_config(config)}
    return listing._replace(made_assets={**listing.made_assets, **made})


def _in_paddle(held: FileSet) -> FileSet:
    """The set in its actual layout, not the one that the files state."""
    return held._replace(formats=dict.fromkeys(held.formats, "np"))


def _of_peft(tensor: ForeignTensor, options: ReadOptions) -> ForeignTensor:
    group = "adapter" if tensor.spec.group == "model" else tensor.spec.group
    if options.as_is:
        return renamed(tensor, group, tensor.spec.name)
    owner, slash, kind = tensor.spec.name.partition("/")
    name = f"{_PREFIX}{owner}"
    if owner.endswith((".lora_A", ".lora_B")):
        name += ".weight"
        if len(tensor.spec.shape) != (0 if kind == "step" else 2):
            text = f"{tensor.spec.name!r} has shape {list(tensor.spec.shape)}, which is not an adapter weight's"
            raise StateMismatch(text, tensor=tensor.spec.name)
        tensor = turned(tensor) if kind != "step" else tensor
    elif not owner.endswith(".bias"):
        raise StateMismatch(
            f"{tensor.spec.name!r} is not lora_A, lora_B or a bias of a layer, and has no PEFT name",
            hint="import it under its own name with --as-is",
            tensor=tensor.spec.name,
        )
    return renamed(tensor, group, name + slash + kind)


def _peft_config(config: Mapping[str, Any]) -> bytes:
    """Paddle's configuration as PEFT reads it. `StateMismatch` for settings that PEFT lacks."""
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise StateMismatch(
            f"{CONFIG}: r is {rank!r} and lora_alpha is {alpha!r}; both must be positive numbers", file=CONFIG
        )
    expressions = [targets] if isinstance(targets, str) else targets
    if not isinstance(expressions, list) or not all(isinstance(one, str) for one in expressions):
        raise StateMismatch(f"{CONFIG}: target_modules is {targets!r} instead of regular expressions", file=CONFIG)
    for key, value in config.items():
        if key not in _UNDERSTOOD and value not in (None, False, [], {}):
            raise StateMismatch(
                f"{CONFIG}: PEFT's LoRA has no equivalent of {key} = {value!r}",
                hint="import the adapter without a PEFT configuration with --as-is",
                file=CONFIG,
            )
    scale = alpha / (math.sqrt(rank) if config.get("rslora") else rank)
    if not math.isclose(config.get("scaling") or scale, scale, rel_tol=1e-6):
        raise StateMismatch(f"{CONFIG}: scaling is {config['scaling']!r}, but r and lora_alpha give {scale:g}", file=CONFIG)
    made = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("base_model_name_or_path"),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": config.get("lora_dropout") or 0.0,
        "use_rslora": bool(config.get("rslora")),
        "target_modules": "|".join(f"(?:{one})" for one in expressions),
        "bias": "lora_only" if config.get("trainable_bias") else "none",
        "inference_mode": True,
    }
    return json.dumps(made, indent=2).encode() + b"\n"


KIND = ForeignKind(NAME, IMPORT_KINDS[NAME], recognises, read)
