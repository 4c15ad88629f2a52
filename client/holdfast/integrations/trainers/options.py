"""The options of an attached Trainer, beside its own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.messages import Policy


class TrainerOptions(TypedDict, total=False):
    """The options of a `Checkpointer` for an attached Trainer, and directories of exports by their kind."""

    at: str | PathLike[str] | None
    assets: Any
    keep_last: int | None
    slots: int
    policy: Policy
    file_bytes_max: int
    exports: Mapping[str, str | PathLike[str]]


def check_names(options: Mapping[str, Any], known: Mapping[str, Any] = TrainerOptions.__annotations__) -> None:
    unknown = options.keys() - known.keys()
    if unknown:
        raise InvalidRequest(f"attach has no option {', '.join(sorted(unknown))}", hint=f"it has {', '.join(known)}")


def check_limits(args: Any, options: Mapping[str, Any]) -> None:
    """`InvalidRequest` if the Trainer's arguments contradict the options."""
    limit, kept = args.save_total_limit, options.get("keep_last")
    if limit and limit > 0 and kept is not None and kept != limit:
        raise InvalidRequest(
            f"save_total_limit={limit} and keep_last={kept} contradict each other", hint="pass only one of them"
        )
    if args.load_best_model_at_end and is_remote(options):
        raise InvalidRequest(
            "load_best_model_at_end needs a daemon on this machine, because a link protects the best checkpoint",
            hint="give the daemon's directory as at=, or set load_best_model_at_end=False",
        )


def of_checkpointer(options: TrainerOptions) -> dict[str, Any]:
    """Those that a `Checkpointer` has too."""
    return {name: value for name, value in options.items() if name != "exports"}


def keep_last(args: Any, options: Mapping[str, Any]) -> int | None:
    """How many checkpoints stay: the Trainer's save_total_limit, or the option."""
    limit: int | None = args.save_total_limit
    return limit if limit and limit > 0 else options.get("keep_last")


def is_remote(options: Mapping[str, Any]) -> bool:
    """Whether the daemon is on another machine, so that links to its checkpoints would be broken."""
    return str(options.get("at") or "").startswith(("http://", "https://"))
