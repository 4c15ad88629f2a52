"""`holdfast serve`: run the daemon in this process."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from holdfast.terminal import console
from holdfast_formats.errors import InvalidRequest

# What `holdfast-checkpoint[service]` adds, by import name; asked for here because the client may not import the service.
_EXTRAS = ("aiofiles", "alembic", "fastapi", "prometheus_client", "sqlalchemy", "uvicorn", "zstandard")


def serve(context: typer.Context) -> None:
    """Run this machine's checkpoint daemon until it is interrupted. `holdfast serve --help` lists its flags.

    Every flag can also be set in the environment: HOLDFAST_ROOT, HOLDFAST_LISTEN, and so on.
    """
    with console.reporting(as_json=False):
        check_installed()
    os.execv(sys.executable, [sys.executable, "-m", "holdfast_service", *context.args])


def check_installed() -> None:
    """Raise `InvalidRequest` if the service's dependencies are not installed."""
    missing = [name for name in ("holdfast_service", *_EXTRAS) if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(f"the daemon needs {', '.join(missing)}", hint="pip install 'holdfast-checkpoint[service]'")
