"""Exports a LoRA adapter for PaddleFormers, with its masters and its optimizer as a unified checkpoint has them.

PEFT's A is [r, in] and its B [out, r]; Paddle has both transposed, and names them without `.weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from holdfast_formats.dtypes import FLOATS
from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.committed_files import refuse_sub_byte
from holdfast_formats.mapping.listing import ForeignTensor, is_of_rank
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports.ordered_tensors import Arranged
from holdfast_service.wings.convert.exports.paddle import state as paddle_state
from holdfast_service.wings.convert.exports.paddle.state import KEPT, PaddleLayout, PaddleState, transposed
from holdfast_service.wings.convert.exports.paddle.trainer import FILES, trainer_files
from holdfast_service.wings.convert.exports.paddle.unified import training_files
from holdfast_service.wings.convert.exports.peft import CONFIG as PEFT_CONFIG
from holdfast_service.wings.convert.exports.peft import GROUPS
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    copied_assets,
    other_groups,
    small_file,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.safetensors_files import shard_set
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import renamed

NAME = "paddle-lora"
STEM, CONFIG = "peft_model", "lora_config.json"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"base_model\.model\.(.+\.lora_[AB])\.weight")
_BIAS = re.compile(r"base_model\.model\.(.+\.bias)")
_HINT = "export it with --as peft"
# Keys of PEFT that are translated, and those that do not change what the adapter computes.
_TRANSLATED = frozenset(
    {"r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "bias", "base_model_name_or_path"}
)
_HARMLESS = frozenset(
    {
        "peft_type",
        "task_type",
        "peft_version",
        "revision",
        "inference_mode",
        "auto_mapping",
        "init_lora_weights",
        "megatron_core",
        "runtime_config",
        "use_qalora",
        "qalora_group_size",
    }
)


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """The adapter with an index and lora_config.json, the sets of its training, and the checkpoint's small files.

    Raises `NoSuchResource` without an adapter or its configuration, `StateMismatch` for what Paddle's LoRA does not have.
    """
    if options.layout is not None or options.weights != "model" or options.program is not None or options.dtype is not None:
        raise InvalidRequest("an adapter is exported unchanged", hint="leave --layout, --weights, --dtype and --program out")
    group = next((group for group in GROUPS if source.group(group)), None)
    if group is None:
        raise NoSuchResource(
            f"the checkpoint has no adapter: no group {' or '.join(GROUPS)}",
            hint=f"groups: {', '.join(source.groups) or 'none'}",
        )
    if source.ties(group):
        raise StateMismatch(f"{min(source.ties(group))!r} is tied, which Paddle's LoRA does not know", hint=_HINT)
    arranged = _arranged(source, group)
    model = arranged.group("model")
    layout = PaddleLayout({}, made=True)
    masters, optimizer = paddle_state.training(source, arranged, layout)
    used = frozenset({group, optimizer_state.MASTER_GROUP, optimizer_state.GROUP})
    left_out = other_groups(source, used, "a directory of Paddle's LoRA holds only the adapter", KEPT)
    state = PaddleState(model, masters, optimizer, layout, (), (*left_out, *values_of_weights(source, frozenset({group}))))
    adapter = shard_set(STEM, model.values(), "pt", numbered=True)
    index = adapter.index_file(f"{STEM}.safetensors.index.json", {"type": "lora"})
    trainer = trainer_files(source, state)
    config = [] if CONFIG in source.assets else [small_file(CONFIG, _config(source, next(iter(model.values())).spec.dtype))]
    files = [*adapter.files, index, *training_files(state), *trainer.files, *config, *copied_assets(source, FILES)]
    return ExportPlan(tuple(files), trainer.notes, state.left_out)


def _arranged(source: ExportSource, group: str) -> Arranged:
    """The adapter as group `model` under Paddle's names, in its layout, and what belongs to its parameters."""
    held = {name: tensor for name, tensor in source.group(group).items() if not is_of_rank(name)}
    refuse_sub_byte(held)
    names = {name: _name(name) for name in held}
    names |= {f"{group}.{name}": new for name, new in names.items()}  # as a trainer's optimizer has them
    masters = {name: one for name, one in source.group(optimizer_state.MASTER_GROUP).items() if name in names}
    state = source.group(optimizer_state.GROUP)
    groups = {
        "model": _placed(held, names.__getitem__),
        optimizer_state.MASTER_GROUP: _placed(masters, names.__getitem__),
        optimizer_state.GROUP: _placed(state, lambda name: _state_name(name, names)),
    }
    return Arranged(groups, {name: (new,) for name, new in names.items()})


