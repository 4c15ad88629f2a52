"""What is asked of a Paddle optimizer: its parameters, their groups with torch's names of the hyper-parameters, and to make
the accumulators of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import StateMismatch

TORCH_NAMES = {"epsilon": "eps", "use_nesterov": "nesterov"}
_LR, _DECAY, _BETAS, _BETA_1, _BETA_2 = "lr", "weight_decay", "betas", "beta1", "beta2"
_NUMBERS = (bool, int, float)


class ParameterGroup(NamedTuple):
    """Parameters that are stepped with the same hyper-parameters. `given` is Paddle's own group, None if it has one list."""

    parameters: list[Any]
    hyper: dict[str, Any]
    given: dict[str, Any] | None
    multiple: float  # of the learning rate
    decays: bool


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """All parameters, in the order of the groups."""
    for _, parameters in _given_groups(optimizer):
        yield from parameters


def groups_of(optimizer: Any, takes: Callable[[Any], bool] = lambda _: True) -> list[ParameterGroup]:
    """The parameters that `takes` selects, in groups. A function such as `apply_decay_param_fun` or `lr_ratio` divides them
    further.
    """
    found: list[ParameterGroup] = []
    rate = float(optimizer.get_lr())
    for given, parameters in _given_groups(optimizer):
        parts: dict[tuple[float, bool], list[Any]] = {}
        for parameter in filter(takes, parameters):
            parts.setdefault((_multiple(optimizer, parameter), _decays(optimizer, parameter)), []).append(parameter)
        for (multiple, decays), members in parts.items():
            hyper = {**_hyper(optimizer, given), _LR: rate * multiple}
            if not decays:
                hyper[_DECAY] = 0.0
            found.append(ParameterGroup(members, hyper, given, multiple, decays))
    return found


def betas_of(optimizer: Any, parameter: Any) -> tuple[float, float]:
    """β1 and β2 with which a parameter is stepped."""
    given = next((g for g, members in _given_groups(optimizer) if g and any(one is parameter for one in members)), None)
    known = _values(optimizer, given)
    return float(known.get(_BETA_1, 0.0)), float(known.get(_BETA_2, 0.0))


def install(optimizer: Any, groups: list[dict[str, Any]], takes: Callable[[Any], bool]) -> None:
    """Set restored hyper-parameters, given for each of `groups_of`. The learning rate of a scheduler is the scheduler's.

    Raises `StateMismatch` for one that cannot be set.
    """
    for known, stored in zip(groups_of(optimizer, takes), groups, strict=True):
        for name, value in stored.items():
            if name == _LR:
                _set_rate(optimizer, known, value)
            elif name == _BETAS:
                _set(optimizer, known, _BETA_1, value[0])
                _set(optimizer, known, _BETA_2, value[1])
            elif name in known.hyper and value != known.hyper[name]:
                own = next((own for own, theirs in TORCH_NAMES.items() if theirs == name), name)
                if name == _DECAY and not known.decays:
                    raise _refused(name, value, known.hyper[name], "which apply_decay_param_fun decides")
                _set(optimizer, known, own, value)


def make_accumulators(optimizer: Any, parameter: Any) -> None:
    """Make everything that the optimizer keeps of a parameter, as its first step would."""
    import paddle
    from paddle.base.framework import default_main_program

    block = default_main_program().global_block()
    with paddle.no_grad():
        for given, parameters in _given_groups(optimizer):
            if any(one is parameter for one in parameters):
                of = [parameter] if given is None else {**given, "params": [parameter]}
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


def _given_groups(optimizer: Any) -> Iterator[tuple[dict[str, Any] | None, list[Any]]]:
    groups = optimizer._param_groups
    if groups and isinstance(groups[0], dict):
        yield from ((group, group["params"]) for group in groups)
    else:
        yield None, groups


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


def _multiple(optimizer: Any, parameter: Any) -> float:
    attributes = getattr(parameter, "optimize_attr", None) or {}
    multiple = float(attributes.get("learning_rate", 1.0))
    ratio = getattr(optimizer, "_lr_ratio", None)
    return multiple if ratio is None else multiple * float(ratio(parameter))


def _decays(optimizer: Any, parameter: Any) -> bool:
    function = getattr(optimizer, "_apply_decay_param_fun", None)
    return function is None or bool(function(parameter.name))


def _set_rate(optimizer: Any, known: ParameterGroup, value: Any) -> None:
    from paddle.optimizer.lr import LRScheduler

    if not isinstance(optimizer._learning_rate, LRScheduler) and known.multiple and value != known.hyper[_LR]:
        optimizer.set_lr(float(value) / known.multiple)


def _set(optimizer: Any, known: ParameterGroup, name: str, value: Any) -> None:
    """Set a hyper-parameter by Paddle's name, where it is a number now."""
    before = _values(optimizer, known.given).get(name)
    if before == value:
        return
    holders: list[tuple[Any, Any]] = [(known.given, name)] if known.given is not None else []
    if not holders:
        holders = [(vars(optimizer), f"_{name}"), (optimizer._default_dict, name)]
    holders = [(holder, key) for holder, key in holders if isinstance(holder.get(key), _NUMBERS)]
    if not holders:
        raise _refused(name, value, before, f"which {type(optimizer).__name__} gets when it is constructed")
    for holder, key in holders:
        holder[key] = type(holder[key])(value)


def _refused(name: str, stored: Any, live: Any, why: str) -> StateMismatch:
    return StateMismatch(
        f"the checkpoint has {name} {stored}, and the live optimizer {live}, {why}",
        hint=f"construct the optimizer as the one that was saved, or keep the live value: keep=('*/{name}',)",
    )
