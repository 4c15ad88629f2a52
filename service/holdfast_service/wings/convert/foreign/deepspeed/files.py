"""The files of a DeepSpeed checkpoint with ZeRO, recognised by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_files.opened import join
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_service.wings.convert.foreign import torch_values
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord, read_torch

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
LATEST_BYTES_MAX = 512
_TAG = re.compile(r"global_step\d+")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ZERO = "deepspeed.runtime.zero.config.ZeroStageEnum"
_RECORDS = frozenset(
    (
        _ZERO,
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
)
_UNIVERSAL = "convert it with DeepSpeed's zero_to_fp32.py and import the weights, or continue with ZeRO only and save again"
OF_PARTS = "convert it, and import the result: python -m deepspeed.checkpoint.ds_to_universal --input_folder …"


class ZeroFiles(NamedTuple):
    """The directory of the tag below the source (empty: the source itself), and its files by rank."""

    directory: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...]

    def path(self, name: str) -> str:
        return join(self.directory, name)


def tag(files: Files) -> str | None:
    """The directory of the checkpoint: the one in `latest`, or the only one; None without one."""
    names = files.list("")
    if any(_OPTIMIZER.fullmatch(name) for name in names):
        return ""
    if LATEST in names:
        latest = files.read(LATEST, 0, LATEST_BYTES_MAX).decode("utf-8", "replace").strip()
        return latest if latest in names and _is_checkpoint(files, latest) else None
    tags = [name for name in names if _TAG.fullmatch(name) and _is_checkpoint(files, name)]
    return tags[0] if len(tags) == 1 else None


def _is_checkpoint(files: Files, directory: str) -> bool:
    return any(_OPTIMIZER.fullmatch(name) for name in files.list(directory))


def sort_out(files: Files, directory: str) -> list[ZeroFiles]:
    """The files of a tag's directory for each tensor-parallel rank; `StateMismatch` for any other file."""
    models: dict[int, dict[int | None, str]] = {}
    optimizers: dict[int, dict[int, str]] = {}
    for name in files.list(directory):
        model, optimizer = _MODEL.fullmatch(name), _OPTIMIZER.fullmatch(name)
        path = join(directory, name)
        if model:
            models.setdefault(int(model[2]), {})[None if model[1] is None else int(model[1])] = name
        elif optimizer:
            held = optimizers.setdefault(int(optimizer[2]), {})
            if int(optimizer[1]) in held:
                raise refused(path, f"and {held[int(optimizer[1])]} belong to the same rank")
            held[int(optimizer[1])] = name
        elif directory:
            raise refused(path, "does not belong to a checkpoint that uses only ZeRO and tensor parallelism", OF_PARTS)
    if models.keys() != optimizers.keys() or sorted(models) != list(range(len(models))):
        raise refused(directory or "the directory", "lacks files of some ranks of tensor parallelism", "copy all files")
    return [_of_one(directory, models[rank], optimizers[rank]) for rank in sorted(models)]


def _of_one(directory: str, models: Mapping[int | None, str], optimizers: Mapping[int, str]) -> ZeroFiles:
    """The files of one tensor-parallel rank, in the order of their ranks; `StateMismatch` if some are missing."""
    if sorted(optimizers) != list(range(len(optimizers))):
        missing = next(rank for rank in range(len(optimizers)) if rank not in optimizers)
        raise refused(
            optimizers[max(optimizers)], f"is present, but the file of rank {missing} is missing", "copy all files"
        )
    numbered = sorted(rank for rank in models if rank is not None)
    if None in models and not numbered:
        ordered = [models[None]]
    elif None not in models and numbered == list(range(len(optimizers))):
        ordered = [models[rank] for rank in numbered]
    else:
        raise refused(
            directory or "the directory", "has neither one file of model states nor one for each rank", "copy all files"
        )
    return ZeroFiles(directory, tuple(ordered), tuple(optimizers[rank] for rank in range(len(optimizers))))


def is_model(name: str) -> bool:
    return _MODEL.fullmatch(name) is not None


def model_rank(name: str) -> int | None:
    """The rank of a file of model states; None for one of all ranks."""
    found = _MODEL.fullmatch(name)
    return None if found is None or found[1] is None else int(found[1])


def read_value(files: Files, path: str) -> Any:
    return read_torch(files, path, _RECORDS)


def read(files: Files, path: str) -> dict[str, Any]:
    value = read_value(files, path)
    if not isinstance(value, dict):
        raise refused(path, "does not have the content that DeepSpeed writes")
    return value


def stage(optimizer: Mapping[str, Any], path: str) -> int:
    """ZeRO's stage, which DeepSpeed's bfloat16 optimizer does not state: it is 1."""
    value = optimizer.get("zero_stage")
    if value is None and "single_partition_of_fp32_groups" in optimizer:
        return 1
    if isinstance(value, PickledRecord) and len(value.args) == 1:
        value = value.args[0]
    if value not in (1, 2, 3):
        raise refused(path, "does not name its ZeRO stage")
    return int(value)


def dict_in(held: Mapping[str, Any], key: str, path: str) -> dict[Any, Any]:
    """A required dict."""
    value = held.get(key)
    if not isinstance(value, dict):
        raise torch_values.mismatch(path, key, f"has no dict {key!r}", _UNIVERSAL)
    return value


def list_in(held: Mapping[str, Any], key: str, path: str) -> list[Any]:
    """A required list."""
    value = held.get(key)
    if not isinstance(value, list):
        raise torch_values.mismatch(path, key, f"has no list {key!r}", _UNIVERSAL)
    return value


def flat(arrays: Sequence[Any], key: str, path: str) -> list[PickledArray]:
    """Required arrays of one dimension."""
    for number, array in enumerate(arrays):
        if not isinstance(array, PickledArray) or len(array.shape) != 1 or array.strides != (1,):
            raise torch_values.mismatch(path, key, f"has no flat tensor {key}[{number}]", _UNIVERSAL)
    return list(arrays)


def shapes_in(held: Mapping[str, Any], key: str, path: str) -> dict[str, tuple[int, ...]]:
    """Required shapes by parameter name."""
    shapes = dict_in(held, key, path)
    for name, shape in shapes.items():
        if not isinstance(name, str) or not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise torch_values.mismatch(path, str(name), f"has no shape for parameter {name!r}", _UNIVERSAL)
    return shapes


def refused(path: str, what: str, hint: str = _UNIVERSAL) -> Exception:
    return StateMismatch(f"{path} {what}", hint=hint, file=path)
