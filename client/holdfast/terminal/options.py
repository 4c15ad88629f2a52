"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.terminal import completion

SELECTED = "RUN@STEP, RUN@latest (or RUN), RUN@latest-healthy, RUN@best, or RUN@best:METRIC[:max]"
Root = Annotated[Path | None, typer.Option("--root", metavar="DIR", help="Read this directory directly, without a service.")]
Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="Use the service at this URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help=f"{SELECTED}, or a directory.",
        autocompletion=completion.checkpoints,
    ),
]