def _placed(tensors: Mapping[str, ForeignTensor], name_of: Callable[[str], str]) -> dict[str, MappedTensor]:
    placed: dict[str, MappedTensor] = {}
    for name, tensor in tensors.items():
        new, mapped = name_of(name), same(tensor)
        is_matrix = ".lora_" in new and len(tensor.spec.shape) == 2
        placed[new] = renamed(transposed(mapped) if is_matrix else mapped, tensor.spec.group, new)
    return placed


def _name(name: str) -> str:
    found = _MATRIX.fullmatch(name) or _BIAS.fullmatch(name)
    if found is None:
        raise StateMismatch(f"Paddle's LoRA has no tensor for {name!r}", hint=_HINT, tensor=name)
    return found[1]


def _state_name(name: str, names: Mapping[str, str]) -> str:
    owner, _, kind = name.rpartition("/")
    if owner not in names:
        raise StateMismatch(f"the optimizer has state for {name!r}, which is not the adapter's", hint=_HINT, tensor=name)
    return f"{names[owner]}/{kind}"


def _config(source: ExportSource, dtype: str) -> bytes:
    """PEFT's configuration as PaddleFormers reads it."""
    try:
        config = json.loads(source.read_asset(PEFT_CONFIG)) if PEFT_CONFIG in source.assets else None
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{PEFT_CONFIG} is no JSON: {error}", hint=_HINT, file=PEFT_CONFIG) from error
    if not isinstance(config, dict):
        raise NoSuchResource(
            f"the checkpoint has no {PEFT_CONFIG}, from which the adapter's rank and scale are taken",
            hint="pass it as an asset when you save: assets=holdfast.integrations.peft.adapter_config(model)",
        )
    for key, value in sorted(config.items()):
        if key not in _TRANSLATED | _HARMLESS and value not in (None, False, [], {}, ""):
            raise StateMismatch(f"{PEFT_CONFIG}: Paddle's LoRA has no {key} = {value!r}", hint=_HINT, file=PEFT_CONFIG)
    rank, targets, bias = config.get("r"), config.get("target_modules"), config.get("bias", "none")
    listed = [targets] if isinstance(targets, str) else [rf"(.*\.)?{re.escape(str(one))}" for one in sorted(targets or [])]
    if config.get("peft_type") != "LORA" or type(rank) is not int or not listed or bias not in ("none", "lora_only"):
        raise StateMismatch(f"{PEFT_CONFIG} is not that of a plain LoRA adapter", hint=_HINT, file=PEFT_CONFIG)
    made = {
        "base_model_name_or_path": config.get("base_model_name_or_path"),
        "dtype": FLOATS.get(dtype),
        "lora_alpha": config.get("lora_alpha", 8),
        "lora_dropout": config.get("lora_dropout", 0.0),
        "r": rank,
        "rslora": bool(config.get("use_rslora")),
        "target_modules": listed,
        "tensor_model_parallel_size": -1,
        "trainable_bias": "lora" if bias == "lora_only" else None,
    }
    return json.dumps(made, indent=2, sort_keys=True).encode() + b"\n"


KIND = ExportKind(NAME, EXPORT_KINDS[NAME], plan)
