"""`holdfast import`: create a checkpoint from a Hugging Face directory or from an exported checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.config import default_url
from holdfast.rest import delegated
from holdfast.rest.api import Api
from holdfast.terminal import console
from holdfast.terminal.options import AsJson, Root, Url
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rest.operations import JobRequest

from .marks import named

Source = Annotated[
    str,
    typer.Argument(metavar="SRC", help="Source directory. With a service: a path relative to its --export-root."),
]
Wanted = Annotated[str, typer.Argument(metavar="RUN@STEP", help="Run and step of the new checkpoint.")]


def import_(source: Source, checkpoint: Wanted, root: Root = None, url: Url = None, as_json: AsJson = False) -> None:
    """Create a committed checkpoint from a directory. Every byte is digested, written, and read back before the
    commit.

    From a Hugging Face directory (one safetensors file, or several with an index), the tensors become the group
    `model` and the small files become assets. A Holdfast checkpoint is verified on the way and keeps all its
    groups. Symbolic links are not followed. With --root no daemon may be serving that directory; otherwise the
    service does the import.
    """
    with console.reporting(as_json):
        run, step = named(checkpoint)
        if root is not None and url is not None:
            raise InvalidRequest("--root and --url cannot be combined", hint="pass only one of them")
        if root is not None:
            done = delegated.offline("import", source, f"{run}@{step}", "--root", str(root))
        else:
            done = _by_service(url, JobRequest(kind="import", run=run, step=step, arguments={"from": source}), as_json)
    if as_json:
        console.print_json(done)
        return
    size = console.human_bytes(int(done["bytes"]))
    told = f"{run}@{step}: {done['tensors']} tensors, {size} in {done['files']} files, verified"
    console.out().print(Text.assemble(("imported  ", "green"), told))


def _by_service(url: str | None, wanted: JobRequest, as_json: bool) -> dict[str, Any]:
    with Api(url or default_url()) as api, console.progress("importing", 0, shown=not as_json) as bar:
        return delegated.as_job(api, wanted, lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total))
