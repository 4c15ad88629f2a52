"""What is stored of a layer's parameters, of which this rank may have a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast.integrations.paddle.adapters import adapter_of, base_of
from holdfast.integrations.paddle.fleet.names import local_experts, stored_names
from holdfast.integrations.paddle.fleet.places import Declared, ElementRange, ParameterPlace
from holdfast.integrations.paddle.fleet.sharding import weight
from holdfast.integrations.paddle.fleet.tensor_parallel import TensorParallel
from holdfast.integrations.paddle.fleet.wrappers import unwrapped


class _Said(NamedTuple):
    view: torch.Tensor
    span: ElementRange | None
    declared: Declared


class LayerPlaces:
    """The places of the parameters of `layer`, which is the user's own layer inside what fleet has wrapped around it.

    Of a LoRAModel they are those of its `adapter`, if PEFT knows such adapters.
    """

    def __init__(self, layer: Any) -> None:
        self.layer, self._stage_3 = unwrapped(layer)
        self.sharded = self._stage_3 is not None  # then the tensors that have the elements come and go
        self.adapter = adapter_of(self.layer)
        self._turned = frozenset(one.name for one in self.adapter.tensors.values() if one.turned) if self.adapter else ()
        self._cuts = TensorParallel(self.layer)
        self._experts = local_experts(self.layer)
        self._placed: dict[str, tuple[Any, ParameterPlace]] = {}
        self._said: dict[str, _Said] = {}

    def tensors(self) -> dict[str, Any]:
        """Paddle's tensors by stored name: parameters and persistable buffers; those of the adapter alone, if it is one."""
        if self.adapter is not None:
            of_base = base_of(self.layer).state_dict(use_hook=False)
            return {one.name: of_base[name] for name, one in self.adapter.tensors.items()}
        own = self.layer.state_dict(use_hook=False)
        stored = stored_names(self.layer, own, self._experts)
        return {stored[name]: tensor for name, tensor in own.items()}

    def held(self, name: str, parameter: Any) -> Any:
        """The Paddle tensor with the elements of a parameter that this rank has."""
        return weight(name, parameter, self._stage_3).tensor

    def place(self, name: str, parameter: Any) -> ParameterPlace:
        """Where this rank's tensor lies in the whole, before sharding divides it."""
        known = self._placed.get(name)
        if known is None or known[0] is not parameter:
            place = self._cuts.place(name, parameter)
            known = self._placed[name] = parameter, place.transposed() if name in self._turned else place
        return known[1]

    def declared(self, name: str, parameter: Any, view: torch.Tensor) -> Declared:
        """What to store of the view of what `held` returned; the identical object for the identical view."""
        span = weight(name, parameter, self._stage_3).span
        known = self._said.get(name)
        if known is None or known.view is not view or known.span != span:
            place = self.place(name, parameter)
            known = _Said(view, span, place.of(view) if span is None else place.span_of(view, span))
            self._said[name] = known
        return known.declared

    def keep(self, names: Mapping[str, object]) -> None:
        """Forget all other names."""
        if len(self._placed) > len(names):
            self._placed = {name: placed for name, placed in self._placed.items() if name in names}
            self._said = {name: said for name, said in self._said.items() if name in names}
