"""Refuses features of a Trainer that this adapter does not support, before anything is staged."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.integrations.trainers.options import check_limits
from holdfast_formats.errors import InvalidRequest

_PLAIN = "train without it, or without Holdfast; plain loops save FSDP2 and tensor parallelism (docs/saving.md)"


# What a subclass may add to a checkpoint there, and would miss in the next start: these are not called.
_NOT_CALLED = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state", "_save", "save_model")


def check(trainer: Any, options: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` with the name of what is not supported, and what to do instead.

    The attributes are those of transformers 4.57.6 and 5.23.0; FSDP and DeepSpeed may also come from accelerate's
    configuration, which only these attributes show.
    """
    args = trainer.args
    for name, what in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP"), ("is_fsdp_xla_enabled", "FSDP")):
        if getattr(trainer, name):  # an AttributeError here means an untested version of Trainer
            raise InvalidRequest(f"{what} inside a Trainer is not supported yet", hint=_PLAIN)
    if any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()):
        raise InvalidRequest("a model that transformers has sharded is not supported inside a Trainer yet", hint=_PLAIN)
    if "torch_xla" in sys.modules or "smdistributed" in sys.modules:
        raise InvalidRequest("torch_xla and SageMaker's model parallelism are not supported", hint=_PLAIN)
    if args.auto_find_batch_size:
        raise InvalidRequest(
            "auto_find_batch_size restarts with another batch size, which a resumed run could not continue",
            hint="set per_device_train_batch_size to the size it found",
        )
    if getattr(trainer.model, "_hf_peft_config_loaded", False) is True:  # set by add_adapter() since transformers 4.33
        raise InvalidRequest(
            "the model has adapters from add_adapter(), whose names neither PEFT nor from_pretrained() expects",
            hint="make the model with peft.get_peft_model() instead",
        )
    _check_overrides(trainer)
    check_limits(args, options)


def check_trial(trainer: Any, trial: object) -> None:
    if trial is not None or trainer.hp_search_backend is not None:
        raise InvalidRequest(
            "the trials of a hyperparameter search would overwrite each other's checkpoints in one run",
            hint="search with an unattached Trainer, then attach the one that trains",
        )


def _check_overrides(trainer: Any) -> None:
    for name in _NOT_CALLED:
        owner = next((kind for kind in type(trainer).__mro__ if name in vars(kind)), object)
        own = owner.__module__.partition(".")[0] not in ("transformers", "trl", "holdfast")
        if name in vars(trainer) or (own and owner is not object):
            raise InvalidRequest(
                f"{type(trainer).__name__} overrides {name}(), which Holdfast does not call: files that it writes "
                "would be missing from every checkpoint",
                hint="keep that state in the model, or in a TrainerCallback with state() (ExportableState); "
                "pass files that do not change as assets=",
            )
