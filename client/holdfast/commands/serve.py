"""`holdfast serve`: become the daemon's process."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from holdfast import console
from holdfast_formats.errors import InvalidRequest

# What `holdfast[service]` adds, by import name; asked for here because the client may not import the service.
_EXTRAS = ("aiofiles", "alembic", "fastapi", "prometheus_client", "sqlalchemy", "uvicorn", "zstandard")


def serve(
    root: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="Where checkpoints rest.  [default: ./holdfast-data]")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="REST address, or none.  [default: 127.0.0.1:8420]")
    ] = None,
    socket: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Socket for ranks.  [default: in the runtime directory]")
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", metavar="N", min=1, help="Keep the newest N checkpoints.  [default: all]")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="This machine's name.  [default: host name]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.  [default: info]")
    ] = None,
) -> None:
    """Run the checkpoint daemon of this machine, until it is interrupted.

    Every option can be set in the environment instead: HOLDFAST_ROOT, HOLDFAST_LISTEN, and so on.
    """
    with console.reporting(as_json=False):
        missing = [name for name in ("holdfast_service", *_EXTRAS) if importlib.util.find_spec(name) is None]
        if missing:
            raise InvalidRequest(f"the daemon needs {', '.join(missing)}", hint="pip install 'holdfast[service]'")
    options = {
        "--root": root,
        "--listen": listen,
        "--socket": socket,
        "--keep": keep,
        "--node": node,
        "--log-level": log_level,
    }
    given = [text for name, value in options.items() if value is not None for text in (name, str(value))]
    os.execv(sys.executable, [sys.executable, "-m", "holdfast_service", *given])
