"""How tensor parallelism has cut the parameters of a Paddle layer, read from the attributes that Paddle gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.integrations.paddle.fleet.places import ParameterPlace, TensorCut
from holdfast_formats.errors import InvalidRequest


class TensorParallel:
    """The cuts of a layer's parameters. Buffers are whole on every rank."""

    def __init__(self, layer: Any) -> None:
        self._groups = dict(_groups(layer))

    def place(self, name: str, parameter: Any) -> ParameterPlace:
        """The place of a parameter, by its structured name; `InvalidRequest` if Paddle does not say how it is cut."""
        local = tuple(int(size) for size in parameter.shape)
        if not getattr(parameter, "is_distributed", False):
            return ParameterPlace(name, local)
        group = self._groups.get(id(parameter)) or _group_of_fleet()
        axis = getattr(parameter, "split_axis", None)
        if group is None or axis is None or not -len(local) <= axis < len(local):
            raise InvalidRequest(
                f"{name} is a part of a larger parameter (is_distributed), and its split_axis is {axis!r}, so its place is "
                "not known",
                hint="set split_axis of the parameter to the dimension that tensor parallelism divides",
                tensor=name,
            )
        if group.nranks == 1:
            return ParameterPlace(name, local)
        return ParameterPlace(name, local, TensorCut(axis % len(local), int(group.rank), int(group.nranks)))


def _groups(layer: Any) -> Iterator[tuple[int, Any]]:
    """By the identity of a parameter, the group of its layer."""
    for one in layer.sublayers(include_self=True):
        group = getattr(one, "model_parallel_group", None)
        if group is not None:
            yield from ((id(parameter), group) for parameter in one.parameters(include_sublayers=False))


def _group_of_fleet() -> Any:
    from paddle.distributed import fleet

    hcg = getattr(fleet.fleet, "_hcg", None)
    return None if hcg is None else hcg.get_model_parallel_group()
