"""OmegaConf containers in hyper-parameters: stored as plain values, and rebuilt on load.

Lightning's own file pickles the containers, with their class under another key. A module whose `__init__` reads
`config.lr` needs a container. Field types of structured configs are not kept.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from holdfast_formats.errors import CorruptManifest, InvalidRequest

# The only key of the dictionary that replaces a container, or a class.
_CONFIG, _KIND = "holdfast_omegaconf", "holdfast_omegaconf_kind"
_KINDS = ("DictConfig", "ListConfig")


def stored(document: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dictionary with plain values in place of containers and their classes."""
    omegaconf: Any = sys.modules.get("omegaconf")  # without which there is no container
    if omegaconf is None:
        return dict(document)

    def plain(value: Any) -> Any:
        if isinstance(value, omegaconf.Container):
            of = omegaconf.OmegaConf
            flags = {"struct": of.is_struct(value) is True, "readonly": of.is_readonly(value) is True}
            return {_CONFIG: {"value": of.to_container(value, resolve=False), **flags}}
        if isinstance(value, type) and issubclass(value, omegaconf.Container):
            return {_KIND: value.__name__}
        return value

    return {key: _replaced(value, plain) for key, value in document.items()}


def shown(document: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary with its containers; `InvalidRequest` if OmegaConf is not installed."""
    return {key: _replaced(value, _container) for key, value in document.items()}


def _container(value: Any) -> Any:
    if type(value) is not dict or len(value) != 1 or not value.keys() <= {_CONFIG, _KIND}:
        return value
    try:
        import omegaconf
    except ImportError as error:
        raise InvalidRequest(
            "hyper-parameters of the checkpoint are an OmegaConf container, and OmegaConf is not installed",
            hint="pip install omegaconf",
        ) from error
    if _KIND in value:
        if value[_KIND] not in _KINDS:
            raise CorruptManifest(f"{value[_KIND]!r} is not a class of OmegaConf's containers", file="state.json")
        return getattr(omegaconf, value[_KIND])
    container = omegaconf.OmegaConf.create(value[_CONFIG]["value"])
    if value[_CONFIG]["struct"]:
        omegaconf.OmegaConf.set_struct(container, True)
    if value[_CONFIG]["readonly"]:
        omegaconf.OmegaConf.set_readonly(container, True)
    return container


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Replace recursively; returns the value itself if nothing is replaced."""
    replacement = replace(value)
    if replacement is not value:
        return replacement
    if type(value) in (dict, OrderedDict):
        items = {key: _replaced(item, replace) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else type(value)(items)
    if type(value) in (list, tuple):
        made = [_replaced(item, replace) for item in value]
        return value if all(a is b for a, b in zip(made, value, strict=True)) else type(value)(made)
    return value
