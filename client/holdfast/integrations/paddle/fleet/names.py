"""The names of a rank's tensors in the whole model, which are the same however many stages and expert-parallel ranks there
are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SHARED = "shared_layers"


class LocalExperts(NamedTuple):
    """A list of experts that begins with number `first` of the whole model, and the path of its tensors, with the dot."""

    path: str
    first: int


def local_experts(layer: Any) -> tuple[LocalExperts, ...]:
    """The lists that number their experts on each rank from 0: those of Paddle's own MoELayer. PaddleFormers' lists have all
    numbers, with None for experts of other ranks.
    """
    found = []
    for path, one in layer.named_sublayers(include_self=True):
        group = getattr(one, "group", None)
        if group is not None and group.nranks > 1 and any(_is_moe(each) for each in type(one).__mro__):
            found.append(LocalExperts(f"{path}.experts." if path else "experts.", int(group.rank) * int(one.num_expert)))
    return tuple(found)


def with_expert(name: str, lists: Iterable[LocalExperts]) -> str:
    """A name with its expert's number in the whole model, if it is one of an expert."""
    for path, first in lists:
        if name.startswith(path):
            number, _, rest = name.removeprefix(path).partition(".")
            return f"{path}{int(number) + first}.{rest}"
    return name


def _is_moe(kind: type) -> bool:
    return kind.__name__ == "MoELayer" and kind.__module__.startswith("paddle.incubate.")


def stored_names(layer: Any, tensors: Mapping[str, Any], experts: Sequence[LocalExperts] = ()) -> dict[str, str]:
    """The stored name of each of these tensors, by its name in `state_dict()`.

    A weight that stages share is stored under the name that it has in the first of them. PaddleFormers' pipelines name all
    others as the whole model does; those of `PipelineLayer` begin with the layer's number in the whole list.
    """
    from paddle.distributed.fleet.meta_parallel import PipelineLayer

    own = {name: with_expert(name, experts) for name in tensors} if experts else {name: name for name in tensors}
    if not isinstance(layer, PipelineLayer):
        return own
    if not callable(getattr(layer, "get_sequential_name_prefixes", None)):
        if layer.get_num_virtual_stages() == 1 and not layer._use_dualpipev:
            return own
        return {name: numbered(full, layer.shared_layers) for name, full in own.items()}
    first = {id(tensor): name for name, tensor in _shared(layer)}
    return {name: first.get(id(tensors[name]), full) for name, full in own.items()}


def numbered(name: str, shared: Container[str]) -> str:
    """A name in a stage of several chunks, with the layer's number in the whole list for those of chunk and layer."""
    chunk, _, rest = name.partition(".")
    inner, _, more = rest.partition(".")
    if chunk.isdigit() and inner in shared:
        return f"{SHARED}.{rest}"
    if chunk.isdigit() and inner.isdigit() and more:
        return f"{int(chunk) + int(inner)}.{more}"
    return name


def _shared(layer: Any) -> list[tuple[str, Any]]:
    """The weights that stages share, by the name in the first of them."""
    from paddle.distributed.fleet.meta_parallel import SharedLayerDesc

    prefixes = layer.get_sequential_name_prefixes()
    found: list[tuple[str, Any]] = []
    seen: set[str] = set()
    for number, described in enumerate(layer._layers_desc):
        key = getattr(described, "layer_name", None)
        if not isinstance(described, SharedLayerDesc) or key is None or key in seen or key not in layer.shared_layers:
            continue
        seen.add(key)
        for name in described.shared_weight_attr:
            found.append((f"{prefixes[str(number)]}.{name}", getattr(layer.shared_layers[key], name)))
    return found
