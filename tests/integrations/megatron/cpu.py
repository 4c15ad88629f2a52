"""Lets Megatron train on the CPU: whatever asks for `cuda` gets the CPU. For tests only."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


class OnCpu(TorchFunctionMode):
    """Replaces the device in calls of torch, and answers `Tensor.type()` as a GPU would."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: _moved(value) for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _NAMES.get(func(*args), func(*args))
        return func(*(_moved(value) for value in args), **kwargs)


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def pretend() -> None:
    """Make this process one in which Megatron finds a GPU, which is the CPU. Call it before Megatron is imported."""
    torch.compile = lambda function=None, **_: function or (lambda one: one)  # to import its compilers takes ten seconds
    from megatron.core.tensor_parallel import random as streams
    from megatron.core.transformer.moe import moe_utils

    OnCpu().__enter__()
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 forgets to define it where there is no Transformer Engine
        moe_utils.te_general_gemm = None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(seed)
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    torch.cuda.get_device_properties = lambda *_: type("Cpu", (), {"multi_processor_count": 1, "major": 8, "minor": 0})
    streams._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    streams._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
