"""A Paddle optimizer as `OptimizerShards`: by structured names, in the form that torch's optimizers are stored in.

`moment1` is stored as `exp_avg`, `moment2` as `exp_avg_sq`, `velocity` as `momentum_buffer`, other accumulators under their
own names, full-precision weights in the group `master`. The powers of beta are not stored where they are what Paddle makes
of a number of steps; then `step` is that number, as in torch. A power that no longer changes does not tell the number: there
the steps of the optimizer are counted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from holdfast.integrations.paddle import beta_powers, hyper_parameters
from holdfast.integrations.paddle.beta_powers import POWERS
from holdfast.integrations.paddle.fence import fence_of
from holdfast.integrations.paddle.fleet.places import ParameterPlace, empty
from holdfast.integrations.paddle.fleet.ranks import RankTensor
from holdfast.integrations.paddle.fleet.sharding import OptimizerSharding, Stepped
from holdfast.integrations.paddle.hyper_parameters import ParameterGroup
from holdfast.integrations.paddle.kept_state import MASTER, STEP, KeptState, Places
from holdfast.integrations.paddle.others import Others
from holdfast.integrations.paddle.parameter_parts import ParameterPart, ParameterParts
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.state_tensors import MASTER_KEYS
from holdfast_formats.errors import InvalidRequest, StateMismatch


class _Named(NamedTuple):
    """The stored names of the parameters of these parts, which have these places."""

    parts: list[ParameterPart]
    places: Mapping[str, ParameterPlace]
    names: list[list[str]]


class PaddleOptimizer:
    """An optimizer of Paddle, as the entry `shards` of a state.

    `places` returns the place of every parameter of the state in the whole one, with its stored name, by Paddle's name of
    it. An optimizer that fleet has wrapped is divided among ranks as `OptimizerSharding` says. `others` gets what
    takes steps and is not in the state.
    """

    def __init__(self, optimizer: Any, places: Places, others: Others) -> None:
        """Raises `InvalidRequest` for optimizers whose state is not all in accumulators, or cannot be placed."""
        self._sharding = OptimizerSharding(optimizer)
        self.optimizer = self._sharding.inner
        _refuse(self.optimizer)
        self._others = others
        self._fence = fence = fence_of(self.optimizer)
        self._kept = kept = KeptState(self._sharding, places, fence.expect)
        self._parts = ParameterParts(self._sharding, lambda stepped: bool(kept.held(stepped)))
        self._named: _Named | None = None
        self.others: dict[str, RankTensor] = {}  # parameters that only other ranks have
        self._made: dict[str, set[str]] = {}  # keys that a restore has made, by parameter, until they are filled
        fence.register_step_pre_hook(self._before_step)
        fence.register_step_post_hook(self._after_step)
        self.shards = OptimizerShards(
            groups=self.groups,
            state=self.state,
            install=self.install,
            hooks=[fence],
            new=self.new,
            makes_masters=True,
            unchanged=self.unchanged,
            check=self.check,
            left_out=others.left_out,
        )

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups; parameters that are stepped in another way than others of their group form one of their own.
        Frozen parameters without state are in none.
        """
        parts = self._parts_now()
        groups = hyper_parameters.groups_of(self.optimizer, parts)
        self._fence.tell(hyper_parameters.given_names(self.optimizer, groups))
        return [{"params": names, **group.hyper} for names, group in zip(self._names(parts), groups, strict=True)]

    def keys_of_groups(self) -> dict[str, str]:
        """The key of the group of each parameter of this rank, by stored name."""
        parts = self._parts_now()
        return {name: part.key for part, names in zip(parts, self._names(parts), strict=True) for name in names}

    def _parts_now(self) -> list[ParameterPart]:
        return self._parts.now(list(dict.fromkeys(listed.group for listed in self.others.values())))

    def _names(self, parts: list[ParameterPart]) -> list[list[str]]:
        """The stored names of the parameters of each part, with those of other ranks."""
        places, known = self._kept.places(), self._named
        if known is None or known.parts is not parts or known.places is not places:
            names = [[self._kept.place(one).name for one in part.members] for part in parts]
            by_key = {part.key: named for part, named in zip(parts, names, strict=True)}
            for name, listed in self.others.items():
                by_key.get(listed.group, []).append(name)
            known = self._named = _Named(parts, places, names)
        return known.names

    def _groups(self) -> list[ParameterGroup]:
        return hyper_parameters.groups_of(self.optimizer, self._parts_now())

    def state(self) -> dict[str, dict[str, Any]]:
        self._drop_unfilled()
        return self._kept.state()

    def unchanged(self) -> bool:
        """Whether `state` would return the same; numbers of steps are brought up to date."""
        self._drop_unfilled()
        return self._kept.unchanged()

    def new(self, name: str, key: str, dtype: torch.dtype) -> Any:
        """What Paddle itself would make in the first step, to be filled; `StateMismatch` if it would make no such thing.

        Of a parameter that other ranks step, nothing.
        """
        if name in self.others:
            return empty(self.others[name].shape, dtype)
        stepped = self._kept.parameter(name)
        place = self._kept.place(stepped)
        if stepped.elsewhere:
            return empty(place.shape, dtype)
        if name not in self._made:
            before = self._kept.held(stepped)
            hyper_parameters.make_accumulators(self.optimizer, stepped)
            self._made[name] = {key for key in self._kept.held(stepped) if key not in before}
        key = MASTER if key in MASTER_KEYS else key
        held = self._kept.held(stepped)
        if key not in held:
            raise StateMismatch(
                f"{type(self.optimizer).__name__} keeps no {key!r} of {name!r}, and the checkpoint has one",
                hint="construct the optimizer as the one that was saved (multi_precision=True for masters), or leave its "
                "state out: restore(groups=…)",
                tensor=name,
            )
        return self._kept.declared(place, stepped, key, held[key])

    def check(self, groups: list[dict[str, Any]], keys: dict[str, set[str]]) -> None:
        """Raise `StateMismatch` for hyper-parameters that cannot be set, and for state of a parameter of another kind."""
        hyper_parameters.changes(self.optimizer, self._groups(), groups)
        for stepped in hyper_parameters.stepped_by(self._sharding):
            name, held = self._kept.place(stepped).name, self._kept.held(stepped)
            given = {MASTER if key in MASTER_KEYS else key for key in keys.get(name, ())}
            unknown = sorted(given - held.keys() - {STEP})
            if held and unknown:
                raise StateMismatch(
                    f"{type(self.optimizer).__name__} keeps no {unknown[0]!r} of {name!r}, and the checkpoint has one",
                    hint="construct the optimizer as the one that was saved, or leave its state out: restore(groups=…)",
                    tensor=name,
                )
            counted = POWERS if STEP in given or self._kept.steps.known(name) is not None else ()
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
        for stepped in hyper_parameters.stepped_by(self._sharding):
            held = self._kept.held(stepped)
            if held:
                place = self._kept.place(stepped)
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
                    view = self._kept.view(place, key, held[key])
                    if value is not view:
                        view.copy_(value)
            counted = given.get(STEP, self._kept.steps.known(name))
            powers = [key for key in POWERS if key in held and key not in given]
            if counted is not None and powers:
                steps = int(counted.item() if isinstance(counted, torch.Tensor) else counted)
                self._kept.steps.restored(name, steps)
                for key, beta in zip(POWERS, hyper_parameters.betas_of(self.optimizer, stepped), strict=True):
                    if key in powers:
                        self._kept.view(place, key, held[key]).fill_(beta_powers.power(beta, steps))

    def _before_step(self, *_: object) -> None:
        self._drop_unfilled()

    def _after_step(self, *_: object) -> None:
        self._others.own_stepped(self.optimizer)
        skipped = self.optimizer._get_auxiliary_var("found_inf")
        if skipped is None or not bool(skipped):
            self._kept.steps.count()

    def _drop_unfilled(self) -> None:
        """Remove what a restore has made and did not fill, because it was refused."""
        for name, made in self._made.items():
            if made:
                hyper_parameters.remove_accumulators(self.optimizer, self._kept.parameter(name).kept)
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
