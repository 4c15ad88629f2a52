"""Megatron's state besides model and optimizer: scheduler, loss scale, random streams, extra state of modules."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.integrations.megatron.optimizer import members
from holdfast_formats.errors import InvalidRequest


class SchedulerSteps:
    """Megatron's `OptimizerParamScheduler`, which adds loaded steps to those it has made."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `AssertionError`, as Megatron does, if the run has other settings, unless its arguments choose which
        apply.
        """
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(state)


class LossScales:
    """The loss scale of every optimizer in a chain, and the counters that decide when it changes, as numbers."""

    def __init__(self, optimizer: Any) -> None:
        self._scalers = [getattr(one, "grad_scaler", None) for one in members(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        return {str(index): _numbers(scaler) for index, scaler in enumerate(self._scalers) if scaler is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for index, scaler in enumerate(self._scalers):
            saved = state.get(str(index))
            if scaler is None or not saved:
                continue
            like = scaler.scale
            saved = {key: torch.full_like(like, value) if key == "scale" else value for key, value in saved.items()}
            scaler.load_state_dict(saved)


class TrackedStreams:
    """The streams of Megatron's tracker, from which dropout in the parallel regions draws."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        from megatron.core import tensor_parallel

        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return {name: tensor_parallel.convert_cuda_rng_state(state).cpu() for name, state in states.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        from megatron.core import tensor_parallel

        tracker = tensor_parallel.get_cuda_rng_tracker()
        safe = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        states = {name: tensor_parallel.convert_cuda_rng_state(one, to_graphable=safe) for name, one in state.items()}
        tracker.set_states(states)


def extra_states(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The current extra state of these modules, as bytes, by module name. `InvalidRequest` for a value that is not bytes."""
    tensors: dict[str, torch.Tensor] = {}
    for name, module in modules.items():
        value: Any = module.get_extra_state()
        if isinstance(value, io.BytesIO):  # Transformer Engine before 1.14
            value = torch.frombuffer(bytearray(value.getvalue()), dtype=torch.uint8) if value.getvalue() else None
        if value is None or (isinstance(value, torch.Tensor) and not value.numel()):
            continue
        if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8:
            raise InvalidRequest(
                f"the extra state {name} is a {type(value).__name__}, which would have to be pickled",
                hint="return a tensor of dtype uint8, or None, from get_extra_state()",
            )
        tensors[name] = value.detach().cpu().clone().view(-1)
    return tensors


def install_extra_states(modules: Mapping[str, torch.nn.Module], restored: Mapping[str, torch.Tensor]) -> None:
    for name, data in restored.items():
        now: Any = modules[name].get_extra_state()
        modules[name].set_extra_state(io.BytesIO(data.numpy().tobytes()) if isinstance(now, io.BytesIO) else data)


def loss_scales(optimizer: Any) -> Sequence[Any]:
    return [one.grad_scaler for one in members(optimizer) if getattr(one, "grad_scaler", None) is not None]


def _numbers(scaler: Any) -> dict[str, Any]:
    state = dict(scaler.state_dict())
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}
