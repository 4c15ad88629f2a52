"""Optimizers whose state is in blocks of codes with a scale each, without the libraries that have such: the same tensors,
in a page of code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

BLOCK = 64
TABLE = torch.linspace(-1, 1, 256)
TABLE_4BIT = torch.linspace(-1, 1, 16)


def quantised(values: torch.Tensor, table: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """A code of each value, in one line, and a scale of each block; the last one may be shorter."""
    line = values.float().reshape(-1)
    blocks = torch.nn.functional.pad(line, (0, -line.numel() % block)).view(-1, block)
    scale = blocks.abs().amax(1)
    nearest = (blocks / scale.clamp(min=1e-30)[:, None])[..., None].sub(table).abs().argmin(-1)
    return nearest.view(-1)[: line.numel()].to(torch.uint8), scale


def values_of(codes: torch.Tensor, scale: torch.Tensor, table: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    line = codes.reshape(-1)
    return table[line.long()] * scale.repeat_interleave(block)[: line.numel()]


class Coded(torch.Tensor):
    """As torchao's 8-bit state: codes of the tensor's shape. As its 4-bit state with a table of 16: two codes in a byte."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, shape: Any, dtype: torch.dtype) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, shape, device=codes.device, dtype=dtype)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor, shape: Any, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.qmap = codes, scale, qmap

    @classmethod
    def zeros(cls, like: torch.Tensor, table: torch.Tensor) -> Coded:
        codes = torch.zeros(like.shape if len(table) > 16 else (like.numel() // 2,), dtype=torch.uint8)
        return cls(codes, torch.zeros(like.numel() // BLOCK), table.clone(), like.shape, like.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", "qmap"], [self.shape, self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Coded:
        return cls(inner["codes"], inner["scale"], inner["qmap"], *context)

    def dequantize(self) -> torch.Tensor:
        packed = torch.stack([self.codes >> 4, self.codes & 15], -1) if len(self.qmap) == 16 else self.codes
        return values_of(packed, self.scale, self.qmap).view(self.shape)

    def put(self, values: torch.Tensor) -> None:
        codes, scale = quantised(values, self.qmap)
        if len(self.qmap) == 16:
            codes = codes[::2] << 4 | codes[1::2]
        self.codes.copy_(codes.view(self.codes.shape))
        self.scale.copy_(scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):  # as one of its own shape
            one = args[0]
            return return_and_correct_aliasing(
                func, args, kwargs or {}, cls(one.codes, one.scale, one.qmap, one.shape, one.dtype)
            )
        if func is torch.ops.aten.copy_.default:
            args[0].put(args[1])
            return args[0]
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


class _Momentum(torch.optim.Optimizer):
    """Momentum of this rank's part of each parameter."""

    def __init__(self, params: Any, table: torch.Tensor = TABLE) -> None:
        super().__init__(params, {"lr": 0.1})
        self.table = table

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    self.begin(parameter, state)
                new = self.held(state).mul(0.9).add_(local(parameter.grad))
                self.put(state, new)
                local(parameter).sub_(group["lr"] * new)
                state["step"] += 1


class Wrapping(_Momentum):
    """In a wrapper tensor, as in torchao: biases, and parts with no whole number of blocks, stay plain."""

    def begin(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        part = local(parameter)
        plain = part.dim() < 2 or part.numel() % BLOCK or not part.numel()
        made = torch.zeros_like(part) if plain else Coded.zeros(part, self.table)
        if isinstance(parameter, DTensor):
            mesh, places, shape = parameter.device_mesh, parameter.placements, parameter.shape
            made = DTensor.from_local(made, mesh, places, run_check=False, shape=shape, stride=parameter.stride())
        state["momentum"] = made

    def held(self, state: dict[str, Any]) -> torch.Tensor:
        part = local(state["momentum"])
        return part.dequantize() if isinstance(part, Coded) else part.clone()

    def put(self, state: dict[str, Any], new: torch.Tensor) -> None:
        part = local(state["momentum"])
        part.put(new) if isinstance(part, Coded) else part.copy_(new)


class ByKeys(_Momentum):
    """As plain tensors under the keys of bitsandbytes, in blocks of 256 of which the last may be shorter; biases
    stay plain."""

    def begin(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        part = local(parameter)
        state["state1"] = torch.zeros_like(part, dtype=torch.float32 if part.dim() < 2 else torch.uint8)
        if part.dim() > 1:
            state["absmax1"], state["qmap1"] = torch.zeros(-(-part.numel() // 256)), self.table

    def held(self, state: dict[str, Any]) -> torch.Tensor:
        if "qmap1" not in state:
            return state["state1"].clone()
        return values_of(state["state1"], state["absmax1"], state["qmap1"], 256).view(state["state1"].shape)

    def put(self, state: dict[str, Any], new: torch.Tensor) -> None:
        if "qmap1" not in state:
            state["state1"].copy_(new)
            return
        codes, scale = quantised(new, state["qmap1"], 256)
        state["state1"].copy_(codes.view(new.shape))
        state["absmax1"].copy_(scale)


KINDS = {
    "8-bit": Wrapping,
    "4-bit": lambda params: Wrapping(params, TABLE_4BIT),
    "keys": ByKeys,
}
