"""`holdfast pin`, `unpin` and `label`: protect checkpoints from removal."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.config import default_url
from holdfast.read.library import parse_target
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest

Checkpoint = Annotated[str, typer.Argument(metavar="RUN@STEP", help="The checkpoint, with its step number.")]
Label = Annotated[
    str, typer.Argument(metavar="LABEL", help="Letters, digits and . _ -; several checkpoints may share a label.")
]
Remove = Annotated[bool, typer.Option("--remove", help="Remove the label.")]


def pin(checkpoint: Checkpoint, url: Url = None, as_json: AsJson = False) -> None:
    """Pin a checkpoint. It is not removed until you unpin it."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        run, step = named(checkpoint)
        retention.pin(api, run, step)
    _print({"run": run, "step": step, "pinned": True}, f"pinned {run}@{step}", as_json)


def unpin(checkpoint: Checkpoint, url: Url = None, as_json: AsJson = False) -> None:
    """Unpin a checkpoint. The run's retention rules apply to it again."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        run, step = named(checkpoint)
        retention.unpin(api, run, step)
    _print({"run": run, "step": step, "pinned": False}, f"unpinned {run}@{step}", as_json)


def label(checkpoint: Checkpoint, label: Label, remove: Remove = False, url: Url = None, as_json: AsJson = False) -> None:
    """Label a checkpoint. It is not removed while it has a label."""
    with console.reporting(as_json), Api(url or default_url()) as api:
        run, step = named(checkpoint)
        (retention.unlabel if remove else retention.label)(api, run, step, label)
    told = f"removed the label {label} from {run}@{step}" if remove else f"labelled {run}@{step} {label}"
    _print({"run": run, "step": step, "label": label, "removed": remove}, told, as_json)


def named(checkpoint: str) -> tuple[str, int]:
    """Parse RUN@STEP; `InvalidRequest` if the step is not a number."""
    target = parse_target(checkpoint)
    if target.step is None:
        raise InvalidRequest(
            f"{checkpoint!r} has no step number", hint="write RUN@STEP with a step number; selectors are not allowed here"
        )
    return target.run, target.step


def _print(result: dict[str, object], told: str, as_json: bool) -> None:
    if as_json:
        console.print_json(result)
    else:
        console.out().print(told, markup=False)
