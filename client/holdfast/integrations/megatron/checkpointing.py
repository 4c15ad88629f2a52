"""Megatron-LM's `save_checkpoint` and `load_checkpoint`, with its signatures, on Holdfast."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.integrations.megatron.checkpoints import MegatronCheckpoints, RestoredPart
from holdfast.integrations.megatron.names import HuggingFaceNames, MegatronNames, Names
from holdfast.tickets import SaveTicket
from holdfast_formats.errors import InvalidRequest, NoSuchCheckpoint, StateMismatch

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from holdfast.checkpointer_options import Options

log = logging.getLogger(__name__)

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
ARCHITECTURE = ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "position_embedding_type")
PRETRAINED = "pretrained_checkpoint"
TRACKER = "latest_checkpointed_iteration.txt"  # in a directory that Megatron has saved to


class _Settings(NamedTuple):
    run: str | None
    args: Any
    names: Names
    options: Options


_settings = _Settings(None, None, MegatronNames(), {})
_open: dict[tuple[str, str], MegatronCheckpoints] = {}  # by place and run


def configure(run: str | None = None, *, args: Any = None, huggingface: Any = None, **options: Unpack[Options]) -> None:
    """Set what Megatron's arguments do not cover. Call it before the first save or load, if at all.

    `run` replaces the run of --save, and of --load unless that is another directory. `args` are Megatron's arguments,
    for programs without `megatron.training`. With `huggingface`, a transformers config, tensors are stored under the
    names of its architecture, and it is config.json of every checkpoint. The others are options of `Checkpointer`;
    without `at=`, the daemon serves the parent directory of --save.
    """
    global _settings
    if _open:
        raise InvalidRequest(
            "configure() was called after a checkpoint was saved or loaded",
            hint="call configure() before the first save or load",
        )
    names: Names = MegatronNames()
    if huggingface is not None:
        names = HuggingFaceNames(huggingface)
        given = options.get("assets")
        more = given if isinstance(given, list | tuple) else [] if given is None else [given]
        config = {"config.json": dict(huggingface)} if isinstance(huggingface, dict) else huggingface
        options["assets"] = [config, *more]
    _settings = _Settings(run, args, names, options)


def save_checkpoint(  # noqa: PLR0913 - Megatron-LM's signature
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any = None,
    pipeline_rank: int | None = None,
    expert_rank: int | None = None,
    tensor_rank: int | None = None,
    pipeline_parallel: bool | None = None,
    expert_parallel: bool | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: Callable[..., Any] | None = None,
    release: bool = False,
    **groups: Any,
) -> SaveTicket:
    """Save everything at `iteration` to the directory --save, on every rank, and return at once.

    Model, optimizer and scheduler are those that Megatron-LM passes. Process groups are those of `parallel_state`. What it
    would do to the common part of its own format (`preprocess_common_state_dict_fn`) has no counterpart. Raises what
    `Checkpointer.save` raises, and `InvalidRequest` for what cannot be stored.
    """
    args = _arguments()
    _check_groups(groups)
    ranks = {"pipeline_rank": pipeline_rank, "expert_rank": expert_rank, "tensor_rank": tensor_rank}
    _refuse({name: value for name, value in ranks.items() if value is not None}, "Holdfast uses the ranks of parallel_state")
    _refuse({"release": release or None}, "a checkpoint holds the whole training state: export one with `holdfast export`")
    _refuse({"non_persistent_ckpt": non_persistent_ckpt or None}, "save more often instead, and keep fewer: keep_last=")
    if getattr(args, "dataloader_save", None):
        raise InvalidRequest(
            "--dataloader-save would store the position of the data loader in its own files",
            hint="leave it out: consumed samples are stored; an Energon loader's position is not supported",
        )
    _refuse_rerun(train_data_iterator)
    progress = {
        "iteration": int(iteration),
        "floating_point_operations": _number(num_floating_point_operations_so_far),
        **{name: int(getattr(args, name, 0) or 0) for name in COUNTERS},
        "architecture": {name: _plain(getattr(args, name, None)) for name in ARCHITECTURE},
    }
    checkpoints = _checkpoints(getattr(args, "save", None), "save", model, optimizer, opt_param_scheduler)
    kept = ("model", "extra") if getattr(args, "no_save_optim", False) else None
    return checkpoints.save(int(iteration), progress, groups=kept)


def load_checkpoint(  # noqa: PLR0913 - Megatron-LM's signature
    ddp_model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: Any = None,
    skip_load_to_model_and_opt: bool = False,
    **groups: Any,
) -> tuple[int, float]:
    """Restore the newest checkpoint of the directory --load, or --ckpt-step, on every rank.

    Returns the iteration and the floating point operations so far; (0, 0) if there is no checkpoint. --finetune,
    --no-load-optim and --no-load-rng mean what they mean in Megatron-LM. A directory that Megatron-LM wrote itself is loaded
    by Megatron-LM. A run that another program saved is loaded with `strict=False`, or --finetune: weights and optimizer,
    under the same names, without counters. Raises what `Checkpointer.restore` raises; `NoSuchCheckpoint` with
    --exit-on-missing-checkpoint.
    """
    args = _arguments()
    _check_groups(groups)
    _refuse({"skip_load_to_model_and_opt": skip_load_to_model_and_opt or None}, "torch's FSDP2 in Megatron is not supported")
    place, pretrained = getattr(args, load_arg, None), getattr(args, PRETRAINED, None) if load_arg != PRETRAINED else None
    if place is None and pretrained is not None and _settings.run is None:
        return _pretrained(args, ddp_model, optimizer, opt_param_scheduler, strict)
    if place is not None and _of_megatron(Path(place)):
        return _loaded_by_megatron(ddp_model, optimizer, opt_param_scheduler, load_arg, strict)
    checkpoints = _checkpoints(place, load_arg, ddp_model, optimizer, opt_param_scheduler)
    step = getattr(args, "ckpt_step", None)
    finetune = bool(getattr(args, "finetune", False))
    peeked = checkpoints.peek(step, foreign=finetune or not strict)
    if peeked is None:
        if pretrained is not None:
            return _pretrained(args, ddp_model, optimizer, opt_param_scheduler, strict)
        if getattr(args, "exit_on_missing_checkpoint", False):
            raise NoSuchCheckpoint(f"--{load_arg} {place} has no checkpoint, but one is required")
        return 0, 0
    saved = peeked[1]
    if saved is None:
        return _foreign(checkpoints, peeked[0], args, place)
    if not finetune:
        _check_architecture(args, saved)
    restored = checkpoints.restore(step, saved, _part(args, finetune, strict))
    if not finetune and restored != peeked[0]:  # a damaged step was passed over, or one without an optimizer
        saved = checkpoints.progress
    _forget_other(checkpoints, place, args)
    if finetune:
        return 0, saved["floating_point_operations"]
    for name in COUNTERS:
        setattr(args, name, saved[name])
    _update_microbatches(saved["consumed_train_samples"])
    return int(saved["iteration"]), saved["floating_point_operations"]


def close() -> None:
    """Complete every save, and disconnect from the daemon. Raises the error of a save that was not reported yet."""
    while _open:
        _open.popitem()[1].checkpointer.close()


def _pretrained(args: Any, *about: Any) -> tuple[int, float]:
    """The weights of --pretrained-checkpoint, which Megatron-LM loads if there is nothing else."""
    args.finetune = args.exit_on_missing_checkpoint = True
    model, optimizer, scheduler, strict = about
    return load_checkpoint(model, optimizer, scheduler, PRETRAINED, strict)


def _part(args: Any, finetune: bool, strict: bool) -> RestoredPart:
    if finetune:
        return RestoredPart(groups=("model",), strict=strict, masters="from-model")
    streams = not getattr(args, "no_load_rng", False)
    if getattr(args, "no_load_optim", False):
        left = ("extra/scheduler", "extra/scheduler/*", "extra/scaler", "extra/scaler/*")
        return RestoredPart(("model", "extra"), left, streams, strict, "from-model")
    return RestoredPart(streams=streams, strict=strict)


def _arguments() -> Any:
    if _settings.args is not None:
        return _settings.args
    try:
        from megatron.training import get_args
    except ImportError:
        raise InvalidRequest(
            "Megatron's arguments are unknown: megatron.training is not installed",
            hint="pass them to holdfast.integrations.megatron.configure(args=…): an object with save, load and so on",
        ) from None
    return get_args()


def _checkpoints(
    place: str | PathLike[str] | None, option: str, model: Sequence[Any], optimizer: Any, scheduler: Any
) -> MegatronCheckpoints:
    if place is None and _settings.run is None:
        raise InvalidRequest(f"--{option} is missing, so the checkpoints' location is unknown", hint=f"--{option} ROOT/RUN")
    at, run = _place(place, option)
    known = _open.get((str(at), str(run)))
    if known is not None:
        known.check_same(model, optimizer, scheduler)
        return known
    megatron_checkpoints = MegatronCheckpoints(model, optimizer, scheduler, _settings.names)
    options = _settings.options.copy()
    options["at"] = at
    megatron_checkpoints.open(str(run), options)
    _open[str(at), str(run)] = megatron_checkpoints
    return megatron_checkpoints


def _place(place: str | PathLike[str] | None, option: str) -> tuple[Any, str]:
    """The address and the run of one of Megatron's path arguments, with `configure` applied."""
    at, run = _settings.options.get("at"), _settings.run
    if place is None:
        assert run is not None
        return at, run
    path, saved = Path(os.path.abspath(place)), getattr(_arguments(), "save", None)
    if option == "save" or _same_place(place, saved):
        return at or path.parent, run or path.name
    if option == "load" and saved is None and run is not None:
        if path.name != run:
            raise InvalidRequest(
                f"--load belongs to the run {path.name}, but configure(run=) is {run}", hint="pass only one of them"
            )
        return at or path.parent, run
    is_address = at is not None and (str(at).startswith(("http://", "https://")) or Path(at).is_socket())
    return at if is_address else path.parent, path.name


