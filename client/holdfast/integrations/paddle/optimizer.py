"""A Paddle optimizer as `OptimizerShards`: by structured names, in the form that torch's optimizers are stored in.

`moment1` is stored as `exp_avg`, `moment2` as `exp_avg_sq`, `velocity` as `momentum_buffer`, other accumulators under their
own names, full-precision weights in the group `master`. The powers of beta are not stored where they are what Paddle makes
of a number of steps; then `step` is that number, as in torch. A power that no longer changes does not tell the number: there
the steps of the optimizer are counted on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.integrations.paddle import beta_powers, hyper_parameters
from holdfast.integrations.paddle.beta_powers import POWERS
from holdfast.integrations.paddle.fence import fence_of
from holdfast.integrations.paddle.fleet.places import Declared, ElementRange, ParameterPlace, empty
from holdfast.integrations.paddle.fleet.ranks import RankTensor
from holdfast.integrations.paddle.fleet.sharding import OptimizerSharding, Stepped
from holdfast.integrations.paddle.hyper_parameters import ParameterGroup
from holdfast.integrations.paddle.views import Views
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.state_tensors import MASTER_KEYS
from holdfast_formats.errors import InvalidRequest, StateMismatch

MASTER, STEP = "master", "step"
KEYS = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "moment2_max": "max_exp_avg_sq", "velocity": "momentum_buffer"}

Betas = tuple[float, float]
Places = Callable[[], Mapping[str, ParameterPlace]]


class Counted(NamedTuple):
    """A known number of steps of a parameter, and how many the optimizer had taken by then."""

    steps: int
    at: int


class _Step(NamedTuple):
    """A number of steps as it is stored, and in the same memory as numpy reads it, which is faster."""

    tensor: torch.Tensor
    value: NDArray[np.float32]


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


class PaddleOptimizer:
    """An optimizer of Paddle, as the entry `shards` of a state.

    `places` returns the place of every parameter of the state in the whole one, with its stored name, by Paddle's name of
    it. An optimizer that fleet has wrapped is divided among ranks as `OptimizerSharding` says.
    """

    def __init__(self, optimizer: Any, places: Places) -> None:
        """Raises `InvalidRequest` for optimizers whose state is not all in accumulators, or cannot be placed."""
        self._sharding, self._places = OptimizerSharding(optimizer), places
        self.optimizer = self._sharding.inner
        _refuse(self.optimizer)
        self.others: dict[str, RankTensor] = {}  # parameters that only other ranks have
        self._views = Views()
        self._said: dict[tuple[str, str], _Said] = {}
        self._kept: dict[str, _Kept] = {}  # by parameter
        self._steps: dict[str, _Step] = {}  # by parameter
        self._counted: dict[str, Counted] = {}
        self._taken = 0
        self._made: dict[str, set[str]] = {}  # keys that a restore has made, by parameter, until they are filled
        self._fence = fence = fence_of(self.optimizer)
        fence.register_step_pre_hook(self._before_step)
        fence.register_step_post_hook(self._after_step)
        self.shards = OptimizerShards(
            groups=self.groups,
            state=self.state,
            install=self.install,
            hooks=[fence],
            new=self.new,
            makes_masters=True,
            check=self.check,
        )

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups; parameters that are stepped in another way than others of their group form one of their own.
        Frozen parameters without state are in none.
        """
        places = self._places()
        groups = self._groups()
        self._fence.tell(hyper_parameters.given_names(self.optimizer, groups))
        return [
            {
                "params": [self._place(places, one).name for one in group.members]
                + [name for name, listed in self.others.items() if listed.group == group.key],
                **group.hyper,
            }
            for group in groups
        ]

    def keys_of_groups(self) -> dict[str, str]:
        """The key of the group of each parameter of this rank, by stored name."""
        places = self._places()
        return {self._place(places, one).name: group.key for group in self._groups() for one in group.members}

    def _groups(self) -> list[ParameterGroup]:
        keys = dict.fromkeys(listed.group for listed in self.others.values())
        return hyper_parameters.groups_of(self._sharding, self._is_stepped, keys)

    def state(self) -> dict[str, dict[str, Any]]:
        self._drop_unfilled()
        places, found, elements = self._places(), dict[str, dict[str, Any]](), list[int]()
        betas: dict[int, Betas] = {}  # by the identity of the user's group
        count = 0
        for stepped in hyper_parameters.stepped_by(self._sharding):
            held = self._held(stepped)
            count += len(held) - (MASTER in held)
            if held:
                place = self._place(places, stepped)
                if id(stepped.group) not in betas:
                    betas[id(stepped.group)] = hyper_parameters.betas_of(self.optimizer, stepped)
                found[place.name] = self._stored(self._known(place, stepped, held), betas[id(stepped.group)])
            elif not stepped.elsewhere and not stepped.kept.stop_gradient:
                elements.append(self._elements_to_come(stepped.kept))
        self._refuse_strangers(count)
        self._fence.expect(elements)
        return found

    def new(self, name: str, key: str, dtype: torch.dtype) -> Any:
        """What Paddle itself would make in the first step, to be filled; `StateMismatch` if it would make no such thing.

        Of a parameter that other ranks step, nothing.
        """
        if name in self.others:
            return empty(self.others[name].shape, dtype)
        place, stepped = self._parameter(name)
        if stepped.elsewhere:
            return empty(place.shape, dtype)
        if name not in self._made:
            before = self._held(stepped)
            hyper_parameters.make_accumulators(self.optimizer, stepped)
            self._made[name] = {key for key in self._held(stepped) if key not in before}
        key = MASTER if key in MASTER_KEYS else key
        held = self._held(stepped)
        if key not in held:
            raise StateMismatch(
                f"{type(self.optimizer).__name__} keeps no {key!r} of {name!r}, and the checkpoint has one",
                hint="construct the optimizer as the one that was saved (multi_precision=True for masters), or leave its "
                "state out: restore(groups=…)",
                tensor=name,
            )
        return self._declared(place, stepped, key, held[key])

    def check(self, groups: list[dict[str, Any]], keys: dict[str, set[str]]) -> None:
        """Raise `StateMismatch` for hyper-parameters that cannot be set, and for state of a parameter of another kind."""
        hyper_parameters.changes(self.optimizer, self._groups(), groups)
        places = self._places()
        for stepped in hyper_parameters.stepped_by(self._sharding):
            name, held = self._place(places, stepped).name, self._held(stepped)
            given = {MASTER if key in MASTER_KEYS else key for key in keys.get(name, ())}
            unknown = sorted(given - held.keys() - {STEP})
            if held and unknown:
                raise StateMismatch(
                    f"{type(self.optimizer).__name__} keeps no {unknown[0]!r} of {name!r}, and the checkpoint has one",
                    hint="construct the optimizer as the one that was saved, or leave its state out: restore(groups=…)",
                    tensor=name,
                )
            counted = POWERS if STEP in given or name in self._steps else ()
            lacking = sorted(self._made.get(name, set()) - given - {MASTER, *counted})
            if lacking:
                raise StateMismatch(
                    f"the checkpoint has state of {name!r}, but lacks its {lacking[0]!r}",
                    hint="construct the optimizer as the one that was saved, or leave its state out: restore(groups=…)",
                    tensor=name,
                )

    def install(self, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> None:
        made, self._made = self._made, {}
        for change in hyper_parameters.changes(self.optimizer, self._groups(), groups):
            change()
        places = self._places()
        for stepped in hyper_parameters.stepped_by(self._sharding):
            held = self._held(stepped)
            if held:
                place = self._place(places, stepped)
                given = {MASTER if key in MASTER_KEYS else key: value for key, value in values.get(place.name, {}).items()}
                self._fill(place, stepped, held, given)
                if MASTER in made.get(place.name, set()) - given.keys():  # it is made of the weight instead
                    master = self.optimizer._master_weights[stepped.kept.name]
                    master.set_value(stepped.kept.astype(master.dtype))

    def _fill(self, place: ParameterPlace, stepped: Stepped, held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Put values that were not restored in place into the accumulators, and make powers of the number of steps."""
        name = place.name
        with torch.no_grad():
            for key, value in given.items():
                if key != STEP and isinstance(value, torch.Tensor):
                    view = self._view(place, key, held[key])
                    if value is not view:
                        view.copy_(value)
            counted = given.get(STEP, self._steps[name].tensor if name in self._steps else None)
            powers = [key for key in POWERS if key in held and key not in given]
            if counted is not None and powers:
                steps = int(counted.item() if isinstance(counted, torch.Tensor) else counted)
                self._counted[name] = Counted(steps, self._taken)
                for key, beta in zip(POWERS, hyper_parameters.betas_of(self.optimizer, stepped), strict=True):
                    if key in powers:
                        self._view(place, key, held[key]).fill_(beta_powers.power(beta, steps))

    def _known(self, place: ParameterPlace, stepped: Stepped, held: dict[str, Any]) -> _Kept:
        """What is stored of a parameter; the identical one as long as the tensors have the same memory and place."""
        memory = [(tensor.data_ptr(), tensor.dtype) for tensor in held.values()]
        known = self._kept.get(place.name)
        if known is None or not known.is_of(held, memory, place, stepped.span):
            declared = {key: self._declared(place, stepped, key, tensor) for key, tensor in held.items()}
            powers = [self._view(place, key, held[key]) for key in POWERS if key in held]
            if len(powers) < len(POWERS) or not all(one.numel() == 1 and one.dtype is torch.float32 for one in powers):
                powers = []
            read = tuple(one.numpy() if one.device.type == "cpu" else one for one in powers)  # numpy is 10 times as fast
            counted = {key: value for key, value in declared.items() if key not in POWERS}
            known = _Kept(held, memory, place, stepped.span, declared, read, counted)
            self._kept[place.name] = known
        return known

    def _stored(self, known: _Kept, betas: Betas) -> dict[str, Any]:
        """What is stored of a parameter, by key."""
        if not known.powers:
            return known.declared
        steps = beta_powers.steps_of_both(betas, tuple(one.item() for one in known.powers))
        if steps is None:
            return known.declared
        known.counted[STEP] = self._step(known.place.name, steps)
        return known.counted

    def _step(self, name: str, known: beta_powers.StepRange) -> torch.Tensor:
        before, steps = self._counted.get(name), known.first
        if known.open and before is not None:
            steps = max(steps, before.steps + self._taken - before.at)
        self._counted[name] = Counted(steps, self._taken)
        stored = self._steps.get(name)
        if stored is None:
            tensor = torch.zeros((), dtype=torch.float32)
            stored = self._steps[name] = _Step(tensor, tensor.numpy())
        return stored.tensor if stored.value.item() == steps else stored.tensor.fill_(steps)

    def _elements_to_come(self, parameter: Any) -> int:
        """The elements of each of two tensors that a first step will make: moments in float32, and half of a master."""
        count: int = math.prod(parameter.shape)
        halves = getattr(self.optimizer, "_multi_precision", False)
        return count * 3 // 2 if halves and self.optimizer._is_dtype_fp16_or_bf16(parameter.dtype) else count

    def _view(self, place: ParameterPlace, key: str, tensor: Any) -> torch.Tensor:
        return self._views.of(f"{place.name}/{key}", tensor, turned=place.turned)

    def _declared(self, place: ParameterPlace, stepped: Stepped, key: str, tensor: Any) -> Declared:
        """What to store of a tensor that the optimizer keeps: the identical object while it has the same memory."""
        view = self._view(place, key, tensor)
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

    def _held(self, stepped: Stepped) -> dict[str, Any]:
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

    def _is_stepped(self, stepped: Stepped) -> bool:
        return not stepped.parameter.stop_gradient or bool(self._held(stepped))

    def _place(self, places: Mapping[str, ParameterPlace], stepped: Stepped) -> ParameterPlace:
        place = places.get(stepped.parameter.name)
        if place is None:
            raise InvalidRequest(
                f"the {type(self.optimizer).__name__} steps {stepped.parameter.name!r}, which is in no layer of the state",
                hint="give the layer that has it too: state(model, optimizer, other=layer), or more={'other': layer} of "
                "attach(); of a parameter that was replaced in its layer, construct the optimizer again, and attach it",
            )
        return place

    def _parameter(self, name: str) -> tuple[ParameterPlace, Stepped]:
        places = self._places()
        every = ((self._place(places, one), one) for one in hyper_parameters.stepped_by(self._sharding))
        return next((place, one) for place, one in every if place.name == name)

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

    def _before_step(self, *_: object) -> None:
        self._drop_unfilled()

    def _after_step(self, *_: object) -> None:
        skipped = self.optimizer._get_auxiliary_var("found_inf")
        self._taken += not (skipped is not None and bool(skipped))

    def _drop_unfilled(self) -> None:
        """Remove what a restore has made and did not fill, because it was refused."""
        for name, made in self._made.items():
            if made:
                hyper_parameters.remove_accumulators(self.optimizer, self._parameter(name)[1].kept)
        self._made = {}


def _refuse(optimizer: Any) -> None:
    from paddle.incubate import ModelAverage
    from paddle.optimizer import Optimizer

    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise InvalidRequest(
            f"the optimizer is a {kind}, not an optimizer of Paddle", hint="pass the paddle.optimizer.Optimizer inside it"
        )
    if isinstance(optimizer, ModelAverage):
        raise InvalidRequest(
            f"a {kind} is not the optimizer that takes the steps, and Holdfast does not save it",
            hint="let Holdfast average the weights: attach(…, ema=holdfast.Ema(…)), and pass the optimizer that steps",
        )
    around = [held for held in vars(optimizer).values() if isinstance(held, Optimizer) and held is not optimizer]  # stage 3
    if type(optimizer).state_dict is not Optimizer.state_dict or around:
        raise InvalidRequest(
            f"a {kind} keeps state that is in no accumulators, and Holdfast cannot save it",
            hint="use an optimizer that keeps all of its state in accumulators, such as AdamW",
        )
