"""The sizes of a program for one model: values of config.json, and expressions of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.expressions import VALUE_MAX, Expression, evaluate, names_in


def sizes_for(sizes: Mapping[str, Expression], config: Mapping[str, Any]) -> dict[str, int]:
    """Those of a program's sizes for which the config has all keys; its `text_config` takes precedence. `InvalidRequest` for
    invalid values.
    """
    nested = config.get("text_config")
    documents = [nested, config] if isinstance(nested, Mapping) else [config]
    values = {}
    for key in {key for size in sizes.values() for key in names_in(size)}:
        value = next((doc[key] for doc in documents if doc.get(key) is not None), None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= VALUE_MAX:
            raise InvalidRequest(f"config.json has {key} = {value!r}, which is not a valid size")
        values[key] = value
    known_sizes = {}
    for name, expression in sizes.items():
        try:
            size = evaluate(expression, values)
        except InvalidRequest as problem:
            raise InvalidRequest(f"size {name!r} for this config: {problem.detail}") from None
        if size is not None:
            known_sizes[name] = size
    return known_sizes


def number(expression: Expression, sizes: Mapping[str, int], where: str) -> int:
    """The value of a number in a statement; `InvalidRequest` with `where` if a size is unknown for this config."""
    value = evaluate(expression, sizes)
    if value is None:
        missing = sorted(names_in(expression) - set(sizes))
        raise InvalidRequest(
            f"{where}: the size {', '.join(map(repr, missing))} is unknown",
            hint="config.json lacks what the program's [sizes] need: give the model's config.json",
        )
    return value