def _same_place(one: str | PathLike[str] | None, other: str | PathLike[str] | None) -> bool:
    return one is not None and other is not None and os.path.abspath(one) == os.path.abspath(other)


def _foreign(checkpoints: MegatronCheckpoints, step: int, args: Any, place: Any) -> tuple[int, float]:
    """Restore another program's checkpoint. Its step is the iteration; earlier samples and operations are unknown."""
    finetune = bool(getattr(args, "finetune", False))
    checkpoints.restore_foreign(step, _part(args, finetune, strict=True))
    _forget_other(checkpoints, place, args)
    return (0 if finetune else step), 0


def _forget_other(checkpoints: MegatronCheckpoints, place: Any, args: Any) -> None:
    """Disconnect from a run that is only loaded from, so that its own job may continue."""
    if place is None or _same_place(place, getattr(args, "save", None)):
        return
    for key in [key for key, known in _open.items() if known is checkpoints]:
        del _open[key]
    checkpoints.checkpointer.close()


def _of_megatron(place: Path) -> bool:
    return (place / TRACKER).is_file() and not (place / "checkpoints").is_dir()


def _loaded_by_megatron(*about: Any) -> tuple[int, float]:
    try:
        from megatron.training.checkpointing import load_checkpoint as of_megatron
    except ImportError:
        raise InvalidRequest(
            "--load is a directory that Megatron-LM wrote, and megatron.training, which could load it, is not installed",
            hint="load it with Megatron-LM, and save it with this save_checkpoint",
        ) from None
    iteration, operations = of_megatron(*about)
    return iteration, operations


