"""Whether a class or a private attribute belongs to torch, another framework, or the user."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from types import CodeType

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

# Top-level packages whose classes keep caches and marks of their own under private names.
FRAMEWORKS = frozenset(
    {"accelerate", "apex", "bitsandbytes", "colossalai", "deepspeed", "diffusers", "fairscale", "flash_attn", "functorch"}
    | {"lightning", "lightning_fabric", "megatron", "optimum", "paddle", "peft", "pytorch_lightning", "timm", "torch"}
    | {"torchao", "torchaudio", "torchmetrics", "torchtitan", "torchvision", "transformer_engine", "transformers", "triton"}
)
CLASSES_MAX = 1024  # number of classes whose names are cached
ITEMS_MAX = 8  # number of items of a container that are examined
_TRAINED = (torch.Tensor, torch.Generator, nn.Module, torch.optim.Optimizer)
_LAYERS = "torch.nn.modules."
_DERIVING = ("torch.distributed.", "torch.nn.utils.parametrize")


def is_of_framework(cls: type) -> bool:
    """Whether a class is torch's or another framework's, or derived by one from a user's: see `own_class`."""
    return str(cls.__module__).partition(".")[0] in FRAMEWORKS


def is_framework_object(value: object) -> bool:
    """Whether a value is a framework's own: an object of its classes, or a container with some."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
    held = (value, *islice(inside, ITEMS_MAX))
    return any(is_of_framework(type(one)) and not isinstance(one, _TRAINED) for one in held)


def is_framework_code(function: object) -> bool:
    """Whether a function, or what a torch hook wraps, is torch's or another framework's."""
    while isinstance(function, partial | _WrappedHook):
        function = function.func if isinstance(function, partial) else function.hook
    return str(getattr(function, "__module__", "")).partition(".")[0] in FRAMEWORKS


def own_class(module: nn.Module) -> type:
    """A module's class before torch derived from it, under FSDP2 and with parametrized tensors."""
    return next((cls for cls in type(module).__mro__ if not cls.__module__.startswith(_DERIVING)), type(module))


def is_of_torch(module: nn.Module) -> bool:
    return own_class(module).__module__.startswith("torch.")


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's layers, including classes that torch derived from one."""
    return is_of_torch(module) and any(
        cls is not nn.Module and cls.__module__.startswith(_LAYERS) for cls in own_class(module).__mro__
    )


@lru_cache(CLASSES_MAX)
def names_of_frameworks(classes: tuple[type, ...]) -> frozenset[str]:
    """The attribute names that the code of frameworks' classes among these, a class with its bases, uses."""
    return frozenset(
        name
        for base in classes
        if is_of_framework(base)
        for held in vars(base).values()
        for code in _codes(held)
        for name in code.co_names
    )


def _codes(held: object) -> Iterator[CodeType]:
    """The code of a function, method or property, including nested functions."""
    for one in (held, *(getattr(held, part, None) for part in ("fget", "fset", "__func__", "__wrapped__"))):
        code = getattr(one, "__code__", None)
        waiting = [code] if isinstance(code, CodeType) else []
        while waiting:
            code = waiting.pop()
            yield code
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
