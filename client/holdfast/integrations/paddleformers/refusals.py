"""Refuses features of a Trainer that this adapter does not support, before anything is staged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.integrations.paddle import adapters
from holdfast.integrations.paddleformers.library import Library
from holdfast.integrations.trainers.options import check_limits
from holdfast_formats.errors import InvalidRequest

# Arguments of PaddleFormers 1.2.0 and PaddleNLP 3.0.0b4 that would have no effect, or another one, and what to do instead.
_REFUSED = {
    "enable_auto_parallel": "train with fleet's layers, or a loop of your own",
    "enable_zero_cost_checkpoint": "leave it out: saves by Holdfast are asynchronous, on every device",
    "flash_device_save_steps": "leave it out and lower save_steps: the newest checkpoint stays in shared memory",
    "pdc_download_ckpt": "leave it out: the Trainer resumes from the run, and its daemon reads other nodes",
    "ignore_load_lr_and_optim": "export the weights with `holdfast export --as hf`, and begin another run with them",
    "sharded_model_from_ema": "the average is the group ema of each checkpoint: `holdfast export --as hf --weights ema`",
    "auto_parallel_resume_form_hybrid_parallel": "import the checkpoint with `holdfast import`",
    "offload_optim": "leave it out: state that moves between devices is not supported",
    "tensorwise_offload_optimizer": "leave it out: state that moves between devices is not supported",
    "using_sonic_moe": "its callback turns weights when a training begins: train without it",
    "zcc_ema_loss_threshold": "leave it out; loops of your own have Ema(loss_above=…)",
}
_LOOP = "train in a loop of your own: attach(model, optimizer, run) takes what fleet's ranks hold"
# Forms of parallelism that no test has shown.
_DEGREES = ("sep_parallel_size", "context_parallel_size", "expert_model_parallel_size")
# Forms of which each was tested alone.
_COMBINED = (
    "data_parallel_size",
    "sharding_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
# Options of several ranks that let weights change after a step has ended, or keep state where it cannot be placed.
_LEFT, _LATE = "leave it False", "leave it False: weights would arrive from other ranks while a save copies them"
_OPTIONS = {
    "stage1_broadcast_overlap": _LATE,
    "stage1_allgather_overlap": _LATE,
    "stage2_overlap": _LATE,
    "stage1_tensor_fusion": "use split_param, whose buffers are supported",
    "stage1_overlap": "leave it False, or use it with split_param",
    "pp_sharding_comm_overlap": _LEFT,
    "use_dualpipev": _LEFT,
}
# Words of unified_checkpoint_config, and arguments, of which nothing remains to be done.
_REPLACED = {
    "async_save": "saves are asynchronous, and durable",
    "skip_save_model_weight": "weights are saved too",
    "master_weight_compatible": "masters are saved and restored; `holdfast import` reads checkpoints without them",
    "remove_master_weight": "masters are saved; retention can make older checkpoints compact",
    "enable_all_options": "masters and weights are saved, asynchronously",
}
_UNUSED = {"use_async_save": False, "ordered_save_group_size": 0, "optim_shard_num": 1, "replicate_saved_into_local": False}
# What a subclass may add to a checkpoint there, and would miss in the next start: these are not called.
_NOT_CALLED = ("_save", "save_model", "_save_flex_model_state", "_save_flex_optimizer_state", "_load_scheduler")


def check(trainer: Any, library: Library, options: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` with the name of what is not supported, and what to do instead."""
    args = trainer.args
    if args.world_size > 1 and library.is_paddlenlp:
        raise InvalidRequest(f"the Trainer of {library.name} in {args.world_size} ranks is not supported", hint=_LOOP)
    if args.world_size > 1:
        _check_ranks(trainer)
    for name, hint in _REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise InvalidRequest(f"{name}={value!r} cannot be used with Holdfast", hint=hint)
    if getattr(args, "ckpt_quant_stage", "O0") != "O0":
        raise InvalidRequest(
            f"ckpt_quant_stage={args.ckpt_quant_stage!r}: optimizer state is saved as it is",
            hint="leave it out; `holdfast retention` makes checkpoints compact some time after they were saved",
        )
    if getattr(args, "zcc_save_ema_coef", None) and adapters.adapter_of(trainer.model) is not None:
        raise InvalidRequest(
            f"zcc_save_ema_coef={args.zcc_save_ema_coef}: the average of an adapter is not kept", hint="leave it out"
        )
    _check_overrides(trainer)
    check_limits(args, options)


