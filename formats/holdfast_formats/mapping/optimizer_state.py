"""Optimizer state of other programs in the form from which a torch trainer's `restore()` resumes.

Tensors are `NAME/exp_avg`, `NAME/exp_avg_sq` and `NAME/step` (F32, no dimension) in group `optim`, in the weights' names and
layout; masters are `NAME` in group `master`. Their document has the key `optimizer`, the usual name in trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from holdfast_formats.errors import StateMismatch

GROUP = "optim"
MASTER_GROUP = "master"
KEY = "optimizer"
NUMBERED = "numbered"  # true in a document whose parameters have numbers: names are those of a live optimizer's order
# torch wants them in every group, and a Checkpointer does not store them: they say how a step is computed.
IMPLEMENTATION: Mapping[str, Any] = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}

# Names under which optimizers keep a parameter's full-precision copy in their per-parameter state.
MASTER_KEYS = frozenset(
    {
        "master_param",  # Transformer Engine, apex
        "master_params",
        "master_weight",
        "master_weights",
        "master",
        "fp32_param",
        "fp32_params",
        "fp32_master",
        "fp32_weight",
        "main_param",  # Megatron
        "param_fp32",
        "param_master",
    }
)


def document(groups: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> dict[str, Any]:
    """The optimizer's document, for `documents["optim"]["optimizer"]`: the parameter names and hyper-parameters of each
    group. Without hyper-parameters, a trainer keeps its own.
    """
    by_first_name = {names[0]: _ordered({"params": list(names), **hyper}) for names, hyper in groups if names}
    return {
        "$keys": ["groups", "state", "masters", "kinds"],
        "groups": _ordered(by_first_name),
        "state": {},
        "masters": {},
        "kinds": {},
    }


def is_document(held: Any) -> bool:
    return isinstance(held, dict) and isinstance(held.get("groups"), dict)


def masters_in(held: Any) -> frozenset[str]:
    """The parameters whose full-precision copies an optimizer keeps in its own state."""
    masters = _plain(held.get("masters", {})) if is_document(held) else {}
    return frozenset(name for names in masters.values() for name in names)


def is_numbered(held: Any) -> bool:
    """Whether a document's parameters have numbers in place of names."""
    return is_document(held) and held.get(NUMBERED) is True


def renamed(held: Any, became: Callable[[str], Sequence[str]]) -> Any:
    """An optimizer's document with its parameters under the names that each `became`; other values as they are.

    Raises `StateMismatch` if parameters of two groups became one.
    """
    if not is_document(held):
        return held

    def all_became(names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(new for name in names for new in became(name)))

    owners: dict[str, int] = {}
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    for number, group in enumerate(_plain(held["groups"]).values()):
        params = all_became(group.get("params", ()))
        for name in params:
            if owners.setdefault(name, number) != number:
                raise StateMismatch(
                    f"{name!r} is made from parameters of two optimizer groups",
                    hint="leave the optimizer out, or the program",
                    tensor=name,
                )
        groups.append((params, {key: value for key, value in _plain(group).items() if key != "params"}))
    state = {new: value for name, value in _plain(held.get("state", {})).items() for new in became(name)}
    masters = {kind: all_became(names) for kind, names in _plain(held.get("masters", {})).items()}
    return {**held, **document(groups), "state": state, "masters": masters, "kinds": held.get("kinds", {})}


def _plain(held: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a JSON object in their own order, without the key that states it."""
    return {key: held[key] for key in held.get("$keys", held) if key != "$keys"}


def _ordered(held: dict[str, Any]) -> dict[str, Any]:
    return held if list(held) == sorted(held) else {"$keys": list(held), **held}
