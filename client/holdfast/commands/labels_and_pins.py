"""`holdfast pin`, `unpin`, `label` and `rm`: protect checkpoints from removal, and remove one."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from holdfast.commands.runs.trash import remove_run
from holdfast.config import default_url
from holdfast.read.checkpoint_index import of_service
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.retention import Force

Checkpoint = Annotated[str, typer.Argument(metavar="RUN@STEP", help="The checkpoint, with its step number.")]
Label = Annotated[
    str, typer.Argument(metavar="LABEL", help="Letters, digits and . _ -; several checkpoints may share a label.")
]
Remove = Annotated[bool, typer.Option("--remove", help="Remove the label.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Remove nothing; only check whether it could be removed.")]
Target = Annotated[str, typer.Argument(metavar="RUN@STEP|RUN", help="The checkpoint, with its step number; or a whole run.")]
AlsoPinned = Annotated[
    bool, typer.Option("--pinned", help="Delete a run even if some of its checkpoints are pinned or labelled.")
]
Forced = Annotated[
    str | None,
    typer.Option(
        "--force", metavar="WHICH", help=f"Remove it even if it is the {' or the '.join(retention.FORCES)} checkpoint."
    ),
]


def pin(checkpoint: Checkpoint, url: Url = None, as_json: AsJson = False) -> None:
    """Pin a checkpoint. It is not removed until you unpin it."""
    with console.service(url, as_json) as api:
        run, step = named(checkpoint)
        retention.pin(api, run, step)
    console.answer({"run": run, "step": step, "pinned": True}, f"pinned {run}@{step}", as_json)


def unpin(checkpoint: Checkpoint, url: Url = None, as_json: AsJson = False) -> None:
    """Unpin a checkpoint. The run's retention rules apply to it again."""
    with console.service(url, as_json) as api:
        run, step = named(checkpoint)
        retention.unpin(api, run, step)
    console.answer({"run": run, "step": step, "pinned": False}, f"unpinned {run}@{step}", as_json)


def label(checkpoint: Checkpoint, label: Label, remove: Remove = False, url: Url = None, as_json: AsJson = False) -> None:
    """Label a checkpoint. It is not removed while it has a label."""
    with console.service(url, as_json) as api:
        run, step = named(checkpoint)
        (retention.unlabel if remove else retention.label)(api, run, step, label)
    text = f"removed the label {label} from {run}@{step}" if remove else f"labelled {run}@{step} {label}"
    console.answer({"run": run, "step": step, "label": label, "removed": remove}, text, as_json)


def named(checkpoint: str) -> tuple[str, int]:
    """Parse RUN@STEP; `InvalidRequest` if the step is not a number."""
    target = of_service(checkpoint)
    if target.step is None:
        raise InvalidRequest(
            f"{checkpoint!r} has no step number", hint="write RUN@STEP with a step number; selectors are not allowed here"
        )
    return target.run, target.step


def rm(  # noqa: PLR0913 - one an option
    checkpoint: Target,
    yes: Yes = False,
    dry_run: DryRun = False,
    force: Forced = None,
    pinned: AlsoPinned = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Remove a checkpoint, or move a whole run to the trash. This needs the service, which tracks readers, pins and
    labels.
    """
    if "@" not in checkpoint:
        if force is not None:
            with console.reporting(as_json):
                raise InvalidRequest(
                    "--force applies to one checkpoint, not to a whole run",
                    hint="use `holdfast rm RUN@STEP --force …`, or `holdfast rm RUN` without --force",
                )
        remove_run(checkpoint, url, marked=pinned, yes=yes, dry_run=dry_run, as_json=as_json)
        return
    with console.reporting(as_json):
        run, step = named(checkpoint)
        which = _which(force)
        with Api(url or default_url()) as api:
            found = retention.try_remove(api, run, step, which)
            if not yes and not dry_run:
                question = f"Remove {run}@{step} ({console.human_bytes(found.bytes)}) from {api.url}?"
                console.confirm(question, "nothing was removed", as_json)
            if not dry_run:
                retention.remove(api, run, step, which)
    word = "would remove" if dry_run else "removed"
    console.answer({word: found}, f"{word} {run}@{step}", as_json)


def _which(force: str | None) -> Force | None:
    if force is not None and force not in retention.FORCES:
        raise InvalidRequest(f"--force does not accept {force!r}", hint=f"use one of {', '.join(retention.FORCES)}")
    return cast("Force | None", force)
