"""The names of a pipeline stage's tensors in the whole model, which are the same however many stages there are."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

SHARED = "shared_layers"


def stored_names(layer: Any, tensors: Mapping[str, Any]) -> dict[str, str]:
    """The stored name of each of these tensors, by its name in `state_dict()`.

    A weight that stages share is stored under the name that it has in the first of them. PaddleFormers' pipelines name all
    others as the whole model does; those of `PipelineLayer` begin with the layer's number in the whole list.
    """
    from paddle.distributed.fleet.meta_parallel import PipelineLayer

    if not isinstance(layer, PipelineLayer):
        return {name: name for name in tensors}
    if not callable(getattr(layer, "get_sequential_name_prefixes", None)):
        if layer.get_num_virtual_stages() == 1 and not layer._use_dualpipev:
            return {name: name for name in tensors}
        return {name: numbered(name, layer.shared_layers) for name in tensors}
    first = {id(tensor): name for name, tensor in _shared(layer)}
    return {name: first.get(id(tensor), name) for name, tensor in tensors.items()}


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
