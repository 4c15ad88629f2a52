"""Stand-ins for what frameworks put around modules and optimizers: the attributes that matter, by the names they have."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


class Accelerated(torch.optim.Optimizer):
    """accelerate's AcceleratedOptimizer: an Optimizer that never calls its base's __init__."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self._optimizer_original_step_method = optimizer.step

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


class Container(torch.optim.Optimizer):
    """torchtitan's OptimizersContainer: an Optimizer with all parameters and no state, and those that step."""

    def __init__(self, parts: list[nn.Module], make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.model_parts = parts
        self.optimizers = [make(part.parameters()) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": 0.0})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step(closure)


class Mixed:
    """Megatron's Float16OptimizerWithFloat16Params: the torch optimizer inside steps full-precision copies, held here."""

    def __init__(self, optimizer: torch.optim.Optimizer, grad_scaler: Any = None) -> None:
        self.optimizer, self.grad_scaler, self.is_stub_optimizer = optimizer, grad_scaler, False
        self._scale_one = torch.ones(1)
        self.float16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_float16_groups: list[list[torch.Tensor]] = []
        for group in optimizer.param_groups:
            self.float16_groups.append(list(group["params"]))
            for index, parameter in enumerate(group["params"]):
                parameter.main_param = group["params"][index] = parameter.detach().clone().float()
            self.fp32_from_float16_groups.append(list(group["params"]))

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for models, mains in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            yield from zip(models, mains, strict=True)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self) -> None:
        for model, main in self._pairs():
            main.grad = model.grad.float()
        self.optimizer.step()
        for model, main in self._pairs():
            model.data.copy_(main)

    def state_dict(self) -> Any:
        return {"optimizer": self.optimizer.state_dict(), "fp32_from_fp16_params": self.fp32_from_float16_groups}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


class ProxyDict:
    """Megatron's: the states of several optimizers, by number and key."""

    def __init__(self, inner: list[Any]) -> None:
        self._inner_dicts = inner

    def __len__(self) -> int:
        return sum(map(len, self._inner_dicts))

    def items(self) -> Iterator[Any]:
        return (((i, key), value) for i, held in enumerate(self._inner_dicts) for key, value in held.items())


class Chained:
    """Megatron's ChainedOptimizer."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.model_chunks: list[nn.Module] = []
        self.chained_optimizers = optimizers

    @property
    def param_groups(self) -> list[Any]:
        return [group for optimizer in self.chained_optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> ProxyDict:
        return ProxyDict([optimizer.state for optimizer in self.chained_optimizers])

    def step(self) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step()

    def state_dict(self) -> Any:
        return [optimizer.state_dict() for optimizer in self.chained_optimizers]

    def load_state_dict(self, states: Any) -> None:
        for optimizer, state in zip(self.chained_optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one of the same parameters, with state of its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer, self.param_groups = base, base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base_optimizer.step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("slow", parameter.detach().clone())


class CountingLookahead(torch.optim.Optimizer):
    """Shares groups and state with the optimizer inside, and counts in attributes that its state_dict() lacks."""

    def __init__(self, inner: torch.optim.Optimizer, every: int = 2) -> None:
        self.inner, self.every, self.count, self.rate, self.warm = inner, every, 0, 1.0, False
        self.total = torch.zeros(1)
        self.defaults, self.param_groups, self.state = inner.defaults, inner.param_groups, inner.state

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.count += 1
        self.rate *= 0.5
        self.warm = True
        self.total += 3
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p]
                if "slow" not in held:
                    held["slow"] = p.clone()
                if self.count % self.every == 0:
                    held["slow"].lerp_(p, 0.5)
                    p.copy_(held["slow"])


class Helped(torch.optim.SGD):
    """An optimizer of matrices that has another one for everything else."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        super().__init__([p for p in given if p.dim() > 1], lr=0.1, momentum=0.9)
        self.adam = torch.optim.AdamW([p for p in given if p.dim() < 2], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.adam.step()


class Zero3:
    """DeepSpeed's stage 3: parameters without elements, and a torch optimizer of flat partitions that no group names."""

    def __init__(self, module: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(list(module.parameters()))
        flat = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        self.optimizer.state = defaultdict(dict, {flat: {"exp_avg": torch.zeros_like(flat)}})
        for group in self.optimizer.param_groups:
            group["params"] = []
        for number, parameter in enumerate(module.parameters()):
            parameter.ds_id, parameter.ds_shape = number, parameter.shape  # type: ignore[attr-defined]
            parameter.data = torch.empty(0)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None: ...
    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class Homemade:
    """Something with param_groups that is no torch optimizer and has none inside."""

    def __init__(self, module: nn.Module) -> None:
        self.param_groups = [{"params": list(module.parameters())}]
        self.velocity = [torch.ones_like(parameter) for parameter in module.parameters()]

    def step(self) -> None: ...
    def state_dict(self) -> Any:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: Any) -> None:
        self.velocity = state["velocity"]


class Counter:
    """An object of the user's that counts."""

    n = 0

    def __init__(self) -> None:
        self.n = 0


class Unlisted(nn.Module):
    """An average whose warm-up is counted in an attribute, with much else that no state_dict() has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n, self.late = nn.Linear(2, 2), 0, None
        self.begun, self.phase, self.scale = False, "warm", np.float64(0.5)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.table: torch.Tensor
        self.total, self._queue, self.table_of_numpy = torch.zeros(2), torch.zeros(4), np.zeros(3)
        self.seen, self.held, self.names = [torch.zeros(1), 2], {"a": 1}, {"a"}
        self.streams = {"torch": torch.Generator(), "numpy": np.random.default_rng(1), "python": random.Random(1)}
        self.counter, self.hidden = Counter(), [nn.Linear(2, 1)]
        self._phase, self._seen, self._held, self._counter = "warm", [1], {"a": [1]}, Counter()
        self.inner = torch.optim.SGD(self.hidden[0].parameters(), lr=0.1)
        self.weight_again, self.everything = self.linear.weight.detach(), [self.linear, self.linear.weight]
