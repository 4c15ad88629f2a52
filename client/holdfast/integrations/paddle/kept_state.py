"""What a Paddle optimizer keeps of its parameters, by structured names, as torch's optimizers are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.integrations.paddle import beta_powers, hyper_parameters
from holdfast.integrations.paddle.beta_powers import POWERS, StepRange
from holdfast.integrations.paddle.fleet.places import Declared, ElementRange, ParameterPlace
from holdfast.integrations.paddle.fleet.sharding import OptimizerSharding, Stepped, SteppedGroup
from holdfast.integrations.paddle.step_counts import StepCounts
from holdfast.integrations.paddle.views import Views
from holdfast.integrations.paddle.watch import MappingsWatch, TensorMemory, stopped
from holdfast.memory import native_copy
from holdfast_formats.errors import InvalidRequest

MASTER, STEP = "master", "step"
KEYS = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "moment2_max": "max_exp_avg_sq", "velocity": "momentum_buffer"}

Betas = tuple[float, float]
Places = Callable[[], Mapping[str, ParameterPlace]]


class _Said(NamedTuple):
    view: torch.Tensor
    span: ElementRange | None
    declared: Declared


class _Kept(NamedTuple):
    """What an optimizer keeps of a parameter, by key: Paddle's tensors, where these were, their place, and what is stored.

    `powers` are the powers of beta in their memory, if they are single numbers in float32, and `counted` is what is stored
    with the number of steps in their place.
    """

    tensors: dict[str, Any]
    memory: list[tuple[int, object]]
    place: ParameterPlace
    span: ElementRange | None
    declared: dict[str, Any]
    powers: tuple[torch.Tensor | NDArray[np.float32], ...]
    counted: dict[str, Any]

    def is_of(self, tensors: dict[str, Any], memory: object, place: ParameterPlace, span: ElementRange | None) -> bool:
        there = self.memory == memory and self.place == place and self.span == span
        return there and all(map(is_, self.tensors.values(), tensors.values()))


class _Counted:
    """The powers of beta of parameters of one group, which tell the number of steps of each."""

    def __init__(self, kept: Sequence[_Kept]) -> None:
        self.kept = kept
        self.names = tuple(one.place.name for one in kept)
        self._powers = [one for each in kept for one in each.powers]
        self._places: NDArray[np.uint64] | None = None
        if native_copy.available() and all(isinstance(one, np.ndarray) for one in self._powers):
            places = [(one.__array_interface__["data"][0], one.nbytes) for one in self._powers]  # type: ignore[union-attr]
            self._places = np.array(places, np.uint64).reshape(-1, 2)

    def steps(self, betas: Betas) -> list[StepRange | None]:
        """Of each parameter, the numbers of steps after which its powers have their values."""
        if self._places is None:
            values = [one.item() for one in self._powers]
        else:  # one call reads all
            values = native_copy.words_at(self._places).astype(np.uint32).view(np.float32).tolist()
        pairs = list(zip(values[::2], values[1::2], strict=True))
        told = {pair: beta_powers.steps_of_both(betas, pair) for pair in set(pairs)}
        return [told[pair] for pair in pairs]


class _Group(NamedTuple):
    """What is kept of the parameters of one of the optimizer's groups, with the first of them."""

    first: Stepped
    kept: list[_Kept]
    counted: _Counted


class _Found(NamedTuple):
    """What is kept of all parameters."""

    places: Mapping[str, ParameterPlace]
    groups: list[SteppedGroup]
    frozen: list[list[bool]]
    mappings: MappingsWatch
    memory: TensorMemory
    kept: list[_Group]

    def holds(self, places: object, groups: list[SteppedGroup], mappings: Sequence[Mapping[str, Any]]) -> bool:
        """Whether another look would find the same: the same tensors are kept of the same parameters."""
        same = self.places is places and self.groups is groups and self.frozen == _frozen(groups)
        return same and self.mappings.unchanged(mappings) and self.memory.unchanged


