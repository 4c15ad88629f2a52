"""State that each rank has of its own parameters only, such as Muon's where ranks share the work of a step.

Which rank steps a parameter is not known before a step, so a restore gives its state to every rank. The first save after
some steps drops what this rank has but did not use: another rank has the state that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.tensors import json_values
from holdfast.tensors.fragments import Storable, local_tensors
from holdfast_formats.digest import digest


class OwnedParameter(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def kept(self) -> Mapping[str, Any]: ...


class _Seen(NamedTuple):
    weight: str
    state: str


class RestoredForAll:
    """The state that a restore gave to every rank, although only some of them had it when it was saved; by parameter."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    @property
    def pending(self) -> bool:
        """Whether a save is to look again."""
        return bool(self._seen)

    def note(self, parameters: Iterable[OwnedParameter]) -> None:
        """Record these parameters and their state as they are now, after a restore."""
        self._seen = {parameter.name: _now(parameter) for parameter in parameters if parameter.kept}

    def drop(self, parameters: Iterable[OwnedParameter]) -> None:
        """Remove state from the optimizer that is as it was restored, though its parameter has changed since.

        Only if the optimizer has stepped here, which other state shows.
        """
        held = [(parameter, _now(parameter)) for parameter in parameters if parameter.name in self._seen and parameter.kept]
        used = {one.name for one, now in held if now.state != self._seen[one.name].state}
        idle = [one for one, now in held if one.name not in used and now.weight != self._seen[one.name].weight]
        if used:
            for one in idle:
                del one.optimizer.state[one.tensor]
            away = used | {one.name for one in idle}
            self._seen = {name: seen for name, seen in self._seen.items() if name not in away}


def _now(parameter: OwnedParameter) -> _Seen:
    return _Seen(_digest(parameter.tensor), json_values.dumps(dict(parameter.kept), parameter.name, _beside))


def _beside(_: json_values.Trail, value: Any) -> str:
    return _digest(value) if not hasattr(value, "tobytes") else digest(value.tobytes())


def _digest(value: Storable) -> str:
    return "; ".join(digest(_bytes(local)) for local in local_tensors(value))


def _bytes(local: torch.Tensor) -> memoryview:
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
