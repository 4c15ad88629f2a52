"""The training's progress: Paddle's trainer state and scheduler, and the steps that follow from its beta powers.

Paddle keeps β^(t+1) of each parameter, multiplied up in F32, where torch keeps the step t. The number of steps comes from
the trainer's state; the powers must agree with it, unless they are too small to distinguish.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats.errors import CheckpointError, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.reading import fetched
from holdfast_service.wings.convert.foreign import json_values
from holdfast_service.wings.convert.foreign.paddle.tensor_parallel import LocalTensorParts
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord, read_pickle

TRAINER_STATES = ("trainer_state.bin", "trainer_state.json")
_DOCUMENTS = {"scheduler.pdparams": "paddle_scheduler", "scaler.pdparams": "paddle_scaler"}
_RECORDS = frozenset(f"{home}.trainer.trainer_callback.TrainerState" for home in ("paddleformers", "paddlenlp"))
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
STATE_BYTES_MAX = 2**27
SMALL_VALUES_MAX = 64  # of an array that becomes part of a document
_TINY = float(np.finfo(np.float32).tiny)  # below this a power has lost digits
_ROUNDING = 1.2e-7  # of a product in F32, and of β itself


class TrainingProgress(NamedTuple):
    """The training's step (None: in no file), its documents by key, and their files."""

    step: int | None
    documents: dict[str, Any]
    files: tuple[str, ...]
    learning_rate: float | None = None


def read(files: Files) -> TrainingProgress:
    """The directory's training progress; `StateMismatch` if a number is not one."""
    documents: dict[str, Any] = {}
    used, step, rate = [], None, None
    for path in TRAINER_STATES:
        if files.size(path) is None:
            continue
        state = _trainer_state(files, path)
        told_step = state.get("global_step") if isinstance(state, dict) else None
        if not isinstance(told_step, int) or isinstance(told_step, bool) or told_step < 0 or step not in (None, told_step):
            raise StateMismatch(f"{path} has the invalid global_step {told_step!r}", file=path)
        step, documents["paddle_trainer_state"] = told_step, document(state)
        used.append(path)
    for path, key in _DOCUMENTS.items():
        if files.size(path) is not None:
            state = _plain(files, read_pickle(files, path, _RECORDS))
            documents[key] = document(state)
            used.append(path)
            if key == "paddle_scheduler" and isinstance(state, dict):
                rate = state.get("last_lr")
    known = isinstance(rate, float) and math.isfinite(rate)
    return TrainingProgress(step, documents, tuple(used), rate if known else None)


def document(value: Any) -> Any:
    return json_values.encode(value, lambda _, other: repr(other))


def _trainer_state(files: Files, path: str) -> Any:
    if not path.endswith(".json"):
        return _plain(files, read_pickle(files, path, _RECORDS))
    if (files.size(path) or 0) > STATE_BYTES_MAX:
        raise LimitExceeded(f"{path} is over the limit of {STATE_BYTES_MAX} bytes", file=path)
    try:
        return _plain(files, json.loads(files.read(path, 0, STATE_BYTES_MAX)))
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"{path} is not JSON: {error}", file=path) from error


def _plain(files: Files, value: Any) -> Any:
    """The value with records and small arrays as dicts and lists."""
    if isinstance(value, PickledRecord):
        return _plain(files, value.state if value.state is not None else value.items)
    if isinstance(value, dict):
        return {key: _plain(files, inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_plain(files, inner) for inner in value)
    if isinstance(value, PickledArray) and math.prod(value.shape) <= SMALL_VALUES_MAX:
        return small_values(files, value)
    return value


def small_values(files: Files, array: PickledArray) -> Any:
    return fetched(files, array.stored("value").tensor("extra", "value")).tolist()


def betas(files: Files, powers: Iterable[LocalTensorParts], step: int) -> tuple[float, float] | None:
    """β1 and β2, from the beta powers after `step` steps; None if they are too small.

    Raises `StateMismatch` for a power of no β after so many steps, or of another β than the others.
    """
    known: dict[str, tuple[float, LocalTensorParts]] = {}
    for power in powers:
        kind = next(kind for kind in POWERS if power.key.endswith(kind))
        if power.dtype != "F32" or math.prod(power.shape) != 1:
            raise _odd(power, f"{power.dtype} of shape {list(power.shape)} instead of a single F32")
        value = float(fetched(files, power.tensor("optim", power.key)).reshape(-1)[0])
        if value == 0 or abs(value) < _TINY:
            continue
        beta = _beta(value, step)
        if beta is None:
            raise _odd(power, f"{value!r}, which is not β^(t+1) for any usual β after t = {step} steps")
        other = known.setdefault(kind, (beta, power))
        if other[0] != beta:
            raise _odd(power, f"{value!r}, a power of {beta}, but {other[1].key!r} is a power of {other[0]}")
    return (known[POWERS[0]][0], known[POWERS[1]][0]) if len(known) == len(POWERS) else None


def _beta(value: float, step: int) -> float | None:
    """The β of at most two digits after its nines whose power this is, within F32 rounding."""
    if not 0 < value < 1:
        return None
    rest = float(f"{1 - value ** (1 / (step + 1)):.2g}")
    beta = round(1 - rest, 12)
    if not 0 < beta < 1:
        return None
    return beta if abs(value / beta ** (step + 1) - 1) <= _ROUNDING * (step + 2) else None


def _odd(power: LocalTensorParts, why: str) -> CheckpointError:
    return StateMismatch(
        f"{power.file}: {power.key!r} is {why}",
        hint="the optimizer's files and the trainer's state may be from different steps; import them unchanged with --as-is",
        file=power.file,
        tensor=power.key,
    )
