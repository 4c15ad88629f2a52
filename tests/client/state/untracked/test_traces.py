"""A trace of a value is the same until the value changes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.state.untracked.traces import ITEMS_MAX, SAMPLE_BYTES_MAX, UNKNOWN, ForwardTracer, is_object

TRACER = ForwardTracer(lambda value: False)


class Configuration(SimpleNamespace):
    """As those of transformers."""

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def stepped() -> torch.optim.Optimizer:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1)).backward()
    optimizer.step()
    return optimizer


def written(optimizer: torch.optim.Optimizer) -> None:
    for held in optimizer.state.values():
        held["momentum_buffer"].add_(1)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "tensor": (lambda: torch.zeros(2), lambda value: value.add_(1)),
    "parameter": (lambda: nn.Parameter(torch.zeros(2)), lambda value: value.detach().add_(1)),
    "array": (lambda: np.zeros(2), lambda value: value.fill(1)),
    "large array": (lambda: np.zeros(10 * SAMPLE_BYTES_MAX), lambda value: value.fill(1)),
    "array of objects": (lambda: np.array([None]), lambda value: value.fill("x")),
    "list": (lambda: [1], lambda value: value.append(2)),
    "long list": (lambda: [0] * 9 * ITEMS_MAX, lambda value: value.__setitem__(-1, 2)),
    "tuple": (lambda: ([1],), lambda value: value[0].append(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "mapping": (lambda: {"a": 1}, lambda value: value.update(a=2)),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "tensor inside": (lambda: {"a": torch.zeros(2)}, lambda value: value["a"].add_(1)),
    "stream of torch": (torch.Generator, lambda value: torch.rand(1, generator=value)),
    "stream of numpy": (lambda: np.random.default_rng(1), lambda value: value.random()),
    "old stream of numpy": (lambda: np.random.RandomState(1), lambda value: value.rand()),
    "stream of Python": (lambda: random.Random(1), lambda value: value.random()),
    "object": (lambda: SimpleNamespace(n=1), lambda value: setattr(value, "n", 2)),
    "module": (lambda: nn.Linear(1, 1), lambda value: value.weight.detach().add_(1)),
    "optimizer": (stepped, written),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen(kind: str) -> None:
    """And nothing else than a change."""
    make, change = CHANGES[kind]
    value = make()
    before = TRACER.trace(value)
    assert before == TRACER.trace(value) != UNKNOWN
    change(value)
    assert before != TRACER.trace(value)


def test_another_tensor_is_another_one() -> None:
    """Also in the memory of one that is gone, which is not kept alive."""
    tensor = torch.zeros(2)
    before = TRACER.trace(tensor)
    assert before != TRACER.trace(torch.zeros(2))
    del tensor
    assert before != before


@pytest.mark.parametrize(
    "value", [len, nn.Linear, torch.ones(1, requires_grad=True) * 2, Configuration(n=1), object(), lambda: 0, torch]
)
def test_what_nothing_trains_is_not_looked_at(value: object) -> None:
    """Code, configurations, and results of a forward pass."""
    assert TRACER.trace(value) == UNKNOWN and is_object(value) is not isinstance(value, torch.Tensor)


def test_what_is_saved_anyway_leaves_no_trace() -> None:
    """Tensors and objects alike; a list of such ones stays the same."""
    held = [torch.zeros(1), SimpleNamespace(n=1)]
    tracer = ForwardTracer(lambda value: any(value is one for one in held))
    before = tracer.trace(held)
    held[0].add_(1)  # type: ignore[attr-defined]
    held[1].n = 2  # type: ignore[attr-defined]
    assert tracer.trace(held) == before and tracer.trace(held[0]) == UNKNOWN