class KeptState:
    """What the optimizer in `sharding` keeps of its parameters. `places` is as for `PaddleOptimizer`, and `expect` gets the
    elements of each of two tensors that the first step will make of every parameter.
    """

    def __init__(self, sharding: OptimizerSharding, places: Places, expect: Callable[[Sequence[int]], None]) -> None:
        self.optimizer, self.places = sharding.inner, places
        self.steps = StepCounts()
        self._sharding, self._expect = sharding, expect
        self._views = Views()
        self._said: dict[tuple[str, str], _Said] = {}
        self._kept: dict[str, _Kept] = {}  # by parameter
        self._found: _Found | None = None
        self._counted: list[tuple[str, ...]] = []  # the parameters whose steps `state` has returned

    def unchanged(self) -> bool:
        """Whether `state` would return what it has returned last, with the numbers of steps as they are now."""
        found = self._found
        if found is None or not found.holds(self.places(), self._sharding.groups(), self._mappings()):
            return False
        return self._store_all(found) == self._counted

    def state(self) -> dict[str, dict[str, Any]]:
        """By stored name and key, the identical objects as long as nothing but values changes. `InvalidRequest` for state of
        no parameter, and of a form that cannot be placed.
        """
        places, groups, kept = self.places(), self._sharding.groups(), self._mappings()
        if self._found is None or not self._found.holds(places, groups, kept):
            self._found = None  # in case that something is refused
            self._found = self._find(places, groups)
        self._counted = self._store_all(self._found)
        counted = set(chain.from_iterable(self._counted))
        held = {one.place.name: one for group in self._found.kept for one in group.kept}
        for name in counted:
            held[name].counted[STEP] = self.steps.stored(name)
        return {name: one.counted if name in counted else one.declared for name, one in held.items()}

    def _store_all(self, found: _Found) -> list[tuple[str, ...]]:
        """Bring the numbers of steps up to date. Returns of each group the parameters that have one."""
        counted: list[tuple[str, ...]] = []
        for group in found.kept:
            told = group.counted.steps(hyper_parameters.betas_of(self.optimizer, group.first))
            known = [steps for steps in told if steps is not None]
            names = group.counted.names
            if len(known) < len(told):
                names = tuple(name for name, steps in zip(names, told, strict=True) if steps is not None)
            self.steps.store(names, known)
            counted.append(names)
        return counted

    def _find(self, places: Mapping[str, ParameterPlace], groups: list[SteppedGroup]) -> _Found:
        watch, elements = MappingsWatch(self._mappings()), list[int]()
        found: list[_Group] = []
        count = 0
        for group in groups:
            of_group: list[_Kept] = []
            for stepped in group.members:
                held = self.held(stepped)
                count += len(held) - (MASTER in held)
                if held:
                    of_group.append(self._known(self.place(stepped), stepped, held))
                elif not stepped.elsewhere and not stepped.kept.stop_gradient:
                    elements.append(self._elements_to_come(stepped.kept))
            if of_group:
                counted = _Counted([one for one in of_group if one.powers])
                found.append(_Group(group.members[0], of_group, counted))
        self._refuse_strangers(count)
        self._expect(elements)
        return _Found(places, groups, _frozen(groups), watch, TensorMemory(watch.values), found)

    def _mappings(self) -> list[Mapping[str, Any]]:
        """By key, and then by owner, what the optimizer keeps."""
        return [*self.optimizer._accumulators.values(), self.optimizer._master_weights]

    def _known(self, place: ParameterPlace, stepped: Stepped, held: dict[str, Any]) -> _Kept:
        """What is stored of a parameter; the identical one as long as the tensors have the same memory and place."""
        memory = [(tensor.data_ptr(), tensor.dtype) for tensor in held.values()]
        known = self._kept.get(place.name)
        if known is None or not known.is_of(held, memory, place, stepped.span):
            declared = {key: self.declared(place, stepped, key, tensor) for key, tensor in held.items()}
            powers = [self.view(place, key, held[key]) for key in POWERS if key in held]
            if len(powers) < len(POWERS) or not all(one.numel() == 1 and one.dtype is torch.float32 for one in powers):
                powers = []
            read = tuple(one.numpy() if one.device.type == "cpu" else one for one in powers)  # numpy is 10 times as fast
            counted = {key: value for key, value in declared.items() if key not in POWERS}
            known = _Kept(held, memory, place, stepped.span, declared, read, counted)
            self._kept[place.name] = known
        return known

    def _elements_to_come(self, parameter: Any) -> int:
        """The elements of each of two tensors that a first step will make: moments in float32, and half of a master."""
        count: int = math.prod(parameter.shape)
        halves = getattr(self.optimizer, "_multi_precision", False)
        return count * 3 // 2 if halves and self.optimizer._is_dtype_fp16_or_bf16(parameter.dtype) else count

    def view(self, place: ParameterPlace, key: str, tensor: Any) -> torch.Tensor:
        return self._views.of(f"{place.name}/{key}", tensor, turned=place.turned)

    def declared(self, place: ParameterPlace, stepped: Stepped, key: str, tensor: Any) -> Declared:
        """What to store of a tensor that the optimizer keeps: the identical object while it has the same memory."""
        view = self.view(place, key, tensor)
        known = self._said.get((place.name, key))
        if known is None or known.view is not view or known.span != stepped.span:
            if key in POWERS or (place.cut is None and stepped.span is None and view.numel() == 1):
                declared: Declared = view
            elif stepped.span is not None:
                declared = place.span_of(view, stepped.span)
            elif tuple(view.shape) == place.local:
                declared = place.of(view)
            else:
                raise InvalidRequest(
                    f"{type(self.optimizer).__name__} keeps {key!r} of {place.name} in shape {list(view.shape)}, which is "
                    f"not the parameter's, {list(place.local)}, so it is not known how to cut and transpose it",
                    hint="use an optimizer whose state has the parameters' shapes, such as AdamW, or save(groups=…)",
                    tensor=place.name,
                )
            known = self._said[place.name, key] = _Said(view, stepped.span, declared)
        return known.declared

    def held(self, stepped: Stepped) -> dict[str, Any]:
        """The accumulators and the full-precision weight of a parameter, by the key under which they are stored."""
        own = stepped.kept.name
        master = self.optimizer._master_weights.get(own)
        owner = own if master is None else master.name
        found = {}
        for key, by_owner in self.optimizer._accumulators.items():
            tensor = by_owner.get(owner)
            if tensor is None and master is not None:
                tensor = by_owner.get(own)
            if tensor is not None:
                named = key if self.optimizer._name is None else key.removeprefix(f"{self.optimizer._name}_")
                found[KEYS.get(named, named)] = tensor
        if master is not None:
            found[MASTER] = master
        return found

    def place(self, stepped: Stepped) -> ParameterPlace:
        place = self.places().get(stepped.parameter.name)
        if place is None:
            raise InvalidRequest(
                f"the {type(self.optimizer).__name__} steps {stepped.parameter.name!r}, which is in no layer of the state",
                hint="give the layer that has it too: state(model, optimizer, other=layer), or more={'other': layer} of "
                "attach(); of a parameter that was replaced in its layer, construct the optimizer again, and attach it",
            )
        return place

    def parameter(self, name: str) -> Stepped:
        """The parameter of this stored name."""
        return next(one for one in hyper_parameters.stepped_by(self._sharding) if self.place(one).name == name)

    def _refuse_strangers(self, count: int) -> None:
        """Refuse accumulators of no parameter of the optimizer: they would be lost."""
        kept = self.optimizer._accumulators
        if count == sum(map(len, kept.values())):
            return
        known = {one.kept.name for one in hyper_parameters.stepped_by(self._sharding)}
        known |= {master.name for name, master in self.optimizer._master_weights.items() if name in known}
        key, owner = next((key, owner) for key, by_owner in kept.items() for owner in by_owner if owner not in known)
        raise InvalidRequest(
            f"the {type(self.optimizer).__name__} keeps {key!r} of {owner!r}, which is none of its parameters, so it would "
            "not be saved",
            hint="do not rename parameters once the optimizer has stepped; after a layer was replaced, construct the "
            "optimizer again, and attach it",
        )


def _frozen(groups: Sequence[SteppedGroup]) -> list[list[bool]]:
    return [stopped([one.kept for one in group.members]) for group in groups]
