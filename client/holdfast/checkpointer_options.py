"""The options of `Checkpointer`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict, get_args

from holdfast.layout.rules_choice import LayoutSource, ParallelLayout
from holdfast.stage.averaging import Ema
from holdfast.stage.from_master import ModelSource
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.arena import SLOTS_MAX
from holdfast_formats.staging.messages import Policy


class Options(TypedDict, total=False):
    """The options of a `Checkpointer`."""

    at: str | PathLike[str] | None
    assets: Any
    keep_last: int | None
    slots: int
    policy: Policy
    fenced: bool
    file_bytes_max: int
    layout: LayoutSource | ParallelLayout | None
    model: ModelSource | None
    ema: Ema | None
    info: Mapping[str, Any] | None


def check(slots: int, policy: str, file_bytes_max: int, keep_last: int | None, model: str | None = None) -> None:
    """`InvalidRequest` naming the option that cannot be what it is."""
    if slots > SLOTS_MAX:
        raise InvalidRequest(
            f"slots={slots} is over the limit of {SLOTS_MAX} per rank",
            hint="use slots=2, or slots=3 if the speed of the storage varies",
        )
    if slots < 1 or file_bytes_max < 1 or (keep_last is not None and keep_last < 1):
        raise InvalidRequest("slots, file_bytes_max and keep_last must be at least 1")
    if policy not in get_args(Policy):
        raise InvalidRequest(f"policy must be one of {', '.join(get_args(Policy))}, not {policy!r}")
    if model is not None and model not in get_args(ModelSource):
        raise InvalidRequest(
            f"model must be {get_args(ModelSource)[0]!r} or None, not {model!r}",
            hint="put the model itself into the state",
        )


def declared_layout(layout: LayoutSource | ParallelLayout | None) -> ParallelLayout | None:
    """The layout with its rules and config, None without one; `InvalidRequest` for rules or a config of another kind."""
    if layout is None:
        return None
    layout = layout if isinstance(layout, ParallelLayout) else ParallelLayout(layout)
    if not isinstance(layout.config, Mapping | None):
        raise InvalidRequest(
            f"config of a ParallelLayout must be a mapping, not {type(layout.config).__name__}",
            hint="for a transformers model, pass config=model.config.to_dict()",
        )
    if not isinstance(layout.rules, str | PathLike | Mapping | None):
        raise InvalidRequest(
            f"rules of a ParallelLayout must be a TOML file's path or a mapping, not {type(layout.rules).__name__}",
            hint="docs/rules.md describes the format of rules",
        )
    return layout