def replaced(trainer: Any) -> list[str]:
    """Sentences about arguments that Holdfast's saves take the place of, and what is saved of a model with LoRA."""
    args = trainer.args
    words = list(args.unified_checkpoint_config or ())
    found = [f"unified_checkpoint_config {word}: {_REPLACED[word]}" for word in words if word in _REPLACED]
    given = {name: getattr(args, name, default) for name, default in _UNUSED.items()}
    unused = [f"{name}={value!r}" for name, value in given.items() if value != _UNUSED[name]]
    if unused:
        found.append(f"{', '.join(unused)}: each rank writes its own part into its daemon's memory, without waiting")
    if not getattr(args, "save_rng_states", True):
        found.append("save_rng_states=False: random streams are saved all the same, since resuming needs them")
    several = {name: getattr(args, name, 1) for name in _COMBINED}
    combined = [f"{name}={size}" for name, size in several.items() if size > 1]
    if len(combined) > 1:
        found.append(f"{' and '.join(combined)}: Holdfast was tested with each of them, and not with several at once")
    return [*found, *_of_adapter(trainer.model)]


def _of_adapter(model: Any) -> list[str]:
    """What is saved of a model with LoRA, and what is not."""
    if not adapters.is_lora(model):
        return []
    adapter, unlike = adapters.adapter_of(model), adapters.unlike_peft(model)
    if adapter is None:
        return [f"{unlike}: PEFT has no such adapters, so the base model is saved with it, in Paddle's names"]
    found = ["the adapter alone is saved, as PEFT has it: begin every start with the same base model"]
    if adapter.fused:
        found.append(f"PEFT cannot load the adapter: its base model has no {adapter.fused[0]}, which Paddle has fused")
    return found


def _check_ranks(trainer: Any) -> None:
    """Data, tensor and pipeline parallelism and all stages of sharding are supported."""
    args = trainer.args
    for name in _DEGREES:
        if getattr(args, name, 1) > 1:
            raise InvalidRequest(f"{name}={getattr(args, name)} of a Trainer is not supported yet", hint=_LOOP)
    stages = [str(getattr(one, "value", one)) for one in args.sharding]
    if "offload" in stages:
        raise InvalidRequest(
            f"sharding={' '.join(stages)!r} of a Trainer is not supported", hint="leave the optimizer on its device"
        )
    for name, hint in _OPTIONS.items():
        if getattr(args, name, False) and not (name == "stage1_overlap" and args.split_param):
            raise InvalidRequest(f"{name}={getattr(args, name)!r} cannot be used with Holdfast in several ranks", hint=hint)
    parts = "stage3" in stages or max(args.tensor_model_parallel_size, args.pipeline_model_parallel_size) > 1
    if parts and adapters.is_lora(trainer.model):
        raise InvalidRequest(
            "a model with LoRA is not supported under stage 3 of sharding, tensor parallelism or in a pipeline",
            hint="train it with data parallelism, or stages 1 and 2 of sharding",
        )
    if "sharding_io" in (args.save_checkpoint_format, args.load_checkpoint_format):
        raise InvalidRequest(
            "the checkpoint format 'sharding_io' of a Trainer in several ranks is not supported",
            hint="leave save_checkpoint_format and load_checkpoint_format out",
        )
    if args.zcc_save_ema_coef:
        raise InvalidRequest(
            f"zcc_save_ema_coef={args.zcc_save_ema_coef} of a Trainer in several ranks is not supported yet", hint=_LOOP
        )


def _check_overrides(trainer: Any) -> None:
    for name in _NOT_CALLED:
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), object)
        own = owner.__module__.partition(".")[0] not in ("paddleformers", "paddlenlp", "holdfast")
        if name in vars(trainer) or (own and owner is not object):
            raise InvalidRequest(
                f"{type(trainer).__name__} overrides {name}(), which Holdfast does not call: files that it writes "
                "would be missing from every checkpoint",
                hint="keep that state in the model; pass files that do not change as assets=",
            )
