"""What is asked of a Paddle optimizer: its parameters, their groups with torch's names of the hyper-parameters, and to make
the accumulators of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from holdfast.integrations.paddle.fleet.sharding import OptimizerSharding, Stepped
from holdfast.integrations.paddle.parameter_parts import Decay, ParameterPart, l1_of
from holdfast_formats.errors import StateMismatch

TORCH_NAMES = {"epsilon": "eps", "use_nesterov": "nesterov"}
_LR, _DECAY, _BETAS, _BETA_1, _BETA_2 = "lr", "weight_decay", "betas", "beta1", "beta2"
_L1 = "l1_decay"  # torch's optimizers have none
_OWN_L2 = "l2_decay"  # of a parameter's own regularizer, beside a decay that is no part of the gradient
_L2, _METHOD = "regularization_coeff", "regularization_method"  # how Momentum keeps its decay
_NUMBERS = (bool, int, float)


class ParameterGroup(NamedTuple):
    """Parameters that are stepped with the same hyper-parameters, and these."""

    part: ParameterPart
    hyper: dict[str, Any]


def stepped_by(sharding: OptimizerSharding) -> Iterator[Stepped]:
    """All parameters, in the order of the groups."""
    for group in sharding.groups():
        yield from group.members


def groups_of(optimizer: Any, parts: Iterable[ParameterPart]) -> list[ParameterGroup]:
    """The parts with their hyper-parameters now."""
    rate = float(optimizer.get_lr())
    found: list[ParameterGroup] = []
    for part in parts:
        hyper = {**_hyper(optimizer, part.given), _LR: rate * part.multiple}
        if not part.decays:
            hyper[_DECAY] = 0.0
        found.append(ParameterGroup(part, {**hyper, **_of_own_decay(optimizer, part.own)}))
    return found


def betas_of(optimizer: Any, stepped: Stepped) -> tuple[float, float]:
    """β1 and β2 with which a parameter is stepped."""
    known = _values(optimizer, stepped.group)
    return float(known.get(_BETA_1, 0.0)), float(known.get(_BETA_2, 0.0))


def given_names(optimizer: Any, known_groups: Sequence[ParameterGroup]) -> set[str]:
    """The names of hyper-parameters that the user gives and no scheduler moves."""
    from paddle.optimizer.lr import LRScheduler

    moved = {_LR} if isinstance(optimizer._learning_rate, LRScheduler) else set()
    return {name for group in known_groups for name in group.hyper} - moved


def changes(
    optimizer: Any, known_groups: Sequence[ParameterGroup], groups: Sequence[Mapping[str, Any]]
) -> list[Callable[[], None]]:
    """What sets restored hyper-parameters, given for each of these groups. The learning rate of a scheduler is the
    scheduler's.

    Raises `StateMismatch` for one that cannot be set.
    """
    found: list[Callable[[], None]] = []
    for known, stored in zip(known_groups, groups, strict=True):
        for name, value in stored.items():
            if name == _LR:
                found += _change_of_rate(optimizer, known, value)
            elif name == _BETAS:
                found += _change(optimizer, known, _BETA_1, value[0])
                found += _change(optimizer, known, _BETA_2, value[1])
            elif name in known.hyper and value != known.hyper[name]:
                own = next((own for own, theirs in TORCH_NAMES.items() if theirs == name), name)
                if name == _DECAY and not known.part.decays:
                    raise _refused(name, value, known.hyper[name], "which apply_decay_param_fun decides")
                if name == _OWN_L2 or (known.part.own is not None and name in _of_own_decay(optimizer, known.part.own)):
                    raise _refused(name, value, known.hyper[name], "which ParamAttr(regularizer=…) decides")
                found += _change(optimizer, known, own, value)
    return found


def make_accumulators(optimizer: Any, stepped: Stepped) -> None:
    """Make everything that the optimizer keeps of a parameter, as its first step would."""
    import paddle
    from paddle.base.framework import default_main_program

    block = default_main_program().global_block()
    of = [stepped.kept] if stepped.group is None else {**stepped.group, "params": [stepped.kept]}
    with paddle.no_grad():
        optimizer._create_accumulators(block, of)


def remove_accumulators(optimizer: Any, parameter: Any) -> None:
    """Undo `make_accumulators`."""
    master = optimizer._master_weights.pop(parameter.name, None)
    for by_owner in optimizer._accumulators.values():
        for owner in (parameter.name, *(() if master is None else (master.name,))):
            tensor = by_owner.pop(owner, None)
            if tensor is not None and tensor.name in optimizer._opti_name_list:
                optimizer._opti_name_list.remove(tensor.name)
    optimizer._already_create_accumulator.discard(parameter.name)


def _values(optimizer: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Paddle's own names and values of the hyper-parameters of a group."""
    names = [*optimizer._default_dict]
    names += [name for name in ("beta1", "beta2", "epsilon", "momentum", "rho") if name not in names]
    found = {}
    for name in names:
        own = getattr(optimizer, f"_{name}", optimizer._default_dict.get(name))
        found[name] = _number(own if given is None else given.get(name, own))
    if given is None and isinstance(getattr(optimizer, "regularization", None), object) and found.get(_DECAY) is None:
        found[_DECAY] = _number(getattr(optimizer, "regularization", None))
    if _L2 in found:
        found[_DECAY] = found.pop(_L2)
    found[_L1] = l1_of(getattr(optimizer, "regularization", None) if given is None else given.get(_DECAY))
    return {name: value for name, value in found.items() if isinstance(value, _NUMBERS)}


