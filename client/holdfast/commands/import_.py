"""`holdfast import`: a checkpoint made of a directory: a Hugging Face model's, or a checkpoint from elsewhere."""

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
    typer.Argument(metavar="SRC", help="A directory. For a service, one below its --export-root, as a path from there."),
]
Wanted = Annotated[str, typer.Argument(metavar="RUN@STEP", help="What it becomes.")]


def import_(source: Source, checkpoint: Wanted, root: Root = None, url: Url = None, as_json: AsJson = False) -> None:
    """Make a committed checkpoint of a directory. Every byte is digested, written, and read back before it counts.

    A Hugging Face directory (one safetensors file, or several with an index) becomes group `model`, its small files the
    assets. A checkpoint of Holdfast's is proven on the way and keeps all its groups. Links are not followed. With --root no
    daemon may be serving that directory; else the service does it.
    """
    with console.reporting(as_json):
        run, step = named(checkpoint)
        if root is not None and url is not None:
            raise InvalidRequest("--root and --url exclude each other", hint="give the one you mean")
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
