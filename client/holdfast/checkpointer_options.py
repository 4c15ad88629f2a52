"""What `Checkpointer` is told: whether it can be, and the names that options had before, which are taken until 0.2.0."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast, get_args

from holdfast.config import check_launch_name
from holdfast.layout.rules_choice import LayoutSource, ParallelLayout, RulesSource
from holdfast.link import address
from holdfast.link.address import DaemonAddress
from holdfast.save_warning import warn
from holdfast.stage.averaging import Ema
from holdfast.stage.from_master import ModelSource
from holdfast.stage.save_request import Check, check_check
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.arena import SLOTS_MAX
from holdfast_formats.staging.messages import Policy

_INSTEAD = {
    "root": 'at= with the same directory; where it is new and ends in ".sock", make it first',
    "socket": 'at= with the same path, which ends in ".sock" or exists',
    "url": "at= with the same address",
    "launch": "HOLDFAST_LAUNCH in the environment of every rank",
    "check": "save(…, check=…)",
    "rules": "layout=holdfast.ParallelLayout(layout, rules=…)",
    "config": "layout=holdfast.ParallelLayout(layout, config=…)",
}


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


class OldOptions(TypedDict, total=False):
    """Options under their old names."""

    root: str | Path | None
    socket: str | Path | None
    url: str | None
    launch: str | None
    check: Check
    rules: RulesSource
    config: Mapping[str, Any] | None


class Settled(NamedTuple):
    """What is meant, under whichever name it was said."""

    place: DaemonAddress
    layout: ParallelLayout | None
    launch: str | None
    check: str


def settle(at: str | PathLike[str] | None, layout: LayoutSource | ParallelLayout | None, old: OldOptions) -> Settled:
    """A `DeprecationWarning` for each old name says what to write.

    Raises `InvalidRequest` for what is said under both names, `TypeError` for a name that never was one.
    """
    for name in old:
        if name not in _INSTEAD:
            raise TypeError(f"Checkpointer.__init__() got an unexpected keyword argument {name!r}")
    old = cast(OldOptions, {name: value for name, value in old.items() if value is not None})  # None said nothing
    launch = check_launch_name(old["launch"], "launch=") if "launch" in old else None
    meant = Settled(_place(at, old), _layout(layout, old), launch, check_check(old.get("check", "sampled")))
    for name in old:
        text = f"Checkpointer({name}=…) is deprecated and ends with 0.2.0: use {_INSTEAD[name]}"
        warn(text, DeprecationWarning)
    return meant


def check(slots: int, policy: str, file_bytes_max: int, keep_last: int | None, model: str | None = None) -> None:
    """`InvalidRequest` naming the option that cannot be what it is."""
    if slots > SLOTS_MAX:
        raise InvalidRequest(f"slots={slots}: a rank may have {SLOTS_MAX}", hint="2 suffice, 3 where storage is uneven")
    if slots < 1 or file_bytes_max < 1 or (keep_last is not None and keep_last < 1):
        raise InvalidRequest("slots, file_bytes_max and keep_last must be at least 1")
    if policy not in get_args(Policy):
        raise InvalidRequest(f"policy must be one of {', '.join(get_args(Policy))}, not {policy!r}")
    if model is not None and model not in get_args(ModelSource):
        raise InvalidRequest(
            f"model must be {get_args(ModelSource)[0]!r} or None, not {model!r}",
            hint="the model itself belongs into the state",
        )


def _place(at: str | PathLike[str] | None, old: OldOptions) -> DaemonAddress:
    root, socket, url = old.get("root"), old.get("socket"), old.get("url")
    given = {"at=": at, "root=": root, "socket=": socket, "url=": url}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)} each say where the daemon is", hint="give at= alone")
    if not named or at is not None:
        return address.place(at)
    if root is not None:
        return address.place_of_root(root)
    return address.place_of_socket(socket) if socket is not None else DaemonAddress(url=url)


def _layout(layout: LayoutSource | ParallelLayout | None, old: OldOptions) -> ParallelLayout | None:
    rules, config = old.get("rules"), old.get("config")
    if not isinstance(layout, ParallelLayout):
        return None if layout is None else _checked(ParallelLayout(layout, rules, config))
    if rules is not None or config is not None:
        raise InvalidRequest(
            f"{'rules=' if rules is not None else 'config='} stands beside layout=ParallelLayout(…), which says it too",
            hint="say it in the ParallelLayout alone",
        )
    return _checked(layout)


def _checked(layout: ParallelLayout) -> ParallelLayout:
    if not isinstance(layout.config, Mapping | None):
        raise InvalidRequest(
            f"config of a ParallelLayout must be a mapping, not {type(layout.config).__name__}",
            hint="for a transformers model: model.config.to_dict()",
        )
    if not isinstance(layout.rules, str | PathLike | Mapping | None):
        raise InvalidRequest(
            f"rules of a ParallelLayout must be a TOML file's path or a mapping, not {type(layout.rules).__name__}",
            hint="docs/rules.md says what they hold",
        )
    return layout