def _refuse(given: dict[str, Any], hint: str) -> None:
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if named:
        raise InvalidRequest(f"{', '.join(named)} is not supported", hint=hint)


def _check_groups(given: dict[str, Any]) -> None:
    """Refuse the caller's own process groups: the places of tensors follow `parallel_state`."""
    from megatron.core import parallel_state

    known = {
        "tp_group": parallel_state.get_tensor_model_parallel_group,
        "pp_group": parallel_state.get_pipeline_model_parallel_group,
        "dp_group": parallel_state.get_data_parallel_group,
        "dp_cp_group": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
        "expt_dp_group": parallel_state.get_expert_data_parallel_group,
    }
    for name, value in given.items():
        if name not in known and name != "rng_state_key_prefix":
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        if value and (name not in known or value is not known[name]()):
            raise InvalidRequest(
                f"{name}={value!r} is not the group of parallel_state", hint="leave it out, or pass that of parallel_state"
            )


def _refuse_rerun(train_data_iterator: Any) -> None:
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    if get_rerun_state_machine().state_dict(train_data_iterator, "torch_dist") is not None:
        raise InvalidRequest(
            "the rerun state machine is repeating a step, which a checkpoint cannot record",
            hint="save after the step, or train with --rerun-mode disabled",
        )


def _check_architecture(args: Any, saved: dict[str, Any]) -> None:
    known = saved.get("architecture") or {}
    wrong = [
        f"{name}: {known[name]} was saved, now it is {_plain(getattr(args, name))}"
        for name in known
        if known[name] is not None and hasattr(args, name) and _plain(getattr(args, name)) != known[name]
    ]
    if wrong:
        raise StateMismatch(
            f"the checkpoint belongs to another model: {'; '.join(wrong)}",
            hint="use the arguments with which its run was trained",
        )


def _update_microbatches(consumed: int) -> None:
    from megatron.core import num_microbatches_calculator

    # No public function checks whether there is one (0.16.1); without one, update raises AttributeError.
    if getattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", None) is not None:
        num_microbatches_calculator.update_num_microbatches(consumed_samples=consumed, verbose=True)


def _number(value: Any) -> float:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise InvalidRequest(f"num_floating_point_operations_so_far must be a number, not {value!r}")
    return plain


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