def _number(value: Any) -> Any:
    """The number of a hyper-parameter: a tensor's, or the coefficient of an L2 decay."""
    from paddle.regularizer import L2Decay

    if isinstance(value, L2Decay):
        return float(value._coeff)
    return float(value.item()) if hasattr(value, "item") else value


def _hyper(optimizer: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    known = _values(optimizer, given)
    hyper = {TORCH_NAMES.get(name, name): value for name, value in known.items() if name not in (_BETA_1, _BETA_2)}
    if _BETA_1 in known and _BETA_2 in known:
        hyper[_BETAS] = (float(known[_BETA_1]), float(known[_BETA_2]))
    hyper.setdefault(_DECAY, 0.0)
    return hyper


def _of_own_decay(optimizer: Any, own: Decay | None) -> dict[str, float]:
    """The hyper-parameters that a parameter's own regularizer decides. It replaces the optimizer's; a decay that is no part
    of the gradient stays beside it.
    """
    from paddle.optimizer import AdamW, Lamb

    l2, l1 = own or (0.0, 0.0)
    if isinstance(optimizer, AdamW | Lamb):
        return {_OWN_L2: l2, _L1: l1}
    return {} if own is None else {_DECAY: l2, _L1: l1}


def _change_of_rate(optimizer: Any, known: ParameterGroup, value: Any) -> Iterator[Callable[[], None]]:
    from paddle.optimizer.lr import LRScheduler

    if not isinstance(optimizer._learning_rate, LRScheduler) and known.part.multiple and value != known.hyper[_LR]:
        yield partial(optimizer.set_lr, float(value) / known.part.multiple)


def _change(optimizer: Any, known: ParameterGroup, name: str, value: Any) -> Iterator[Callable[[], None]]:
    """Set a hyper-parameter by Paddle's name, where it is a number now."""
    before = _values(optimizer, known.part.given).get(name)
    if before == value:
        return
    if name == _DECAY and _L2 in optimizer._default_dict:
        yield from _change_of_l2(optimizer, known, float(value))
        return
    holders: list[tuple[Any, Any]] = [(known.part.given, name)] if known.part.given is not None else []
    if not holders:
        holders = [(vars(optimizer), f"_{name}"), (optimizer._default_dict, name)]
    holders = [(holder, key) for holder, key in holders if isinstance(holder.get(key), _NUMBERS)]
    if not holders:
        raise _refused(name, value, before, f"which {type(optimizer).__name__} gets when it is constructed")
    for holder, key in holders:
        yield partial(holder.update, {key: type(holder[key])(value)})


def _change_of_l2(optimizer: Any, known: ParameterGroup, value: float) -> Iterator[Callable[[], None]]:
    """Set the decay of a Momentum, whose step does it by a method and a coefficient."""
    other = optimizer.regularization if known.part.given is None else known.part.given.get(_DECAY)
    if other is not None:
        raise _refused(_DECAY, value, str(other), "which it gets when it is constructed")
    new = {_L2: value, _METHOD: "l2_decay" if value else ""}
    if known.part.given is not None:
        yield partial(known.part.given.update, new)
    else:
        yield partial(vars(optimizer).update, {f"_{name}": one for name, one in new.items()})
        yield partial(optimizer._default_dict.update, new)


def _refused(name: str, stored: Any, live: Any, why: str) -> StateMismatch:
    return StateMismatch(
        f"the checkpoint has {name} {stored}, and the live optimizer {live}, {why}",
        hint=f"construct the optimizer as the one that was saved, or keep the live value: keep=('*/{name}',)",
    )
